"""What one round of a step promotes and skips, and whether its outputs meet the budget."""

from typing import Any, NamedTuple

import numpy as np

from rcq_cli.kernels._cpu_bounds import (
    Cut,
    Split,
    best_split,
    blocks_to_drop,
    count_ones,
    errors_of,
    key_bound,
    key_terms,
    normalise,
    rounding_bound,
    skip_terms,
    skipped_weight,
    split_near,
    spread,
    value_terms,
)
from rcq_cli.kernels._cpu_gather import sum_reads
from rcq_cli.kernels._cpu_promote import ask_for, exact_delta, explore, promote_keys
from rcq_cli.kernels._cpu_score import LOW, MARGIN, item_bytes
from rcq_cli.kernels._cpu_state import (
    APART,
    DROPPED_BOUND,
    EXACT,
    FIELDS,
    KEY_BOUND,
    KEY_WANTED,
    KEYS_USED,
    NEAR_KEY,
    NEAR_SKIP,
    NEAR_VALUE,
    NORM,
    PAGED,
    PLAN_AWAY,
    PLAN_CARE,
    PLAN_LEFT,
    PLAN_LIMIT,
    PLAN_NORM,
    PLAN_VALUE,
    PLAN_WEIGHT,
    PLANS,
    READ_CODES,
    READ_ORIGINALS,
    ROUNDING_BOUND,
    RUNG,
    SKIPPED,
    TROUBLE,
    VALUE_BOUND,
    VALUE_WANTED,
    VALUES_USED,
    Item,
    Limits,
    Line,
    Shape,
    Slot,
    Store,
    Turn,
    lambda_of,
    line_of,
    next_of,
    used_width,
)
from rcq_cli.kernels._cpu_vector import (
    LANES,
    add,
    ahead,
    bfloat,
    bits,
    half,
    half_bits,
    highest,
    larger,
    load,
    loose,
    merged,
    mul,
    pick_less,
    plain,
    put_float,
    put_short,
    splat,
    store,
    total,
)

GLANCE, GLANCE_PART, GLANCE_SURE = 8, 0.98, 0.05
"""Heaviest blocks read to guess the output before anything is skipped or promoted, fewer where they have this
share of the weight; and the share of what is not read from which on it may matter what that is like."""
CARE = 0.93
"""Share of the budget that a plan may use, to the power of the round."""
VALUE_PART, VALUE_TARGET, SKIP_PART = 0.5, 0.45, 0.2
"""Shares of the budget: values are promoted when beyond the first, down to the second.

Skipping takes the third.
"""


KEY_FLOOR = 0.1
"""Keys are promoted until their bound fits what is left, at least this share of the budget."""


@merged
def start(shape: Shape, turn: Turn, tiers: Store, slot: Slot, h: int) -> None:
    """Pin what is always read from the originals: raw blocks, the first block (sinks) and the newest one."""
    tiers.faults[2 * h] = 0
    one, zero, width = np.float32(1), np.float32(0), used_width(turn.blocks)
    for field in range(FIELDS):
        for column in range(h * shape.group, (h + 1) * shape.group):
            tiers.fields[field * shape.heads * shape.group + column] = 0.0
    ones = splat(one)
    for r in range(shape.group):
        line = line_of(turn, slot, r)
        for b in range(0, width, LANES):
            store(line.keep, b, ones)
            store(line.key_coded, b, ones)
            store(line.value_coded, b, ones)
        for b in range(turn.blocks, width):
            line.key_coded[b] = line.value_coded[b] = zero
        for b in range(width):
            slot.flags[r * turn.width + b] = 0
        for b in range(turn.blocks + 1, width):
            line.peak[b], line.mass[b], line.square[b] = LOW, zero, zero
            line.delta[b] = line.rest[b] = zero
    for b in range(turn.blocks + 1, width):
        slot.reach[b] = slot.key_radius[b] = slot.eta[b] = slot.radius[b] = zero
        slot.magnitude[b] = slot.step[b] = zero
        slot.key_spectrum[b] = slot.value_spectrum[b] = slot.centre_spectrum[b] = zero
    for b in range(width):
        pinned = (
            b == 0 or b == turn.blocks - 1 or (b < turn.blocks and tiers.raw[h * turn.raw_pitch + b] != 0)
        )
        slot.pins[b] = pinned and b < turn.blocks and turn.certify != 0


