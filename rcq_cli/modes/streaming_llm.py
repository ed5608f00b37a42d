"""Attention sinks and a recent window, at true positions. Source: arXiv:2309.17453.

True positions and trimming before attention, so that a step sees exactly the budget, are rcq's choices; the
paper renumbers positions inside the cache.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rcq_cli.cache.statistics import Statistics
from rcq_cli.errors import SpecError
from rcq_cli.modes._budget import BudgetOptions
from rcq_cli.modes._evicting import EvictingLayer, ends
from rcq_cli.protocols import Geometry, Needs


@dataclass(frozen=True, slots=True)
class Options(BudgetOptions):
    """Options of `streaming-llm`."""

    start: int = 4
    """first tokens that are always kept"""
    recent: int = 512
    """last tokens that are kept when no budget is given"""

    def __post_init__(self) -> None:
        BudgetOptions.__post_init__(self)
        if self.start < 0 or self.recent < 1:
            raise SpecError(
                f"start={self.start}, recent={self.recent} is not allowed",
                fix="allowed: start 0 or more, recent 1 or more",
                id="RCQ-USE-11",
            )
        self.check(self.start + 1)


class StreamingLayer(EvictingLayer):
    """One layer under `streaming-llm`; no score is ever computed."""

    judges = watches = False
    score_bytes = 0

    def minimum(self) -> int:
        """Return the sinks and one recent token."""
        return self.options.start + 1

    def default_budget(self) -> int:
        """Return sinks and window."""
        return self.options.start + self.options.recent

    def choose(self, seen: Statistics | None) -> Tensor | None:
        """Keep the sinks and the most recent tokens."""
        del seen
        if self.held <= self.budget:
            return None
        start = self.options.start
        heads, device = self.geometry.kv_heads, self.geometry.device
        return ends(heads, start, self.budget - start, self.held, device)

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Add `[Hkv, T, D]` keys and values; once the prompt has ended, trim before anything attends."""
        super().prefill(keys, values)
        if self.ended:
            self._keep(self.choose(None))


class StreamingLlm:
    """Sinks and a window."""

    name = "streaming-llm"
    summary = "keeps the first tokens and a recent window, at true positions"
    label = "none"
    certifies = False
    Options = Options

    def needs(self, options: Any) -> Needs:
        """Return nothing but the end of the prompt, of which a budget may be a share."""
        del options
        return Needs()

    def open(self, geometry: Geometry, options: Any, backend: Any) -> StreamingLayer:
        """Make the empty cache of one layer."""
        return StreamingLayer(geometry, options, backend)


MODE = StreamingLlm()
