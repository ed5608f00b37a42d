"""The published policy of arXiv:2605.20868, unchanged, with our bounds measured beside its own formulas.

INT8 keys in blocks of 16, INT4 values in groups of 16, originals on the host. Each head promotes the keys of
its heaviest blocks up to a coverage, expands once, promotes values by their share of the value error, and
checks the order of blocks. No budget on the key error exists there, so any size passes: what this mode prints
is reported, never certified. The columns of its certificates are ours; its own formulas stand in `reported`.

Where text and published code differ an option chooses. Not reproduced, for they make a reported number no
bound: relative and averaged value residuals, annotations taken before metadata is rounded, value norms
without the open tail, value errors with the masses of another pass.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rcq_cli.cache.tiers import TieredStore
from rcq_cli.certify.bounds import MARGIN, Masses
from rcq_cli.certify.ladder import Budget, CertifiedStep
from rcq_cli.kernels import _cpu_float64_blocks
from rcq_cli.kernels._format import TierFormat
from rcq_cli.modes._compiled import CompiledStore, ReadingStep
from rcq_cli.modes._tiered import TieredCounters, check_range
from rcq_cli.modes.certified import CertifiedLayer
from rcq_cli.phases import phased
from rcq_cli.protocols import Engagement, Geometry, Step

FORMAT = TierFormat(block=16, group=16, key_meta="float32", value_meta="float16")
EXPANSION_MASS = 0.02
_NO_BUDGET = Budget(eps=1.0, denominator="out", skip=False, rounds=0, first_share=0.0)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `certified-paper`; defaults are those of the experiments."""

    tau: float = 0.995
    """coverage of attention mass by blocks whose keys are exact"""
    k_min: int = 2
    """fewest key blocks a head promotes"""
    k_max: int = 128
    """most key blocks a head promotes before the expansion, which may double them"""
    v_tol: float = 0.05
    """value error above which values are promoted, in the unit of the values"""
    value_rule: Literal["per_block", "greedy"] = "per_block"
    """per_block: every block above v_tol (the text); greedy: until the sum is below (the code)"""
    ranks: int = 1
    """leading blocks whose order is checked"""
    eps_guard: float = 1e-6
    """slack of the score check; the published code has 0.01"""
    delta: Literal["d0", "d1"] = "d0"
    """score perturbation: d0 sums |q_c| s_c over channels, d1 is its Cauchy-Schwarz form"""
    inflate: Literal[2, 3] = 2
    """multiple of delta in the mass inflation of the reported key error"""
    explore: float = 0.01
    """share of blocks per step whose keys are compared with the originals only to find corruption"""

    def __post_init__(self) -> None:
        check_range("tau", self.tau, 0.0, 1.0)
        check_range("k_min", self.k_min, 1, 2**20)
        check_range("k_max", self.k_max, self.k_min, 2**20)
        check_range("v_tol", self.v_tol, 0.0, 1e9)
        check_range("ranks", self.ranks, 1, 1024)
        check_range("eps_guard", self.eps_guard, 0.0, 1.0)
        check_range("explore", self.explore, 0.0, 1.0)


class Selection(NamedTuple):
    """The key blocks of each head."""

    chosen: Tensor
    """bool `[Hkv, R, M]`"""
    uncovered: Tensor
    """`[Hkv, R]` Phase-1 mass of the completed blocks that were not chosen"""
    expanded: Tensor
    """bool `[Hkv, R]`: rung 1"""


def select(share: Tensor, options: Options) -> Selection:
    """Choose from `[Hkv, R, M + 1]` Phase-1 masses, whose last column is the open tail (always exact)."""
    blocks = share[..., :-1]
    order = blocks.argsort(dim=-1, descending=True, stable=True)
    ranked = blocks.gather(-1, order)
    ahead = share[..., -1:] + ranked.cumsum(-1) - ranked
    rank = torch.arange(blocks.shape[-1], device=share.device)
    count = (ahead < options.tau).sum(-1).clamp(options.k_min, options.k_max)
    uncovered = torch.where(rank >= count[..., None], ranked, 0.0).sum(-1)
    expanded = uncovered > EXPANSION_MASS
    count = torch.where(expanded, (2 * count).clamp_max(2 * options.k_max), count)
    beyond = rank >= count[..., None]
    chosen = torch.zeros_like(blocks, dtype=torch.bool).scatter(-1, order, ~beyond)
    return Selection(chosen, torch.where(beyond, ranked, 0.0).sum(-1), expanded)


