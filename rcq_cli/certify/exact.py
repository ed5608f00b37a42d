"""Attention in float64 on the originals: the last word on a head, and what an audit compares with."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rcq_cli.certify.bounds import MARGIN, rounding
from rcq_cli.certify.spectral import theta
from rcq_cli.errors import SpecError

ROUNDOFF, UNDERFLOW = 2.0**-53, 2.0**-1022


class Exact(NamedTuple):
    """Output and what float64 arithmetic may have changed about it."""

    output: Tensor
    """float64 `[Hkv, R, D]`"""
    bound: Tensor
    """float64 `[Hkv, R]`, absolute L2"""


def exact_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Exact:
    """Return softmax(scale * q k^T) v of `[Hkv, R, D]` queries on exact `[Hkv, T, D]` keys and values.

    The difference to the maximum is scaled, not the score, so that no finite input overflows.
    """
    q, k, v = query.double(), keys.double(), values.double()
    sign = -1.0 if scale < 0 else 1.0
    dots = sign * (q @ k.transpose(1, 2))
    weights = ((dots - dots.amax(-1, keepdim=True)) * abs(scale)).exp()
    total = weights.sum(-1)
    output = (weights @ v) / total[..., None]
    # every score errs by at most `delta`, so no weight shifts by more than tanh(delta / 2) in total variation
    longest = k.norm(dim=-1).amax(-1)[:, None]
    delta = score_slack(q.norm(dim=-1), longest, scale, q.shape[-1])
    centre = v.mean(1, keepdim=True)
    radius = (v - centre).norm(dim=-1).amax(-1)[:, None]
    flushed = math.log(k.shape[1] * UNDERFLOW) + 2 * delta - total.log()
    shift = torch.nan_to_num(torch.tanh(delta / 2) + flushed.exp(), nan=1.0, posinf=1.0).clamp_max(1.0)
    mean_norm = (weights @ v.norm(dim=-1)[..., None])[..., 0] / total
    lost = rounding(mean_norm, output.norm(dim=-1), k.shape[1], q.shape[-1], total, (ROUNDOFF, UNDERFLOW))
    return Exact(output, (2 * radius * shift + lost) * MARGIN)


def score_slack(query_norm: Tensor, key_norm: Tensor, scale: float, dim: int) -> Tensor:
    """Return how far a float64 score and its exponential may be off, in nats.

    theta(d + 8) ||q|| ||k|| |scale| for the dot product in any order, dequantisation and the scale; the rest
    for the two subtractions of maxima (differences beyond 745 flush to zero) and the exponential itself.
    """
    return (
        theta(dim + 8, ROUNDOFF) * query_norm * key_norm * abs(scale) + (4 * 745 + 16) * ROUNDOFF
    ) * MARGIN


def store(output: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the float64 `[..., D]` output in `dtype`, and the L2 error of storing it, float64 `[...]`.

    An exact average of finite values fits; what rounding or a quantised value pushed past the largest number
    is brought back to it, and the difference is charged.
    """
    limit = torch.finfo(dtype).max
    stored = output.clamp(-limit, limit).to(dtype)
    return stored, (output - stored.double()).norm(dim=-1) * (1 + 2.0**-40)


def as_groups(query: Tensor, kv_heads: int) -> Tensor:
    """Return the float64 `[Hkv, R, D]` view of an `[Hq, D]` query: head h reads KV head h // R."""
    if query.shape[0] % kv_heads:
        raise SpecError(f"{query.shape[0]} query heads over {kv_heads} KV heads", fix="give a multiple")
    return query.double().unflatten(0, (kv_heads, -1))
