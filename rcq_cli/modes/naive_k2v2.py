"""Unchecked 2 bits: the control that every task must show to collapse."""

import torch

from rcq_cli.modes._coded import CodedMode, naive_format
from rcq_cli.modes._quantiser import Layout

FORMAT = naive_format(
    keys=Layout(bits=2, size=32, per_channel=True, meta=torch.float32),
    values=Layout(bits=2, size=32, per_channel=False),
)
MODE = CodedMode("naive-k2v2", FORMAT, "2-bit keys and values, no checks: the mode that has to fail")
