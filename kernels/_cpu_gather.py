"""The value pass: weights times values, from codes in integers and from originals in float32."""

from typing import Any

import numpy as np

from rcq_cli.kernels._cpu_bounds import EXACT_RUN, RUN, WEIGHT_STEPS
from rcq_cli.kernels._cpu_integer import TILE
from rcq_cli.kernels._cpu_promote import ask_for, sound
from rcq_cli.kernels._cpu_score import item_bytes
from rcq_cli.kernels._cpu_state import (
    READ_CODES,
    READ_ORIGINALS,
    TEAM,
    Item,
    Shape,
    Slot,
    Store,
    Turn,
    line_of,
    next_of,
)
from rcq_cli.kernels._cpu_values import SCALE_ASKS, mix_kernel, scale_kernel
from rcq_cli.kernels._cpu_vector import (
    LANES,
    ORIGINALS,
    add,
    add_to_doubles,
    fma,
    load,
    merged,
    mul,
    plain,
    splat,
    store,
    total,
    variant,
)


def _coded_values(team: int) -> Any:
    mix = mix_kernel(team)
    two_level, one_level = (scale_kernel(team, levels) for levels in (True, False))

    def gather(
        shape: Shape, values: Any, at: int, width: float, ahead: int, weights: Any, item: Item
    ) -> None:
        """Add factor * sum_t weight * value of the coded block at byte `at` for `team` rows.

        A value is code * s + z; the codes are multiplied in integers by weights times s, the offsets in
        float32. Asks for a block that is needed soon, `ahead` bytes on: evenly, as scoring does.
        """
        padded, dim, groups, pairs = shape.padded, shape.dim, shape.groups, shape.padded // 2
        octets, soon = padded // 8, at + ahead
        meta, chunk = at + padded * dim // 2, dim // groups
        unit = np.float32(1 if width == 0 else WEIGHT_STEPS / width)
        for i in range(team):
            item.scales[i] = item.factors[i] * np.float32(width / WEIGHT_STEPS)
        back = np.float32(1)
        if shape.two_level:
            unit /= np.float32(15)
            back /= unit
        if shape.two_level:
            two_level(
                values, meta, soon, padded, groups, weights, item.to, item.factors, unit, back, item.floats,
                item.ints, item.gathered, item.lows, item.offsets,
            )  # fmt: skip
        else:
            one_level(
                values, meta, soon, padded, groups, weights, item.to, item.factors, unit, back, item.floats,
                item.ints, item.gathered, item.lows, item.offsets,
            )  # fmt: skip
        soon += groups * SCALE_ASKS
        step = (shape.value_bytes - groups * SCALE_ASKS) // (octets * dim // TILE)
        for g in range(groups):
            for c in range(g * chunk, (g + 1) * chunk, TILE):
                mix(
                    values, at + 4 * c, 4 * dim, soon, step, octets, item.ints, g * team * pairs, pairs,
                    item.gathered, item.places, c, item.scales,
                )  # fmt: skip
                soon += octets * step

    return variant(gather, str(team), merged)


_gather1, _gather2, _gather3, _gather4 = (_coded_values(team) for team in range(1, TEAM + 1))


@merged
def gather_coded(
    shape: Shape, turn: Turn, tiers: Store, item: Item, slot: Slot, h: int, b: int, later: int, count: int
) -> None:
    """Add coded block `b` for the first `count` rows in `item.rows`; `later` is needed after the next."""
    wide = shape.groups * LANES
    for i in range(count):
        r = item.rows[i]
        item.to[i], item.places[i] = (b * shape.group + r) * shape.padded, r * shape.dim
        item.offsets[i] = shape.group * shape.dim + r * wide
        item.lows[i] = shape.group * (shape.dim + wide) + r * LANES
        item.factors[i] = line_of(turn, slot, r).factor[b]
    at, step = h * turn.value_pitch + b * shape.value_bytes, np.float64(slot.step[b])
    further = (later - b) * shape.value_bytes
    if count == 1:
        _gather1(shape, tiers.values, at, step, further, slot.weights, item)
    elif count == 2:
        _gather2(shape, tiers.values, at, step, further, slot.weights, item)
    elif count == 3:
        _gather3(shape, tiers.values, at, step, further, slot.weights, item)
    else:
        _gather4(shape, tiers.values, at, step, further, slot.weights, item)


@merged
def accumulate(gathered: Any, place: int, part: Any) -> None:
    """Add a vector to the accumulators."""
    store(gathered, place, add(part, load(gathered, place)))


