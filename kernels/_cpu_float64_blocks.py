"""Float64 pieces of a step, compiled for the CPU: passes over the blocks of each head.

Every one states which function of `rcq_cli` defines what it computes; nothing is skipped here, the values of
all blocks being read. A bound that is NaN counts as infinite.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rcq_cli.kernels._cpu_float64 import LOOSE, Array, Place, compiled
from rcq_cli.kernels._cpu_float64_rows import kind_of, widen
from rcq_cli.kernels._cpu_vector import ahead, doubles_at, half, loose, plain, shorts_at
from rcq_cli.kernels._rounding import MARGIN

_NEAR_ONE = 2.0**-30


class Weighed(NamedTuple):
    """The masses of all blocks, `[Hkv, R, M + 1]` each, and their total."""

    log_weight: Tensor
    log_square: Tensor
    log_flushed: Tensor
    share: Tensor
    """Factor of the weights of a block in the output."""
    error: Tensor
    """Share of the total times eta, 0 where values are exact, `[Hkv, R, M]`."""
    total: Tensor
    """`[Hkv, R]`"""


def weighed(
    masses: tuple[Tensor, ...], values: tuple[Tensor, Tensor], tokens: tuple[int, int], underflow: float
) -> Weighed:
    """Return what `ladder.CertifiedStep.masses` does, and the errors of values.

    `masses` are peak, mass and square of `weigh`; `values` are eta `[Hkv, M + 1]` and which are
    exact `[Hkv, M]`; `tokens` are those of a block and of the tail.
    """
    (heads, group, width), peak = masses[0].shape, masses[0]
    found = Weighed(
        *(torch.empty_like(peak) for _ in range(4)),
        peak.new_empty(heads, group, width - 1),
        peak.new_empty(heads, group),
    )
    inputs = (each.numpy() for each in (*masses, *values))
    _weigh(*inputs, *tokens, np.log(underflow), *(each.numpy() for each in found))
    return found


class Chosen(NamedTuple):
    """What `certified_paper.Selection` holds."""

    chosen: Tensor
    uncovered: Tensor
    expanded: Tensor


def choose(coded: Tensor, tau: float, fewest: int, most: int, expand_above: float) -> Chosen:
    """Return what `certified_paper.select` does for the softmax of log masses `[Hkv, R, M + 1]`."""
    heads, group, width = coded.shape
    found = Chosen(
        torch.zeros((heads, group, width - 1), dtype=torch.bool),
        coded.new_empty(heads, group),
        torch.empty((heads, group), dtype=torch.bool),
    )
    rows = (each.flatten(0, 1).numpy() for each in found)
    _choose(coded.flatten(0, 1).numpy(), tau, fewest, most, expand_above, *rows)
    return found


def order_failures(
    exact: Tensor, coded: Tensor, known: Tensor, delta: Tensor, ranks: int
) -> tuple[Tensor, Tensor]:
    """Return what `certified_paper.order_failures` does; `known` is `[Hkv, M]`, masses are `[Hkv, R, M + 1]`.

    The last column of the masses is left out.
    """
    rank, boundary = (torch.empty(delta.shape, dtype=torch.bool) for _ in "rb")
    _order(exact.numpy(), coded.numpy(), known.numpy(), delta.numpy(), ranks, rank.numpy(), boundary.numpy())
    return rank, boundary


class Bounds(NamedTuple):
    """Bounds on the error of an output, `[Hkv, R]`."""

    key: Tensor
    value: Tensor
    rounding: Tensor
    """Of the weighted sum and its normalisation, storing the output left out."""


class Spread(NamedTuple):
    """What bounds on values rest on."""

    eta: Tensor
    """`[Hkv, M + 1]`, the tail's being 0."""
    radius: Tensor
    """rv, `[Hkv, M + 1]`"""
    centre: Tensor
    """c0, `[Hkv, D]`"""
    residual_spectrum: Tensor
    """`[Hkv]`"""
    spectrum: Tensor
    """`[Hkv]`"""


