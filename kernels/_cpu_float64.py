"""Float64 pieces of a step on tensors as the reference lays them out, compiled for the CPU.

They compute what `reference.py` and the float64 ladder define, in another order of additions, and copy
nothing first: for modes whose policy compares float64 numbers, which the float32 kernels cannot give.
"""

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from rcq_cli.kernels._cpu_vector import entry, longs_at
from rcq_cli.kernels._format import CHECKSUM_FACTOR
from rcq_cli.kernels.cpu import Cpu, share_threads
from rcq_cli.kernels.reference import Blocks

Array = np.ndarray[Any, Any]
_PIECES = 16
"""Work is cut into this many pieces, so that a thread that was held up is waited for only briefly."""


class Flat(NamedTuple):
    """The memory of `[H, M, ...]` rows: element (h, m, i) lies at h * pitch + m * width + i."""

    memory: Array
    pitch: int
    width: int


def flat(rows: Tensor) -> Flat:
    """Return the memory of `[H, M, ...]` rows; those of one head lie behind each other."""
    (heads, count, *_), (pitch, width, *_) = rows.shape, rows.stride()
    assert width == prod(rows.shape[2:]), "rows with gaps"
    memory = rows.as_strided(((heads - 1) * pitch + count * width,), (1,))
    return Flat(memory.numpy(), pitch, width)


def score_blocks(query: Tensor, blocks: Blocks) -> Tensor:
    """Return q . k' of `[Hkv, R, D]` float64 queries with every token: `[Hkv, R, M, S]`, not scaled."""
    heads, count, size = blocks["key_codes"].shape[:3]
    out = query.new_empty(heads, query.shape[1], count, size)
    if count:
        codes, scale, offset = (flat(blocks[f"key_{name}"]) for name in ("codes", "scale", "offset"))
        _score_codes(query.contiguous().numpy(), *codes[:2], *scale[:2], offset.memory, out.numpy())
    return out


def half_steps(query: Tensor, blocks: Blocks) -> Tensor:
    """Return 0.5 * sum_c |q_c| s_bc per head and block, `[Hkv, R, M]`."""
    out = query.new_empty(*query.shape[:2], blocks["key_scale"].shape[1])
    _half_steps(query.contiguous().numpy(), *flat(blocks["key_scale"])[:2], out.numpy())
    return out


def weigh(scores: Tensor, weights: Tensor, peak: Tensor, mass: Tensor, square: Tensor) -> None:
    """Set `weights` to exp(score - peak of its block) for `[Hkv, R, M, S]` scores, and sum them up.

    `peak`, `mass` (sum of weights) and `square` (of their squares) are `[Hkv, R, M + 1]`, of which the last
    column is left alone.
    """
    _below_peak(scores.numpy(), weights.numpy(), peak.numpy())
    weights.exp_()  # torch has vector instructions for it, Numba calls the C library element by element
    _sum_weights(weights.numpy(), mass.numpy(), square.numpy())


def promote(
    query: Tensor, scale: float, keys: Tensor, pairs: tuple[Tensor, Tensor], take: Tensor, allowed: Tensor,
    scores: Tensor,
) -> Tensor:  # fmt: skip
    """Put exact scores in the place of the coded `[Hkv, R, M, S]` at (KV head, block) pairs where `take`.

    `keys` are the originals `[Hkv, M, S, D]`. Returns which pairs `[n]` had a coded score further than
    `allowed` `[Hkv, R, M]` from the exact one.
    """
    heads, blocks = pairs
    rows, first = _reached(keys, heads, blocks)
    bad = torch.zeros(len(heads), dtype=torch.bool)
    _promote(
        query.contiguous().numpy(), scale, rows, first.numpy(), heads.numpy(), blocks.numpy(), take.numpy(),
        allowed.contiguous().numpy(), scores.numpy(), bad.numpy(),
    )  # fmt: skip
    return bad


def _reached(keys: Tensor, heads: Tensor, blocks: Tensor) -> tuple[Array, Tensor]:
    """Return float32 memory and where in it the keys of each pair begin; 16-bit ones are widened first."""
    if keys.dtype == torch.float32:
        memory, pitch, width = flat(keys)
        return memory, heads * pitch + blocks * width
    rows = keys[heads, blocks].float()
    return rows.flatten().numpy(), torch.arange(len(heads)) * rows[0].numel()