def _exact_values(name: str, read: Any, item_size: int) -> Any:

    def gather(shape: Shape, source: Any, at: int, tokens: int, item: Item, count: int) -> None:
        """Add the weighted originals at byte `at`; a number is `item_size` bytes, read by `read`."""
        dim, weights, gathered, rows, pad = shape.dim, item.floats, item.gathered, item.rows, shape.padded
        row, step, c = dim * item_size, LANES * item_size, 0
        while count == 1 and c + 4 * LANES <= dim:
            one = two = three = four = splat(np.float32(0))
            for t in range(tokens):
                here, weight = at + t * row + c * item_size, splat(weights[t])
                one, two = fma(weight, read(source, here), one), fma(weight, read(source, here + step), two)
                three = fma(weight, read(source, here + 2 * step), three)
                four = fma(weight, read(source, here + 3 * step), four)
            place = rows[0] * dim + c
            accumulate(gathered, place, one)
            accumulate(gathered, place + LANES, two)
            accumulate(gathered, place + 2 * LANES, three)
            accumulate(gathered, place + 3 * LANES, four)
            c += 4 * LANES
        while c + 2 * LANES <= dim:  # two vectors share a weight once it is in all lanes
            one = two = three = four = splat(np.float32(0))
            five = six = seven = eight = one
            for t in range(tokens):
                here = at + t * row + c * item_size
                x, y = read(source, here), read(source, here + step)
                weight = splat(weights[t])
                one, two = fma(weight, x, one), fma(weight, y, two)
                weight = splat(weights[t + pad])
                three, four = fma(weight, x, three), fma(weight, y, four)
                weight = splat(weights[t + 2 * pad])
                five, six = fma(weight, x, five), fma(weight, y, six)
                weight = splat(weights[t + 3 * pad])
                seven, eight = fma(weight, x, seven), fma(weight, y, eight)
            place = c + LANES
            accumulate(gathered, rows[0] * dim + c, one)
            accumulate(gathered, rows[0] * dim + place, two)
            accumulate(gathered, rows[1] * dim + c, three)
            accumulate(gathered, rows[1] * dim + place, four)
            accumulate(gathered, rows[2] * dim + c, five)
            accumulate(gathered, rows[2] * dim + place, six)
            accumulate(gathered, rows[3] * dim + c, seven)
            accumulate(gathered, rows[3] * dim + place, eight)
            c += 2 * LANES
        while c < dim:
            for i in range(TEAM):
                one = splat(np.float32(0))
                for t in range(tokens):
                    x = read(source, at + t * row + c * item_size)
                    one = fma(splat(weights[i * pad + t]), x, one)
                accumulate(gathered, rows[i] * dim + c, one)
            c += LANES

    return variant(gather, name)


_values_single, _values_bfloat, _values_half = (
    _exact_values(kind.name, kind.load, kind.bytes) for kind in ORIGINALS
)


@plain
def gather_exact(
    shape: Shape, turn: Turn, source: Any, at: int, tokens: int, item: Item, slot: Slot, b: int, count: int
) -> None:
    """Add `tokens` original values at byte `at` for the first `count` rows listed in `item.rows`."""
    floats, rows = item.floats, item.rows
    for i in range(TEAM):  # a spare member adds nothing to a row that is there anyway
        r = rows[i] if i < count else rows[0]
        rows[i] = r
        factor = line_of(turn, slot, r).factor[b] if i < count else np.float32(0)
        for t in range(0, shape.padded, LANES):
            weight = load(slot.weights, (b * shape.group + r) * shape.padded + t)
            store(floats, i * shape.padded + t, mul(weight, splat(np.float32(factor))))
    if shape.kind == 0:
        _values_single(shape, source, at, tokens, item, count)
    elif shape.kind == 1:
        _values_bfloat(shape, source, at, tokens, item, count)
    else:
        _values_half(shape, source, at, tokens, item, count)


@merged
def clear(shape: Shape, item: Item, low: int, high: int) -> None:
    """Set the float32 accumulators of the rows `low` to `high` to 0."""
    dim, wide, zero = shape.dim, shape.groups * LANES, splat(np.float32(0))
    offsets, lows = shape.group * dim, shape.group * (dim + wide)
    for c in range(low * dim, high * dim, LANES):
        store(item.gathered, c, zero)
    for c in range(offsets + low * wide, offsets + high * wide, LANES):
        store(item.gathered, c, zero)
    for c in range(lows + low * LANES, lows + high * LANES, LANES):
        store(item.gathered, c, zero)


