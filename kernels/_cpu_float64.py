"""Float64 pieces of a step on tensors as the reference lays them out, compiled for the CPU.

They compute what `reference.py` and the float64 ladder define, in another order of additions, and copy
nothing first: for modes whose policy compares float64 numbers, which the float32 kernels cannot give. Blocks
hold a multiple of four tokens, groups of values 16 channels. The open tail is the last block, with scores of
-inf where it holds no token. Here are passes over tokens, in `_cpu_float64_blocks.py` those over blocks.
All run on one thread: a parallel loop of Numba leaves out stores through pointers that nothing reads again.
"""

from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rcq_cli.kernels._cpu_float64_rows import ROWS, add_rows, decode, dots, kind_of, widen
from rcq_cli.kernels._cpu_vector import ahead, bytes_at, doubles_at, entry, longs_at, plain
from rcq_cli.kernels._format import CHECKSUM_FACTOR
from rcq_cli.kernels._rounding import MARGIN

Array = np.ndarray[Any, Any]
Pairs = tuple[Tensor, Tensor]
"""KV head and block of each of n blocks, int64 `[n]`."""


class Place(NamedTuple):
    """Where `[H, M, ...]` rows lie: element (h, m, i) at `address`, h * pitch + m * width + i elements on."""

    address: int
    pitch: int
    width: int
    size: int
    """Bytes of an element."""
    kind: int
    """Of `widen`; 0 where nobody asks."""


def place(rows: Tensor, tokens: int = 1) -> Place:
    """Return where `[H, M, ...]` rows lie, or `[H, T, D]` rows taken as blocks of `tokens`."""
    pitch, width, *_ = rows.stride()
    assert width == prod(rows.shape[2:]), "rows with gaps"
    return Place(rows.data_ptr(), pitch, width * tokens, rows.element_size(), kind_of(rows.dtype))


class Layer(NamedTuple):
    """Where the sealed blocks of a layer lie."""

    codes: dict[str, Place]
    annotations: Place
    keys: Place
    """Originals, in blocks."""
    values: Place
    checks: Array
    """Checksums int64 `[H, M, 2]`: of codes and annotations, of originals."""
    slots: Array
    """Row of each block in the codes of values, int32 `[H, M]`; negative where they are not there."""
    tier_1: Array
    """Table of what the first checksum covers: address, pitch and width of rows in words of eight bytes, and
    whether slots number them."""
    originals: Array
    """Table of what the second checksum covers."""
    factors: Array
    """The odd factors of the words of a block, modulo 2^64."""


def layer(
    codes: dict[str, Place], annotations: Place, originals: tuple[Place, Place], checks: Array, slots: Array
) -> Layer:
    """Return a layer, given where its parts lie."""
    stored = [(place, name.startswith("value_")) for name, place in codes.items()]
    tables = _table([*stored, (annotations, False)]), _table([(place, False) for place in originals])
    factors = _odd(max(int(words[:, 2].sum()) for words in tables))
    return Layer(codes, annotations, *originals, checks, slots, *tables, factors)


