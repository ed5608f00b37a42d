"""Decayed attention instead of verdicts, with sinks and recent tokens protected.

Source of the rule: the selector that KVCache-Factory ships for arXiv:2305.17118; the constants are rcq's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.statistics import Statistics
from rcq_cli.modes._budget import BudgetOptions
from rcq_cli.modes._evicting import EvictingLayer, checked, gathered, top
from rcq_cli.modes._tiered import check_range
from rcq_cli.protocols import Geometry, Needs

DEFAULT_FRACTION = 0.25
ROWS = 400


@dataclass(frozen=True, slots=True)
class Options(BudgetOptions):
    """Options of `scissorhands-decay`; without a budget a quarter of the prompt is kept."""

    decay: float = 0.9
    """factor of the importance so far when a row is added"""
    sinks: int = 4
    """first tokens that are always kept"""
    recent: int = 10
    """last tokens that are always kept"""
    seed: int | None = None
    """draw what is kept in proportion to importance with this seed; none: keep the most important"""

    def __post_init__(self) -> None:
        BudgetOptions.__post_init__(self)
        check_range("decay", self.decay, 0.0, 1.0)
        check_range("sinks", self.sinks, 0, 4096)
        check_range("recent", self.recent, 1, 4096)
        self.check(self.sinks + self.recent + 1)


class DecayLayer(EvictingLayer):
    """One layer under `scissorhands-decay`."""

    def __init__(self, geometry: Geometry, options: Any, backend: Any) -> None:
        super().__init__(geometry, options, backend)
        self.importance = torch.zeros(geometry.kv_heads, 0, device=geometry.device)
        self.generator = None if options.seed is None else torch.Generator().manual_seed(options.seed)

    def minimum(self) -> int:
        """Return the protected tokens and one more."""
        return int(self.options.sinks + self.options.recent + 1)

    def default_budget(self) -> int:
        """Return a quarter of the prompt."""
        return max(self.minimum(), round(DEFAULT_FRACTION * self.tokens))

    def choose(self, seen: Statistics | None) -> Tensor | None:
        """Start from the last rows of the prompt: older ones would have decayed to nothing."""
        if seen is None:
            return None
        rows = seen.last(self.keys.rows, ROWS)
        age = torch.arange(rows.shape[1] - 1, -1, -1, device=rows.device)
        self.importance = (rows * (self.options.decay**age)[:, None]).sum(1)
        return self.compress(None)

    def observe(self, row: Tensor) -> None:
        """Add a decode row."""
        self.importance = self.options.decay * self.importance + row

    def compress(self, row: Tensor | None) -> Tensor | None:
        """Keep sinks, recent tokens and the most important of the others."""
        del row
        if self.held <= self.budget:
            return None
        sinks, recent = self.options.sinks, self.options.recent
        scores = self.importance.clone()
        if self.generator is not None:
            # exponential races: the largest p / Exp(1) are a draw without replacement in proportion to p
            noise = torch.empty(scores.shape).exponential_(generator=self.generator).to(scores.device)
            scores = checked(scores) / noise.clamp_min(1e-30)
        scores[:, :sinks] = torch.inf
        scores[:, -recent:] = torch.inf
        return top(scores, self.budget)

    def grow(self, count: int) -> None:
        """Start new tokens at zero."""
        new = self.importance.new_zeros(self.importance.shape[0], count)
        self.importance = torch.cat((self.importance, new), 1)

    def pick(self, index: Tensor) -> None:
        """Forget the importance of evicted tokens."""
        self.importance = gathered(self.importance, index)

    def extra(self) -> list[Tensor]:
        """Return the importance."""
        return [self.importance]

    def copy_extra(self, twin: Any) -> None:
        """Share the importance, which is never rewritten; each side draws on its own."""
        twin.importance = self.importance
        twin.generator = None if self.generator is None else self.generator.clone_state()


class ScissorhandsDecay:
    """Decayed attention."""

    name = "scissorhands-decay"
    summary = "keeps sinks, recent tokens and those of the largest decayed attention"
    label = "none"
    certifies = False
    Options = Options

    def needs(self, options: Any) -> Needs:
        """Return the last rows of the prompt."""
        del options
        return Needs(last_rows=ROWS)

    def open(self, geometry: Geometry, options: Any, backend: Any) -> DecayLayer:
        """Make the empty cache of one layer."""
        return DecayLayer(geometry, options, backend)


MODE = ScissorhandsDecay()
