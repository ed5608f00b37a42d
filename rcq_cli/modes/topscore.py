"""A static score at the end of the prompt and a sliding window: recas without stages and without refresh.

The definition of the score is rcq's; the RECAS paper names this ablation without defining it.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rcq_cli.cache.statistics import Statistics
from rcq_cli.modes._budget import BudgetOptions
from rcq_cli.modes._evicting import EvictingLayer, ends, top, with_last
from rcq_cli.modes._tiered import check_range
from rcq_cli.protocols import Geometry, Needs

DEFAULT_FRACTION = 0.345


@dataclass(frozen=True, slots=True)
class Options(BudgetOptions):
    """Options of `topscore`; without a budget 34.5 % of the prompt are kept."""

    recent: int = 64
    """last tokens that are always kept"""
    last_row: float = 0.5
    """weight of the last row's probability"""
    history: float = 0.5
    """weight of the mean over all rows"""

    def __post_init__(self) -> None:
        BudgetOptions.__post_init__(self)
        check_range("recent", self.recent, 1, 2**20)
        check_range("last_row", self.last_row, 0.0, 1.0)
        check_range("history", self.history, 0.0, 1.0)
        self.check(self.recent + 1)


def static_scores(last_row: Tensor, history: Tensor, weights: tuple[float, float]) -> Tensor:
    """Return the weighted sum of both signals `[H, n]`, each divided by its largest value per head."""
    parts = [part / part.amax(-1, keepdim=True).clamp_min(1e-30) for part in (last_row, history)]
    return weights[0] * parts[0] + weights[1] * parts[1]


class TopScoreLayer(EvictingLayer):
    """One layer under `topscore`: scores are used once and not kept."""

    watches = False
    score_bytes = 0

    def minimum(self) -> int:
        """Return the window and one token."""
        return int(self.options.recent + 1)

    def default_budget(self) -> int:
        """Return 34.5 % of the prompt."""
        return max(self.minimum(), round(DEFAULT_FRACTION * self.tokens))

    def choose(self, seen: Statistics | None) -> Tensor | None:
        """Keep the window and the best before it."""
        if seen is None or seen.columns is None or self.held <= self.budget:
            return None
        visible = (self.tokens - self.positions.rows).clamp_max(seen.rows_seen)
        weights = (self.options.last_row, self.options.history)
        scores = static_scores(seen.last(self.keys.rows, 1)[:, -1], seen.columns / visible, weights)
        recent = self.options.recent
        chosen = top(scores[:, : self.held - recent], self.budget - recent)
        return with_last(chosen, recent, self.held)

    def compress(self, row: Tensor | None) -> Tensor | None:
        """Drop the token that leaves the window: it has no score."""
        del row
        if self.held <= self.budget:
            return None
        recent = self.options.recent
        heads, device = self.geometry.kv_heads, self.geometry.device
        return ends(heads, self.budget - recent, recent, self.held, device)


class TopScore:
    """A static selection."""

    name = "topscore"
    summary = "keeps the best tokens of the prompt by a score taken once, and a sliding window"
    label = "none"
    certifies = False
    Options = Options

    def needs(self, options: Any) -> Needs:
        """Return the last row and the column sums."""
        del options
        return Needs(last_rows=1, column_sums=True)

    def open(self, geometry: Geometry, options: Any, backend: Any) -> TopScoreLayer:
        """Make the empty cache of one layer."""
        return TopScoreLayer(geometry, options, backend)


MODE = TopScore()