def _table(parts: list[tuple[Place, bool]]) -> Array:
    rows = []
    for (address, pitch, width, size, _), by_slot in parts:
        assert width * size % 8 == pitch * size % 8 == 0, "whole words only"
        rows.append((address, pitch * size // 8, width * size // 8, by_slot))
    return np.array(rows, dtype=np.int64)


class Scores(NamedTuple):
    """Scores of all tokens, and how far they may be from those of the originals."""

    scores: Tensor
    """`[Hkv, R, M + 1, S]`"""
    half_step: Tensor
    """0.5 * sum_c |q_c| s_bc `[Hkv, R, M + 1]`, 0 for the tail."""
    slack: Tensor
    """What `exact.score_slack` allows a score of an original, `[Hkv, R, M + 1]`."""
    delta: Tensor
    """What the ladder allows a coded one, `[Hkv, R, M + 1]`."""
    wide: Tensor
    """What `bounds.breadth` says of the errors of a coded one, `[Hkv, R, M + 1]`."""


def score(
    query: Tensor, scale: float, layer: Layer, notes: tuple[Tensor, ...], size: int, tail: Place,
    tail_tokens: int, slack: tuple[float, float],
) -> tuple[Scores, bool]:  # fmt: skip
    """Score `[Hkv, R, D]` float64 queries with every token; return whether all is finite, too.

    `notes` are rk, kappa and sk, `[Hkv, M + 1]` (sk infinite where nothing is known), `tail` the keys of the
    open tail `[Hkv, S, D]`, `slack` the factor of ||q|| * (kappa + rk) and the constant in
    `exact.score_slack`.
    """
    (heads, group, _), count = query.shape, notes[0].shape[1]
    found = Scores(
        query.new_empty(heads, group, count, size), *(query.new_empty(heads, group, count) for _ in "hsdw")
    )
    fine = torch.empty(heads, count, dtype=torch.bool)
    nowhere = Place(0, 0, 0, 0, 0)
    codes, steps, offset = (layer.codes.get(f"key_{name}", nowhere) for name in ("codes", "scale", "offset"))
    assert steps.pitch == offset.pitch
    _score(
        query.contiguous().numpy(), scale, *codes[:2], *steps[:2], offset.address, steps.kind, *tail[:2],
        tail.kind, tail_tokens, *(note.numpy() for note in notes), *slack, scratch(group + ROWS + 2, query),
        *(each.numpy() for each in found), fine.numpy(),
    )  # fmt: skip
    return found, bool(fine.all())


def weigh(
    scores: Tensor, weights: Tensor, peak: Tensor, mass: Tensor, square: Tensor, log_mass: Tensor
) -> None:
    """Set `weights` to exp(score - peak of its block) for `[Hkv, R, M, S]` scores, and sum them up.

    `peak`, `mass` (sum of weights), `square` (of their squares) and `log_mass` (log mass + peak) are
    `[Hkv, R, M]`; a block of -inf alone has mass 0. All are contiguous.
    """
    rows, size = peak.numel(), scores.shape[-1]
    _below_peak(scores.data_ptr(), weights.data_ptr(), peak.data_ptr(), rows, size)
    weights.exp_()  # torch has vector instructions for it, Numba calls the C library element by element
    sums = (each.data_ptr() for each in (peak, mass, square, log_mass))
    _sum_weights(weights.data_ptr(), *sums, rows, size)


class Promoted(NamedTuple):
    """What was wrong with blocks, bool `[n]` each."""

    unlike: Tensor
    """A coded score was further from the exact one than allowed, or what was sealed has changed.

    A block without codes of values is judged by its scores."""
    changed: Tensor
    """The originals are not what was stored; what was scored is of no use."""


def promote(
    query: Tensor, scale: float, layer: Layer, pairs: Pairs, take: Tensor, allowed: Tensor, scores: Tensor
) -> Promoted:
    """Put exact scores in the place of the coded `[Hkv, R, M + 1, S]` at pairs where `take`, and check all.

    `allowed` `[Hkv, R, M]` is how far scores may differ.
    """
    found = Promoted(*(torch.empty(len(take), dtype=torch.bool) for _ in "uc"))
    _promote(
        query.contiguous().numpy(), scale, *layer.keys[:3], layer.keys.kind, *(i.numpy() for i in pairs),
        take.numpy(), allowed.numpy(), layer.tier_1, layer.originals, layer.factors, layer.checks,
        layer.slots, scratch(ROWS, query), scores.numpy(), *(flags.numpy() for flags in found),
    )  # fmt: skip
    return found


def sum_values(
    weights: Tensor, share: Tensor, layer: Layer, exact: Tensor, tail: Place, tail_tokens: int, dim: int
) -> tuple[Tensor, Tensor]:
    """Return the sum of `share` `[Hkv, R, M + 1]` times `weights` `[.., S]` times values, `[Hkv, R, D]`.

    Values are originals in `exact` `[Hkv, M]` blocks and in the `tail` `[Hkv, S, D]`, elsewhere what the
    codes stand for. The second item tells which exact blocks are not what was stored, `[Hkv, M]`.
    """
    heads, group = weights.shape[:2]
    changed, sums = torch.zeros_like(exact), weights.new_zeros(heads, group, dim)
    nowhere = Place(0, 0, 0, 0, 0)
    codes, scale, offset = (
        layer.codes.get(f"value_{name}", nowhere) for name in ("codes", "scale", "offset")
    )
    assert scale.pitch == offset.pitch
    _sum_values(
        weights.numpy(), share.numpy(), *codes[:2], *scale[:2], offset.address, exact.numpy(),
        *layer.values[:3], layer.values.kind, layer.originals, layer.factors, layer.checks, *tail[:2],
        tail_tokens, scratch(2 * ROWS, sums), sums.numpy(), changed.numpy(),
    )  # fmt: skip
    # even channels come before odd ones
    return sums.unflatten(2, (2, -1)).transpose(2, 3).flatten(2), changed


def checksums(layer: Layer, words: Array, pairs: Pairs) -> Tensor:
    """Return the checksum of pairs over the parts of one of the tables of a layer, int64 `[n]`."""
    out = torch.empty(len(pairs[0]), dtype=torch.int64)
    _checksums(words, layer.factors, *(index.numpy() for index in pairs), layer.slots, out.numpy())
    return out


def scratch(rows: int, like: Tensor) -> Array:
    """Return room for rows of float64 `[.., D]`, for kernels that reach it through a pointer.

    It must belong to the caller: Numba frees what a kernel makes after its last use by name.
    """
    return np.empty((rows, like.shape[-1]))


@cache
def _odd(count: int) -> Array:
    return ((torch.arange(1, 1 + count, dtype=torch.int64) * CHECKSUM_FACTOR) | 1).numpy()


LOOSE = {"reassoc", "contract"}
"""Sums in any order and fused products: what the rounding terms of a certificate allow for."""


@entry(fastmath=LOOSE)
def _score(
    query: Array, factor: float, codes: int, code_pitch: int, scale: int, meta_pitch: int, offset: int,
    meta_kind: int, tail: int, tail_pitch: int, kind: int, tail_tokens: int, rk: Array, kappa: Array,
    sk: Array, rate: float, floor: float, spare: Array, out: Array, half_step: Array, slack: Array,
    delta: Array, wide: Array, fine: Array,
) -> None:  # fmt: skip
    (heads, group, count, size), dim = out.shape, query.shape[2]
    pairs, most = heads * count, np.sqrt(size) * MARGIN
    rows, constant = doubles_at(spare.ctypes.data), np.empty(group)
    folded = ahead(rows, ROWS * dim)
    steps, zeros = ahead(folded, group * dim), ahead(folded, (group + 1) * dim)
    for pair in range(pairs):
        h, b, check = pair // count, pair % count, 0.0
        coded, held = b < count - 1, size if b < count - 1 else tail_tokens
        if coded:
            meta = h * meta_pitch + b * dim
            widen(meta_kind, scale, meta, dim, steps)
            widen(meta_kind, offset, meta, dim, zeros)
        for r in range(group):
            asked, into = (
                ahead(doubles_at(query.ctypes.data), (h * group + r) * dim),
                ahead(folded, r * dim),
            )
            dot, step, square = 0.0, 0.0, 0.0
            for d in range(dim):
                into[d] = asked[d]
                square += asked[d] * asked[d]
            if coded:
                for d in range(dim):
                    into[d] *= steps[d]
                    dot += asked[d] * zeros[d]
                    step += abs(asked[d]) * steps[d]
            norm = np.sqrt(square) * MARGIN
            constant[r], half_step[h, r, b] = dot, 0.5 * step
            allowed = rate * norm * (kappa[h, b] + rk[h, b]) + floor
            slack[h, r, b], check = allowed, check + allowed * 0.0
            delta[h, r, b] = min(0.5 * step, norm * rk[h, b]) * (abs(factor) * MARGIN) + allowed
            breadth = (norm * sk[h, b] * (abs(factor) * MARGIN) + most * allowed) / delta[h, r, b]
            wide[h, r, b] = breadth if breadth < most else most
        for t in range(0, size, ROWS):
            present = min(max(held - t, 0), ROWS)
            if coded:
                code = ahead(bytes_at(codes), h * code_pitch + (b * size + t) * dim)
                for d in range(ROWS * dim):
                    rows[d] = np.int8(code[d])
            else:
                widen(kind, tail, h * tail_pitch + t * dim, present * dim, rows)
            for r in range(group):
                found = dots(rows, ahead(folded, r * dim), dim)
                for i in range(ROWS):
                    scored = (found[i] + constant[r]) * factor if i < present else -np.inf
                    check += scored * 0.0 if i < present else 0.0
                    out[h, r, b, t + i] = scored
        fine[h, b] = check == 0.0


@entry(fastmath=LOOSE)
def _below_peak(scores: int, into: int, peak: int, rows: int, size: int) -> None:
    for row in range(rows):
        mine, below = ahead(doubles_at(scores), row * size), ahead(doubles_at(into), row * size)
        highest = -np.inf
        for t in range(size):
            highest = max(highest, mine[t])
        doubles_at(peak)[row] = highest
        highest = max(highest, -1.7e308)  # of nothing at all -inf shall stay
        for t in range(size):
            below[t] = mine[t] - highest


@entry(fastmath=LOOSE)
def _sum_weights(
    weights: int, peak: int, mass: int, square: int, log_mass: int, rows: int, size: int
) -> None:
    for row in range(rows):
        mine, total, squares = ahead(doubles_at(weights), row * size), 0.0, 0.0
        for t in range(size):
            total += mine[t]
            squares += mine[t] * mine[t]
        doubles_at(mass)[row], doubles_at(square)[row] = total, squares
        doubles_at(log_mass)[row] = doubles_at(peak)[row] + np.log(total)


@plain
def checksum(words: Array, factors: Array, head: int, block: int, slot: int) -> Any:
    total, mine = 0, longs_at(factors.ctypes.data)
    for part in range(len(words)):
        address, pitch, width = words[part, 0], words[part, 1], words[part, 2]
        row = slot if words[part, 3] else block
        stored = longs_at(address + 8 * (head * pitch + row * width))
        for i in range(width):
            total += stored[i] * mine[i]
        mine = ahead(mine, width)
    return total


@entry(fastmath=LOOSE)
def _promote(
    query: Array, scale: float, keys: int, pitch: int, width: int, kind: int, heads: Array, blocks: Array,
    take: Array, allowed: Array, tier_1: Array, originals: Array, factors: Array, checks: Array,
    slots: Array, spare: Array, scores: Array, unlike: Array, changed: Array,
) -> None:  # fmt: skip
    group, size, dim, count = scores.shape[1], scores.shape[3], query.shape[2], len(heads)
    rows = doubles_at(spare.ctypes.data)
    for pair in range(count):
        h, b = heads[pair], blocks[pair]
        slot = slots[h, b]
        # the originals are summed up just before they are scored, so memory is read once
        changed[pair] = checksum(originals, factors, h, b, b) != checks[h, b, 1]
        # what has no values here is checked by its scores alone
        bad = slot >= 0 and checksum(tier_1, factors, h, b, slot) != checks[h, b, 0]
        for t in range(0, size, ROWS):
            widen(kind, keys, h * pitch + b * width + t * dim, ROWS * dim, rows)
            for r in range(group):
                found = dots(rows, ahead(doubles_at(query.ctypes.data), (h * group + r) * dim), dim)
                for i in range(ROWS):
                    exact, coded = found[i] * scale, scores[h, r, b, t + i]
                    bad = bad or not abs(exact - coded) <= allowed[h, r, b]
                    scores[h, r, b, t + i] = exact if take[pair] else coded
        unlike[pair] = bad


@entry(fastmath=LOOSE)
def _sum_values(
    weights: Array, share: Array, codes: int, code_pitch: int, scale: int, meta_pitch: int, offset: int,
    exact: Array, values: int, pitch: int, width: int, kind: int, originals: Array, factors: Array,
    checks: Array, tail: int, tail_pitch: int, tail_tokens: int, spare: Array, out: Array, changed: Array,
) -> None:  # fmt: skip
    (heads, group, count, size), dim = weights.shape, out.shape[2]
    pairs = heads * count
    # even channels are low nibbles, odd ones high: apart, both run through memory in order
    rows = doubles_at(spare.ctypes.data)
    raw = ahead(rows, ROWS * dim)
    for pair in range(pairs):
        h, b = pair // count, pair % count
        held, coded = size if b < count - 1 else tail_tokens, b < count - 1 and not exact[h, b]
        if b < count - 1 and exact[h, b]:
            changed[h, b] = checksum(originals, factors, h, b, b) != checks[h, b, 1]
        for start in range(0, held, ROWS):
            present = min(held - start, ROWS)
            if coded:
                token = b * size + start
                meta = h * meta_pitch + token * (dim // 16)
                decode(codes + h * code_pitch + token * (dim // 2), scale, offset, meta, dim, rows)
            else:
                if b < count - 1:
                    widen(kind, values, h * pitch + b * width + start * dim, ROWS * dim, raw)
                else:
                    widen(kind, tail, h * tail_pitch + start * dim, present * dim, raw)
                for i in range(ROWS):
                    for d in range(dim // 2):
                        rows[i * dim + d] = raw[i * dim + 2 * d] if i < present else 0.0
                        rows[i * dim + dim // 2 + d] = raw[i * dim + 2 * d + 1] if i < present else 0.0
            for r in range(group):
                into = ahead(doubles_at(out.ctypes.data), (h * group + r) * dim)
                add_rows(rows, dim, weights[h, r, b], start, share[h, r, b], into)


@entry()
def _checksums(words: Array, factors: Array, heads: Array, blocks: Array, slots: Array, out: Array) -> None:
    count = len(heads)
    for pair in range(count):
        h, b = heads[pair], blocks[pair]
        out[pair] = checksum(words, factors, h, b, slots[h, b])
