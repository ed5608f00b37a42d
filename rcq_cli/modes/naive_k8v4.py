"""The storage of `certified-paper` with no check: INT8 keys, INT4 values, the published metadata."""

import math
from typing import Any

from rcq_cli.modes._coded import NoOptions
from rcq_cli.modes._tiered import FormatOptions
from rcq_cli.modes.naive import NaiveLayer
from rcq_cli.modes.naive import Options as NaiveOptions
from rcq_cli.protocols import Geometry

PAPER = FormatOptions(block=16, group=16, key_meta="float32", value_meta="float16")


class NaivePaper:
    """The published format, unchecked, with value groups of a given width."""

    label = "none"
    certifies = False
    Options = NoOptions

    def __init__(self, name: str, group: int, summary: str) -> None:
        self.name, self.group, self.summary = name, group, summary

    def open(self, geometry: Geometry, options: Any, backend: Any) -> NaiveLayer:
        """Make the empty cache of one layer; groups shrink to a width that divides the head dim."""
        del options
        group = math.gcd(self.group, geometry.head_dim)
        fixed = NaiveOptions(PAPER.block, group, PAPER.key_meta, PAPER.value_meta)
        return NaiveLayer(geometry, fixed, backend)


MODE = NaivePaper("naive-k8v4", 16, "INT8 keys and INT4 values in the storage of certified-paper, no checks")
