"""Float64 pieces of a step, compiled for the CPU: the masses of blocks and what is proven from them.

Every one states which function of `rcq_cli` defines what it computes. Blocks that are not read are *skipped*:
they add to the bounds and not to the output. The open tail is the last block, always read. A bound that is
NaN counts as infinite.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rcq_cli.kernels._cpu_float64 import LOOSE, Array
from rcq_cli.kernels._cpu_vector import entry, loose, plain
from rcq_cli.kernels._rounding import MARGIN

_NEAR_ONE = 2.0**-30


class Weighed(NamedTuple):
    """The masses of all blocks, `[Hkv, R, M + 1]` each, and the total of those that are read."""

    log_weight: Tensor
    log_square: Tensor
    log_flushed: Tensor
    share: Tensor
    """Factor of the weights of a block in the output; 0 where it is skipped."""
    error: Tensor
    """Share of the total times eta, 0 where values are exact, `[Hkv, R, M]`."""
    total: Tensor
    """`[Hkv, R]`"""
    log_peak: Tensor
    """The heaviest token of a block."""


def weighed(
    masses: tuple[Tensor, ...], read: Tensor, values: tuple[Tensor, Tensor], tokens: tuple[int, int],
    underflow: float,
) -> Weighed:  # fmt: skip
    """Return what `ladder.CertifiedStep.masses` does, and the errors of values.

    `masses` are peak, mass and square of `weigh`; `read` `[Hkv, M]`; `values` are eta `[Hkv, M + 1]` and
    which are exact `[Hkv, M]`; `tokens` are those of a block and of the tail.
    """
    (heads, group, width), peak = masses[0].shape, masses[0]
    shapes = [peak.shape] * 4 + [(heads, group, width - 1), (heads, group), peak.shape]
    found = Weighed._make(peak.new_empty(shape) for shape in shapes)
    inputs = (each.numpy() for each in (*masses, read, *values))
    _weigh(*inputs, *tokens, np.log(underflow), *(each.numpy() for each in found))
    return found


class Ordered(NamedTuple):
    """The fields of `bounds.Split`."""

    order: Tensor
    prefix: Tensor
    rest: Tensor


class Bounds(NamedTuple):
    """Bounds on the error of an output, `[Hkv, R]`, and what led to them."""

    key: Tensor
    dropped: Tensor
    value: Tensor
    rounding: Tensor
    """Of the weighted sum and its normalisation, storing the output left out."""
    floor: Tensor
    """What exact keys could bring the key error to; 0 for a head within its limit."""
    contribution: Tensor
    """`[Hkv, R, M + 1]`"""
    key_split: Ordered
    value_split: Ordered


class Spread(NamedTuple):
    """What bounds on values rest on."""

    eta: Tensor
    """`[Hkv, M + 1]`, the tail's being 0."""
    radius: Tensor
    """rv, `[Hkv, M + 1]`"""
    residual_joint: Tensor
    """se, `[Hkv, M + 1]`; infinite, like the next one, where nothing is known."""
    joint: Tensor
    """sv, `[Hkv, M + 1]`"""
    centre: Tensor
    """c0, `[Hkv, D]`"""
    residual_spectrum: Tensor
    """`[Hkv]`"""
    spectrum: Tensor
    """`[Hkv]`"""


def bounds(
    masses: Weighed, spread: Spread, deltas: tuple[Tensor, ...], states: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor], limit: Tensor, rounding: tuple[float, float, float],
) -> Bounds:  # fmt: skip
    """Return what `ladder.CertifiedStep.evaluate` does; the floor only for heads above `limit` `[Hkv, R]`.

    `deltas` `[Hkv, R, M + 1]` are those of exact and of coded keys, and what `bounds.breadth` says of the
    latter; `states` `[Hkv, M]` mark blocks with exact keys, with exact values and with values that were read;
    `outputs` are the float64 output, the stored one in float64 `[Hkv, R, D]` and the error of storing it
    `[Hkv, R]`. `rounding` is the relative error of a sum (theta), the unit roundoff and what underflow may
    have lost, as in `bounds.rounding`.
    """
    blocks, heads = masses.share, masses.total

    def split() -> Ordered:
        wide = (blocks.new_empty(*blocks.shape[:2], blocks.shape[2] + 1) for _ in "pr")
        return Ordered(torch.zeros(blocks.shape, dtype=torch.int64), *wide)

    errors = [torch.empty_like(heads) for _ in "kdvrf"]
    found = Bounds._make([*errors, torch.empty_like(blocks), split(), split()])
    inputs = (*masses[:3], masses.log_peak, heads, *spread, *deltas, *states, *outputs, limit)
    results = (*found[:6], *found.key_split, *found.value_split)
    _bounds(*(each.numpy() for each in inputs), *rounding, *(each.numpy() for each in results))
    return found


