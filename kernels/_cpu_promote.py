"""Promotion of keys: fingerprints, exact scores, and the check that codes and originals agree."""

from typing import Any

import numpy as np

from rcq_cli.kernels._cpu_bounds import FLUSHED, WIDEST
from rcq_cli.kernels._cpu_exact import exact_scores
from rcq_cli.kernels._cpu_integer import LINE, hash_words
from rcq_cli.kernels._cpu_score import (
    DELTAS,
    EXP_SLACK,
    LOW,
    as_scores,
    bound_scores,
    fold_queries,
    item_bytes,
    meta_of,
    multiply,
    weigh,
)
from rcq_cli.kernels._cpu_state import NOTES, TEAM, Item, Limits, Shape, Slot, Store, Turn, line_of
from rcq_cli.kernels._cpu_vector import (
    LANES,
    add,
    exponential,
    highest,
    larger,
    load,
    long_bits,
    merged,
    mul,
    pick_less,
    plain,
    prefetch,
    splat,
    store,
    sub,
)


@plain
def note_print(notes: Any, at: int) -> int:
    """Return the part of a fingerprint that covers the annotations of one block."""
    result = np.uint64(0)
    for i in range(NOTES):
        result += np.uint64(notes[at + i]) * (np.uint64(0x9E3779B97F4A7C15) + np.uint64(i * 0x51ED27A))
    return np.int64(result)


@plain
def block_print(shape: Shape, turn: Turn, tiers: Store, h: int, b: int, part: int, ahead: int) -> int:
    """Return a fingerprint of block `b`: 0 key record, 1 value record (both with notes), 2, 3 originals.

    Those cover what stands for a raw block in its bounds. Asks for that of the block `ahead` further on.
    """
    if part == 0:
        at, notes = (
            h * turn.key_pitch + b * shape.key_bytes,
            note_print(tiers.notes, h * turn.note_pitch + NOTES * b),
        )
        return hash_words(tiers.keys, at, shape.key_bytes, 1, ahead * shape.key_bytes) + notes
    if part == 1:
        at, notes = (
            h * turn.value_pitch + b * shape.value_bytes,
            note_print(tiers.notes, h * turn.note_pitch + NOTES * b),
        )
        return hash_words(tiers.values, at, shape.value_bytes, 2, ahead * shape.value_bytes) + notes
    bound = bound_print(tiers, h * turn.raw_bound_pitch + 2 * b, part)
    return originals_print(shape, turn, tiers, h, b, part, ahead) + bound


@plain
def originals_print(shape: Shape, turn: Turn, tiers: Store, h: int, b: int, part: int, ahead: int) -> int:
    """Return a fingerprint of the keys (2) or values (3) of block `b`."""
    count = shape.block * shape.dim * item_bytes(shape)
    source = tiers.original_keys if part == 2 else tiers.original_values
    return hash_words(source, h * turn.original_pitch + b * count, count, part + 1, ahead * count)


@plain
def bound_print(tiers: Store, at: int, part: int) -> int:
    """Return what the bound of a raw block at `raw_bounds[at:]` adds to the fingerprint of its originals."""
    return np.int64(np.uint64(long_bits(tiers.raw_bounds[at + part - 2])) * np.uint64(0xD6E8FEB86659FD93))


@plain
def sound(shape: Shape, turn: Turn, tiers: Store, h: int, b: int, part: int, ahead: int) -> bool:
    """Compare a fingerprint with the one taken at sealing; ask for what the block `ahead` further on needs.

    Record a fault and return False where they differ.
    """
    if part < 2 and tiers.raw[h * turn.raw_pitch + b]:
        return True
    known = tiers.checks[h * turn.check_pitch + 4 * b + part]
    if block_print(shape, turn, tiers, h, b, part, ahead) == known:
        return True
    tiers.faults[2 * h] = 1 if part < 2 else 2
    tiers.faults[2 * h + 1] = b
    return False


@merged
def compare_scores(
    shape: Shape, turn: Turn, tiers: Store, item: Item, slot: Slot, h: int, b: int, low: int, high: int
) -> None:
    """Score block `b` from codes and from the originals into `pads`; a difference above Delta is a fault."""
    pads, padded, exact = item.pads, shape.padded, shape.group * shape.padded
    at = h * turn.key_pitch + b * shape.key_bytes
    source = h * turn.original_pitch + b * shape.block * shape.dim * item_bytes(shape)
    keys, block = tiers.original_keys, shape.block
    if not exact_scores(shape, tiers, keys, source, block, h, low, high, pads, exact):
        for r in range(low, high):
            tiers.failed[h * shape.group + r] = 1
        return
    if tiers.raw[h * turn.raw_pitch + b]:
        return
    reach = np.float64(slot.reach[b])
    fold_queries(shape, tiers, at, at, item, h, 0, low, high)
    multiply(shape, tiers, at, at, item, 0, low, high, pads, 0)
    for r in range(low, high):
        row = h * shape.group + r
        if tiers.failed[row]:
            continue
        as_scores(shape, item, 0, r, pads, r * padded, padded)
        meta = meta_of(shape, 0, r)
        bound_scores(shape, tiers, item.floats, meta - r % TEAM, row - r % TEAM, slot, b)
        allowed = np.float64(item.floats[meta + DELTAS]) + np.float64(tiers.slacks[row]) * reach
        for t in range(r * padded, r * padded + block):
            if not abs(np.float64(pads[t]) - np.float64(pads[exact + t])) <= allowed:
                tiers.faults[2 * h], tiers.faults[2 * h + 1] = 1, b


