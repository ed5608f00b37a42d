"""Unchecked 8-bit keys and 4-bit values, both per token, as servers store them."""

from rcq_cli.modes._coded import CodedMode, naive_format
from rcq_cli.modes._quantiser import Layout

FORMAT = naive_format(
    keys=Layout(bits=8, size=64, per_channel=False),
    values=Layout(bits=4, size=64, per_channel=False),
)
MODE = CodedMode("naive-tok8v4", FORMAT, "8-bit keys and 4-bit values per token, groups of 64, no checks")
