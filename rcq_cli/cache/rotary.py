"""Rotary positions: moving keys to other positions by turning them further. Source: arXiv:2104.09864."""

import torch
from torch import Tensor

from rcq_cli.protocols import Rotation


def moved(rows: Tensor, rotation: Rotation, steps: Tensor) -> Tensor:
    """Return `[..., T, D]` keys or queries `steps` positions further on; `steps` is `[T]`, or `[]` for all.

    Rotations by one angle after the other are one by their sum, so what was turned for position p comes out
    turned for p + steps, whatever factor the model gave it. Angles and products are float64.
    """
    pairs = len(rotation.frequencies)
    if not pairs:
        return rows
    angle = steps.double()[..., None] * torch.tensor(rotation.frequencies, dtype=torch.float64)
    cos, sin = angle.cos().to(rows.device), angle.sin().to(rows.device)
    place = (pairs, 2) if rotation.interleaved else (2, pairs)
    axis = -1 if rotation.interleaved else -2
    first, second = rows[..., : 2 * pairs].double().unflatten(-1, place).unbind(axis)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), axis).flatten(-2)
    return torch.cat((turned.to(rows.dtype), rows[..., 2 * pairs :]), -1)