def bounds(
    masses: Weighed, spread: Spread, deltas: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor], rounding: tuple[float, float, float],
) -> Bounds:  # fmt: skip
    """Return what `ladder.CertifiedStep.evaluate` does with nothing skipped.

    `deltas` `[Hkv, R, M + 1]` are those of exact and of coded keys, `exact` `[Hkv, M]` marks blocks with
    exact keys and with exact values; `outputs` are the float64 output, the stored one in float64
    `[Hkv, R, D]` and the error of storing it `[Hkv, R]`. `rounding` is the relative error of a sum (theta),
    the unit roundoff and what underflow may have lost, as in `bounds.rounding`.
    """
    found = Bounds(*(torch.empty_like(masses.total) for _ in "kvr"))
    inputs = (*masses[:3], masses.total, *spread, *deltas, *exact, *outputs)
    _bounds(*(each.numpy() for each in inputs), *rounding, *(each.numpy() for each in found))
    return found


def annotations(stored: Place, raw: Tensor, raw_bounds: Tensor, tails: Tensor, centre: Tensor) -> Tensor:
    """Return what `TieredStore.bounds` does, `[4, Hkv, M + 1]`.

    `stored` `[Hkv, M, 4]` are float16, `raw` `[Hkv, M]`, `raw_bounds` `[Hkv, M, 2]`; `tails` `[2, Hkv, n, D]`
    keys and values of the open tail, `centre` `[Hkv, D]`.
    """
    (heads, count), tokens = raw.shape, tails.shape[2]
    out = centre.new_empty(4, heads, count + 1)
    _annotations(
        *stored[:2], raw.numpy(), raw_bounds.numpy(), tails.data_ptr(), *tails.stride()[:2],
        kind_of(tails.dtype), tokens, centre.numpy(), out.numpy(),
    )  # fmt: skip
    return out


@compiled(fastmath=LOOSE)
def _annotations(
    stored: int, pitch: int, raw: Array, raw_bounds: Array, tails: int, side: int, head: int, kind: int,
    tokens: int, centre: Array, out: Array,
) -> None:  # fmt: skip
    heads, count, dim = raw.shape[0], raw.shape[1], centre.shape[1]
    for h in prange(heads):
        buffer = np.empty(dim)
        row, notes = doubles_at(buffer.ctypes.data), ahead(shorts_at(stored), h * pitch)
        for b in range(count):
            for i in range(4):
                out[i, h, b] = half(notes[4 * b + i])
            if raw[h, b]:
                out[0, h, b], out[1, h, b] = 0.0, raw_bounds[h, b, 0]
                out[2, h, b], out[3, h, b] = 0.0, raw_bounds[h, b, 1]
        for i in range(2):
            largest = 0.0
            for t in range(tokens):
                widen(kind, tails, i * side + h * head + t * dim, dim, row)
                square = 0.0
                for d in range(dim):
                    away = row[d] - i * centre[h, d]
                    square += away * away
                largest = max(largest, square)
            out[2 * i, h, count], out[2 * i + 1, h, count] = 0.0, np.sqrt(largest) * MARGIN


@compiled(fastmath=LOOSE)
def _weigh(
    peak: Array, mass: Array, square: Array, eta: Array, exact: Array, size: int, tail: int,
    log_underflow: float, log_weight: Array, log_square: Array, log_flushed: Array, share: Array,
    error: Array, total: Array,
) -> None:  # fmt: skip
    heads, group, count = peak.shape
    for row in prange(heads * group):
        h, r, top, weight = row // group, row % group, -np.inf, 0.0
        for b in range(count):
            top = max(top, peak[h, r, b])
        for b in range(count):
            share[h, r, b] = np.exp(peak[h, r, b] - top)
            weight += share[h, r, b] * mass[h, r, b]
        log_total = np.log(weight)
        for b in range(count):
            below = peak[h, r, b] - top
            log_weight[h, r, b] = (below - log_total) + np.log(mass[h, r, b])
            log_square[h, r, b] = np.log(square[h, r, b]) + 2 * (below - log_total)
            tokens = np.float64(size if b < count - 1 else tail)
            log_flushed[h, r, b] = np.log(tokens) + min(below, log_underflow) - log_total
            share[h, r, b] /= weight
            if b < count - 1:
                error[h, r, b] = 0.0 if exact[h, b] else share[h, r, b] * mass[h, r, b] * eta[h, b]
        total[h, r] = weight