@plain
def promote_wanted(shape: Shape, turn: Turn, tiers: Store, item: Item, slot: Slot, h: int) -> None:
    """Promote the keys that rows marked, each while the next one is on its way."""
    end = turn.blocks
    b = next_of(slot.want_keys, 0, end, 1)
    if b < end:
        ask_for(shape, turn, tiers.original_keys, h, b)
    while b < end:
        after = next_of(slot.want_keys, b + 1, end, 1)
        promote_keys(shape, turn, tiers, item, slot, h, b, after if after < end else b)
        b = after


@merged
def pin(shape: Shape, turn: Turn, limits: Limits, tiers: Store, item: Item, slot: Slot, h: int) -> None:
    """Read keys of the pinned blocks from the originals, and probe a few others."""
    if not turn.certify or not turn.blocks:
        return
    explore(shape, turn, limits, tiers, item, slot, h)
    for b in range(turn.blocks):
        slot.want_keys[b] = slot.pins[b]
    b = next_of(slot.pins, 0, turn.blocks, 1)
    while b < turn.blocks:
        for r in range(shape.group):
            line_of(turn, slot, r).value_coded[b] = np.float32(0)
        b = next_of(slot.pins, b + 1, turn.blocks, 1)
    promote_wanted(shape, turn, tiers, item, slot, h)


@loose
def settle(tiers: Store, row: int, dim: int, weight: float, missing: float, centre: Any, sums: Any) -> None:
    """Write sums / weight + missing * c0 as the output of `row`, its norm and distance to its plan."""
    norm, away = 0.0, 0.0
    for c in range(dim):
        y = sums[c] / weight + missing * centre[c]
        tiers.outputs[row * dim + c] = y
        norm += y * y
        away += (y - centre[c]) ** 2
    tiers.plans[row * PLANS + PLAN_NORM] = np.sqrt(norm)
    tiers.plans[row * PLANS + PLAN_AWAY] = np.sqrt(away)


@merged
def heaviest(line: Line, width: int) -> tuple[float, float, int]:
    """Return the share from which on blocks are read for a guess, that from which on some are, and how many.

    Pinned blocks do not count; classes of shares stand in for an order.
    """
    zero, one, top, whole = splat(np.float32(0)), splat(np.float32(1)), splat(np.float32(0)), np.float64(0)
    for b in range(0, width, LANES):
        top = larger(mul(load(line.share, b), load(line.value_coded, b)), top)
    most = np.float64(highest(top))
    edges = np.float32(0.75 * most), np.float32(0.5 * most), np.float32(0.25 * most), np.float32(most / 16)
    first, second, third, fourth = splat(edges[0]), splat(edges[1]), splat(edges[2]), splat(edges[3])
    count1 = count2 = count3 = count4 = sum1 = sum2 = sum3 = sum4 = every = zero
    for b in range(0, width, LANES):
        here = mul(load(line.share, b), load(line.value_coded, b))
        count1 = add(count1, pick_less(here, first, zero, one))
        count2 = add(count2, pick_less(here, second, zero, one))
        count3 = add(count3, pick_less(here, third, zero, one))
        count4 = add(count4, pick_less(here, fourth, zero, one))
        sum1 = add(sum1, pick_less(here, first, zero, here))
        sum2 = add(sum2, pick_less(here, second, zero, here))
        sum3 = add(sum3, pick_less(here, third, zero, here))
        sum4 = add(sum4, pick_less(here, fourth, zero, here))
        every = add(every, here)
    counts = total(count1), total(count2), total(count3), total(count4)
    sums = total(sum1), total(sum2), total(sum3), total(sum4)
    whole, high, left = GLANCE_PART * total(every), np.float32(np.inf), GLANCE
    for i in range(4):
        if counts[i] > GLANCE:
            return high, edges[i], left
        high, left = edges[i], GLANCE - np.int64(counts[i])
        if sums[i] >= whole:
            break
    return high, high, 0


