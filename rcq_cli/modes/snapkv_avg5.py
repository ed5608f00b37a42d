"""`snapkv` as its code initialises it: 2,048 tokens, scores averaged over five."""

from dataclasses import dataclass
from typing import Literal

from rcq_cli.modes.snapkv import Options as SnapKvOptions
from rcq_cli.modes.snapkv import SnapKv, SnapKvLayer


@dataclass(frozen=True, slots=True)
class Options(SnapKvOptions):
    """Options of `snapkv-avg5`; without a budget 2,048 tokens are kept."""

    kernel: int = 5
    """width over which scores are pooled, odd"""
    pooling: Literal["max", "avg"] = "avg"
    """how scores are pooled"""


class Avg5Layer(SnapKvLayer):
    """One layer under `snapkv-avg5`."""

    fixed_budget = 2048


MODE = SnapKv("snapkv-avg5", Options, Avg5Layer, "snapkv with 2,048 tokens and average pooling over five")
