"""Unchecked 4-bit keys and values."""

import torch

from rcq_cli.modes._coded import CodedMode, naive_format
from rcq_cli.modes._quantiser import Layout

FORMAT = naive_format(
    keys=Layout(bits=4, size=16, per_channel=True, meta=torch.float32),
    values=Layout(bits=4, size=16, per_channel=False),
)
MODE = CodedMode("naive-k4v4", FORMAT, "4-bit keys per channel and 16 tokens, 4-bit values, no checks")