@merged
def mark_heaviest(turn: Turn, line: Line, slot: Slot, width: int) -> float:
    """Mark the heaviest blocks to be read, none that is pinned; return their share of the weight."""
    high, low, left = heaviest(line, width)
    for b in range(turn.blocks + 1):
        slot.reads[b] = 0
    seen = 0.0
    for first in range(0, turn.blocks, LANES):
        if highest(load(line.share, first)) < low:
            continue
        for b in range(first, min(first + LANES, turn.blocks)):
            certain = line.share[b] >= high
            if slot.pins[b] == 0 and (certain or (left > 0 and line.share[b] >= low)):
                left -= not certain
                seen += np.float64(line.share[b])
                slot.reads[b] = READ_CODES
    return seen


@merged
def pinned_share(turn: Turn, line: Line, slot: Slot) -> float:
    """Return the share of the weight of the pinned blocks and the open tail."""
    pinned, b = np.float64(line.share[turn.blocks]), next_of(slot.pins, 0, turn.blocks, 1)
    while b < turn.blocks:
        pinned, b = pinned + np.float64(line.share[b]), next_of(slot.pins, b + 1, turn.blocks, 1)
    return pinned


@merged
def mark_pinned(turn: Turn, slot: Slot) -> None:
    """Mark the pinned blocks and the open tail to be read."""
    slot.reads[turn.blocks], b = READ_ORIGINALS, next_of(slot.pins, 0, turn.blocks, 1)
    while b < turn.blocks:
        slot.reads[b], b = READ_ORIGINALS, next_of(slot.pins, b + 1, turn.blocks, 1)


@merged
def guess(shape: Shape, turn: Turn, tiers: Store, item: Item, slot: Slot, h: int, r: int) -> None:
    """Guess the output of row `r` from its pinned and its heaviest blocks; only steers."""
    line, row, dim, end = line_of(turn, slot, r), h * shape.group + r, shape.dim, turn.blocks + 1
    width, plan = used_width(turn.blocks), ahead(tiers.plans, row * PLANS)
    weight = plan[PLAN_WEIGHT] = normalise(line, width)
    # only sums of their own tell what more of the heaviest would add: two passes, unless little is missing
    seen = mark_heaviest(turn, line, slot, width)
    missing = max(0.0, 1 - seen - pinned_share(turn, line, slot))
    mine, apart = ahead(item.sums, r * dim), ahead(tiers.outputs, row * dim)
    for c in range(dim):
        apart[c] = 0.0
    if missing >= GLANCE_SURE:
        sum_reads(shape, turn, tiers, item, slot, h, 0, end, r)
        for c in range(dim):
            apart[c] = mine[c]
        for b in range(turn.blocks):
            slot.reads[b] = 0
    mark_pinned(turn, slot)
    sum_reads(shape, turn, tiers, item, slot, h, 0, end, r)
    stretch = missing / seen if missing >= GLANCE_SURE and seen > 0 else 0.0
    extrapolate(tiers, row, dim, weight, missing, stretch, ahead(tiers.centre, h * dim), mine, apart)


@loose
def extrapolate(
    tiers: Store, row: int, dim: int, weight: float, missing: float, stretch: float, centre: Any, fixed: Any,
    read: Any,
) -> None:  # fmt: skip
    """Guess the output of `row`: sums over some blocks, over the heaviest of the others, and what is missing.

    That may be like c0, or like those heaviest: then it is `stretch` times their sum; or like anything in
    between. Plan for the smallest of these outputs: what is promoted for a budget that turns out larger costs
    less than another round.
    """
    unit = 1 / weight
    norm = across = step = 0.0
    for c in range(dim):
        x, y = fixed[c] * unit, read[c] * unit
        one, change = x + y + missing * centre[c], y * stretch - missing * centre[c]
        norm, across, step = norm + one * one, across + one * change, step + change * change
    part = min(1.0, max(0.0, -across / step)) if stretch > 0 and step > 0 else 0.0
    norm = away = 0.0
    for c in range(dim):
        x, y = fixed[c] * unit, read[c] * unit
        z = x + y + missing * centre[c] + part * (y * stretch - missing * centre[c])
        norm, away = norm + z * z, away + (z - centre[c]) ** 2
    tiers.plans[row * PLANS + PLAN_NORM] = np.sqrt(norm)
    tiers.plans[row * PLANS + PLAN_AWAY] = np.sqrt(away)


