"""Kernels around single helpers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rcq_cli.kernels._triton.arithmetic import growth, half_up, shrinkage, two_halves


@triton.jit
def each(x, grown, shrunk, up, left, count, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i, i < count, 0.0)
    tl.store(grown + i, growth(v), i < count)
    tl.store(shrunk + i, shrinkage(v), i < count)
    tl.store(up + i, half_up(v), i < count)
    single = v.to(tl.float32)
    high, low = two_halves(single)
    rest = single.to(tl.float64) - high.to(tl.float64) - low.to(tl.float64) / 2048
    tl.store(left + i, rest, i < count)


def run(x: Tensor) -> tuple[Tensor, ...]:
    """Return expm1(x), -expm1(-x), x rounded up to float16, and what two halves leave of x."""
    outs = [torch.empty_like(x) for _ in range(2)] + [torch.empty(len(x), dtype=torch.float16)]
    outs.append(torch.empty_like(x))
    each[(1,)](x, *outs, len(x), N=64)
    return tuple(outs)