@plain
def _falling(values: Array) -> Any:
    """Return the order of falling values, of equal ones the lower index first."""
    return np.argsort(-values, kind="mergesort")


@compiled()
def _choose(
    coded: Array, tau: float, fewest: int, most: int, expand_above: float, chosen: Array, uncovered: Array,
    expanded: Array,
) -> None:  # fmt: skip
    rows, width = coded.shape
    for row in prange(rows):
        share, top, weight = np.empty(width), -np.inf, 0.0
        for b in range(width):
            top = max(top, coded[row, b])
        for b in range(width):
            share[b] = np.exp(coded[row, b] - top)
            weight += share[b]
        for b in range(width):
            share[b] /= weight
        order = _falling(share[: width - 1])
        count, before = 0, 0.0
        for b in order:
            before += share[b]
            if share[width - 1] + before - share[b] < tau:
                count += 1
        count = min(max(count, fewest), most)
        left = _sum_from(share, order, count)
        expanded[row] = left > expand_above
        if expanded[row]:
            count = min(2 * count, 2 * most)
            left = _sum_from(share, order, count)
        for b in order[:count]:
            chosen[row, b] = True
        uncovered[row] = left


@plain
def _sum_from(values: Array, order: Array, first: int) -> float:
    result = 0.0
    for b in order[first:]:
        result += values[b]
    return result


@compiled()
def _order(
    exact: Array, coded: Array, known: Array, delta: Array, ranks: int, rank: Array, boundary: Array
) -> None:
    heads, group, count = exact.shape[0], exact.shape[1], known.shape[1]
    for row in prange(heads * group):
        h, r = row // group, row % group
        places = np.flatnonzero(known[h])
        mine, theirs = exact[h, r, :count][places], coded[h, r, :count][places]
        leading = min(ranks, len(places))
        failed, last, hidden = False, np.inf, -np.inf
        if leading == 1:  # the default needs no sorting
            a, b = np.argmax(mine), np.argmax(theirs)
            failed, last = a != b, mine[a]
        elif leading > 1:
            a_order, b_order = _falling(mine), _falling(theirs)
            last = mine[a_order[leading - 1]]
            for i in range(leading):
                failed = failed or a_order[i] != b_order[i]
        for b in range(count):
            if not known[h, b]:
                hidden = max(hidden, coded[h, r, b] + delta[h, r])
        rank[h, r], boundary[h, r] = failed, hidden > last


@plain
def _least(prefix: float, least: float, rest: float) -> float:
    """Return min(least, prefix + rest)."""
    bound = prefix + rest
    return bound if bound < least else least


@loose
def _value_terms(
    log_weight: Array, log_square: Array, eta: Array, exact: Array, radius: Array, centre: float,
    spectrum: float,
) -> Any:  # fmt: skip
    """Return the bound on sum p ||v|| and sum p ||v'||, and `bounds.value_split(...).value()`."""
    count = len(log_weight)
    cost, after, norm, square = np.empty(count), np.empty(count + 1), 0.0, 0.0
    for b in range(count):
        share, off = np.exp(log_weight[b]), eta[b]
        if b < count - 1 and exact[b]:
            off = 0.0
        norm += share * (radius[b] + centre + off)
        cost[b] = share * off
    order = _falling(cost)
    after[count] = 0.0
    for j in range(count - 1, -1, -1):
        b = order[j]
        square += np.exp(log_square[b]) if cost[b] > 0 else 0.0
        after[j] = np.sqrt(spectrum * square * MARGIN)
    before, least = 0.0, np.inf
    for j in range(count + 1):
        least = _least(before, least, after[j])
        before += cost[order[j]] if j < count else 0.0
    return norm * MARGIN, least * MARGIN


@plain
def _or_infinite(x: float) -> float:
    return np.inf if np.isnan(x) else x