@plain
def budget(limits: Limits, norm: float) -> float:
    """Return the largest error that keeps a head within eps."""
    return limits.eps if limits.absolute > 0 else norm * limits.eps / (1 + limits.eps)


@merged
def leading(cut: Cut, cost: float, spare: float) -> tuple[bool, float]:
    """Return whether a block of that cost is to be promoted, and what its bucket has left over.

    All blocks before the cut are, and `part` of those of the bucket that it goes through.
    """
    if not cost < cut.high:
        return True, spare
    if cost < cut.low:
        return False, spare
    spare += cut.part
    return (True, spare - 1.0) if spare > 1 else (False, spare)


@merged
def choose_values(
    shape: Shape,
    turn: Turn,
    limits: Limits,
    tiers: Store,
    slot: Slot,
    h: int,
    r: int,
) -> bool:
    """Decide which values row `r` needs from the originals; leave what is left for keys in its plan.

    Returns whether it needs any.
    """
    row, line, width = h * shape.group + r, line_of(turn, slot, r), used_width(turn.blocks)
    plan = ahead(tiers.plans, row * PLANS)
    for b in range(width):
        line.keep[b] = np.float32(1)
    weight = plan[PLAN_WEIGHT]
    sums = value_terms(line, slot, width, weight, centre_norm(shape, tiers, h))
    top = spread(line, width, slot.table)
    plan[PLAN_LIMIT] = budget(limits, plan[PLAN_NORM]) * plan[PLAN_CARE]
    spectrum, tokens = lambda_of(shape, tiers.residual_parts, h), turn.blocks * shape.block + turn.tail
    plan[PLAN_LEFT] = plan[PLAN_LIMIT] - rounding_bound(shape, sums, plan[PLAN_NORM], weight, tokens)
    plan[PLAN_VALUE], plan[NEAR_VALUE] = best_split(slot.table, top, spectrum, 0.0)
    if not turn.rounds or plan[PLAN_VALUE] <= VALUE_PART * plan[PLAN_LEFT]:
        return False
    cut, spare = blocks_to_drop(slot.table, top, spectrum, 0.0, VALUE_TARGET * plan[PLAN_LEFT]), 1.0
    plan[NEAR_VALUE] = cut.near
    for first in range(0, turn.blocks, LANES):
        if highest(load(line.cost, first)) < cut.low:
            continue
        for b in range(first, min(first + LANES, turn.blocks)):
            if not line.value_coded[b] > 0 or not line.cost[b] > 0:
                continue
            leads, spare = leading(cut, line.cost[b], spare)
            if leads:
                slot.flags[r * turn.width + b] |= VALUE_WANTED
                want_value(shape, turn, tiers, slot, h, b)
    return True


@merged
def want_value(shape: Shape, turn: Turn, tiers: Store, slot: Slot, h: int, b: int) -> None:
    """Read the values of block `b` from the originals in every row to do: what one reads, its group reads."""
    for r in range(shape.group):
        if tiers.todo[h * shape.group + r]:
            line_of(turn, slot, r).value_coded[b] = np.float32(0)