def limits(masses: Weighed, outside: Tensor, errors: tuple[Tensor, Tensor], exact: Tensor) -> Tensor:
    """Return what `joint.dropped_interval` does for blocks `outside` `[Hkv, M]`, `[2, Hkv, R]`.

    `errors` `[Hkv, R, M + 1]` are those of exact and of coded scores, `exact` `[Hkv, M]` tells which count.
    """
    found = masses.total.new_empty(2, *masses.total.shape)
    inputs = (masses.log_weight, masses.log_flushed, outside, *errors, exact)
    _limits(*(each.numpy() for each in inputs), found.numpy())
    return found


@entry(fastmath=LOOSE)
def _weigh(
    peak: Array, mass: Array, square: Array, read: Array, eta: Array, exact: Array, size: int, tail: int,
    log_underflow: float, log_weight: Array, log_square: Array, log_flushed: Array, share: Array,
    error: Array, total: Array, log_peak: Array,
) -> None:  # fmt: skip
    heads, group, count = peak.shape
    for row in range(heads * group):
        h, r, top, weight = row // group, row % group, -np.inf, 0.0
        for b in range(count):
            if b == count - 1 or read[h, b]:
                top = max(top, peak[h, r, b])
        for b in range(count):
            share[h, r, b] = 0.0
            if b == count - 1 or read[h, b]:
                share[h, r, b] = np.exp(peak[h, r, b] - top)
                weight += share[h, r, b] * mass[h, r, b]
        log_total = np.log(weight)
        for b in range(count):
            below = peak[h, r, b] - top
            log_peak[h, r, b] = below - log_total
            log_weight[h, r, b] = (below - log_total) + np.log(mass[h, r, b])
            log_square[h, r, b] = np.log(square[h, r, b]) + 2 * (below - log_total)
            tokens = np.float64(size if b < count - 1 else tail)
            log_flushed[h, r, b] = np.log(tokens) + min(below, log_underflow) - log_total
            share[h, r, b] /= weight
            if b < count - 1:
                error[h, r, b] = 0.0 if exact[h, b] else share[h, r, b] * mass[h, r, b] * eta[h, b]
        total[h, r] = weight


@plain
def falling(values: Array) -> Any:
    """Return the order of falling values, of equal ones the lower index first."""
    return np.argsort(-values, kind="mergesort")


@plain
def _least(prefix: float, least: float, rest: float) -> float:
    """Return min(least, prefix + rest)."""
    bound = prefix + rest
    return bound if bound < least else least


@loose
def _value_terms(
    log_weight: Array, log_square: Array, eta: Array, exact: Array, read: Array, radius: Array,
    joint: Array, centre: float, spectrum: float, order: Array, before: Array, after: Array,
) -> Any:  # fmt: skip
    """Return the bound on sum p ||v|| and sum p ||v'||, and `bounds.value_split(...).value()`.

    The fields of the split are written to `order`, `before` and `after`.
    """
    count, norm, square = len(log_weight), 0.0, 0.0
    cost = np.zeros(count)
    for b in range(count):
        if b == count - 1 or read[b]:
            share = np.exp(log_weight[b])
            off = 0.0 if b < count - 1 and exact[b] else eta[b]
            norm += share * (radius[b] + centre + off)
            cost[b] = share * off
            if off > 0:
                cost[b] = _lesser(cost[b], np.exp(log_square[b] / 2) * joint[b])
    order[:] = falling(cost)
    after[count] = 0.0
    for j in range(count - 1, -1, -1):
        b = order[j]
        square += np.exp(log_square[b]) if cost[b] > 0 else 0.0
        after[j] = np.sqrt(spectrum * square * MARGIN)
    least = _along(cost, order, 1.0, before, after)
    return norm * MARGIN, least * MARGIN


@plain
def _along(cost: Array, order: Array, divisor: float, before: Array, after: Array) -> float:
    """Write the sums of the first costs, divided, to `before`; return the least of before + after."""
    total, least = 0.0, np.inf
    for j in range(len(before)):
        before[j] = total / divisor
        least = _least(before[j], least, after[j])
        total += cost[order[j]] if j < len(order) else 0.0
    return least


@plain
def _lesser(one: float, other: float) -> float:
    """Return the smaller of two, the first where the second is no number."""
    return other if other < one else one