def values_to_promote(error: Tensor, options: Options) -> Tensor:
    """Return the blocks `[Hkv, R, M]` whose values become exact, given rho_b * eta_b."""
    if options.value_rule == "per_block":
        return error > options.v_tol
    order = error.argsort(dim=-1, descending=True, stable=True)
    left = error.gather(-1, order).flip(-1).cumsum(-1).flip(-1)  # with this block and all smaller ones
    return torch.zeros_like(error, dtype=torch.bool).scatter(-1, order, left > options.v_tol)


def reported_key_error(value_norm: Tensor, delta: Tensor, uncovered: Tensor, inflate: int) -> Tensor:
    """Return 2 V_max e^(inflate * delta) alpha (e^(2 delta) - 1), the paper's formula."""
    return 2 * value_norm * (inflate * delta).exp() * uncovered * torch.expm1(2 * delta)


def order_failures(
    exact: Tensor, coded: Tensor, known: Tensor, delta: Tensor, ranks: int
) -> tuple[Tensor, Tensor]:
    """Return which heads `[Hkv, R]` fail the rank and the boundary check.

    `exact` and `coded` are block log masses `[Hkv, R, M]` (`exact` counts where `known`). Rank: the leading
    blocks among the known ones differ. Boundary: an unknown block could exceed the last of them by `delta`.
    """
    leading = min(ranks, exact.shape[-1])
    if not leading:
        nothing = torch.zeros_like(delta, dtype=torch.bool)
        return nothing, nothing
    among = [torch.where(known, masses, -torch.inf) for masses in (exact, coded)]
    order = [_leading(masses, leading) for masses in among]
    lists = [masses.gather(-1, first) for masses, first in zip(among, order, strict=True)]
    valid = torch.isfinite(lists[0])
    rank = ((order[0] != order[1]) & valid).any(-1)
    last = torch.where(valid, lists[0], torch.inf).amin(-1)
    hidden = torch.where(known, -torch.inf, coded + delta[..., None]).amax(-1)
    return rank, hidden > last


def _leading(masses: Tensor, count: int) -> Tensor:
    """Return the indices `[..., count]` of the largest masses, ties to the lower one."""
    if count == 1:  # argmax names the first of equals, and the default needs no more
        return masses.argmax(-1, keepdim=True)
    return masses.argsort(dim=-1, descending=True, stable=True)[..., :count]


