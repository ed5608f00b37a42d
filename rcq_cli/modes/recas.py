"""Stage-aware eviction and sparse reads under an estimated loss, after the RECAS paper.

Two sets per KV head: the kept tokens C, and S, a part of C, which a step reads. Everything that ever arrived
stays in host memory, where probes measure the mass that S leaves out, and from where tokens come back when
the calibrated estimate of that mass is too large for the budget `eps`. An estimate is never called a bound.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rcq_cli.cache.slab import Slab
from rcq_cli.cache.statistics import Statistics, one_row
from rcq_cli.certify.exact import as_groups, exact_attention, store
from rcq_cli.modes._budget import token_bytes
from rcq_cli.modes._evicting import gathered
from rcq_cli.modes._recas import (
    EVICT_EVERY,
    PROMPT_ROWS,
    RecasOptions,
    TokenHistory,
    stage_signal,
    static_scores,
)
from rcq_cli.modes._tiered import check_range
from rcq_cli.protocols import Engagement, Geometry, LayerBytes, Needs, Step
from rcq_cli.recas import selector, utility
from rcq_cli.recas.controller import Controller, allowed_mass
from rcq_cli.recas.estimator import Calibrator, MassEstimator, to_logit
from rcq_cli.recas.stages import StageTracker

PROBE_EVERY = 64
"""Steps between two periodic probes, which train the estimator."""


@dataclass(frozen=True, slots=True)
class Options(RecasOptions):
    """Options of `recas`."""

    eps: float = 0.05
    """error budget per head and step that the estimated loss has to meet, relative to the output"""
    adapt: bool = True
    """let the budget follow the calibrated estimate once there is one"""
    probe_rate: float = 0.03125
    """share of steps, drawn at random, whose true loss calibrates the estimate"""
    miss_rate: float = 0.1
    """share of steps in which the loss may exceed its calibrated estimate"""

    def __post_init__(self) -> None:
        RecasOptions.__post_init__(self)
        check_range("eps", self.eps, 1e-9, 1.0)
        check_range("probe_rate", self.probe_rate, 0.0, 1.0)
        check_range("miss_rate", self.miss_rate, 0.001, 0.5)


class Reading(NamedTuple):
    """One attempt at a step: what was read and what came out."""

    output: Tensor
    """float64 `[Hkv, R, D]`"""
    read: Tensor
    """bool `[Hkv, n]` over the kept tokens: S"""
    attention: Tensor
    """`[Hkv, n]` group-mean weight that was used, 0 on what was not read."""
    worth: Tensor
    """`[Hkv, n]` utility"""
    features: list[list[float]]
    """Of each KV head, for the estimator."""


class RecasLayer:
    """One layer under `recas`."""

    def __init__(self, geometry: Geometry, options: Options, backend: Any) -> None:
        self.geometry, self.options, self.backend = geometry, options, backend
        self.dtype = getattr(torch, geometry.dtype)
        heads, dim = geometry.kv_heads, geometry.head_dim
        self.originals = tuple(Slab(heads, (dim,), self.dtype) for _ in "kv")
        self.kept = tuple(Slab(heads, (dim,), self.dtype, geometry.device) for _ in "kv")
        self.positions = Slab(heads, (), torch.int32, geometry.device)
        self.history = TokenHistory(heads)
        self.worth = torch.zeros(heads, 0)
        self.evicted_history = torch.zeros(heads)
        self.stages: StageTracker | None = None
        self.transitions = self.stages_since_probe = 0
        self.controller = Controller(0, options.minimum)
        self.estimator, self.calibrator = MassEstimator(), Calibrator(options.miss_rate)
        self.generator = torch.Generator().manual_seed(34529)
        self.last_mass = [0.0] * heads
        self.since_probe = self.since_eviction = 0
        self.ended = self.waiting = False
        self.steps = self.steps_acted = self.evicted = self.exhausted = self.probes = 0
        self.scratch_bytes = 0
        self.active = torch.zeros(heads, 0, dtype=torch.bool)
        """What the last step read of the kept tokens, `[Hkv, n]`."""

    # -- storage --------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Return the tokens seen."""
        return self.originals[0].length

    def follow(self, stages: StageTracker | None) -> None:
        """Read stage evidence from `stages`, which is told the ids of all tokens."""
        self.stages = stages

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Add `[Hkv, T, D]` keys and values."""
        first, count = self.tokens, keys.shape[1]
        for slabs in (self.originals, self.kept):
            for slab, rows in zip(slabs, (keys, values), strict=True):
                slab.extend(rows.to(slab.data.device))
        fresh = torch.arange(first, first + count, dtype=torch.int32, device=keys.device)
        self.positions.extend(fresh.expand(keys.shape[0], count))
        self.history.grow(count)
        self.worth = torch.cat((self.worth, torch.zeros(keys.shape[0], count)), 1)

    def end_prefill(self, seen: Statistics | None) -> None:
        """Fix the budget and evict by the last rows of the prompt; without them wait for the first query."""
        self.ended = True
        self.controller.budget = self.options.budget(self.tokens, token_bytes(self.geometry, 4))
        if self.stages is not None:
            self.stages.close()
            self.transitions = self.stages.transitions
        self.waiting = seen is None and self.tokens > 0
        if seen is not None and seen.queries.shape[1]:
            self._judge(seen)

    def _judge(self, seen: Statistics) -> None:
        """Evict for the first time, with the newest query as the present one."""
        links = stage_signal(self.stages, self._index())
        self._evict(static_scores(self.history, seen, self.kept[0].rows, self.options.weights(), links))

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the `[Hkv, D]` key and value of one token."""
        if not self.ended:
            self.end_prefill(None)
        self.prefill(key[:, None], value[:, None])

    def _evict(self, worth: Tensor) -> None:
        """Keep the best tokens up to the budget, protected ones first."""
        index = self._index()
        self.worth = self.worth.scatter(1, index, worth.float())
        if index.shape[1] <= self.controller.budget:
            return
        chosen = selector.top(worth, self.controller.budget, self._protected(index))
        dropped = self.history.attention.gather(1, index).masked_fill(chosen, 0.0).sum(1)
        self.evicted_history = self.evicted_history + dropped
        self.evicted += int((~chosen).sum())
        self._hold(index[chosen].unflatten(0, (index.shape[0], -1)))
        self.since_eviction = 0

    def _readmit(self, budget: int) -> None:
        """Bring the best evicted tokens back from the originals until `budget` are kept."""
        index = self._index()
        room = min(budget, self.tokens) - index.shape[1]
        if room <= 0:
            return
        outside = torch.ones_like(self.worth, dtype=torch.bool).scatter(1, index, False)
        ranked = torch.where(outside, self.worth, -torch.inf)
        back = selector.ranking(ranked, torch.zeros_like(outside))[:, :room]
        self._hold(torch.cat((index, back), 1).sort(1).values)

    def _hold(self, index: Tensor) -> None:
        """Keep the tokens `[Hkv, n]`, in new buffers: forks share the old ones."""
        for slab, source in zip(self.kept, self.originals, strict=True):
            slab.data = gathered(source.rows, index).to(slab.data.device)
            slab.length = index.shape[1]
        self.positions.data, self.positions.length = index.to(torch.int32), index.shape[1]
        self.scratch_bytes = max(self.scratch_bytes, 2 * self.kept[0].nbytes)

    def _index(self) -> Tensor:
        return self.positions.rows.long()

    def _protected(self, index: Tensor) -> Tensor:
        return (index < selector.SINKS) | (index >= self.tokens - self.options.window)

    # -- one step -------------------------------------------------------------------------------------------

    def attend(self, query: Tensor) -> Step:
        """Return the attention of `[Hq, D]` queries on the tokens read, within the estimated loss."""
        if not self.ended:
            self.end_prefill(None)
        groups = as_groups(query, self.geometry.kv_heads)
        if self.waiting:
            self.waiting = False
            self._judge(one_row(query, self.kept[0].rows, self.geometry.scale))
        self.steps += 1
        self.since_eviction += 1
        reading = self._controlled(groups)
        self._after(groups, reading)
        self.active = reading.read
        return Step(store(reading.output, self.dtype)[0].flatten(0, 1), None)

    def _read(self, groups: Tensor) -> Reading:
        """Choose what is read of the kept tokens, and read it."""
        keys, values = (slab.rows.double() for slab in self.kept)
        scores = (groups @ keys.transpose(1, 2)) * self.geometry.scale
        mean = scores.mean(1)
        worth = self._worth(mean)
        standard = utility.standard_scores(mean)
        ranked = selector.sparse_scores(standard, worth, self.options.active_utility)
        weights = scores.softmax(-1)
        always = self._protected(self._index())
        read = selector.covering(ranked, weights.mean(1), 1 - self.options.active_loss, always)
        used = torch.where(read[:, None], weights, 0.0)
        used = used / used.sum(-1, keepdim=True)
        self.scratch_bytes = max(self.scratch_bytes, 8 * (2 * keys.numel() + 3 * scores.numel()))
        return Reading(used @ values, read, used.mean(1), worth, self._features(ranked, read, used.mean(1)))

    def _worth(self, mean_scores: Tensor) -> Tensor:
        """Return the utility `[Hkv, n]` of the kept tokens for group-mean scores."""
        index = self._index()
        return utility.utility(
            utility.compatibility(mean_scores),
            self.history.signal(index, index.shape[1]).double(),
            stage_signal(self.stages, index).double(),
            self.options.weights(),
        )

    def _features(self, ranked: Tensor, read: Tensor, attention: Tensor) -> list[list[float]]:
        """Return what is known of each KV head's loss without the dropped tokens."""
        total, kept = self.tokens, read.shape[1]
        entropy = -torch.where(attention > 0, attention * attention.log(), 0.0).sum(1)
        gap = ranked.amax(1) - torch.where(read, ranked, torch.inf).amin(1)
        counts = read.sum(1)
        return [
            [
                float((counts[head] / total).log()),
                float(torch.tensor(kept / total).log()),
                to_logit(self.last_mass[head]),
                float(self.since_probe),
                float(entropy[head]),
                float(gap[head]),
                float(self.evicted_history[head]),
                float(self.stages_since_probe),
            ]
            for head in range(read.shape[0])
        ]

    def _controlled(self, groups: Tensor) -> Reading:
        """Read, and widen what is kept while the calibrated estimate of the loss is too large."""
        reading = self._read(groups)
        if not self.options.adapt or not self.calibrator.ready:
            return reading
        found = [reading]

        def mass(budget: int) -> float:
            if budget > self._index().shape[1]:
                self._readmit(budget)
                found.append(self._read(groups))
            return max(self.calibrator.upper(value) for value in self._estimates(found[-1]))

        decision = self.controller.step(mass, self._allowed(reading), self.tokens)
        if not decision.exhausted:
            return found[-1]
        self.exhausted += 1
        keys, values = (slab.rows for slab in self.originals)
        return found[-1]._replace(output=exact_attention(groups, keys, values, self.geometry.scale).output)

    def _estimates(self, reading: Reading) -> list[float]:
        """Return the estimated mass outside what was read, per KV head; 0 where nothing is outside."""
        if reading.read.shape[1] == self.tokens and bool(reading.read.all()):
            return [0.0] * len(reading.features)
        return [self.estimator.estimate(features) or 0.0 for features in reading.features]

    def _allowed(self, reading: Reading) -> float:
        """Return the smallest mass over all heads that may be left out under `eps`."""
        values = self.originals[1].rows.double()
        centre = values.mean(1, keepdim=True)
        radius = (values - centre).norm(dim=-1).amax(-1)[:, None]
        reach = radius + (centre - reading.output).norm(dim=-1)
        limit = reading.output.norm(dim=-1) * (self.options.eps / (1 + self.options.eps))
        return min(
            allowed_mass(float(a), float(b)) for a, b in zip(limit.flatten(), reach.flatten(), strict=True)
        )

    def _after(self, groups: Tensor, reading: Reading) -> None:
        """Probe, take the step into the history, evict where it is time."""
        index = self._index()
        self.steps_acted += bool((~reading.read).any()) or index.shape[1] < self.tokens
        self._probe(groups, reading)
        self.history.add(index, reading.attention)
        now = self.stages.transitions if self.stages else 0
        self.stages_since_probe += now - self.transitions
        ended, self.transitions = now != self.transitions, now
        if self.since_eviction >= EVICT_EVERY or ended or self.controller.budget < self._floor(index):
            self._evict(reading.worth)

    def _floor(self, index: Tensor) -> int:
        """Return the tokens kept beyond which a shrunk budget is acted on at once."""
        return index.shape[1] - EVICT_EVERY

    def _probe(self, groups: Tensor, reading: Reading) -> None:
        """Measure the mass outside what was read: at random to calibrate, else now and then to train."""
        random = float(torch.rand((), generator=self.generator)) < self.options.probe_rate
        periodic = self.steps % PROBE_EVERY == 1
        self.since_probe += 1
        if not (random or periodic):
            return
        masses = self._true_masses(groups, reading.read)
        if random:
            self.calibrator.observe(masses, self._estimates(reading))
        else:
            for features, mass in zip(reading.features, masses, strict=True):
                self.estimator.train(features, mass)
        self.probes += 1
        self.last_mass, self.since_probe, self.stages_since_probe = masses, 0, 0

    def _true_masses(self, groups: Tensor, read: Tensor) -> list[float]:
        """Return the exact mass outside what was read, per KV head the largest over its query heads."""
        keys = self.originals[0].rows.double()
        weights = ((groups @ keys.transpose(1, 2)) * self.geometry.scale).softmax(-1)
        outside = torch.ones(keys.shape[:2], dtype=torch.bool).scatter(1, self._index(), ~read)
        # summed over what was left out: one minus the rest would lose the digits of a small mass
        return [float(m) for m in torch.where(outside[:, None], weights, 0.0).sum(-1).amax(1)]

    # -- housekeeping ---------------------------------------------------------------------------------------

    def exact(self, query: Tensor) -> Tensor:
        """Return float64 attention on the originals, `[Hq, D]`."""
        keys, values = (slab.rows for slab in self.originals)
        groups = as_groups(query, self.geometry.kv_heads)
        return exact_attention(groups, keys, values, self.geometry.scale).output.flatten(0, 1)

    def fork(self) -> "RecasLayer":
        """Return an independent copy; counters of steps start anew, what was evicted stays counted."""
        twin = RecasLayer(self.geometry, self.options, self.backend)
        twin.originals = tuple(slab.fork() for slab in self.originals)
        twin.kept, twin.positions = tuple(slab.fork() for slab in self.kept), self.positions.fork()
        twin.history, twin.worth = self.history.fork(), self.worth
        twin.stages, twin.transitions = self.stages, self.transitions
        twin.evicted_history, twin.evicted = self.evicted_history, self.evicted
        twin.controller.budget, twin.ended, twin.waiting = self.controller.budget, self.ended, self.waiting
        twin.scratch_bytes = self.scratch_bytes
        return twin

    def bytes(self) -> LayerBytes:
        """Return what is allocated now: the kept tokens on the device, everything on the host."""
        g = self.geometry
        meta = self.positions.nbytes + self.history.nbytes
        return LayerBytes(
            device=sum(slab.nbytes for slab in self.kept) + meta,
            host=sum(slab.nbytes for slab in self.originals) + self.worth.nbytes,
            metadata=meta,
            scratch=self.scratch_bytes,
            dense_equivalent=2 * g.kv_heads * self.tokens * g.head_dim * 2,
        )

    def engagement(self) -> Engagement:
        """Return whether tokens were evicted or left unread, and what the probes found."""
        engaged = self.evicted > 0 and self.steps_acted > 0
        reason = ""
        if not engaged:
            reason = "no_decode_steps" if not self.steps else "inactive"
            if self.steps and self.tokens <= self.options.minimum:
                reason = "short_context"
            elif self.steps and self.tokens <= self.controller.budget + EVICT_EVERY:
                reason = "budget_ge_context"
        details = {
            "probes": self.probes,
            "estimate_probes": self.calibrator.probes,
            "estimate_misses": self.calibrator.misses,
            "estimate_tested": self.calibrator.tested,
            "exhausted_steps": self.exhausted,
            "kept_tokens_max": self.positions.length,
        }
        return Engagement(self.steps, self.steps_acted, 0, self.evicted, engaged, reason, details=details)


class Recas:
    """Eviction and sparse reads under a calibrated estimate."""

    name = "recas"
    summary = "stage-aware eviction and sparse reads; the loss is estimated, calibrated by probes"
    label = "calibrated"
    certifies = False
    Options = Options

    def needs(self, options: Any) -> Needs:
        """Return the last rows of the prompt and the token ids."""
        del options
        return Needs(last_rows=PROMPT_ROWS, token_ids=True)

    def open(self, geometry: Geometry, options: Any, backend: Any) -> RecasLayer:
        """Make the empty cache of one layer."""
        return RecasLayer(geometry, options, backend)


MODE = Recas()
