"""What every backend is held against: attention in float64."""

import torch
from torch import Tensor


def truth(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Return the output `[Hq, D]` of queries `[Hq, D]` on keys and values `[Hkv, T, D]`."""
    groups = query.double().unflatten(0, (keys.shape[0], -1))
    weights = torch.softmax(groups @ keys.double().transpose(1, 2) * scale, -1)
    return (weights @ values.double()).flatten(0, 1)
