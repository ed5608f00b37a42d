"""Proven bounds on the output error of one decode step, from the masses that the step really used.

All tensors are float64 and `[..., M + 1]` over blocks (the last column is the open tail) unless a shape is
given. A block is *active* when its tokens contribute to the output and *skipped* when only its keys were
read. The joint certificate over skipping and quantising goes beyond arXiv:2605.20868, which bounds the two
alone; sources of the single inequalities are named where they are used. A bound that is NaN counts as
infinite.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rcq_cli.certify.spectral import theta

MARGIN = 1.0 + 2.0**-12
INF = math.inf


class Masses(NamedTuple):
    """What the step's softmax put on each block, in units of the active total."""

    log_weight: Tensor
    """log of the block's share: log rho on active blocks, log beta on skipped ones (may exceed 0)."""
    log_square: Tensor
    """log of the block's sum of squared token weights (S2 or G2), which itself underflows below e^-372."""
    log_flushed: Tensor
    """log of an upper bound on the weight lost to underflow."""
    skipped: Tensor
    """bool"""
    log_peak: Tensor | None = None
    """log of the largest weight of a token of the block; without it bounds that ask for it are left out."""

    def active(self) -> Tensor:
        """Return rho: the share of each active block, 0 on skipped ones."""
        return torch.where(self.skipped, 0.0, self.log_weight.exp())


class KeyTerms(NamedTuple):
    """Per-block terms of the key and skipping error."""

    cw: Tensor
    """Largest shift of weight that score errors in this block can cause."""
    c2: Tensor
    """Sum of the squares of what score errors can do to its weights."""
    z_low: Tensor
    """`[...]` lower bound of the normaliser."""
    total_variation: Tensor
    """`[...]` bound on the total variation between used and exact weights, capped at 1."""


def breadth(delta: Tensor, rest: Tensor, reach: Tensor, tokens: int) -> Tensor:
    """Return the norm of the score errors of a block over the largest one: at most sqrt(tokens).

    Errors due to K - K' have norm ||q|| |scale| ||K - K'||_2 = `reach` at most; `rest` of `delta` has other
    causes, which may add up in any way.
    """
    most = math.sqrt(tokens) * MARGIN
    wide = (reach * MARGIN + most * rest) / delta
    return torch.nan_to_num(wide, nan=most, posinf=most).clamp_max(most)


def key_terms(masses: Masses, delta: Tensor, wide: Tensor | None = None) -> KeyTerms:
    """Return the per-block terms for score errors of at most `delta`, and of norm `wide * delta` at most.

    cw = rho * expm1(delta) on active blocks and beta * exp(delta) on skipped ones, plus exp(delta) times
    what underflow may have lost; Z_lo = sum (rho or beta) * exp(-delta). Formed in the log domain: expm1
    overflows long before the product does.

    As |expm1(e)| <= |e| expm1(delta) / delta, the errors of an active block also move at most sqrt(S2) * wide
    times expm1(delta) (Cauchy-Schwarz), and their squares sum up to (wide times the largest weight)^2 times
    its square.
    """
    log_up = delta + torch.log(-torch.expm1(-delta))
    log_cw, log_c2 = masses.log_weight + log_up, masses.log_square + 2 * log_up
    if wide is not None:
        log_cw = torch.minimum(log_cw, masses.log_square / 2 + wide.log() + log_up)
        if masses.log_peak is not None:
            log_c2 = torch.minimum(log_c2, 2 * (masses.log_peak + wide.log() + log_up))
    log_cw = torch.where(masses.skipped, masses.log_weight + delta, log_cw)
    log_c2 = torch.where(masses.skipped, masses.log_square + 2 * delta, log_c2)
    flushed = (masses.log_flushed + delta).exp()
    cw = _finite_or_inf(log_cw.exp() + flushed)
    c2 = _finite_or_inf(log_c2.exp() + flushed.square())
    shrunk = (masses.log_weight - delta).exp()
    z_low = shrunk.sum(-1) / MARGIN
    active = ~masses.skipped
    moved = torch.where(active, cw, 0.0).sum(-1)
    widest = torch.tanh(torch.where(active, delta, 0.0).amax(-1) / 2)
    up_skipped = torch.where(masses.skipped, cw, 0.0).sum(-1)
    kept = torch.where(active, shrunk, 0.0).sum(-1)
    lost = torch.where(active, flushed, 0.0).sum(-1) / z_low
    dropped = torch.where(up_skipped > 0, 1 / (1 + kept / up_skipped), 0.0)
    variation = torch.minimum(moved, widest) + lost + dropped
    variation = _finite_or_inf(variation).minimum(
        _around_one(masses, delta, cw - flushed, moved, up_skipped, z_low)
    )
    variation = variation * MARGIN
    return KeyTerms(cw, c2, z_low, _finite_or_inf(variation).clamp_max(1.0))


def _around_one(
    masses: Masses, delta: Tensor, counted: Tensor, moved: Tensor, lifted: Tensor, z_low: Tensor
) -> Tensor:
    """Bound the total variation of a head that reads one token almost alone, `[...]`.

    Let w be the used weight of the heaviest token. If its exact weight is not larger, everything else gains
    no more than sum w' (exp(delta) / Z_lo - 1) over the other active tokens and sum beta exp(delta) / Z_lo
    over skipped ones; if it is larger, the others lose no more than 1 - w. So a head with w near 1 is known
    well however wrong its scores are. w is at least S2 / rho of its block.
    """
    least = masses.log_square - masses.log_weight if masses.log_peak is None else masses.log_peak
    largest = torch.nan_to_num(torch.where(masses.skipped, -INF, least), nan=-INF)
    log_alone, block = largest.max(-1, keepdim=True)
    alone = log_alone.exp() * (1 - 2.0**-30)
    # what was counted for its block need not hold w x: the other tokens there count with all that is theirs
    spare = (masses.active().gather(-1, block) - alone).clamp_min(0) * torch.expm1(delta.gather(-1, block))
    taken = (counted.gather(-1, block) - spare).clamp_min(0)[..., 0]
    others = (moved * (1 + 2.0**-30) - taken).clamp_min(0)
    low, rest = z_low.clamp_max(1.0), 1 - alone[..., 0]
    return _finite_or_inf(torch.maximum((others + lifted + rest * (1 - low)) / low, rest))


