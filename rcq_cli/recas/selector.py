"""Which tokens are kept (C) and which of those are read (S), S being a part of C.

Both sets hold the protected tokens: the first ones (attention sinks) and the newest. Leaving S never removes
a token from C. Tensors are `[..., n]` over tokens in order of their position; leading dimensions are heads.
"""

import torch
from torch import Tensor

SINKS = 4
WINDOW = 128
ACTIVE_UTILITY = 0.5
"""mu_u: weight of the utility in the score that decides what is read."""


def protected(tokens: int, sinks: int = SINKS, window: int = WINDOW) -> Tensor:
    """Return which of `tokens` positions are in both sets whatever they score, bool `[n]`."""
    position = torch.arange(tokens)
    return (position < sinks) | (position >= tokens - window)


def ranking(score: Tensor, always: Tensor) -> Tensor:
    """Return positions by falling score, those of `always` before all others; ties to the newer token."""
    ranked = torch.where(always, torch.inf, score).flip(-1)
    return score.shape[-1] - 1 - ranked.argsort(dim=-1, descending=True, stable=True)


def top(score: Tensor, count: int, always: Tensor) -> Tensor:
    """Return the `count` best tokens, but at least those of `always`, bool `[..., n]`."""
    chosen = torch.zeros_like(score, dtype=torch.bool)
    return chosen.scatter(-1, ranking(score, always)[..., :count], True) | always


def covering(score: Tensor, mass: Tensor, share: float, always: Tensor) -> Tensor:
    """Return the shortest prefix by score whose mass reaches `share` of all mass, with all of `always`.

    `mass` is not negative; a share of 1 takes every token that has any mass left to give.
    """
    if share >= 1:
        return torch.ones_like(score, dtype=torch.bool)
    order = ranking(score, always)
    sorted_mass = mass.gather(-1, order)
    reached = sorted_mass.cumsum(-1)
    ahead = reached - sorted_mass
    chosen = torch.zeros_like(score, dtype=torch.bool)
    return chosen.scatter(-1, order, ahead < share * reached[..., -1:]) | always


def sparse_scores(standard: Tensor, utility: Tensor, weight: float = ACTIVE_UTILITY) -> Tensor:
    """Return what decides whether a kept token is read: its standard score plus `weight` times utility."""
    return standard + weight * utility