@plain
def _or_infinite(x: float) -> float:
    return np.inf if np.isnan(x) else x


@loose
def _key_terms(
    log_weight: Array, log_square: Array, log_flushed: Array, log_peak: Array, delta: Array, wide: Array,
    read: Array, shift: Array, energy: Array,
) -> Any:  # fmt: skip
    """Write cw and c2 of `bounds.key_terms` to `shift` and `energy`; return its Z_lo and total variation."""
    count = len(log_weight)
    low, kept, moved, lifted, flushed, widest = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    log_alone, heaviest = -np.inf, 0
    for b in range(count):
        d, log_share, active = delta[b], log_weight[b], b == count - 1 or read[b]
        lost, shrunk = np.exp(log_flushed[b] + d), np.exp(log_share - d)
        log_up, together, square = d, log_share, log_square[b]
        if active:
            log_up, log_wide = d + np.log(-np.expm1(-d)), np.log(wide[b])
            together = _lesser(log_share, square / 2 + log_wide)
            square = _lesser(square, 2 * (log_peak[b] + log_wide))
        shift[b] = _or_infinite(np.exp(together + log_up) + lost)
        energy[b] = _or_infinite(np.exp(square + 2 * log_up) + lost * lost)
        low += shrunk
        if active:
            kept += shrunk
            moved += shift[b]
            flushed += lost
            widest = max(widest, d)
            if log_peak[b] > log_alone:
                log_alone, heaviest = log_peak[b], b
        else:
            lifted += shift[b]
    low /= MARGIN
    alone = np.exp(log_alone) * (1 - _NEAR_ONE)
    dropped = 1 / (1 + kept / lifted) if lifted > 0 else 0.0
    variation = _or_infinite(min(moved, np.tanh(widest / 2)) + flushed / low + dropped)
    spare = max(np.exp(log_weight[heaviest]) - alone, 0.0) * np.expm1(delta[heaviest])
    taken = shift[heaviest] - np.exp(log_flushed[heaviest] + delta[heaviest]) - spare
    around = _around_one(alone, moved, lifted, taken, low)
    return low, min(1.0, min(variation, around) * MARGIN)


@plain
def _around_one(alone: float, moved: float, lifted: float, taken: float, low: float) -> float:
    """Return `bounds._around_one`; `alone` is the heaviest token's share, `taken` its part of `moved`."""
    others = moved * (1 + _NEAR_ONE) - (taken if taken > 0 else 0.0)
    others = 0.0 if others < 0 else others
    fit, rest = min(low, 1.0), 1 - alone
    bound = (others + lifted + rest * (1 - fit)) / fit
    return _or_infinite(rest if bound < rest else bound)


@loose
def _key_bound(
    logs: Any, delta: Array, wide: Array, read: Array, radius: Array, joint: Array, offset: float,
    spectrum: float, cost: Array, order: Array, before: Array, after: Array,
) -> float:  # fmt: skip
    """Return the smaller of `bounds.key_split(...).value()` and 2 * radius * total variation.

    `logs` are log weight, square, flushed and peak. The fields of the split are written to `order`, `before`
    and `after`, the contributions over Z_lo to `cost`.
    """
    count, farthest, c2, cw = len(delta), 0.0, 0.0, 0.0
    shift, energy = np.empty(count), np.empty(count)
    low, variation = _key_terms(
        logs[0], logs[1], logs[2], logs[3], delta, wide, read, shift, energy
    )  # fmt: skip
    for b in range(count):
        cost[b] = (
            _lesser(_or_infinite(shift[b] * radius[b]), np.sqrt(energy[b]) * joint[b]) + shift[b] * offset
        )
        farthest = max(farthest, radius[b])
    order[:] = falling(cost)
    after[count] = 0.0
    for j in range(count - 1, -1, -1):
        b = order[j]
        c2 += energy[b]
        cw += shift[b]
        after[j] = (np.sqrt(spectrum * c2) + offset * cw) / low
    least = _along(cost, order, low, before, after)
    for b in range(count):
        cost[b] /= low
    return min(least * MARGIN, _or_infinite(2 * farthest * variation * MARGIN))


@plain
def _share_of_skipped(cost: Array, read: Array) -> float:
    """Return `ladder._share`: the part of the contributions that skipped blocks make."""
    outside, total = 0.0, 0.0
    for b in range(len(cost)):
        total += cost[b]
        outside += cost[b] if b < len(cost) - 1 and not read[b] else 0.0
    part = outside / total
    return 0.0 if np.isnan(part) else min(max(part, 0.0), 1.0)


