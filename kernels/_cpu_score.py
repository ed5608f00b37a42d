"""Scores of a step: from codes with a proven error, from originals, and from the open tail."""

from typing import Any

import numpy as np

from rcq_cli.kernels._cpu_exact import exact_scores
from rcq_cli.kernels._cpu_integer import FOLD_ASKS, LINE, SPAN, TILE, dots_kernel, fold_kernel
from rcq_cli.kernels._cpu_state import (
    NOTES,
    STATS,
    STRIP,
    TEAM,
    Item,
    Limits,
    Shape,
    Slot,
    Store,
    Turn,
    line_of,
    whole_teams,
)
from rcq_cli.kernels._cpu_vector import (
    FLUSH,
    LANES,
    add,
    ahead,
    exponential,
    fma,
    half,
    highest,
    larger,
    load,
    load_bfloat,
    load_half,
    load_int,
    loose,
    merged,
    mul,
    pick_less,
    plain,
    prefetch,
    size,
    smaller,
    splat,
    store,
    store_sums,
    store_tops,
    sub,
    total,
    variant,
)

LOW = np.float32(-3.0e38)
ROUNDOFF = 2.0**-24
MARGIN = 1.0 + 2.0**-12
# both exponentials (inside a block, and of the block's peak): two roundings of a difference up to FLUSH, the
# scaling by log2(e), and the polynomial
EXP_SLACK = 2 * (4 * (FLUSH + 1) * ROUNDOFF + 1e-6)


@merged
def widen(source: Any, at: int, kind: int, count: int, out: Any, to: int) -> None:
    """Write `count` numbers of an original at byte `at` as float32 to `out[to:]`."""
    if kind == 0:
        for c in range(0, count, LANES):
            store(out, to + c, load(source, at + 4 * c))
    elif kind == 1:
        for c in range(0, count, LANES):
            store(out, to + c, load_bfloat(source, at + 2 * c))
    else:
        for c in range(0, count, LANES):
            store(out, to + c, load_half(source, at + 2 * c))


@plain
def item_bytes(shape: Shape) -> int:
    """Return the bytes of one number of an original."""
    return 2 if shape.kind else 4


@plain
def prepare(shape: Shape, limits: Limits, tiers: Store, h: int) -> None:
    """Scale the queries of KV head `h`; set their norms and the slack per unit of key norm (theory 7.1)."""
    dim = shape.dim
    relative = (dim + 16) * ROUNDOFF / (1 - (dim + 16) * ROUNDOFF)
    for row in range(h * shape.group, (h + 1) * shape.group):
        at, square = row * dim, 0.0
        tiers.failed[row], tiers.todo[row] = 0, 1
        widen(tiers.source, at * item_bytes(shape), shape.kind, dim, tiers.query, at)
        for c in range(at, at + dim):
            exact = np.float64(tiers.query[c]) * limits.scale
            tiers.query[c] = np.float32(exact)
            square += exact * exact
        norm = np.sqrt(square) * MARGIN
        if not norm < 1e30:
            tiers.failed[row] = 1
            norm = 1e30
        # the absolute parts cover scaled queries that underflow
        tiers.norms[row] = np.float32((norm + 1e-36) * (1 + 2.0**-22))
        tiers.slacks[row] = np.float32((relative * norm * MARGIN + 1e-36) * (1 + 2.0**-22))


@plain
def all_along(shape: Shape, norm: float) -> float:
    """Bound the spectral norm of a block's rows, none of which is longer than `norm`."""
    return np.float32(np.float64(norm) * np.sqrt(np.float64(shape.block)) * (1 + 2.0**-22))


@merged
def read_notes(shape: Shape, turn: Turn, tiers: Store, slot: Slot, h: int, b: int) -> None:
    """Widen the annotations of block `b`; a raw block has no residual and its own key and value norms."""
    at, bounds = h * turn.note_pitch + NOTES * b, h * turn.raw_bound_pitch + 2 * b
    if tiers.raw[h * turn.raw_pitch + b]:
        slot.reach[b] = tiers.raw_bounds[bounds] * MARGIN
        slot.radius[b] = tiers.raw_bounds[bounds + 1] * MARGIN
        slot.key_radius[b] = slot.eta[b] = slot.magnitude[b] = slot.step[b] = np.float32(0)
        slot.key_spectrum[b] = slot.value_spectrum[b] = np.float32(0)
        slot.centre_spectrum[b] = all_along(shape, slot.radius[b])
        return
    slot.key_radius[b] = half(tiers.notes[at])
    slot.reach[b] = half(tiers.notes[at]) + half(tiers.notes[at + 1])
    slot.eta[b] = half(tiers.notes[at + 2])
    slot.radius[b] = half(tiers.notes[at + 3])
    slot.magnitude[b] = half(tiers.notes[at + 4])
    slot.step[b] = half(tiers.notes[at + 5])
    slot.key_spectrum[b], slot.value_spectrum[b] = half(tiers.notes[at + 6]), half(tiers.notes[at + 7])
    slot.centre_spectrum[b] = half(tiers.notes[at + 8])


