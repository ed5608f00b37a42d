"""INT8/INT4 tiers with an error certificate per head and step, and a budget that is enforced.

Source of the setting: arXiv:2605.20868. Bounds, the joint treatment of skipped values, the enforced relative
budget and the rounding analysis are rcq's own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.device import DeviceStore
from rcq_cli.cache.packed import PackedStore, make_store
from rcq_cli.certify.device import DeviceStep
from rcq_cli.certify.exact import as_groups, exact_attention
from rcq_cli.certify.fused import FusedStep, unfused
from rcq_cli.certify.ladder import Budget, CertifiedStep
from rcq_cli.errors import SpecError
from rcq_cli.modes._tiered import FormatOptions, TieredCounters, check_range
from rcq_cli.protocols import Engagement, Geometry, LayerBytes, Step

DENOMINATORS = ("out", "layer", "abs")


@dataclass(frozen=True, slots=True)
class Options(FormatOptions):
    """Options of `certified`."""

    eps: float = 0.05
    """error budget per head and step, relative to the exact output (absolute with denominator=abs)"""
    denominator: str = "out"
    """what eps is relative to: out (the head's output), layer (the layer's output), abs (nothing)"""
    skip: bool = True
    """do not read the values of blocks where that costs little of the budget"""
    tau: float = 0.0
    """promote the heaviest key blocks up to this share of the mass before the first check"""
    rounds: int = 4
    """promotion rounds before a head is recomputed exactly"""
    explore: float = 0.01
    """share of blocks per step whose keys are compared with the originals only to find corruption"""

    def __post_init__(self) -> None:
        FormatOptions.__post_init__(self)
        check_range("eps", self.eps, 1e-9, 1e9 if self.denominator == "abs" else 1.0)
        check_range("tau", self.tau, 0.0, 1.0)
        check_range("rounds", self.rounds, 0, 16)
        check_range("explore", self.explore, 0.0, 1.0)
        if self.denominator not in DENOMINATORS:
            raise SpecError(
                f"denominator={self.denominator!r} is not allowed", fix=f"allowed: {', '.join(DENOMINATORS)}"
            )


class CertifiedLayer:
    """One layer under `certified`."""

    def __init__(self, geometry: Geometry, options: Options, backend: Any) -> None:
        self.options = options
        self.cache = make_store(geometry, options.format(), backend)
        self.counters = TieredCounters(self.cache)
        self.budget = Budget(options.eps, options.denominator, options.skip, options.rounds, options.tau)
        self.scratch_bytes = 0
        self.generator = torch.Generator().manual_seed(20868)

    @property
    def tokens(self) -> int:
        """Return the tokens seen."""
        return self.cache.tokens

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Add `[Hkv, T, D]` keys and values."""
        self.cache.extend(keys, values)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the `[Hkv, D]` key and value of one token."""
        self.cache.append(key, value)

    def attend(self, query: Tensor) -> Step:
        """Return the output of `[Hq, D]` queries, certified within the budget or exact."""
        self.counters.count()
        work = self._work(query)
        step = work.run()
        self.scratch_bytes = max(self.scratch_bytes, work.scratch_bytes)
        return step

    def _work(self, query: Tensor) -> CertifiedStep | FusedStep | DeviceStep:
        if isinstance(self.cache, DeviceStore):
            return DeviceStep(self.cache, query, self.budget, self.options.explore)
        if isinstance(self.cache, PackedStore) and not unfused(self.cache.fmt, self.budget):
            return FusedStep(self.cache, query, self.budget, self.options.explore, self.counters.steps)
        shape = self.cache.raw.rows.shape
        explore = torch.rand(shape, generator=self.generator) < self.options.explore
        return CertifiedStep(self.cache, query, self.budget, explore)

    def exact(self, query: Tensor) -> Tensor:
        """Return float64 attention on the originals, `[Hq, D]`."""
        self.cache.check_originals()
        assert self.cache.originals is not None
        keys, values = (slab.rows.to(query.device) for slab in self.cache.originals)
        groups = as_groups(query, keys.shape[0])
        return exact_attention(groups, keys, values, self.cache.geometry.scale).output.flatten(0, 1)

    def check_intact(self) -> None:
        """Raise `BrokenRun` when something stored has changed since it was stored."""
        self.cache.check_intact()

    def fork(self) -> "CertifiedLayer":
        """Return an independent copy."""
        twin = CertifiedLayer.__new__(CertifiedLayer)
        twin.options, twin.budget, twin.scratch_bytes = self.options, self.budget, self.scratch_bytes
        twin.cache = self.cache.fork()
        twin.counters = TieredCounters(twin.cache)
        twin.generator = self.generator.clone_state()
        return twin

    def bytes(self) -> LayerBytes:
        """Return what is allocated now."""
        return self.cache.bytes(self.scratch_bytes)

    def engagement(self) -> Engagement:
        """Return the counters since the cache was made."""
        return self.counters.engagement()


class Certified:
    """Enforced budget under our bounds."""

    name = "certified"
    summary = (
        "INT8 keys, INT4 values, originals on the host; every head certified within eps or recomputed exactly"
    )
    label = "certified"
    certifies = True
    Options = Options

    def open(self, geometry: Geometry, options: Any, backend: Any) -> CertifiedLayer:
        """Make the empty cache of one layer."""
        return CertifiedLayer(geometry, options, backend)


MODE = Certified()