@loose
def _norm(one: Array, other: Array, factor: float) -> float:
    """Return || one - factor * other ||."""
    square = 0.0
    for d in range(len(one)):
        away = one[d] - factor * other[d]
        square += away * away
    return np.sqrt(square)


@entry(fastmath=LOOSE)
def _bounds(
    log_weight: Array, log_square: Array, log_flushed: Array, log_peak: Array, total: Array, eta: Array,
    radius: Array, residual_joint: Array, joint: Array, centre: Array, residual_spectrum: Array,
    spectrum: Array, slack: Array, coded: Array, breadth: Array, exact_keys: Array, exact_values: Array,
    read: Array, output: Array, stored: Array, storing: Array, limit: Array, relative: float, roundoff: float,
    lost: float, key: Array, dropped: Array, value: Array, rounding: Array, floor: Array,
    contribution: Array, key_order: Array, key_before: Array, key_after: Array, value_order: Array,
    value_before: Array, value_after: Array,
) -> None:  # fmt: skip
    heads, group, count = log_weight.shape
    for row in range(heads * group):
        h, r = row // group, row % group
        logs = log_weight[h, r], log_square[h, r], log_flushed[h, r], log_peak[h, r]
        middle = _norm(centre[h], centre[h], 0.0)
        mean, inexact = _value_terms(
            logs[0], logs[1], eta[h], exact_values[h], read[h], radius[h], residual_joint[h], middle,
            residual_spectrum[h], value_order[h, r], value_before[h, r], value_after[h, r],
        )  # fmt: skip
        error = relative * mean + (relative + 4 * roundoff) * _norm(output[h, r], output[h, r], 0.0)
        error = (error + (lost / max(total[h, r], 1.0) if mean > 0 else 0.0)) * MARGIN
        away = (_norm(centre[h], stored[h, r], 1.0) + error + storing[h, r]) * MARGIN
        # errors of exact scores may add up in any way
        delta, wide, anyhow = slack[h, r].copy(), np.full(count, np.inf), np.full(count, np.inf)
        for b in range(count - 1):
            if not exact_keys[h, b]:
                delta[b], wide[b] = coded[h, r, b], breadth[h, r, b]
        both = _key_bound(
            logs, delta, wide, read[h], radius[h], joint[h], away + inexact, spectrum[h],
            contribution[h, r], key_order[h, r], key_before[h, r], key_after[h, r],
        )  # fmt: skip
        part = _share_of_skipped(contribution[h, r], read[h])
        dropped[h, r] = both * part if part > 0 else 0.0
        key[h, r], value[h, r], rounding[h, r] = both - dropped[h, r], inexact, error
        floor[h, r] = 0.0
        if not both + inexact + error + storing[h, r] <= limit[h, r]:
            everything, spare = np.ones(count - 1, dtype=np.bool_), np.empty((3, count + 1))
            order = np.empty(count, dtype=np.int64)
            floor[h, r] = _key_bound(
                logs, slack[h, r], anyhow, everything, radius[h], joint[h], away, spectrum[h],
                spare[0, :count], order, spare[1], spare[2],
            )  # fmt: skip


@plain
def _add_log(total: float, top: float, log: float) -> Any:
    """Add exp(log) to a sum that is total * exp(top); return both."""
    if log <= top:
        return total + (np.exp(log - top) if log > -np.inf else 0.0), top
    return total * np.exp(top - log) + 1.0, log


@entry()
def _limits(
    log_weight: Array, log_flushed: Array, outside: Array, slack: Array, coded: Array, exact: Array,
    out: Array,
) -> None:  # fmt: skip
    heads, group, count = log_weight.shape
    for row in range(heads * group):
        h, r = row // group, row % group
        for side in range(2):
            sign = 2.0 * side - 1.0
            inner, top, outer, outer_top = 0.0, -np.inf, 0.0, -np.inf
            for b in range(count):
                known = b == count - 1 or exact[h, b]
                error, log = slack[h, r, b] if known else coded[h, r, b], log_weight[h, r, b]
                if b < count - 1 and outside[h, b]:
                    if side == 1:
                        log = np.logaddexp(log, log_flushed[h, r, b])
                    outer, outer_top = _add_log(outer, outer_top, log + sign * error)
                else:
                    inner, top = _add_log(inner, top, log - sign * error)
            between = (outer_top + np.log(outer)) - (top + np.log(inner))
            share = 1 / (1 + np.exp(-between))
            out[side, h, r] = min(share * MARGIN, 1.0) if side else share / MARGIN