@merged
def skip_blocks(
    turn: Turn, line: Line, slot: Slot, width: int, weight: float, spectrum: float, allowance: float
) -> Split:
    """Let c0 stand for the values of blocks as long as that costs at most `allowance`.

    Returns what it is planned to cost, and where that splits best.
    """
    for b in range(turn.blocks):
        line.keep[b] = np.float32(1) - line.value_coded[b]
    skip_terms(line, slot, width, weight)
    top = spread(line, width, slot.table)
    split = best_split(slot.table, top, spectrum, 0.0)
    if split.bound <= allowance:
        return split
    cut, spare = blocks_to_drop(slot.table, top, spectrum, 0.0, allowance), 1.0
    high, one, zero = splat(cut.high), splat(np.float32(1)), splat(np.float32(0))
    for first in range(0, width, LANES):
        here, keep = load(line.cost, first), load(line.keep, first)
        # what costs nothing, being kept already or without weight, is left as it is
        store(line.keep, first, pick_less(zero, here, pick_less(here, high, keep, one), keep))
        if highest(pick_less(here, high, here, zero)) < cut.low:
            continue
        for b in range(first, min(first + LANES, turn.blocks)):
            if line.keep[b] > 0 or not line.cost[b] > 0:
                continue
            leads, spare = leading(cut, line.cost[b], spare)
            if leads:
                line.keep[b] = np.float32(1)
    return Split(allowance, cut.near)


@merged
def choose_keys(shape: Shape, turn: Turn, tiers: Store, slot: Slot, h: int, r: int, promoted: bool) -> None:
    """Skip what costs little, and decide which keys row `r` needs within what values leave.

    `promoted` says that values were promoted after the rows looked at theirs.
    """
    row, line, width = h * shape.group + r, line_of(turn, slot, r), used_width(turn.blocks)
    plan, spectrum = ahead(tiers.plans, row * PLANS), lambda_of(shape, tiers.value_parts, h)
    weight, away = plan[PLAN_WEIGHT], plan[PLAN_AWAY]
    if promoted:  # by any row: this one reads the originals too
        value_terms(line, slot, width, weight, 0.0)
        residual = lambda_of(shape, tiers.residual_parts, h)
        plan[PLAN_VALUE] = split_near(line, width, plan[NEAR_VALUE], residual, 0.0)
    left = plan[PLAN_LEFT] - plan[PLAN_VALUE]
    if turn.skip:
        allowance = max(0.0, min(left, plan[PLAN_LIMIT])) * SKIP_PART
        skipped = skip_blocks(turn, line, slot, width, weight, spectrum, allowance)
        left, plan[NEAR_SKIP] = left - skipped.bound, skipped.near
    sums = key_terms(line, slot, width, weight, away, shape.block, errors_of(shape, tiers, row))
    top = spread(line, width, slot.table)
    # where values or rounding leave nothing, promoting every key would not help: the next round knows the
    # output, and a head that reads one token is certified by it
    target = max(left * sums.low - sums.fixed, KEY_FLOOR * plan[PLAN_LIMIT] * sums.low)
    split = best_split(slot.table, top, spectrum, away)
    plan[NEAR_KEY] = split.near
    if not turn.rounds or split.bound <= target:
        return
    cut, spare = blocks_to_drop(slot.table, top, spectrum, away, target), 1.0
    plan[NEAR_KEY] = cut.near
    for first in range(0, turn.blocks, LANES):
        if highest(load(line.cost, first)) < cut.low:
            continue
        for b in range(first, min(first + LANES, turn.blocks)):
            if not line.key_coded[b] > 0 or not line.cost[b] > 0:
                continue
            leads, spare = leading(cut, line.cost[b], spare)
            if leads:
                slot.flags[r * turn.width + b] |= KEY_WANTED
                want_key(shape, turn, tiers, slot, h, b)


@merged
def want_key(shape: Shape, turn: Turn, tiers: Store, slot: Slot, h: int, b: int) -> None:
    """Mark the key of block `b` for promotion in every row to do, and plan with the error it will have."""
    slot.want_keys[b] = 1
    for r in range(shape.group):
        row, line = h * shape.group + r, line_of(turn, slot, r)
        if tiers.todo[row]:
            line.key_coded[b] = np.float32(0)
            line.delta[b] = line.rest[b] = exact_delta(tiers, slot, row, b)


@loose
def centre_norm(shape: Shape, tiers: Store, h: int) -> float:
    """Return the norm of c0."""
    square = 0.0
    for c in range(h * shape.dim, (h + 1) * shape.dim):
        square += tiers.centre[c] ** 2
    return np.sqrt(square)


