"""What every backend is held against: attention in float64."""

import torch
from torch import Tensor


def truth(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Return the output `[Hq, D]` of queries `[Hq, D]` on keys and values `[Hkv, T, D]`."""
    groups = query.double().unflatten(0, (keys.shape[0], -1))
    weights = torch.softmax(groups @ keys.double().transpose(1, 2) * scale, -1)
    return (weights @ values.double()).flatten(0, 1)


def data(kind: str, heads: int, tokens: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return keys and values `[H, T, D]` of one shape of difficulty."""
    gen = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(heads, tokens, dim, generator=gen) for _ in "kv")
    if kind == "outlier":
        k[..., 0], v[..., 3] = 100 * k[..., 0], 50 * v[..., 3]
    elif kind == "tiny":
        k, v = 1e-6 * k, 1e-6 * v
    elif kind == "huge":
        k = 1500 * k
    elif kind == "constant":
        k, v = torch.full_like(k, 1.5), torch.full_like(v, -2)
    elif kind == "zero":
        k, v = 0 * k, 0 * v
    elif kind == "lognormal":
        k, v = k.exp(), (2 * v).exp()
    elif kind == "offset":
        k, v = k + 12, v + 40
    elif kind == "ties":
        k = k[:, :1] + 1e-3 * k
    elif kind == "late":
        v[:, -3:] *= 1000
    elif kind == "topics":
        topics = torch.randn(heads, 8, dim, generator=gen)
        k = topics[:, torch.arange(tokens) // 40 % 8] + 0.4 * k
        v = 0.5 * v + 0.3
    return k, v
