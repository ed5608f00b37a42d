"""Directed rounding into the dtypes of metadata and annotations; shared by every backend."""

import torch
from torch import Tensor

MARGIN = 1.0 + 2.0**-12
"""Factor that covers the rounding of a blocked sum of non-negative terms (relative error below 2^-12)."""
REFRESH = 0.1
"""Share of a spectral bound that rows since its last refresh may add."""

_BITS = {torch.float16: torch.int16, torch.float32: torch.int32}


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest value of `dtype` (float16 or float32) that is not below the float64 `x`.

    Overflow gives +inf; NaN stays NaN.
    """
    rounded = x.to(dtype)
    bits = rounded.view(_BITS[dtype])
    # one step towards +inf: away from zero for positive numbers, towards it for negative ones
    step = torch.where(torch.signbit(rounded), -1, 1).to(bits.dtype)
    above = (bits + step).view(dtype)
    low = rounded.double() < x
    return torch.where(
        low, torch.where(rounded == 0, torch.full_like(rounded, smallest(dtype)), above), rounded
    )


def round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest value of `dtype` that is not above the float64 `x`."""
    return -round_up(-x, dtype)


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest positive step rcq lets a scale of `dtype` take (2^-24 or 2^-126)."""
    return 2.0**-24 if dtype == torch.float16 else 2.0**-126


def upper(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return UP(x): at least x * (1 + 2^-12), stored in `dtype`; x is float64 and not negative."""
    return round_up(x * MARGIN, dtype)