@plain
def choose(
    shape: Shape, turn: Turn, limits: Limits, tiers: Store, item: Item, slot: Slot, h: int, number: int
) -> None:
    """Plan round `number` of KV head `h`, what to skip and what to promote, and promote it."""
    width = used_width(turn.blocks)
    for r in range(shape.group):
        row = h * shape.group + r
        tiers.plans[row * PLANS + PLAN_CARE] = CARE ** (number + 1)
        if tiers.failed[row]:
            tiers.todo[row] = 0
    if turn.certify:
        for b in range(width):
            slot.want_keys[b] = 0
        promoted = False
        for r in range(shape.group):
            if number == 0 and tiers.todo[h * shape.group + r]:
                guess(shape, turn, tiers, item, slot, h, r)
        for r in range(shape.group):
            if tiers.todo[h * shape.group + r]:
                promoted |= choose_values(shape, turn, limits, tiers, slot, h, r)
        for r in range(shape.group):
            if tiers.todo[h * shape.group + r]:
                choose_keys(shape, turn, tiers, slot, h, r, promoted)
        promote_wanted(shape, turn, tiers, item, slot, h)
    for b in range(width):
        slot.reads[b] = 0
    for r in range(shape.group):
        if tiers.todo[h * shape.group + r]:
            line = line_of(turn, slot, r)
            tiers.plans[(h * shape.group + r) * PLANS + PLAN_WEIGHT] = normalise(line, width)
            for b in range(turn.blocks + 1):
                kept = line.keep[b] * line.factor[b] > 0
                slot.reads[b] |= np.uint8(kept) << np.uint8(line.value_coded[b] == 0)


class Stored(NamedTuple):
    """The output of one head as stored."""

    norm: float
    error: float
    """Norm of the difference to what was computed."""


@merged
def store_row(shape: Shape, tiers: Store, h: int, r: int) -> Stored:
    """Round the output of row `r` to the dtype of the cache."""
    first, dim = (h * shape.group + r) * shape.dim, shape.dim
    norm, error = 0.0, 0.0
    largest = 65504.0 if shape.kind == 2 else 3.3895313892515355e38
    at = (h * shape.group + r) * dim * item_bytes(shape)
    for c in range(dim):
        y = tiers.outputs[first + c]
        single = np.float32(min(max(y, -largest), largest))
        if shape.kind == 0:
            put_float(tiers.output, at + 4 * c, single)
            kept = np.float64(single)
        elif shape.kind == 1:
            pattern = np.int64(bits(single)) & 0xFFFFFFFF
            pattern = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
            put_short(tiers.output, at + 2 * c, np.uint16(pattern))
            kept = np.float64(bfloat(np.uint16(pattern)))
        else:
            put_short(tiers.output, at + 2 * c, half_bits(single))
            kept = np.float64(half(half_bits(single)))
        norm += kept * kept
        error += (y - kept) ** 2
    return Stored(np.sqrt(norm), np.sqrt(error) * (1 + 2.0**-30))


@merged
def judge(
    shape: Shape, turn: Turn, limits: Limits, tiers: Store, slot: Slot, h: int, r: int, weight: float
) -> bool:
    """Store the output of row `r` with its bounds; return whether they meet the budget."""
    row, line, width = h * shape.group + r, line_of(turn, slot, r), used_width(turn.blocks)
    plan, fields = ahead(tiers.plans, row * PLANS), tiers.fields
    stored, heads = store_row(shape, tiers, h, r), shape.heads * shape.group
    column = h * shape.group + r
    fields[NORM * heads + column] = stored.norm
    if not turn.certify:
        return stored.norm < np.inf
    tokens = turn.blocks * shape.block + turn.tail
    value_sums = value_terms(line, slot, width, weight, centre_norm(shape, tiers, h))
    rounding = rounding_bound(shape, value_sums, plan[PLAN_NORM], weight, tokens) + stored.error
    value = split_near(line, width, plan[NEAR_VALUE], lambda_of(shape, tiers.residual_parts, h), 0.0)
    spectrum, skipped = lambda_of(shape, tiers.value_parts, h), 0.0
    if turn.skip:
        skip_terms(line, slot, width, weight)
        skipped = split_near(line, width, plan[NEAR_SKIP], spectrum, 0.0)
    away = (plan[PLAN_AWAY] + value + skipped + rounding) * MARGIN
    errors = errors_of(shape, tiers, row)
    sums = key_terms(line, slot, width, weight, away, shape.block, errors)
    split = split_near(line, width, plan[NEAR_KEY], spectrum, away)
    key = key_bound(line, slot, width, weight, sums, split, value_sums.radius, errors)
    limit = budget(limits, stored.norm) / (1 + 2.0**-40)
    plan[PLAN_NORM] = stored.norm
    fields[KEY_BOUND * heads + column], fields[DROPPED_BOUND * heads + column] = key, skipped
    fields[VALUE_BOUND * heads + column], fields[ROUNDING_BOUND * heads + column] = value, rounding
    return key + skipped + value + rounding <= limit