def sum_values(weights: Tensor, blocks: Blocks, pairs: tuple[Tensor, Tensor], out: Tensor) -> int:
    """Sum `[Hkv, R, M, S]` weights times v' into `out` `[Hkv, R, M + 1, D]`, for (KV head, block) pairs.

    Values have one scale and offset per token and group of evenly many channels. Returns the bytes of
    temporary copies.
    """
    codes = flat(blocks["value_codes"])
    # Numba knows no float16, and torch widens it to float32 several times as fast as to float64
    scale, offset = (blocks[f"value_{name}"].float().numpy() for name in ("scale", "offset"))
    _sum_values(weights.numpy(), *codes[:2], scale, offset, *(index.numpy() for index in pairs), out.numpy())
    return int(scale.nbytes + offset.nbytes)


def checksums(parts: list[Tensor], heads: Tensor, blocks: Tensor) -> Tensor:
    """Return the checksum of (KV head, block) pairs over `[H, M, ...]` parts, int64 `[n]`."""
    out = torch.zeros(len(heads), dtype=torch.int64)
    table = np.array([_words(part) for part in parts], dtype=np.int64)
    factors = _factors(int(table[:, 2].sum()))
    _checksums(table, factors, heads.numpy(), blocks.numpy(), out.numpy())
    return out


def _words(part: Tensor) -> tuple[int, int, int]:
    """Return address, pitch and width of `[H, M, ...]` rows in words of eight bytes."""
    size, (pitch, width, *_) = part.element_size(), part.stride()
    assert width == prod(part.shape[2:]), "rows with gaps"
    assert width * size % 8 == pitch * size % 8 == 0, "whole words only"
    return part.data_ptr(), pitch * size // 8, width * size // 8


@cache
def _factors(count: int) -> Array:
    """Return the odd factor of each word of a block, modulo 2^64."""
    return ((torch.arange(1, 1 + count, dtype=torch.int64) * CHECKSUM_FACTOR) | 1).numpy()


_LOOSE = {"reassoc", "contract"}
"""Sums in any order and fused products: what the rounding terms of a certificate allow for."""


def _compiled(**options: Any) -> Callable[[Any], Callable[..., None]]:
    """Return a decorator that compiles for one thread and for several, whichever is asked for first."""

    def decorate(function: Any) -> Callable[..., None]:
        alone, together = entry(**options)(function), entry(parallel=True, **options)(function)

        def call(*arguments: Any) -> None:
            # most calls take less time than to gather a team, which is of no use to one thread
            several = torch.get_num_threads() > 1 and share_threads() > 1
            (together if several else alone)(*arguments)

        return call

    return decorate


# an index that is a sum may be negative for all that Numba knows: slices leave loops a plain counter