class PaperStep(CertifiedStep):
    """One step under the published policy; scores, masses and our bounds come from the ladder."""

    def __init__(self, cache: TieredStore, query: Tensor, options: Options, explore: Tensor) -> None:
        self.options = options
        self.final: tuple[Masses, Tensor, Tensor] | None = None
        super().__init__(cache, query, _NO_BUDGET, explore)
        self.half_step = self._half_step()
        self.rank_failed = self.boundary_failed = torch.zeros(self.query.shape[:2], dtype=torch.bool)

    def _plan(self) -> None:
        super()._plan()
        # nothing is pinned here but what has no codes
        self.pinned = self.cache.raw.rows.clone()
        self.exact_values = self.pinned.clone()

    def masses(self) -> tuple[Masses, Tensor, Tensor]:
        """Return the block masses; once all keys and values are read nothing changes them any more."""
        return self.final or super().masses()

    def _floor(self, masses: Masses, radius: Tensor, away: Tensor, spectrum: Tensor) -> Tensor:
        """Return 0: nothing is promoted for the sake of a bound, so nobody asks what promotion can reach."""
        del masses, radius, spectrum
        return torch.zeros_like(away)

    def _half_step(self) -> Tensor:
        """Return D0 or D1 per block, `[Hkv, R, M]`."""
        if not self.blocks:
            return self.query.new_zeros(*self.query.shape[:2], 0)
        factor = abs(self.scale)
        if self.options.delta == "d0":
            return self.half_step * factor
        # half the steps of one channel are what a unit query sees
        units = torch.eye(self.query.shape[-1], dtype=torch.float64).expand(self.query.shape[0], -1, -1)
        steps = self.backend.half_steps(units, self.cache.codes()).norm(dim=1)
        return self.query.norm(dim=-1)[..., None] * steps[:, None] * factor

    def _check(self, head: Tensor, block: Tensor, exact: Tensor) -> None:
        """Compare scores as published: beyond D0 and the guard, codes or metadata are corrupt (rung 4)."""
        difference = (exact - self.scores[head, :, block]).abs()
        bad = (difference > self.allowed()[head, :, block][..., None]).flatten(1).any(1)
        self._distrust(bad | self.cache.damaged(head, block), head, block)

    def allowed(self) -> Tensor:
        """Return how far a coded score may be from the exact one before something must be corrupt."""
        return self.half_step * MARGIN + self.options.eps_guard

    @phased("select")
    def chosen(self, coded: Tensor) -> Selection:
        """Return the key blocks to promote, given the log masses `[Hkv, R, M + 1]` of the codes."""
        return select(coded.softmax(-1), self.options)

    def log_masses(self) -> Tensor:
        """Return the log masses of blocks as they are scored now, `[Hkv, R, M + 1]`."""
        return self.peak + self.mass.log()

    @phased("select")
    def value_errors(self) -> Tensor:
        """Return rho_b * eta_b `[Hkv, R, M]`, 0 where values are exact; all scores are final."""
        self.final = self.masses()
        return self._inexact(self.final[0].active()[..., :-1] * self.notes.eta[:, None, :-1])

    @phased("rank_check")
    def order_failures(self, exact: Tensor, coded: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return which heads fail the rank and the boundary check, given log masses `[Hkv, R, M + 1]`."""
        known = self.exact_keys[:, None].expand_as(coded[..., :-1])
        return order_failures(exact[..., :-1], coded[..., :-1], known, delta, self.options.ranks)

    def judged(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output and our bounds on its errors of keys, values, dropping and rounding."""
        output, _, bounds = self.evaluate()
        return output, (bounds.key, bounds.value, bounds.dropped, bounds.rounding)

    def run_paper(self, value_norm: Tensor) -> Step:
        """Run the policy; `value_norm` `[Hkv]` is the largest norm of a value, open tail included."""
        if not self.finite:
            return self._finish(None)
        self._weigh()
        coded = self.log_masses()
        selection = self.chosen(coded)
        self.promote_keys(selection.chosen.any(1) | self.pinned)
        self._read_values(torch.ones_like(self.read))
        error = self.value_errors()
        wanted = values_to_promote(error, self.options)
        self.promote_values(wanted.any(1))
        delta = self.half_step.amax(-1) if self.blocks else torch.zeros(self.query.shape[:2]).double()
        self.rank_failed, self.boundary_failed = self.order_failures(self.log_masses(), coded, delta)
        rung = torch.where(wanted.any(-1), 2, torch.where(selection.expanded, 1, 0))
        step = self._conclude(*self.judged(), rung)
        norm = value_norm[:, None].expand_as(delta)
        key_error = reported_key_error(norm, delta, selection.uncovered, self.options.inflate)
        reported = {
            "key_bound": key_error.flatten(),
            "value_bound": self._inexact(error).sum(-1).flatten(),
            "delta": delta.flatten(),
            "uncovered": selection.uncovered.flatten(),
        }
        assert step.certificate is not None
        return Step(step.output, replace(step.certificate, reported=reported))

    def _inexact(self, error: Tensor) -> Tensor:
        """Return what `[Hkv, R, M]` value errors are where values come from codes, else 0."""
        return torch.where(self.exact_values[:, None], 0.0, error)

    def _conclude(self, output: Tensor, parts: tuple[Tensor, ...], rung: Tensor) -> Step:
        """Recompute the heads whose order check failed, or the layer when a score check did."""
        exact = self.rank_failed | self.boundary_failed
        if self.broken:
            output, parts, exact = *self._whole_layer(), torch.ones_like(exact)
            rung = torch.full_like(rung, 4)
        elif bool(exact.any()):
            output, parts = self._exact_heads(output, parts, exact)
            rung = torch.where(exact, 3, rung)
        return self._step(output, parts, exact, rung)


class CompiledPaperStep(PaperStep, ReadingStep):
    """The same step with compiled pieces."""

    @phased("select")
    def chosen(self, coded: Tensor) -> Selection:
        """Return the key blocks to promote, given the log masses `[Hkv, R, M + 1]` of the codes."""
        o = self.options
        found = _cpu_float64_blocks.choose(coded, o.tau, o.k_min, o.k_max, EXPANSION_MASS)
        return Selection(*found)

    def log_masses(self) -> Tensor:
        """Return the log masses of blocks as they are scored now, `[Hkv, R, M + 1]`."""
        return self.log_mass

    @phased("select")
    def value_errors(self) -> Tensor:
        """Return rho_b * eta_b `[Hkv, R, M]`, 0 where values are exact; all scores are final."""
        self.weights_of_blocks = self.weighed()
        return self.weights_of_blocks.error

    @phased("rank_check")
    def order_failures(self, exact: Tensor, coded: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return which heads fail the rank and the boundary check, given log masses `[Hkv, R, M + 1]`."""
        return _cpu_float64_blocks.order_failures(exact, coded, self.exact_keys, delta, self.options.ranks)

    def judged(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output and our bounds on its errors of keys, values, dropping and rounding."""
        return self.bounded(self.weights_of_blocks, self.average(self.weights_of_blocks))


class PaperLayer(CertifiedLayer):
    """One layer under `certified-paper`."""

    def __init__(self, geometry: Geometry, options: Any, backend: Any) -> None:
        self.paper: Options = options
        self.step: type[PaperStep] = PaperStep
        self.cache = TieredStore(geometry, FORMAT, backend)
        if backend.name == "cpu":
            self.step = CompiledPaperStep
            self.cache = CompiledStore(geometry, FORMAT, backend)
        self.counters = TieredCounters(self.cache)
        self.scratch_bytes = 0
        self.generator = torch.Generator().manual_seed(20868)
        self.value_norm = torch.zeros(geometry.kv_heads, dtype=torch.float64)
        self.details: dict[str, float] = {}

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Add `[Hkv, T, D]` keys and values."""
        self.value_norm = torch.maximum(self.value_norm, values.double().norm(dim=-1).amax(1))
        super().prefill(keys, values)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the `[Hkv, D]` key and value of one token."""
        self.value_norm = torch.maximum(self.value_norm, value.double().norm(dim=-1))
        super().append(key, value)

    def attend(self, query: Tensor) -> Step:
        """Return the output of `[Hq, D]` queries under the published policy."""
        self.counters.count()
        explore = torch.rand(self.cache.raw.rows.shape, generator=self.generator) < self.paper.explore
        work = self.step(self.cache, query, self.paper, explore)
        step = work.run_paper(self.value_norm)
        self.scratch_bytes = max(self.scratch_bytes, work.scratch_bytes)
        self._take(work, step)
        return step

    def _take(self, work: PaperStep, step: Step) -> None:
        """Count what the published policy did and what its formulas said."""
        certificate = step.certificate
        assert certificate is not None
        rungs = certificate.rung.tolist()
        counts = {f"paper_rung_{i}": float(rungs.count(i)) for i in range(5)}
        counts["paper_rank_failures"] = float(work.rank_failed.sum())
        counts["paper_boundary_failures"] = float(work.boundary_failed.sum())
        for name, value in counts.items():
            self.details[name] = self.details.get(name, 0.0) + value
        for name, figures in certificate.reported.items():
            total, largest, values = f"paper_{name}_sum", f"paper_{name}_max", figures.tolist()
            self.details[total] = self.details.get(total, 0.0) + sum(values)
            self.details[largest] = max(self.details.get(largest, 0.0), *values)

    def fork(self) -> "PaperLayer":
        """Return an independent copy; counters start anew."""
        twin = PaperLayer.__new__(PaperLayer)
        twin.paper, twin.step, twin.value_norm = self.paper, self.step, self.value_norm
        twin.scratch_bytes = self.scratch_bytes
        twin.cache = self.cache.fork()
        twin.counters, twin.details = TieredCounters(twin.cache), {}
        twin.generator = self.generator.clone_state()
        return twin

    def engagement(self) -> Engagement:
        """Return the counters since the cache was made."""
        return replace(self.counters.engagement(), details=dict(self.details))


class CertifiedPaper:
    """The paper's policy and gate."""

    name = "certified-paper"
    summary = "the published policy of certified attention, its formulas reported beside our sound bounds"
    label = "reported"
    certifies = True
    Options = Options

    def open(self, geometry: Geometry, options: Any, backend: Any) -> PaperLayer:
        """Make the empty cache of one layer."""
        return PaperLayer(geometry, options, backend)


MODE = CertifiedPaper()
