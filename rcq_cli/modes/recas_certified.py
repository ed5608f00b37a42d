"""The selection of `recas` under a joint certificate over dropping and quantising.

Values of dropped blocks leave the device; their INT8 keys stay, so the weight they would have had is known
within a proven factor, and the error of leaving them out is part of the certificate. Where that part is too
large for the budget, blocks come back from the originals before anything else is tried. Where every step is
certified (`cert_every=1`) no figure of this mode is an estimate.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.ghosts import BITS
from rcq_cli.cache.statistics import Statistics, one_row
from rcq_cli.certify.exact import as_groups, exact_attention, store
from rcq_cli.certify.ladder import Budget
from rcq_cli.errors import SpecError
from rcq_cli.modes._between import Glance, Schedule, glance
from rcq_cli.modes._ghost_step import GhostStep, open_store
from rcq_cli.modes._recas import (
    EVICT_EVERY,
    PROMPT_ROWS,
    RecasOptions,
    TokenHistory,
    stage_signal,
    static_scores,
)
from rcq_cli.modes._tiered import FormatOptions, TieredCounters, check_range
from rcq_cli.modes.certified import DENOMINATORS
from rcq_cli.protocols import Engagement, Geometry, LayerBytes, Needs, Step
from rcq_cli.recas import selector, utility
from rcq_cli.recas.stages import StageTracker

DROPPED = ("dropped_mass_low", "dropped_mass_high")
"""Names of the proven limits of the dropped mass in `Certificate.reported`."""


@dataclass(frozen=True)  # no slots: two bases bring their own
class Options(RecasOptions):
    """Options of `recas-certified`."""

    eps: float = 0.05
    """error budget per head and step, relative to the exact output (absolute with denominator=abs)"""
    denominator: str = "out"
    """what eps is relative to: out (the head's output), layer (the layer's output), abs (nothing)"""
    rounds: int = 5
    """rounds of bringing back and promoting before a head is recomputed exactly"""
    explore: float = 0.01
    """share of blocks per step whose keys are compared with the originals only to find corruption"""
    block: int = 32
    """tokens per block"""
    group: int = 16
    """channels that share one value scale; divides the head dim"""
    ghost_bits: int = 8
    """bits per element of the keys that are left of dropped blocks: 8 or 4"""
    cert_every: int = 1
    """certify every n-th step; the loss of the steps between is estimated, once the estimate is calibrated"""
    probe_rate: float = 0.125
    """share of steps, drawn at random, that are certified beside those and calibrate the estimate"""
    miss_rate: float = 0.1
    """share of steps in which the loss may exceed its calibrated estimate"""

    def __post_init__(self) -> None:
        RecasOptions.__post_init__(self)
        self.format()
        check_range("eps", self.eps, 1e-9, 1e9 if self.denominator == "abs" else 1.0)
        check_range("rounds", self.rounds, 0, 16)
        if self.ghost_bits not in BITS:
            raise SpecError(
                f"ghost_bits={self.ghost_bits} is not allowed", fix="allowed: 8, 4", id="RCQ-USE-11"
            )
        check_range("explore", self.explore, 0.0, 1.0)
        check_range("cert_every", self.cert_every, 1, 2**20)
        check_range("probe_rate", self.probe_rate, 0.0, 1.0)
        check_range("miss_rate", self.miss_rate, 0.001, 0.5)
        if self.denominator not in DENOMINATORS:
            raise SpecError(
                f"denominator={self.denominator!r} is not allowed", fix=f"allowed: {', '.join(DENOMINATORS)}"
            )

    def format(self) -> FormatOptions:
        """Return the storage options, checked."""
        return FormatOptions(block=self.block, group=self.group)


class RecasCertifiedLayer:
    """One layer under `recas-certified`."""

    def __init__(self, geometry: Geometry, options: Options, backend: Any) -> None:
        self.options = options
        self.cache, self.step = open_store(geometry, options.format().format(), backend, options.ghost_bits)
        self.counters = TieredCounters(self.cache)
        self.budget = Budget(options.eps, options.denominator, True, options.rounds, 0.0)
        self.history = TokenHistory(geometry.kv_heads)
        self.stages: StageTracker | None = None
        self.transitions = self.since_eviction = self.evicted = self.readmitted = 0
        self.kept_tokens = 0
        self.ended = self.waiting = False
        self.scratch_bytes = 0
        self.generator = torch.Generator().manual_seed(20868)
        self.schedule = Schedule(geometry.kv_heads, options.cert_every, options.probe_rate, options.miss_rate)
        self.read = torch.zeros(geometry.kv_heads, 0, dtype=torch.bool)
        """Which blocks the last step read values of, `[Hkv, M]`; a head that was exact read all."""

    @property
    def tokens(self) -> int:
        """Return the tokens seen."""
        return self.cache.tokens

    def follow(self, stages: StageTracker | None) -> None:
        """Read stage evidence from `stages`, which is told the ids of all tokens."""
        self.stages = stages

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Add `[Hkv, T, D]` keys and values."""
        self.cache.extend(keys, values)
        self.history.grow(keys.shape[1])

    def end_prefill(self, seen: Statistics | None) -> None:
        """Fix the budget and evict by the last rows of the prompt; without them wait for the first query."""
        self.ended = True
        geometry = self.cache.geometry
        element = 2 * geometry.head_dim * geometry.kv_heads
        self.kept_tokens = self.options.budget(self.tokens, element)
        if self.stages is not None:
            self.stages.close()
            self.transitions = self.stages.transitions
        self.waiting = seen is None and self.tokens > 0
        if seen is not None and seen.queries.shape[1]:
            self._judge(seen)

    def _judge(self, seen: Statistics) -> None:
        assert self.cache.originals is not None
        keys = self.cache.originals[0].rows
        everything = torch.arange(self.tokens).expand(keys.shape[0], -1)
        links = stage_signal(self.stages, everything)
        self._evict(static_scores(self.history, seen, keys, self.options.weights(), links))

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the `[Hkv, D]` key and value of one token."""
        if not self.ended:
            self.end_prefill(None)
        self.prefill(key[:, None], value[:, None])

    def _worth(self, scores: Tensor) -> Tensor:
        """Return the utility of every token for group-mean scores `[Hkv, T]`."""
        everything = torch.arange(self.tokens).expand(scores.shape[0], -1)
        return utility.utility(
            utility.compatibility(scores),
            self.history.signal(everything, self.tokens).double(),
            stage_signal(self.stages, everything).double(),
            self.options.weights(),
        )

    def _evict(self, worth: Tensor, needed: Tensor | None = None) -> None:
        """Keep the values of the best blocks up to the budget; a block is worth its best token.

        `worth` is the utility `[Hkv, T]`, `needed` blocks stay whatever they are worth.
        """
        blocks, size = self.cache.block_count, self.cache.fmt.block
        if not blocks:
            return
        position = torch.arange(blocks * size)
        always = (position < selector.SINKS) | (position >= self.tokens - self.options.window)
        fixed = always.unflatten(0, (blocks, size)).any(1).expand(worth.shape[0], -1) | self.cache.raw.rows
        if needed is not None:
            fixed = fixed | needed
        # heads hold equally many blocks: the fullest one decides
        count = min(blocks, max(self.kept_tokens // size, int(fixed.sum(1).max())))
        best = worth[:, : blocks * size].unflatten(1, (blocks, size)).amax(-1)
        chosen = selector.top(best, count, fixed)
        self.evicted += int((self.cache.at_hand() & ~chosen).sum()) * size
        self.cache.keep(chosen)

    def attend(self, query: Tensor) -> Step:
        """Return the output of `[Hq, D]` queries, certified within the budget or exact."""
        if not self.ended:
            self.end_prefill(None)
        if self.waiting:
            self.waiting = False
            assert self.cache.originals is not None
            self._judge(one_row(query, self.cache.originals[0].rows, self.cache.geometry.scale))
        self.counters.count()
        self.since_eviction += 1
        due, seen = self.schedule.next(), None
        if self.schedule.probing or not due:
            seen = glance(self.cache, as_groups(query, self.cache.geometry.kv_heads))
            features = self.schedule.features(seen, self.tokens, self._evicted_history(seen))
            if not due and self.schedule.upper(features) <= self._allowed(seen):
                return self._between(seen)
        held = self.cache.at_hand()
        explore = torch.rand(self.cache.raw.rows.shape, generator=self.generator) < self.options.explore
        work = self.step(self.cache, query, self.budget, explore)
        step = work.run()
        self.scratch_bytes = max(self.scratch_bytes, work.scratch_bytes)
        if due and seen is not None and work.finite:
            self.schedule.observe(features, missed_masses(work, held))
        self.read = work.read
        self._after(work)
        if not due:  # its estimate was too large, so it was done like a certified one; all layers keep step
            self.schedule.between += 1
            return Step(step.output, None)
        assert step.certificate is not None
        reported = dropped_masses(work, step.certificate.exact)
        return replace(step, certificate=replace(step.certificate, reported=reported))

    def _evicted_history(self, seen: Glance) -> Tensor:
        """Return the attention that tokens outside a glance had received, `[Hkv]`."""
        received = self.history.attention
        return (received.sum(1) - received.gather(1, seen.tokens).sum(1)).clamp_min(0)

    def _allowed(self, seen: Glance) -> float:
        """Return the smallest mass over all heads that may be left out under `eps`."""
        norm, eps = seen.output.norm(dim=-1), self.options.eps
        if self.options.denominator == "layer":
            norm = norm.square().mean().sqrt().expand_as(norm)
        limit = torch.full_like(norm, eps) if self.options.denominator == "abs" else norm * (eps / (1 + eps))
        radius = self.cache.bounds().rv[:, :-1].masked_fill(self.cache.at_hand(), 0.0)
        away = (seen.output - self.cache.centred_on()[:, None]).norm(dim=-1)
        largest = radius.amax(-1) if radius.shape[1] else radius.new_zeros(radius.shape[0])
        return float((limit / (largest[:, None] + away)).nan_to_num(nan=0.0).min())

    def _between(self, seen: Glance) -> Step:
        """Return a glance as the output of a step of which nothing is proven."""
        self.schedule.between += 1
        self.history.add(seen.tokens, seen.attention)
        self.read = self.cache.at_hand()
        return Step(store(seen.output, self.cache.dtype)[0].flatten(0, 1), None)

    def _after(self, work: GhostStep) -> None:
        """Take the step into the history, credit what it brought back, evict where it is time."""
        if work.finite:
            self.history.add_to_all(work.attention())
        back = work.readmitted
        self.readmitted += int(back.sum())
        if self.stages is not None and bool(back.any()):
            size = self.cache.fmt.block
            tokens = back.any(0).repeat_interleave(size).nonzero()[:, 0]
            self.stages.credit(tokens[tokens < self.stages.tokens].numpy())
        now = self.stages.transitions if self.stages else 0
        ended, self.transitions = now != self.transitions, now
        if not work.finite:
            return
        if self.since_eviction >= EVICT_EVERY or ended:
            self._evict(self._worth(work.mean_scores()), back)
            self.since_eviction = 0
        elif bool(back.any()):  # what came back stays until the next eviction, beside what was there
            self._evict(self._worth(work.mean_scores()), back | self.cache.at_hand())

    def exact(self, query: Tensor) -> Tensor:
        """Return float64 attention on the originals, `[Hq, D]`."""
        self.cache.check_originals()
        assert self.cache.originals is not None
        keys, values = (slab.rows for slab in self.cache.originals)
        groups = as_groups(query, keys.shape[0])
        return exact_attention(groups, keys, values, self.cache.geometry.scale).output.flatten(0, 1)

    def check_intact(self) -> None:
        """Raise `BrokenRun` when something stored has changed since it was stored."""
        self.cache.check_intact()

    def fork(self) -> "RecasCertifiedLayer":
        """Return an independent copy; counters of steps start anew, what was evicted stays counted."""
        twin = RecasCertifiedLayer(self.cache.geometry, self.options, self.cache.backend)
        twin.cache = self.cache.fork()
        twin.counters = TieredCounters(twin.cache)
        twin.history, twin.stages, twin.transitions = self.history.fork(), self.stages, self.transitions
        twin.evicted, twin.kept_tokens = self.evicted, self.kept_tokens
        twin.ended, twin.waiting, twin.scratch_bytes = self.ended, self.waiting, self.scratch_bytes
        twin.generator = self.generator.clone_state()
        return twin

    def bytes(self) -> LayerBytes:
        """Return what is allocated now; history counts as metadata of the device."""
        held = self.cache.bytes(self.scratch_bytes)
        return LayerBytes(
            device=held.device + self.history.nbytes,
            host=held.host,
            metadata=held.metadata + self.history.nbytes,
            scratch=held.scratch,
            dense_equivalent=held.dense_equivalent,
        )

    def engagement(self) -> Engagement:
        """Return whether codes were written and read, and how many blocks came back."""
        record = self.counters.engagement()
        ghosts = int((~self.cache.at_hand()).sum())
        details = {"readmitted_blocks": self.readmitted, "ghost_blocks": ghosts, **self.schedule.details()}
        return Engagement(
            record.steps,
            record.steps_acted,
            record.coded_elems,
            self.evicted,
            record.engaged,
            record.reason,
            details=details,
        )


def dropped_masses(work: GhostStep, exact: Tensor) -> dict[str, Tensor]:
    """Return between which limits the mass of what a step did not read lies, `[Hq]`; 0 for exact heads."""
    if not work.finite:
        return {name: torch.zeros_like(exact, dtype=torch.float64) for name in DROPPED}
    limits = (limit.flatten() for limit in work.mass_outside(work.read))
    return {name: torch.where(exact, 0.0, limit) for name, limit in zip(DROPPED, limits, strict=True)}


def missed_masses(work: GhostStep, held: Tensor) -> list[float]:
    """Return the largest mass that may lie outside the blocks `held` `[Hkv, M]` and the tail, per KV head."""
    return [float(mass) for mass in work.mass_outside(held)[1].amax(1)]


class RecasCertified:
    """The selection of `recas`, certified."""

    name = "recas-certified"
    summary = "the selection of recas with INT8 ghosts of what is dropped; every head certified or exact"
    label = "certified"
    certifies = True
    Options = Options

    def needs(self, options: Any) -> Needs:
        """Return the last rows of the prompt and the token ids."""
        del options
        return Needs(last_rows=PROMPT_ROWS, token_ids=True)

    def open(self, geometry: Geometry, options: Any, backend: Any) -> RecasCertifiedLayer:
        """Make the empty cache of one layer."""
        return RecasCertifiedLayer(geometry, options, backend)


MODE = RecasCertified()