@_compiled(fastmath=_LOOSE)
def _score_codes(
    query: Array, codes: Array, code_pitch: int, scale: Array, meta_pitch: int, offset: Array, out: Array
) -> None:
    heads, group, count, size = out.shape
    dim, pairs = query.shape[2], heads * count
    for piece in prange(_PIECES):
        folded, constant, row = np.empty((group, dim)), np.empty(group), np.empty(dim)
        for pair in range(piece * pairs // _PIECES, (piece + 1) * pairs // _PIECES):
            h, b = pair // count, pair % count
            first, meta = h * code_pitch + b * size * dim, h * meta_pitch + b * dim
            steps, zeros = scale[meta : meta + dim], offset[meta : meta + dim]
            for r in range(group):
                asked, into, dot = query[h, r], folded[r], 0.0
                for d in range(dim):
                    into[d] = asked[d] * steps[d]
                    dot += asked[d] * zeros[d]
                constant[r] = dot
            for t in range(size):
                coded = codes[first + t * dim : first + (t + 1) * dim]
                for d in range(dim):
                    row[d] = coded[d]
                for r in range(group):
                    into, dot = folded[r], 0.0
                    for d in range(dim):
                        dot += row[d] * into[d]
                    out[h, r, b, t] = dot + constant[r]


@_compiled(fastmath=_LOOSE)
def _half_steps(query: Array, scale: Array, pitch: int, out: Array) -> None:
    heads, group, count = out.shape
    dim = query.shape[2]
    for pair in prange(heads * count):
        h, b = pair // count, pair % count
        steps = scale[h * pitch + b * dim : h * pitch + (b + 1) * dim]
        for r in range(group):
            asked, total = query[h, r], 0.0
            for d in range(dim):
                total += abs(asked[d]) * steps[d]
            out[h, r, b] = 0.5 * total


@_compiled()
def _below_peak(scores: Array, weights: Array, peak: Array) -> None:
    heads, group, count, size = scores.shape
    for row in prange(heads * group * count):
        h, r, b = row // (group * count), row // count % group, row % count
        mine, into = scores[h, r, b], weights[h, r, b]
        highest = mine[0]
        for t in range(size):
            highest = max(highest, mine[t])
        for t in range(size):
            into[t] = mine[t] - highest
        peak[h, r, b] = highest


@_compiled(fastmath=_LOOSE)
def _sum_weights(weights: Array, mass: Array, square: Array) -> None:
    heads, group, count, size = weights.shape
    for row in prange(heads * group * count):
        h, r, b = row // (group * count), row // count % group, row % count
        mine, total, squares = weights[h, r, b], 0.0, 0.0
        for t in range(size):
            total += mine[t]
            squares += mine[t] * mine[t]
        mass[h, r, b], square[h, r, b] = total, squares


@_compiled(fastmath=_LOOSE)
def _promote(
    query: Array, scale: float, keys: Array, first: Array, heads: Array, blocks: Array, take: Array,
    allowed: Array, scores: Array, bad: Array,
) -> None:  # fmt: skip
    group, size, dim, count = scores.shape[1], scores.shape[3], query.shape[2], len(heads)
    for piece in prange(_PIECES):
        row, exact = np.empty(dim), np.empty((group, size))
        for pair in range(piece * count // _PIECES, (piece + 1) * count // _PIECES):
            h, b, start = heads[pair], blocks[pair], first[pair]
            for t in range(size):
                key = keys[start + t * dim : start + (t + 1) * dim]
                for d in range(dim):
                    row[d] = key[d]
                for r in range(group):
                    asked, dot = query[h, r], 0.0
                    for d in range(dim):
                        dot += row[d] * asked[d]
                    exact[r, t] = dot * scale
            for r in range(group):
                true, coded, off = exact[r], scores[h, r, b], 0.0
                for t in range(size):
                    off = max(off, abs(true[t] - coded[t]))
                if off > allowed[h, r, b]:
                    bad[pair] = True
                if take[pair]:
                    for t in range(size):
                        coded[t] = true[t]


@_compiled(fastmath=_LOOSE)
def _sum_values(
    weights: Array, codes: Array, pitch: int, scale: Array, offset: Array, heads: Array, blocks: Array,
    out: Array,
) -> None:  # fmt: skip
    group, size, half, groups = weights.shape[1], weights.shape[3], out.shape[3] // 2, scale.shape[3]
    width, count = half // groups, len(heads)
    for piece in prange(_PIECES):
        # even channels are low nibbles, odd ones high: apart, both run through memory in order
        even, odd = np.empty(half), np.empty(half)
        evens, odds = np.empty((group, half)), np.empty((group, half))
        for pair in range(piece * count // _PIECES, (piece + 1) * count // _PIECES):
            h, b = heads[pair], blocks[pair]
            evens[:], odds[:] = 0.0, 0.0
            for t in range(size):
                first = h * pitch + (b * size + t) * half
                for g in range(groups):
                    s, z = np.float64(scale[h, b, t, g]), np.float64(offset[h, b, t, g])
                    coded = codes[first + g * width : first + (g + 1) * width]
                    low, high = even[g * width : (g + 1) * width], odd[g * width : (g + 1) * width]
                    for d in range(width):
                        # 32 bits: a processor may have no instruction that makes float64 of 64
                        low[d] = np.int32(coded[d] & 15) * s + z
                        high[d] = np.int32(coded[d] >> 4) * s + z
                for r in range(group):
                    w, into, onto = weights[h, r, b, t], evens[r], odds[r]
                    for d in range(half):
                        into[d] += w * even[d]
                        onto[d] += w * odd[d]
            for r in range(group):
                into, onto, whole = evens[r], odds[r], out[h, r, b]
                for d in range(half):
                    whole[2 * d], whole[2 * d + 1] = into[d], onto[d]


@_compiled()
def _checksums(table: Array, factors: Array, heads: Array, blocks: Array, out: Array) -> None:
    count = len(heads)
    for piece in prange(_PIECES):
        for pair in range(piece * count // _PIECES, (piece + 1) * count // _PIECES):
            total, done = 0, 0
            for part in range(len(table)):
                address, pitch, width = table[part, 0], table[part, 1], table[part, 2]
                words = longs_at(address + 8 * (heads[pair] * pitch + blocks[pair] * width))
                mine = factors[done : done + width]
                for i in range(width):
                    total += words[i] * mine[i]
                done += width
            out[pair] = total


class Float64(Cpu):
    """Backend `cpu` whose float64 scores are compiled."""

    def score_blocks(self, query: Tensor, blocks: Blocks) -> Tensor:
        """Return q . k' of `[Hkv, R, D]` float64 queries: `[Hkv, R, M, S]`, not scaled."""
        return score_blocks(query, blocks)

    def half_steps(self, query: Tensor, blocks: Blocks) -> Tensor:
        """Return D0 without its scale: `[Hkv, R, M]`."""
        return half_steps(query, blocks)


FLOAT64 = Float64()