@merged
def read_scales(shape: Shape, keys: Any, at: int, floats: Any) -> None:
    """Widen scale and offset of the key record at byte `at` to `floats[:2 * D]`."""
    widen(keys, at + shape.padded * shape.dim, 2 if shape.narrow_keys else 0, 2 * shape.dim, floats, 0)


_fold1, _fold2, _fold3, _fold4 = (fold_kernel(team) for team in range(1, TEAM + 1))


def _multiplier(span: int) -> Any:
    one, two, three, four = (dots_kernel(team, span) for team in range(1, TEAM + 1))

    def multiply(
        shape: Shape, tiers: Store, at: int, soon: int, item: Item, place: int, low: int, high: int,
        scores: Any, to: int,
    ) -> None:  # fmt: skip
        """Do it `span` tokens at a time."""
        keys, ints, dim, padded = tiers.keys, item.ints, shape.dim, shape.padded
        pairs, stride = dim // 2, 2 * padded
        for r in range(low // TEAM * TEAM, high, TEAM):
            first, out, team = (place * shape.group + r) * pairs, to + r * padded, shape.group - r
            for t in range(0, padded, span):
                codes, later, sums = at + 2 * t, soon + FOLD_ASKS * dim + t * pairs, out + t
                if team == 1:
                    one(keys, codes, stride, later, ints, first, pairs, scores, sums, padded)
                elif team == 2:
                    two(keys, codes, stride, later, ints, first, pairs, scores, sums, padded)
                elif team == 3:
                    three(keys, codes, stride, later, ints, first, pairs, scores, sums, padded)
                else:
                    four(keys, codes, stride, later, ints, first, pairs, scores, sums, padded)

    return variant(multiply, str(span), merged)


_multiply_tile = _multiplier(TILE)
_multiply_span = _multiplier(SPAN) if SPAN != TILE else _multiply_tile


LEAD = 6
"""Blocks from one that is scored to the one whose record is asked for.

Each stage asks for a part, in proportion to the time it takes: a request waits for room among those under
way, and with it all that follows, so that after bursts of them memory and arithmetic take turns.
"""
USUAL = 32
"""Tokens of a block that loops are unrolled for."""
META = 32
"""Numbers that a team has in `floats`: TEAM units, then as many of each of the following."""
ABSOLUTES, SHIFTS, DELTAS, RESTS = TEAM, 2 * TEAM, 3 * TEAM, 4 * TEAM
"""Sums of |q s|, q . z; bounds on the score errors, and what of them is not due to K - K'."""


@plain
def meta_of(shape: Shape, place: int, r: int) -> int:
    """Return where the unit of row `r` and block `place` of a strip stands in `floats`."""
    teams = whole_teams(shape.group) // TEAM
    return 4 * shape.dim + META * (place * teams + r // TEAM) + r % TEAM


@merged
def fold_queries(
    shape: Shape, tiers: Store, at: int, soon: int, item: Item, h: int, place: int, low: int, high: int
) -> None:
    """Fold the teams of rows `low` to `high` into the scales of the key record at byte `at`.

    Asks for the first part of the record needed later, at byte `soon`. Rounded to 16 bits per head and block,
    so that the dot products are exact integers. Block `place` of a strip has its integers at
    `ints[place * rows * D / 2:]`.
    """
    dim, floats, steps = shape.dim, item.floats, np.float32(shape.fold_steps)
    read_scales(shape, tiers.keys, at, floats)
    for r in range(low // TEAM * TEAM, high, TEAM):
        meta, query = meta_of(shape, place, r), (h * shape.group + r) * dim
        ints, team = ahead(item.ints, (place * shape.group + r) * (dim // 2)), shape.group - r
        if team == 1:
            _fold1(floats, dim, tiers.query, query, steps, ints, meta, tiers.keys, soon)
        elif team == 2:
            _fold2(floats, dim, tiers.query, query, steps, ints, meta, tiers.keys, soon)
        elif team == 3:
            _fold3(floats, dim, tiers.query, query, steps, ints, meta, tiers.keys, soon)
        else:
            _fold4(floats, dim, tiers.query, query, steps, ints, meta, tiers.keys, soon)


@merged
def multiply(
    shape: Shape, tiers: Store, at: int, soon: int, item: Item, place: int, low: int, high: int, scores: Any,
    to: int,
) -> None:  # fmt: skip
    """Multiply the codes at byte `at` by what `fold_queries` left: integers in `scores[to + row * P:]`.

    Asks for the second part of the record needed later, at byte `soon`.
    """
    if shape.padded % SPAN == 0:
        _multiply_span(shape, tiers, at, soon, item, place, low, high, scores, to)
    else:
        _multiply_tile(shape, tiers, at, soon, item, place, low, high, scores, to)


@merged
def as_scores(shape: Shape, item: Item, place: int, r: int, scores: Any, to: int, padded: int) -> None:
    """Turn the integers of row `r` at `scores[to:]` into scores."""
    meta = meta_of(shape, place, r)
    step, shift = splat(item.floats[meta]), splat(item.floats[meta + SHIFTS])
    for t in range(to, to + padded, LANES):
        store(scores, t, fma(load_int(scores, t), step, shift))


@merged
def bound_scores(shape: Shape, tiers: Store, floats: Any, meta: int, row: int, slot: Slot, b: int) -> None:
    """Bound the score errors of a team whose folding left its sums at `floats[meta:]`; `row` is its first.

    min(D0, D3) of theory section 2, the 16-bit rounding of the folded query (half a step times |code| <= 128
    per channel), rounding slack; infinite where float32 might have overflowed.
    """
    dim = shape.dim
    unit, absolute = load(floats, meta), load(floats, meta + ABSOLUTES)
    radius, reach = splat(slot.key_radius[b]), splat(slot.reach[b])
    rounded = mul(splat(np.float32(0.51 * 128 * dim)), unit)
    folding = pick_less(splat(np.float32(0)), unit, rounded, mul(splat(np.float32(128)), absolute))
    nearest = smaller(mul(splat(np.float32(0.5)), absolute), mul(load(tiers.norms, row), radius))
    margin = splat(np.float32(MARGIN))
    rest = fma(load(tiers.slacks, row), reach, fma(folding, margin, splat(np.float32(EXP_SLACK))))
    delta = fma(nearest, margin, rest)
    worst = fma(splat(np.float32(128.0 * dim * shape.fold_steps)), unit, size(load(floats, meta + SHIFTS)))
    most, infinite = splat(np.float32(1e37)), splat(np.float32(np.inf))
    up = splat(np.float32(1 + 2.0**-20))  # float32 rounding of the bounds themselves
    delta, rest = (
        pick_less(worst, most, mul(delta, up), infinite),
        pick_less(worst, most, mul(rest, up), infinite),
    )
    store(floats, meta + DELTAS, pick_less(absolute, most, delta, infinite))
    store(floats, meta + RESTS, pick_less(absolute, most, rest, infinite))


@merged
def weigh_one(weights: Any, at: int, peak: Any, padded: int) -> Any:
    """Turn the scores of a row into exp(score - peak); return mass and sum of squares, lane by lane."""
    mass = square = splat(np.float32(0))
    for t in range(at, at + padded, LANES):
        weight = exponential(sub(load(weights, t), peak))
        store(weights, t, weight)
        mass, square = add(mass, weight), fma(weight, weight, square)
    return mass, square


@merged
def weigh(
    weights: Any, at: int, tokens: int, padded: int, peaks: Any, masses: Any, squares: Any, b: int
) -> None:
    """Turn scores at `weights[at:]` into exp(score - peak).

    Write peak, mass and sum of squares of block `b`.
    """
    for t in range(tokens, padded):
        weights[at + t] = LOW
    top = splat(LOW)
    for t in range(at, at + padded, LANES):
        top = larger(load(weights, t), top)
    peak = highest(top)
    mass, square = weigh_one(weights, at, splat(peak), padded)
    peaks[b], masses[b], squares[b] = peak, total(mass), total(square)


@merged
def score_strip(
    shape: Shape, turn: Turn, tiers: Store, item: Item, slot: Slot, h: int, first: int, last: int
) -> None:
    """Score blocks `first` to `last`, at most STRIP, from their codes for all rows and bound the errors.

    Stage by stage: every stage ends in a chain of dependent instructions, which the next block covers.
    """
    record, keys, area = shape.key_bytes, h * turn.key_pitch, shape.group * shape.padded
    lead = LEAD * record
    for b in range(first, last):
        at = keys + b * record
        read_notes(shape, turn, tiers, slot, h, b)
        fold_queries(shape, tiers, at, at + lead, item, h, b - first, 0, shape.group)
    for b in range(first, last):
        at = keys + b * record
        multiply(shape, tiers, at, at + lead, item, b - first, 0, shape.group, slot.weights, b * area)
    for b in range(first, last):
        soon = keys + b * record + lead
        for r in range(0, shape.group, TEAM):
            bound_scores(
                shape, tiers, item.floats, meta_of(shape, b - first, r), h * shape.group + r, slot, b
            )
        if shape.group < 3:
            ask_rest(shape, tiers, soon, 0, 1)
        for r in range(0, shape.group, TEAM):
            team = shape.group - r
            if team < 3:
                for one in range(r, shape.group):
                    finish_row(shape, turn, item, slot, b, b - first, one)
            elif shape.padded != USUAL:
                finish_team(
                    shape, turn, tiers, soon, item, slot, b, b - first, r, min(team, TEAM), shape.padded
                )
            elif team == 3:  # loops of known length
                finish_team(shape, turn, tiers, soon, item, slot, b, b - first, r, 3, USUAL)
            else:
                finish_team(shape, turn, tiers, soon, item, slot, b, b - first, r, TEAM, USUAL)


@merged
def ask_rest(shape: Shape, tiers: Store, soon: int, part: int, parts: int) -> None:
    """Ask for one of `parts` of what `fold_queries` and `multiply` leave out of the key record at `soon`."""
    asked = (FOLD_ASKS + shape.padded // 2) * shape.dim
    share = max(0, shape.key_bytes - asked) // parts
    for i in range(soon + asked + part * share, soon + asked + (part + 1) * share, LINE):
        prefetch(tiers.keys, i)


@merged
def finish_row(shape: Shape, turn: Turn, item: Item, slot: Slot, b: int, place: int, r: int) -> None:
    """Turn the integers of block `b` and row `r` into weights; write what stands in its line."""
    line, meta, to = line_of(turn, slot, r), meta_of(shape, place, r), (b * shape.group + r) * shape.padded
    line.delta[b] = line.coded_delta[b] = item.floats[meta + DELTAS]
    line.rest[b] = item.floats[meta + RESTS]
    as_scores(shape, item, place, r, slot.weights, to, shape.padded)
    weigh(slot.weights, to, shape.block, shape.padded, line.peak, line.mass, line.square, b)


@merged
def weigh_pair(weights: Any, one: int, two: int, peak: Any, other_peak: Any, padded: int) -> Any:
    """Turn the scores of two rows into exp(score - peak); more rows at a time do not fit the registers.

    Return mass and sum of squares of the first, then of the second, lane by lane.
    """
    mass = square = other_mass = other_square = splat(np.float32(0))
    for t in range(0, padded, LANES):
        weight = exponential(sub(load(weights, one + t), peak))
        other = exponential(sub(load(weights, two + t), other_peak))
        store(weights, one + t, weight)
        store(weights, two + t, other)
        mass, square = add(mass, weight), fma(weight, weight, square)
        other_mass, other_square = add(other_mass, other), fma(other, other, other_square)
    return mass, square, other_mass, other_square


@merged
def finish_team(
    shape: Shape, turn: Turn, tiers: Store, soon: int, item: Item, slot: Slot, b: int, place: int, first: int,
    count: int, padded: int,
) -> None:  # fmt: skip
    """Do what `finish_row` does for three or four rows from `first` on, whose instructions interleave.

    Asks for the last part of the record needed later, at byte `soon`.
    """
    line, meta = line_of(turn, slot, first), meta_of(shape, place, first)
    weights, floats, pitch = slot.weights, item.floats, STATS * turn.width
    one = (b * shape.group + first) * padded
    two, three = one + padded, one + 2 * padded
    four = one + (count - 1) * padded  # of three rows the last one again
    for i in range(count):
        to = b + i * pitch
        line.delta[to] = line.coded_delta[to] = floats[meta + DELTAS + i]
        line.rest[to] = floats[meta + RESTS + i]
        ask_rest(shape, tiers, soon, i, count)
        as_scores(shape, item, place, first + i, weights, one + i * padded, padded)
        for t in range(one + i * padded + shape.block, one + (i + 1) * padded):
            weights[t] = LOW
    peak1 = peak2 = peak3 = peak4 = splat(LOW)
    for t in range(0, padded, LANES):
        peak1, peak2 = larger(load(weights, one + t), peak1), larger(load(weights, two + t), peak2)
        peak3, peak4 = larger(load(weights, three + t), peak3), larger(load(weights, four + t), peak4)
    store_tops(line.peak, b, pitch, peak1, peak2, peak3, peak4)
    peak1, peak2 = splat(line.peak[b]), splat(line.peak[b + pitch])
    peak3 = splat(line.peak[b + 2 * pitch])
    mass1, square1, mass2, square2 = weigh_pair(weights, one, two, peak1, peak2, padded)
    if count == 3:
        mass3, square3 = weigh_one(weights, three, peak3, padded)
        mass4, square4 = mass3, square3
    else:
        peak4 = splat(line.peak[b + 3 * pitch])
        mass3, square3, mass4, square4 = weigh_pair(weights, three, four, peak3, peak4, padded)
    store_sums(line.mass, b, pitch, mass1, mass2, mass3, mass4)
    store_sums(line.square, b, pitch, square1, square2, square3, square4)


@merged
def note_overflow(shape: Shape, turn: Turn, tiers: Store, slot: Slot, h: int, first: int, end: int) -> None:
    """Mark the rows with a score of blocks `first` to `end` that float32 might not hold."""
    zero, one = splat(np.float32(0)), splat(np.float32(1))
    wide, high = splat(np.float32(1e30)), splat(np.float32(1e37))
    for r in range(shape.group):
        line, bad, b = line_of(turn, slot, r), zero, first
        while b + LANES <= end:  # NaN is not below anything
            fine = pick_less(load(line.delta, b), wide, zero, one)
            bad, b = larger(bad, pick_less(size(load(line.peak, b)), high, fine, one)), b + LANES
        if highest(bad) > 0:
            b = first
        while b < end:
            if (
                not (line.delta[b] < 1e30 and abs(line.peak[b]) < 1e37)
                and not tiers.raw[h * turn.raw_pitch + b]
            ):
                tiers.failed[h * shape.group + r] = 1
            b += 1


@loose
def square_distance(row: Any, first: int, dim: int, centre: Any, to: int, scale: float) -> float:
    """Return the squared distance of a float32 row from `scale` times a float64 one."""
    result = 0.0
    for c in range(dim):
        result += (np.float64(row[first + c]) - scale * centre[to + c]) ** 2
    return result


@merged
def score_tail(shape: Shape, turn: Turn, tiers: Store, item: Item, slot: Slot, h: int) -> None:
    """Score the open tail as one more block, with exact keys and values."""
    b, dim, padded, floats = turn.blocks, shape.dim, shape.padded, item.floats
    bytes_ = dim * item_bytes(shape)
    at, values = h * turn.tail_pitch * bytes_, (shape.heads + h) * turn.tail_pitch * bytes_
    reach, radius = 0.0, 0.0
    for t in range(turn.tail):
        widen(tiers.tail, at + t * bytes_, shape.kind, dim, floats, 3 * dim)
        reach = max(reach, square_distance(floats, 3 * dim, dim, tiers.centre, h * dim, 0.0))
        widen(tiers.tail, values + t * bytes_, shape.kind, dim, floats, 3 * dim)
        radius = max(radius, square_distance(floats, 3 * dim, dim, tiers.centre, h * dim, 1.0))
    slot.reach[b], slot.radius[b] = np.sqrt(reach) * MARGIN, np.sqrt(radius) * MARGIN
    slot.key_radius[b] = slot.eta[b] = slot.magnitude[b] = slot.step[b] = np.float32(0)
    slot.key_spectrum[b] = slot.value_spectrum[b] = np.float32(0)
    slot.centre_spectrum[b] = all_along(shape, slot.radius[b])
    to = b * shape.group * padded
    sound = exact_scores(shape, tiers, tiers.tail, at, turn.tail, h, 0, shape.group, slot.weights, to)
    for r in range(shape.group):
        line, row = line_of(turn, slot, r), h * shape.group + r
        line.delta[b] = line.rest[b] = np.float64(tiers.slacks[row]) * slot.reach[b] + EXP_SLACK
        if turn.tail:
            weigh(slot.weights, to + r * padded, turn.tail, padded, line.peak, line.mass, line.square, b)
        else:
            line.peak[b], line.mass[b], line.square[b] = LOW, np.float32(0), np.float32(0)
        if not sound:
            tiers.failed[row] = 1


@plain
def score_range(shape: Shape, turn: Turn, tiers: Store, item: Item, slot: Slot, h: int, part: int) -> None:
    """Score the blocks of one range, and the tail with the last one."""
    first, end = turn.blocks * part // turn.ranges, turn.blocks * (part + 1) // turn.ranges
    for b in range(first, end, STRIP):
        score_strip(shape, turn, tiers, item, slot, h, b, min(b + STRIP, end))
    note_overflow(shape, turn, tiers, slot, h, first, end)
    if part == turn.ranges - 1:
        score_tail(shape, turn, tiers, item, slot, h)