@plain
def exact_delta(tiers: Store, slot: Slot, row: int, b: int) -> float:
    """Return the bound on the errors of exact scores: rounding alone."""
    return np.float32((np.float64(tiers.slacks[row]) * slot.reach[b] + EXP_SLACK) * (1 + 2.0**-23))


@plain
def agree(weights: Any, to: int, exact: Any, at: int, padded: int, peak: float, delta: float) -> bool:
    """Return whether exact scores lie within `delta` of those that `weights[to:]` were made of.

    Weights are exp(score - peak); where they underflowed, only that much is known.
    """
    if not delta < WIDEST:
        return True
    stretch = splat(np.float32(np.exp(np.float64(delta)) * (1 + 2.0**-16)))
    centre, flushed, worst = splat(np.float32(peak)), splat(np.float32(FLUSHED)), splat(LOW)
    for t in range(0, padded, LANES):
        above = sub(load(exact, at + t), centre)
        one = exponential(pick_less(above, splat(np.float32(80)), above, splat(np.float32(80))))
        other = load(weights, to + t)
        worst = larger(sub(one, mul(add(other, flushed), stretch)), worst)
        worst = larger(sub(other, mul(add(one, flushed), stretch)), worst)
    return highest(worst) <= 0


@plain
def ask_for(shape: Shape, turn: Turn, source: Any, h: int, b: int) -> None:
    """Have originals of block `b` brought into the caches while something else is worked on."""
    count = shape.block * shape.dim * item_bytes(shape)
    first = h * turn.original_pitch + b * count
    for i in range(first, first + count, LINE):
        prefetch(source, i)


@plain
def promote_keys(
    shape: Shape, turn: Turn, tiers: Store, item: Item, slot: Slot, h: int, b: int, after: int
) -> None:
    """Check codes and originals of block `b`, and replace its scores by exact ones in every row to do.

    Block `after` is the next one.
    """
    if not (sound(shape, turn, tiers, h, b, 2, after - b) and sound(shape, turn, tiers, h, b, 0, after - b)):
        return
    padded, block, pads, weights = shape.padded, shape.block, item.pads, slot.weights
    size = block * shape.dim * item_bytes(shape)
    at = h * turn.original_pitch + b * size
    if not exact_scores(shape, tiers, tiers.original_keys, at, block, h, 0, shape.group, pads, 0):
        for r in range(shape.group):
            tiers.failed[h * shape.group + r] = 1
        return
    for r in range(shape.group):
        row, line, at = h * shape.group + r, line_of(turn, slot, r), r * padded
        to = b * shape.group * padded + at
        if not tiers.todo[row] or tiers.failed[row]:
            continue
        for t in range(at + block, at + padded):
            pads[t] = LOW
        if not tiers.raw[h * turn.raw_pitch + b]:
            allowed = np.float64(line.coded_delta[b]) + np.float64(tiers.slacks[row]) * slot.reach[b]
            if not agree(weights, to, pads, at, padded, line.peak[b], allowed):
                tiers.faults[2 * h], tiers.faults[2 * h + 1] = 1, b
        for t in range(0, padded, LANES):
            store(weights, to + t, load(pads, at + t))
        weigh(weights, to, block, padded, line.peak, line.mass, line.square, b)
        line.delta[b] = line.rest[b] = exact_delta(tiers, slot, row, b)
        line.key_coded[b] = np.float32(0)


@plain
def following(state: int) -> int:
    """Return the next state of a linear congruential generator."""
    return state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)


@plain
def drawn(state: int, bit: int, count: int) -> int:
    """Return a number below `count` from the bits of a state above `bit`."""
    return np.int64((state >> np.uint64(bit)) % np.uint64(count))


@merged
def explore(shape: Shape, turn: Turn, limits: Limits, tiers: Store, item: Item, slot: Slot, h: int) -> None:
    """Compare a few blocks with their fingerprints, and key codes with the originals for one query head.

    Only to find corruption.
    """
    state = np.uint64(turn.count * 8191 + h + 1) * np.uint64(0x9E3779B97F4A7C15)
    wanted = limits.explore * turn.blocks + np.float64(state >> np.uint64(11)) * 2.0**-53
    for _ in range(int(wanted)):
        state = following(state)
        b, r, after = drawn(state, 33, turn.blocks), drawn(state, 20, shape.group), following(state)
        ahead = drawn(after, 33, turn.blocks) - b
        unchanged = sound(shape, turn, tiers, h, b, 1, ahead) and sound(shape, turn, tiers, h, b, 2, ahead)
        if unchanged and sound(shape, turn, tiers, h, b, 0, ahead):
            compare_scores(shape, turn, tiers, item, slot, h, b, r, r + 1)
