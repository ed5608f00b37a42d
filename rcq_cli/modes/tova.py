"""Tokens by the attention of the newest row alone. Source: arXiv:2401.06104."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rcq_cli.cache.statistics import Statistics
from rcq_cli.modes._budget import BudgetOptions
from rcq_cli.modes._evicting import EvictingLayer, all_but_lowest, top, with_last
from rcq_cli.protocols import Geometry, Needs

DEFAULT_FRACTION = 0.25


@dataclass(frozen=True, slots=True)
class Options(BudgetOptions):
    """Options of `tova` and `tova-layer`; without a budget a quarter of the prompt is kept."""


class TovaLayer(EvictingLayer):
    """One layer under `tova`: nothing accumulates, and sinks enjoy no protection."""

    score_bytes = 0

    def default_budget(self) -> int:
        """Return a quarter of the prompt: the paper has no default that fits every length."""
        return max(1, round(DEFAULT_FRACTION * self.tokens))

    def choose(self, seen: Statistics | None) -> Tensor | None:
        """Keep the newest token and those it attends to most."""
        if seen is None or self.held <= self.budget:
            return None
        row = self.shared(seen.last(self.keys.rows, 1)[:, -1])
        return with_last(top(row[:, :-1], self.budget - 1), 1, self.held)

    def compress(self, row: Tensor | None) -> Tensor | None:
        """Drop the token with the smallest probability in this row, never the newest."""
        excess = self.held - self.budget
        if row is None or excess <= 0:
            return None
        return with_last(all_but_lowest(self.shared(row)[:, :-1], excess), 1, self.held)

    def shared(self, row: Tensor) -> Tensor:
        """Return the scores each KV head goes by."""
        return row


class TovaSharedLayer(TovaLayer):
    """One layer under `tova-layer`: all heads of a layer keep the same tokens, as in the paper."""

    def shared(self, row: Tensor) -> Tensor:
        """Return the mean over all heads for every KV head."""
        return row.mean(0, keepdim=True).expand_as(row)


class Tova:
    """The newest row decides, per KV head or for the layer."""

    label = "none"
    certifies = False
    Options = Options

    def __init__(self, name: str, layer: type[TovaLayer], summary: str) -> None:
        self.name, self.layer, self.summary = name, layer, summary

    def needs(self, options: Any) -> Needs:
        """Return the last row."""
        del options
        return Needs(last_rows=1)

    def open(self, geometry: Geometry, options: Any, backend: Any) -> TovaLayer:
        """Make the empty cache of one layer."""
        return self.layer(geometry, options, backend)


MODE = Tova("tova", TovaLayer, "drops the token that the newest row attends to least, per KV head")
