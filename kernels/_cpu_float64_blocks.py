"""Float64 pieces of a step, compiled for the CPU: annotations of blocks, and choices among them.

Every one states which function of `rcq_cli` defines what it computes.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rcq_cli.kernels._cpu_float64 import LOOSE, Array, Place, scratch
from rcq_cli.kernels._cpu_float64_bounds import falling
from rcq_cli.kernels._cpu_float64_rows import kind_of, widen
from rcq_cli.kernels._cpu_vector import ahead, doubles_at, entry, half, plain, shorts_at
from rcq_cli.kernels._rounding import MARGIN


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


def annotations(
    stored: Place, raw: Tensor, raw_bounds: Tensor, tails: Tensor, centre: Tensor, size: int
) -> Tensor:
    """Return what `TieredStore.bounds` does, `[4, Hkv, M + 1]`, with spectral norms `[7, Hkv, M + 1]`.

    `size` is that of a block, 0 where there are no spectral norms; `stored` are float16 `[Hkv, M, n]`, `raw`
    `[Hkv, M]`, `raw_bounds` `[Hkv, M, 2]`; `tails` `[2, Hkv, n, D]` keys and values of the open tail,
    `centre` `[Hkv, D]`.
    """
    (heads, count), tokens = raw.shape, tails.shape[2]
    out = centre.new_empty(7 if size else 4, heads, count + 1)
    _annotations(
        *stored[:3], size, raw.numpy(), raw_bounds.numpy(), tails.data_ptr(), *tails.stride()[:2],
        kind_of(tails.dtype), tokens, centre.numpy(), scratch(1, centre), out.numpy(),
    )  # fmt: skip
    return out


def heaviest(log_mass: Tensor, share: float) -> Tensor:
    """Return what `ladder.CertifiedStep._heaviest` does, `[Hkv, M]`, for log masses `[Hkv, R, M + 1]`."""
    heads, _, width = log_mass.shape
    chosen = torch.zeros(heads, width, dtype=torch.bool)
    _heaviest(log_mass.numpy(), share, chosen.numpy())
    return chosen[:, :-1]


def dearest(cost: Tensor, allowance: Tensor) -> Tensor:
    """Return what `ladder.CertifiedStep._dearest` does, `[Hkv, M]`, for costs `[Hkv, R, M]`."""
    heads, _, width = cost.shape
    needed = torch.zeros(heads, width, dtype=torch.bool)
    _dearest(cost.numpy(), allowance.numpy(), needed.numpy())
    return needed


@entry(fastmath=LOOSE)
def _annotations(
    stored: int, pitch: int, width: int, size: int, raw: Array, raw_bounds: Array, tails: int, side: int,
    head: int, kind: int, tokens: int, centre: Array, spare: Array, out: Array,
) -> None:  # fmt: skip
    heads, count, dim = raw.shape[0], raw.shape[1], centre.shape[1]
    for h in range(heads):
        row, notes = doubles_at(spare.ctypes.data), ahead(shorts_at(stored), h * pitch)
        for b in range(count):
            for i in range(4):
                out[i, h, b] = half(notes[width * b + i])
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
        if size:
            _add_spectra(notes, width, np.sqrt(size) * MARGIN, raw[h], out[:, h])


@plain
def _add_spectra(notes: Array, width: int, most: float, raw: Array, out: Array) -> None:
    """Write sk, se and sv: what is stored, if anything is, and at most `most` times the longest row."""
    count = len(raw)
    for i in range(3):
        longest = out[i if i == 0 else i + 1]
        for b in range(count + 1):
            out[4 + i, b] = longest[b] * most
            if b < count and not raw[b]:
                out[4 + i, b] = min(out[4 + i, b], half(notes[width * b + 4 + i]))


@entry()
def _choose(
    coded: Array, tau: float, fewest: int, most: int, expand_above: float, chosen: Array, uncovered: Array,
    expanded: Array,
) -> None:  # fmt: skip
    rows, width = coded.shape
    for row in range(rows):
        share = _softmax(coded[row])
        order = falling(share[: width - 1])
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


@entry()
def _order(
    exact: Array, coded: Array, known: Array, delta: Array, ranks: int, rank: Array, boundary: Array
) -> None:
    heads, group, count = exact.shape[0], exact.shape[1], known.shape[1]
    for row in range(heads * group):
        h, r = row // group, row % group
        places = np.flatnonzero(known[h])
        mine, theirs = exact[h, r, :count][places], coded[h, r, :count][places]
        leading = min(ranks, len(places))
        failed, last, hidden = False, np.inf, -np.inf
        if leading == 1:  # the default needs no sorting
            a, b = np.argmax(mine), np.argmax(theirs)
            failed, last = a != b, mine[a]
        elif leading > 1:
            a_order, b_order = falling(mine), falling(theirs)
            last = mine[a_order[leading - 1]]
            for i in range(leading):
                failed = failed or a_order[i] != b_order[i]
        for b in range(count):
            if not known[h, b]:
                hidden = max(hidden, coded[h, r, b] + delta[h, r])
        rank[h, r], boundary[h, r] = failed, hidden > last


@plain
def _softmax(logs: Array) -> Array:
    share, top, total = np.empty(len(logs)), -np.inf, 0.0
    for b in range(len(logs)):
        top = max(top, logs[b])
    for b in range(len(logs)):
        share[b] = np.exp(logs[b] - top)
        total += share[b]
    for b in range(len(logs)):
        share[b] /= total
    return share


@entry()
def _heaviest(log_mass: Array, share: float, chosen: Array) -> None:
    heads, group, _ = log_mass.shape
    for h in range(heads):
        for r in range(group):
            weight, before = _softmax(log_mass[h, r]), 0.0
            for b in falling(weight):
                before += weight[b]
                if before - weight[b] < share:
                    chosen[h, b] = True


@entry()
def _dearest(cost: Array, allowance: Array, needed: Array) -> None:
    heads, group, _ = cost.shape
    for h in range(heads):
        for r in range(group):
            spent = 0.0
            for b in np.argsort(cost[h, r], kind="mergesort"):
                spent += cost[h, r, b]
                if spent > allowance[h, r] and cost[h, r, b] > 0:
                    needed[h, b] = True