@merged
def count_blocks(shape: Shape, turn: Turn, tiers: Store, slot: Slot, h: int, r: int) -> int:
    """Write what row `r` used; return the blocks it brought from the originals."""
    line, rung = line_of(turn, slot, r), 0
    keys = turn.blocks - count_ones(line.key_coded, turn.blocks)
    values = turn.blocks - count_ones(line.value_coded, turn.blocks)
    skipped = turn.blocks - count_ones(line.keep, turn.blocks)
    for b in range(turn.blocks):
        rung |= slot.flags[r * turn.width + b]
    rung = 2 if rung & VALUE_WANTED else rung
    column, heads, fields = h * shape.group + r, shape.heads * shape.group, tiers.fields
    fields[KEYS_USED * heads + column], fields[VALUES_USED * heads + column] = keys, values
    fields[SKIPPED * heads + column], fields[RUNG * heads + column] = skipped, rung
    return keys + values


@plain
def wants_too_much(turn: Turn, slot: Slot, r: int) -> bool:
    """Return whether row `r` asked for more originals than dense attention reads."""
    wanted = 0
    for b in range(turn.blocks):
        flags = slot.flags[r * turn.width + b]
        wanted += (flags & KEY_WANTED != 0) + (flags & VALUE_WANTED != 0)
    return wanted > turn.blocks


@plain
def finish(
    shape: Shape, turn: Turn, limits: Limits, tiers: Store, slot: Slot, sums: Any, h: int, last: bool
) -> int:
    """Add up the ranges from `sums` on, bound and judge every row to do.

    Returns how many are left, and TROUBLE for each that is to be recomputed, if none is left or this is the
    last round, and for a fault.
    """
    left, dim, heads = 0, shape.dim, shape.heads * shape.group
    for r in range(shape.group):
        row, column = h * shape.group + r, EXACT * heads + h * shape.group + r
        if tiers.failed[row]:
            tiers.fields[column] = 1
        if not tiers.todo[row]:
            continue
        mine = ahead(sums, r * dim)
        for part in range(1, turn.ranges):
            for c in range(dim):
                mine[c] += mine[part * (shape.group * dim + APART) + c]
        line, width = line_of(turn, slot, r), used_width(turn.blocks)
        weight = tiers.plans[row * PLANS + PLAN_WEIGHT]
        missing = skipped_weight(line, width) / weight
        settle(tiers, row, dim, weight, missing, ahead(tiers.centre, h * dim), mine)
        done = judge(shape, turn, limits, tiers, slot, h, r, weight) and not tiers.failed[row]
        tiers.fields[column] = not done
        if done or wants_too_much(turn, slot, r) or not tiers.plans[row * PLANS + PLAN_NORM] < np.inf:
            tiers.todo[row] = 0
        else:
            left += 1
    if left == 0 or last:
        paged = 0
        for r in range(shape.group):
            paged = max(paged, count_blocks(shape, turn, tiers, slot, h, r))
            left += TROUBLE * (tiers.fields[EXACT * heads + h * shape.group + r] > 0)
        tiers.fields[PAGED * heads + h * shape.group] = paged * shape.block * dim * item_bytes(shape)
    return left + TROUBLE * (tiers.faults[2 * h] > 0)