class Split(NamedTuple):
    """A bound as the best split of a sorted sum: triangle on the first j blocks, spectral on the rest."""

    order: Tensor
    """Blocks by falling contribution."""
    prefix: Tensor
    """`[..., M + 2]` sums of the first j contributions."""
    rest: Tensor
    """`[..., M + 2]` spectral bound of all but the first j."""

    def value(self) -> Tensor:
        """Return min_j prefix_j + rest_j, `[...]`."""
        return _finite_or_inf(self.prefix + self.rest).amin(-1) * MARGIN

    def after_removing(self) -> Tensor:
        """Return what the bound becomes when the first n contributions vanish, for every n: `[..., M + 2]`.

        min over j >= n of prefix_j - prefix_n + rest_j; only steers promotion, the next round computes it
        anew.
        """
        reach = _finite_or_inf(self.prefix + self.rest).flip(-1).cummin(-1).values.flip(-1)
        return (_finite_or_inf(reach - self.prefix) * MARGIN).clamp_min(0)


def key_shares(terms: KeyTerms, radius: Tensor, offset: Tensor, joint: Tensor | None = None) -> Tensor:
    """Return what each block adds to the triangle form, Z_lo apart: min(cw rv, sqrt(c2) sv) + cw h.

    `joint` is sv >= ||V - c0||_2 per block, over its tokens; cw rv alone without it.
    """
    shares = terms.cw * radius
    if joint is not None:
        shares = torch.minimum(_finite_or_inf(shares), _finite_or_inf(terms.c2.sqrt() * joint))
    return shares + terms.cw * offset[..., None]


def key_split(
    terms: KeyTerms, radius: Tensor, offset: Tensor, spectrum: Tensor, joint: Tensor | None = None
) -> Split:
    """Return the split of `key_shares` (triangle) and sqrt(lambda_V sum c2) + h sum cw (spectral), by Z_lo.

    `radius` is rv per block, `offset` `[...]` is h >= ||c0 - o~||, `spectrum` `[...]` is lambda_V.
    """
    contribution = key_shares(terms, radius, offset, joint)
    order = contribution.argsort(dim=-1, descending=True, stable=True)
    spectral = (spectrum[..., None] * _suffix(terms.c2.gather(-1, order))).sqrt()
    drift = offset[..., None] * _suffix(terms.cw.gather(-1, order))
    z = terms.z_low[..., None]
    return Split(order, _prefix(contribution.gather(-1, order)) / z, (spectral + drift) / z)


def value_split(masses: Masses, eta: Tensor, spectrum: Tensor, joint: Tensor | None = None) -> Split:
    """Return the split of sum rho * eta (triangle), sqrt(lambda_E sum S2) (spectral); eta is 0 where exact.

    The triangle part is the value bound of arXiv:2605.20868, Theorem 1; with `joint` se >= ||V - V'||_2 per
    block it is the sum of min(rho * eta, sqrt(S2) * se).
    """
    inexact = (eta > 0) & ~masses.skipped
    errors = masses.active() * eta
    if joint is not None:
        errors = torch.minimum(_finite_or_inf(errors), _finite_or_inf((masses.log_square / 2).exp() * joint))
    contribution = torch.where(inexact, errors, 0.0)
    order = contribution.argsort(dim=-1, descending=True, stable=True)
    square = torch.where(inexact, masses.log_square.exp(), 0.0).gather(-1, order)
    spectral = (spectrum[..., None] * _suffix(square) * MARGIN).sqrt()
    return Split(order, _prefix(contribution.gather(-1, order)), spectral)


def rounding(
    mean_norm: Tensor, output_norm: Tensor, tokens: int, dim: int, total: Tensor, limits: tuple[float, float]
) -> Tensor:
    """Return the error of the weighted sum and its normalisation, storing the output left out; `[...]`.

    theta covers `tokens` chained additions, the product, the quotient and the dequantisation of a value: no
    summand of it exceeds eight times the largest channel of the token, which is 8 * sqrt(dim) of its norm at
    most. `mean_norm` bounds both sum p ||v|| and sum p ||v'||, `total` is the sum of unnormalised weights,
    `limits` the unit roundoff and the flush threshold.
    """
    roundoff, underflow = limits
    relative = theta(tokens + 24 + 16 * math.sqrt(dim), roundoff)
    lost = math.sqrt(dim) * tokens * underflow / total.clamp_min(1.0)
    error = relative * mean_norm + (relative + 4 * roundoff) * output_norm
    return (error + torch.where(mean_norm > 0, lost, 0.0)) * MARGIN


def _prefix(x: Tensor) -> Tensor:
    return torch.cat((x.new_zeros(*x.shape[:-1], 1), x.cumsum(-1)), -1)


def _suffix(x: Tensor) -> Tensor:
    """Return the sums of all but the first j, from the far end: total minus prefix could go negative."""
    return torch.cat((x.flip(-1).cumsum(-1).flip(-1), x.new_zeros(*x.shape[:-1], 1)), -1)


def _finite_or_inf(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=INF, posinf=INF)