@loose
def _key_bound(
    log_weight: Array, log_square: Array, log_flushed: Array, delta: Array, radius: Array, offset: float,
    spectrum: float,
) -> Any:  # fmt: skip
    """Return the smaller of `bounds.key_split(...).value()` and 2 * radius * total variation."""
    count = len(log_weight)
    shift, energy, cost, after = np.empty(count), np.empty(count), np.empty(count), np.empty(count + 1)
    low, moved, flushed, widest, farthest = 0.0, 0.0, 0.0, 0.0, 0.0
    log_alone, heaviest = -np.inf, 0
    for b in range(count):
        d, log_share = delta[b], log_weight[b]
        growth = np.log(-np.expm1(-d))
        lost = np.exp(log_flushed[b] + d)
        shift[b] = _or_infinite(np.exp(log_share + d + growth) + lost)
        energy[b] = _or_infinite(np.exp(log_square[b] + 2 * (d + growth)) + lost * lost)
        cost[b] = shift[b] * (radius[b] + offset)
        low += np.exp(log_share - d)
        moved += shift[b]
        flushed += lost
        widest, farthest = max(widest, d), max(farthest, radius[b])
        if log_square[b] - log_share > log_alone:
            log_alone, heaviest = log_square[b] - log_share, b
    low /= MARGIN
    alone = np.exp(log_alone) * (1 - _NEAR_ONE)
    variation = _or_infinite(min(moved, np.tanh(widest / 2)) + flushed / low)
    around = _around_one(alone, moved, np.expm1(delta[heaviest]), low)
    variation = min(1.0, min(variation, around) * MARGIN)
    order = _falling(cost)
    after[count], c2, cw = 0.0, 0.0, 0.0
    for j in range(count - 1, -1, -1):
        b = order[j]
        c2 += energy[b]
        cw += shift[b]
        after[j] = np.sqrt(spectrum * c2) + offset * cw
    before, least = 0.0, np.inf
    for j in range(count + 1):
        least = _least(before / low, least, after[j] / low)
        before += cost[order[j]] if j < count else 0.0
    return min(least * MARGIN, _or_infinite(2 * farthest * variation * MARGIN))


@plain
def _around_one(alone: float, moved: float, growth: float, low: float) -> float:
    """Return `bounds._around_one` with nothing lifted; `alone` is the share of the heaviest token."""
    others = moved * (1 + _NEAR_ONE) - alone * growth
    others = 0.0 if others < 0 else others
    fit, rest = min(low, 1.0), 1 - alone
    bound = (others + rest * (1 - fit)) / fit
    return _or_infinite(rest if bound < rest else bound)


@loose
def _norm(one: Array, other: Array, factor: float) -> float:
    """Return || one - factor * other ||."""
    square = 0.0
    for d in range(len(one)):
        away = one[d] - factor * other[d]
        square += away * away
    return np.sqrt(square)


@compiled(fastmath=LOOSE)
def _bounds(
    log_weight: Array, log_square: Array, log_flushed: Array, total: Array, eta: Array, radius: Array,
    centre: Array, residual_spectrum: Array, spectrum: Array, slack: Array, coded: Array, exact_keys: Array,
    exact_values: Array, output: Array, stored: Array, storing: Array, relative: float, roundoff: float,
    lost: float, key: Array, value: Array, rounding: Array,
) -> None:  # fmt: skip
    heads, group, count = log_weight.shape
    for row in prange(heads * group):
        h, r = row // group, row % group
        logs, squares = log_weight[h, r], log_square[h, r]
        middle = _norm(centre[h], centre[h], 0.0)
        mean, inexact = _value_terms(
            logs, squares, eta[h], exact_values[h], radius[h], middle, residual_spectrum[h]
        )
        error = relative * mean + (relative + 4 * roundoff) * _norm(output[h, r], output[h, r], 0.0)
        error = (error + (lost / max(total[h, r], 1.0) if mean > 0 else 0.0)) * MARGIN
        away = (_norm(centre[h], stored[h, r], 1.0) + error + storing[h, r]) * MARGIN
        delta = slack[h, r].copy()
        for b in range(count - 1):
            if not exact_keys[h, b]:
                delta[b] = coded[h, r, b]
        key[h, r] = _key_bound(
            logs, squares, log_flushed[h, r], delta, radius[h], away + inexact, spectrum[h]
        )
        value[h, r], rounding[h, r] = inexact, error
