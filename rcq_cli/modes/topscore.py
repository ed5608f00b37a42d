"""A static score at the end of the prompt and a sliding window: recas without stages and without refresh.

The RECAS paper names this ablation without defining it: here it is the code of `recas` with the weight of
stages at zero, run once. A token that leaves the window has no score and is dropped.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.statistics import Statistics
from rcq_cli.modes._budget import BudgetOptions
from rcq_cli.modes._evicting import EvictingLayer, checked, ends
from rcq_cli.modes._recas import DEFAULT_FRACTION, PROMPT_ROWS, TokenHistory, static_scores
from rcq_cli.modes._tiered import check_range
from rcq_cli.protocols import Geometry, Needs
from rcq_cli.recas import selector, utility


@dataclass(frozen=True, slots=True)
class Options(BudgetOptions):
    """Options of `topscore`; without a budget 34.5 % of the prompt are kept."""

    recent: int = 64
    """last tokens that are always kept"""
    sinks: int = selector.SINKS
    """first tokens that are always kept, as recas does"""
    alpha: float = 0.45
    """weight of the match with the last query of the prompt"""
    beta: float = 0.35
    """weight of the attention of the prompt's last rows"""

    def __post_init__(self) -> None:
        BudgetOptions.__post_init__(self)
        check_range("recent", self.recent, 1, 2**20)
        check_range("sinks", self.sinks, 0, 2**20)
        check_range("alpha", self.alpha, 0.0, 1e6)
        check_range("beta", self.beta, 0.0, 1e6)
        self.check(self.sinks + self.recent + 1)


def best(worth: Tensor, count: int, sinks: int, recent: int) -> Tensor:
    """Return the `count` best of `[H, n]` as ascending indices, the first and last ones always among them."""
    position = torch.arange(worth.shape[1], device=worth.device).expand_as(worth)
    always = (position < sinks) | (position >= worth.shape[1] - recent)
    chosen = selector.top(checked(worth), count, always)
    # equally many per head, so the row-major list splits evenly
    return chosen.nonzero()[:, 1].view(worth.shape[0], -1)


class TopScoreLayer(EvictingLayer):
    """One layer under `topscore`: scores are used once and not kept."""

    watches = False
    score_bytes = 0

    def minimum(self) -> int:
        """Return sinks, window and one token."""
        return int(self.options.sinks + self.options.recent + 1)

    def default_budget(self) -> int:
        """Return 34.5 % of the prompt."""
        return max(self.minimum(), round(DEFAULT_FRACTION * self.tokens))

    def choose(self, seen: Statistics | None) -> Tensor | None:
        """Keep sinks, window and the tokens of the highest utility."""
        if seen is None or self.held <= self.budget:
            return None
        return best(self._worth(seen), self.budget, self.options.sinks, self.options.recent)

    def _worth(self, seen: Statistics) -> Tensor:
        """Return the utility of every token of the prompt, float64 `[Hkv, T]`, without stages."""
        keys = self.keys.rows
        history = TokenHistory(keys.shape[0])
        history.grow(keys.shape[1])
        weights = utility.Weights(self.options.alpha, self.options.beta, 0.0)
        return static_scores(history, seen, keys, weights, torch.zeros(keys.shape[:2]))

    def compress(self, row: Tensor | None) -> Tensor | None:
        """Drop the token that leaves the window."""
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
        """Return the last rows of the prompt."""
        del options
        return Needs(last_rows=PROMPT_ROWS)

    def open(self, geometry: Geometry, options: Any, backend: Any) -> TopScoreLayer:
        """Make the empty cache of one layer."""
        return TopScoreLayer(geometry, options, backend)


MODE = TopScore()
