"""Heavy hitters by accumulated attention, and recent tokens. Source: arXiv:2306.14048."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.statistics import Statistics
from rcq_cli.modes._budget import BudgetOptions
from rcq_cli.modes._evicting import EvictingLayer, gathered, top, with_last
from rcq_cli.modes._tiered import check_range
from rcq_cli.protocols import Geometry, Needs


@dataclass(frozen=True, slots=True)
class Options(BudgetOptions):
    """Options of `h2o` and `h2o-norm`; a budget is shared half and half."""

    heavy_ratio: float = 0.1
    """share of the prompt kept for its accumulated attention, without a budget"""
    recent_ratio: float = 0.1
    """share of the prompt kept for being recent, without a budget"""

    def __post_init__(self) -> None:
        BudgetOptions.__post_init__(self)
        check_range("heavy_ratio", self.heavy_ratio, 0.0, 1.0)
        check_range("recent_ratio", self.recent_ratio, 0.0, 1.0)
        self.check(2)


class H2oLayer(EvictingLayer):
    """One layer under `h2o`: the sum of each token's group-mean probabilities, over rows that saw it.

    `normalised` divides the sum by the number of those rows, which takes the advantage of age away.
    """

    normalised = False

    def __init__(self, geometry: Geometry, options: Any, backend: Any) -> None:
        super().__init__(geometry, options, backend)
        self.sums = torch.zeros(geometry.kv_heads, 0, device=geometry.device)
        self.rows = 0  # rows behind the oldest sums
        self.recent = 0

    def minimum(self) -> int:
        """Return one heavy and one recent token."""
        return 2

    def default_budget(self) -> int:
        """Return the two shares of the prompt, at least one token each."""
        shares = (self.options.heavy_ratio, self.options.recent_ratio)
        heavy, self.recent = (max(1, int(share * self.tokens)) for share in shares)
        return heavy + self.recent

    def choose(self, seen: Statistics | None) -> Tensor | None:
        """Start from the column sums of the prompt."""
        self.recent = self.recent or self.budget - self.budget // 2
        if seen is not None and seen.columns is not None:
            self.sums, self.rows = seen.columns.clone(), seen.rows_seen
        return self.compress(None)

    def observe(self, row: Tensor) -> None:
        """Add a decode row; a new token starts with its own."""
        self.sums = self.sums + row
        self.rows += 1

    def compress(self, row: Tensor | None) -> Tensor | None:
        """Keep the recent tokens and, of the others, those of the largest sums."""
        del row
        if self.held <= self.budget:
            return None
        older = self.held - self.recent
        return with_last(top(self._scores()[:, :older], self.budget - self.recent), self.recent, self.held)

    def _scores(self) -> Tensor:
        if not self.normalised:
            return self.sums
        return self.sums / (self.tokens - self.positions.rows).clamp_max(max(1, self.rows))

    def grow(self, count: int) -> None:
        """Start new tokens at zero."""
        self.sums = torch.cat((self.sums, self.sums.new_zeros(self.sums.shape[0], count)), 1)

    def pick(self, index: Tensor) -> None:
        """Forget the sums of evicted tokens."""
        self.sums = gathered(self.sums, index)

    def extra(self) -> list[Tensor]:
        """Return the sums."""
        return [self.sums]

    def copy_extra(self, twin: Any) -> None:
        """Share the sums: they are replaced, never rewritten."""
        twin.sums, twin.rows, twin.recent = self.sums, self.rows, self.recent


class H2oNormLayer(H2oLayer):
    """One layer under `h2o-norm`."""

    normalised = True


class H2o:
    """Accumulated attention, plain or per row."""

    label = "none"
    certifies = False
    Options = Options

    def __init__(self, name: str, layer: type[H2oLayer], summary: str) -> None:
        self.name, self.layer, self.summary = name, layer, summary

    def needs(self, options: Any) -> Needs:
        """Return the column sums."""
        del options
        return Needs(column_sums=True)

    def open(self, geometry: Geometry, options: Any, backend: Any) -> H2oLayer:
        """Make the empty cache of one layer."""
        return self.layer(geometry, options, backend)


MODE = H2o("h2o", H2oLayer, "keeps recent tokens and those of the largest accumulated attention")