@plain
def flush(shape: Shape, item: Item, first: int, end: int) -> None:
    """Move the float32 accumulators of the rows `first` to `end` into the float64 sums."""
    dim, groups, gathered, chunk = shape.dim, shape.groups, item.gathered, shape.dim // shape.groups
    lows = shape.group * (dim + groups * LANES)
    for r in range(first, end):
        low = np.float64(total(load(gathered, lows + r * LANES)))
        for g in range(groups):
            offset = low + np.float64(total(load(gathered, shape.group * dim + (r * groups + g) * LANES)))
            for c in range(r * dim + g * chunk, r * dim + (g + 1) * chunk, LANES):
                add_to_doubles(item.sums, c, load(gathered, c), offset)
    clear(shape, item, first, end)


@merged
def list_rows(
    shape: Shape, turn: Turn, tiers: Store, item: Item, slot: Slot, h: int, b: int, first: int, only: int,
    coded: float,
) -> int:  # fmt: skip
    """List the rows of the team from `first` on that read values of block `b` in that way.

    Return how many; only `only` counts unless that is -1.
    """
    count = 0
    for r in range(first, min(first + TEAM, shape.group)):
        line = line_of(turn, slot, r)
        wanted = r == only or (only < 0 and tiers.todo[h * shape.group + r] != 0)
        if wanted and line.keep[b] > 0 and line.factor[b] > 0 and line.value_coded[b] == coded:
            item.rows[count] = r
            count += 1
    return count


@merged
def add_coded(
    shape: Shape, turn: Turn, tiers: Store, item: Item, slot: Slot, h: int, b: int, later: int, only: int
) -> None:
    """Add codes of block `b` to the rows that read them; `later` is needed after the next block."""
    for first in range(0, shape.group, TEAM):
        count = list_rows(shape, turn, tiers, item, slot, h, b, first, only, np.float32(1))
        if count:
            gather_coded(shape, turn, tiers, item, slot, h, b, later, count)


@merged
def add_exact(
    shape: Shape, turn: Turn, tiers: Store, item: Item, slot: Slot, h: int, b: int, after: int, only: int
) -> None:
    """Add originals of block `b`, or the open tail, to the rows that read them; block `after` is the next.

    What is kept of them is checked, but for the sake of a guess.
    """
    size = shape.block * shape.dim * item_bytes(shape)
    if b < turn.blocks and only < 0:
        ahead = after - b if after < turn.blocks else 0
        sound(shape, turn, tiers, h, b, 3, ahead)
        sound(shape, turn, tiers, h, b, 1, ahead)
    elif after < turn.blocks:
        ask_for(shape, turn, tiers.original_values, h, after)
    for first in range(0, shape.group, TEAM):
        count = list_rows(shape, turn, tiers, item, slot, h, b, first, only, np.float32(0))
        if count == 0:
            continue
        if b == turn.blocks:
            at = (shape.heads + h) * turn.tail_pitch * (size // shape.block)
            gather_exact(shape, turn, tiers.tail, at, turn.tail, item, slot, b, count)
        else:
            at = h * turn.original_pitch + b * size
            gather_exact(shape, turn, tiers.original_values, at, shape.block, item, slot, b, count)


@plain
def sum_reads(
    shape: Shape, turn: Turn, tiers: Store, item: Item, slot: Slot, h: int, first: int, end: int, only: int
) -> None:
    """Sum weights times values over the blocks from `first` to `end` that `slot.reads` names.

    Of row `only`, or with -1 of all still to do. First from codes, then from originals: each kind asks for
    its next while it works on one.
    """
    low, high = (0, shape.group) if only < 0 else (only, only + 1)
    for c in range(low * shape.dim, high * shape.dim):
        item.sums[c] = 0.0
    clear(shape, item, low, high)
    run, b = 0, next_of(slot.reads, first, end, READ_CODES)
    after = next_of(slot.reads, b + 1, end, READ_CODES)
    while b < end:
        later = next_of(slot.reads, after + 1, end, READ_CODES)
        add_coded(shape, turn, tiers, item, slot, h, b, later, only)
        run, b, after = run + 1, after, later
        if run >= RUN:
            flush(shape, item, low, high)
            run = 0
    b = next_of(slot.reads, first, end, READ_ORIGINALS)
    while b < end:
        after = next_of(slot.reads, b + 1, end, READ_ORIGINALS)
        add_exact(shape, turn, tiers, item, slot, h, b, after, only)
        run, b = run + EXACT_RUN, after
        if run >= RUN:
            flush(shape, item, low, high)
            run = 0
    flush(shape, item, low, high)


@plain
def value_range(shape: Shape, turn: Turn, tiers: Store, item: Item, slot: Slot, h: int, part: int) -> None:
    """Sum weights times values over one range of blocks, and over the tail with the last one."""
    first, last = turn.blocks * part // turn.ranges, turn.blocks * (part + 1) // turn.ranges
    sum_reads(shape, turn, tiers, item, slot, h, first, last + (part == turn.ranges - 1), -1)
