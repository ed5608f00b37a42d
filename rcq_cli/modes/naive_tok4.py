"""Unchecked 4 bits per token, as servers store them."""

from rcq_cli.modes._coded import CodedMode, naive_format
from rcq_cli.modes._quantiser import Layout

FORMAT = naive_format(
    keys=Layout(bits=4, size=64, per_channel=False),
    values=Layout(bits=4, size=64, per_channel=False),
)
MODE = CodedMode("naive-tok4", FORMAT, "4-bit keys and values per token, groups of 64, no checks")
