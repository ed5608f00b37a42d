"""Float64 pieces of a step that reads the values of some blocks only, compiled for the CPU.

Values of blocks are codes with two-level metadata, held for some blocks in rows of their own; sums are kept
apart by block, since what is read, and how a block is weighed, changes from round to round.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rcq_cli.kernels._cpu_float64 import LOOSE, Array, Layer, Place, checksum, scratch
from rcq_cli.kernels._cpu_float64_rows import ROWS, add_rows, decode_two_level, widen
from rcq_cli.kernels._cpu_vector import ahead, doubles_at, entry


class Reading(NamedTuple):
    """Which blocks are read, bool `[Hkv, M]` each."""

    chosen: Tensor
    exact: Tensor
    """From the originals; the others from their codes."""


def sum_blocks(
    weights: Tensor, layer: Layer, reading: Reading, group: int, tail: tuple[Place, int], sums: Tensor
) -> Tensor:
    """Set `sums` `[Hkv, R, M + 1, D]` of the chosen blocks to weights `[.., M + 1, S]` times values.

    `group` channels share a scale. Of the open tail, where its values lie and how many; it is left alone
    where there are none. Returns which of the blocks read from originals are not what was stored, `[Hkv, M]`.
    """
    changed, nowhere = torch.zeros_like(reading.chosen), Place(0, 0, 0, 0, 0)
    codes, low, step, marks = (
        layer.codes.get(f"value_{name}", nowhere) for name in ("codes", "low", "step", "marks")
    )
    assert low.pitch == step.pitch
    (place, tokens), values = tail, layer.values
    _sum_blocks(
        weights.numpy(), *codes[:2], *low[:2], step.address, *marks[:2], group,
        *(flags.numpy() for flags in reading), layer.slots, *values[:3], values.kind, layer.originals,
        layer.factors, layer.checks, *place[:2], tokens, scratch(ROWS + weights.shape[1], sums),
        sums.numpy(), changed.numpy(),
    )  # fmt: skip
    return changed


def attention(weights: Tensor, peak: Tensor, mass: Tensor, tokens: int) -> Tensor:
    """Return the weight `[Hkv, T]` of every token in the softmax over all, a mean over the group.

    `weights` `[Hkv, R, M + 1, S]` are relative to the `peak` of their block, `mass` their sums.
    """
    found = weights.new_empty(weights.shape[0], tokens)
    _attention(weights.numpy(), peak.numpy(), mass.numpy(), found.numpy())
    return found


@entry(fastmath=LOOSE)
def _sum_blocks(
    weights: Array, codes: int, code_pitch: int, low: int, low_pitch: int, step: int, marks: int,
    mark_pitch: int, channels: int, chosen: Array, exact: Array, slots: Array, values: int, pitch: int,
    width: int, kind: int, originals: Array, odd: Array, checks: Array, tail: int, tail_pitch: int,
    tail_tokens: int, spare: Array, sums: Array, changed: Array,
) -> None:  # fmt: skip
    (heads, group, count, size), dim = weights.shape, sums.shape[3]
    pairs = heads * count
    rows = doubles_at(spare.ctypes.data)
    totals = ahead(rows, ROWS * dim)
    for pair in range(pairs):
        h, b = pair // count, pair % count
        open_tail = b == count - 1
        if not (tail_tokens > 0 if open_tail else chosen[h, b]):
            continue
        coded, held = not (open_tail or exact[h, b]), tail_tokens if open_tail else size
        if not open_tail and exact[h, b]:
            changed[h, b] = checksum(originals, odd, h, b, b) != checks[h, b, 1]
        for d in range(group * dim):
            totals[d] = 0.0
        for start in range(0, held, ROWS):
            if coded:
                token = slots[h, b] * size + start
                decode_two_level(
                    codes + h * code_pitch, low + 2 * h * low_pitch, step + 2 * h * low_pitch,
                    marks + h * mark_pitch, token, dim, channels, rows,
                )  # fmt: skip
            elif open_tail:
                present = min(held - start, ROWS)
                widen(kind, tail, h * tail_pitch + start * dim, present * dim, rows)
                for d in range(present * dim, ROWS * dim):
                    rows[d] = 0.0
            else:
                widen(kind, values, h * pitch + b * width + start * dim, ROWS * dim, rows)
            for r in range(group):
                add_rows(rows, dim, weights[h, r, b], start, 1.0, ahead(totals, r * dim))
        for r in range(group):
            mine = ahead(totals, r * dim)
            found = ahead(doubles_at(sums.ctypes.data), ((h * group + r) * count + b) * dim)
            # codes give even channels before odd ones
            apart, stride = (dim // 2, 2) if coded else (dim, 1)
            for d in range(apart):
                found[stride * d] = mine[d]
            for d in range(dim - apart):
                found[2 * d + 1] = mine[apart + d]


@entry(fastmath=LOOSE)
def _attention(weights: Array, peak: Array, mass: Array, out: Array) -> None:
    heads, group, count, size = weights.shape
    tokens = out.shape[1]
    for h in range(heads):
        share = np.empty((group, count))
        for r in range(group):
            top, total = -np.inf, 0.0
            for b in range(count):
                top = max(top, peak[h, r, b])
            for b in range(count):
                share[r, b] = np.exp(peak[h, r, b] - top)
                total += share[r, b] * mass[h, r, b]
            share[r] /= total * group
        for b in range(count):
            held = min(size, tokens - b * size)
            for t in range(held):
                out[h, b * size + t] = 0.0
            for r in range(group):
                for t in range(held):
                    out[h, b * size + t] += share[r, b] * weights[h, r, b, t]
