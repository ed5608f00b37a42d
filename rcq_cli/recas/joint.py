"""The joint certificate of one head that reads some tokens exactly and keeps INT8 ghosts of the others.

With s^ the ghost scores, beta = exp(s^ - m) / L their weights in units of the active total and Delta the
proven score error of a block,

    o - o^ = (1 / Z) [ sum_A p^ expm1(e) (v - o^) + sum_D beta exp(e) (v - o^) ],   |e| <= Delta

so dropped and quantised tokens share one bound. Its parts are those of `rcq_cli.certify.bounds`; every block
counts twice here, once for its tokens that are read and once for those that are not.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rcq_cli.certify.bounds import MARGIN, Masses, key_split, key_terms, rounding
from rcq_cli.certify.exact import ROUNDOFF, UNDERFLOW, score_slack
from rcq_cli.certify.spectral import power_bound
from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels.reference import BACKEND

BLOCK = 16
FORMAT = TierFormat(BLOCK, 16, "float16", "two-level")


class Head(NamedTuple):
    """One KV head with one query: float64 tensors, T a multiple of 16."""

    query: Tensor
    """`[D]`"""
    keys: Tensor
    """`[T, D]`"""
    values: Tensor
    """`[T, Dv]`"""
    scale: float


class Joint(NamedTuple):
    """What is certified of one step."""

    output: Tensor
    """`[Dv]` softmax over what was read."""
    bound: float
    """||o - output|| is at most this, o exact attention over all tokens."""
    mass: tuple[float, float]
    """The dropped mass lies in this interval."""


def joint_certificate(head: Head, read: Tensor) -> Joint:
    """Return the output over the tokens `read` (bool `[T]`, at least one) and its certificate."""
    scores = head.keys @ head.query * head.scale
    ghosts, delta, slack = _ghost_scores(head)
    used = torch.where(read, scores, -torch.inf)
    top = used.max()
    weights = (used - top).exp()
    total = weights.sum()
    output = weights @ head.values / total
    masses, errors = _masses(torch.where(read, scores, ghosts), read, top + total.log(), delta, slack)
    terms = key_terms(masses, errors)
    centre = head.values.mean(0)
    radius = (head.values - centre).norm(dim=-1).unflatten(0, (-1, BLOCK)).amax(-1).repeat(2) * MARGIN
    gram = (head.values - centre).T @ (head.values - centre)
    mean_norm = (weights @ head.values.norm(dim=-1) / total) * MARGIN
    limits = (ROUNDOFF, UNDERFLOW)
    fp = rounding(mean_norm, output.norm(), len(read), head.values.shape[1], total, limits)
    drift = ((centre - output).norm() + fp) * MARGIN
    split = key_split(terms, radius, drift, power_bound(gram[None])[0] * MARGIN)
    widest = 2 * radius.max() * terms.total_variation * MARGIN
    low, high = dropped_interval(masses, errors)
    return Joint(output, float(torch.minimum(split.value(), widest) + fp), (float(low), float(high)))


def _ghost_scores(head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Return the INT8 scores `[T]`, and per block their proven error and that of exact scores, `[M]`."""
    blocks = head.keys.unflatten(0, (-1, BLOCK))[None]
    codes, raw = BACKEND.quantize_keys(blocks, FORMAT)
    # a block that the format cannot hold keeps exact keys
    held = torch.where(raw[..., None, None], blocks, BACKEND.keys(codes))
    residual = (blocks - held).norm(dim=-1).amax(-1)[0] * MARGIN
    reach = torch.maximum(BACKEND.key_magnitude(codes)[0], blocks.norm(dim=-1).amax(-1)[0]) * MARGIN
    norm = head.query.norm() * MARGIN
    slack = score_slack(norm, reach + residual, head.scale, len(head.query))
    half_steps = BACKEND.half_steps(head.query[None, None], codes)[0, 0]
    error = torch.minimum(half_steps, norm * residual) * (abs(head.scale) * MARGIN)
    scores = (held @ head.query)[0].flatten() * head.scale
    return scores, torch.where(raw[0], 0.0, error) + slack, slack


def _masses(
    scores: Tensor, read: Tensor, log_total: Tensor, delta: Tensor, slack: Tensor
) -> tuple[Masses, Tensor]:
    """Return the masses of `2 M` half blocks, read ones first, and the score error of each."""
    halves = torch.stack((read, ~read)).unflatten(1, (-1, BLOCK))
    each = torch.where(halves, scores.unflatten(0, (-1, BLOCK)), -torch.inf).flatten(0, 1)
    counts = halves.flatten(0, 1).sum(-1).double()
    relative = each - log_total
    lost = counts.log() + relative.amax(-1).clamp_max(math.log(UNDERFLOW))
    dropped = torch.arange(2).repeat_interleave(len(delta)).bool()
    masses = Masses(torch.logsumexp(relative, -1), torch.logsumexp(2 * relative, -1), lost, dropped)
    return masses, torch.cat((slack, delta))


def dropped_interval(masses: Masses, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest dropped mass that score errors of at most `errors` allow, `[...]`.

    Of the weights `[..., M]` the skipped ones move one way and the others the other way; formed as
    logarithms, since exp(error) overflows long before a share does.
    """
    flushed = torch.logaddexp(masses.log_weight, masses.log_flushed)

    def share(weight: Tensor, sign: float) -> Tensor:
        dropped = torch.where(masses.skipped, weight + sign * errors, -torch.inf).logsumexp(-1)
        kept = torch.where(masses.skipped, -torch.inf, masses.log_weight - sign * errors).logsumexp(-1)
        return torch.sigmoid(dropped - kept)

    return share(masses.log_weight, -1.0) / MARGIN, (share(flushed, 1.0) * MARGIN).clamp_max(1.0)
