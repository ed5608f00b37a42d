"""What both tests of compiled float64 pieces are fed, and the functions that prove what they compute."""

from typing import NamedTuple

import torch
from torch import Tensor

from rcq_cli.certify import bounds as proven
from rcq_cli.kernels._cpu_float64_bounds import Spread

HEADS, GROUP, DIM, SIZE, SCALE = 2, 3, 32, 16, 0.7
ULP = {"rtol": 1e-12, "atol": 1e-13}
UNDERFLOW, ROUNDOFF = 2.0**-1022, 2.0**-53
KINDS = ("random", "outlier", "constant", "equal", "raw")


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hostile(kind, tokens):
    """Keys and values `[H, T, D]` as named."""
    keys, values = rows(HEADS, tokens, DIM, seed=1), rows(HEADS, tokens, DIM, seed=2)
    if kind == "outlier":
        keys[:, :, 3] *= 100
        values[:, ::7] *= 50
    if kind == "constant":
        keys[:, :, :5] = 2.5
        values[:, 16:48] = values[:, :1]
    if kind == "equal":
        keys[:] = keys[:, :1]
        values[:] = values[:, :1]
    if kind == "raw":  # beyond float16: these blocks have no codes
        values[0, 20:24] *= 1e7
        values[1, 64:65] *= 1e7
    return keys, values


def fill(stores, kind, tokens, dtype):
    """Give every store the same tokens, in two parts."""
    keys, values = (each.to(dtype) for each in hostile(kind, tokens))
    for store in stores:
        store.extend(keys[:, : tokens // 2], values[:, : tokens // 2])
        store.extend(keys[:, tokens // 2 :], values[:, tokens // 2 :])


def weights_of(kind, count=40, seed=0):
    """Scores, weights `[H, R, M + 1, S]`, and their peaks, masses and sums of squares, as named."""
    scores = rows(HEADS, GROUP, count + 1, SIZE, seed=seed)
    if kind == "sharp":
        scores *= 60
    if kind == "one token":
        scores[:, :, count // 2, 3] += 300
    if kind == "far":
        scores[:, :, ::2] -= 900  # squares and weights underflow
    if kind == "equal":
        scores[:] = 1.25
    scores[:, :, -1, 4:] = -torch.inf
    if kind == "no tail":
        scores[:, :, -1] = -torch.inf
    peak = scores.amax(-1)
    weights = torch.where(scores == -torch.inf, 0.0, (scores - peak[..., None]).exp())
    return scores, weights, (peak, weights.sum(-1), weights.square().sum(-1))


MASSES = ("random", "sharp", "one token", "far", "equal", "no tail")


def masses_of(kind, seed=0):
    """Peaks, masses and sums of squares `[H, R, M + 1]` of tokens as named."""
    return weights_of(kind, seed=seed)[2]


class Proven(NamedTuple):
    """What is proven of an output, `[H, R]`, and what led to it."""

    key: Tensor
    """Of keys and dropping together."""
    value: Tensor
    rounding: Tensor
    away: Tensor
    terms: proven.KeyTerms
    key_split: proven.Split
    value_split: proven.Split


def prove(masses, total, spread: Spread, deltas, exact_keys, exact_values, outputs, tokens) -> Proven:
    """Do what `CertifiedStep.evaluate` does, from the functions of `rcq_cli.certify.bounds`."""
    (slack, coded, wide), (exact_output, stored, storing) = deltas, outputs
    tail = torch.ones(HEADS, 1, dtype=torch.bool)
    keys, values = (torch.cat((mask, tail), 1)[:, None] for mask in (exact_keys, exact_values))
    eta = torch.where(values, 0.0, spread.eta[:, None]).expand_as(masses.log_weight)
    radius = spread.radius[:, None].expand_as(masses.log_weight)
    middle = spread.centre.norm(dim=-1)[:, None, None]
    mean = (masses.active() * (radius + middle + eta)).sum(-1) * proven.MARGIN
    lost = proven.rounding(mean, exact_output.norm(dim=-1), tokens, DIM, total, (ROUNDOFF, UNDERFLOW))
    residual, spectrum = (
        each[:, None].expand(-1, GROUP) for each in (spread.residual_spectrum, spread.spectrum)
    )
    within, joint = (
        each[:, None].expand_as(masses.log_weight) for each in (spread.residual_joint, spread.joint)
    )
    value_split = proven.value_split(masses, eta, residual, within)
    value = value_split.value()
    away = ((spread.centre[:, None] - stored).norm(dim=-1) + lost + storing) * proven.MARGIN
    anyhow = SIZE**0.5 * proven.MARGIN
    terms = proven.key_terms(masses, torch.where(keys, slack, coded), torch.where(keys, anyhow, wide))
    key_split = proven.key_split(terms, radius, away + value, spectrum, joint)
    key = torch.minimum(key_split.value(), widest(spread, terms))
    return Proven(key, value, lost, away, terms, key_split, value_split)


def widest(spread: Spread, terms: proven.KeyTerms) -> Tensor:
    """Return 2 * radius * total variation, which no error exceeds."""
    return 2 * spread.radius.amax(-1)[:, None] * terms.total_variation * proven.MARGIN
