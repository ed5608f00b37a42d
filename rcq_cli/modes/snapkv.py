"""One selection at the end of the prompt, by the attention of its last rows. Source: arXiv:2404.14469.

Everything generated is kept, so bytes grow with the answer. With the question in the prompt the selection is
made in its favour.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from rcq_cli.cache.statistics import Statistics
from rcq_cli.errors import SpecError
from rcq_cli.modes._budget import BudgetOptions
from rcq_cli.modes._evicting import EvictingLayer, top, with_last
from rcq_cli.protocols import Geometry, Needs

DEFAULT_FRACTION = 0.25


@dataclass(frozen=True, slots=True)
class Options(BudgetOptions):
    """Options of `snapkv`; without a budget a quarter of the prompt is kept."""

    window: int = 32
    """last rows of the prompt that vote; their tokens are always kept"""
    kernel: int = 7
    """width over which scores are pooled, odd"""
    pooling: Literal["max", "avg"] = "max"
    """how scores are pooled"""

    def __post_init__(self) -> None:
        BudgetOptions.__post_init__(self)
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise SpecError(
                f"window={self.window}, kernel={self.kernel} is not allowed",
                fix="allowed: window 1 or more, kernel odd",
                id="RCQ-USE-11",
            )
        self.check(self.window + 1)


def pooled(scores: Tensor, kernel: int, pooling: str) -> Tensor:
    """Return `[H, n]` scores pooled with stride 1; beyond the ends stand zeros, which an average counts."""
    pool = F.max_pool1d if pooling == "max" else F.avg_pool1d
    return pool(scores[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]


class SnapKvLayer(EvictingLayer):
    """One layer under `snapkv`."""

    watches = False
    score_bytes = 0
    room = 0
    fixed_budget: int | None = None

    def minimum(self) -> int:
        """Return the window and one token."""
        return self.options.window + 1

    def default_budget(self) -> int:
        """Return a quarter of the prompt, or the published number of tokens of a variant."""
        if self.fixed_budget is not None:
            return self.fixed_budget
        return max(self.minimum(), round(DEFAULT_FRACTION * self.tokens))

    def choose(self, seen: Statistics | None) -> Tensor | None:
        """Keep the window and the tokens of the highest pooled scores before it."""
        window = self.options.window
        if seen is None or self.held <= self.budget:
            return None
        # pool after the window is cut off, or its scores would leak over the edge
        scores = seen.last(self.keys.rows, window).sum(1)[:, : self.held - window]
        scores = pooled(scores, self.options.kernel, self.options.pooling)
        return with_last(top(scores, self.budget - window), window, self.held)


class SnapKv:
    """A vote of the last rows."""

    label = "none"
    certifies = False

    def __init__(self, name: str, options: type, layer: type[SnapKvLayer], summary: str) -> None:
        self.name, self.Options, self.layer, self.summary = name, options, layer, summary

    def needs(self, options: Any) -> Needs:
        """Return the last rows of the prompt."""
        return Needs(last_rows=options.window)

    def open(self, geometry: Geometry, options: Any, backend: Any) -> SnapKvLayer:
        """Make the empty cache of one layer."""
        return self.layer(geometry, options, backend)


MODE = SnapKv(
    "snapkv",
    Options,
    SnapKvLayer,
    "keeps what the last rows of the prompt attend to, chosen once, and all after",
)
