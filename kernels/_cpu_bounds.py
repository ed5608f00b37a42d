"""Bounds on one output from per-block statistics: the theorems of rcq_cli/certify/bounds.py in vector form.

Sums over blocks are float32 in short runs and float64 above; all bounds are float64 and carry MARGIN, which
covers both. A split (triangle inequality on some blocks, spectral norm on the rest) is sound for any division
of the blocks, so blocks are sorted into buckets by the bits of their contribution instead of being sorted.
"""

from typing import Any, NamedTuple

import numpy as np

from rcq_cli.kernels._cpu_score import LOW, MARGIN, ROUNDOFF
from rcq_cli.kernels._cpu_state import BUCKETS, TABLE, Line, Shape, Slot, Store
from rcq_cli.kernels._cpu_vector import (
    FLUSH,
    LANES,
    add,
    add_three,
    ahead,
    as_float,
    bits,
    divide,
    exponential,
    fma,
    highest,
    larger,
    least_split,
    load,
    loose,
    merged,
    mul,
    pick_less,
    plain,
    root,
    smaller,
    splat,
    store,
    sub,
    total,
)

WEIGHT_STEPS = 32000.0
"""Steps of a 16-bit value weight, relative to the largest value scale of its block."""
RUN = 16
"""Coded blocks that share one float32 accumulator before it is added in float64."""
EXACT_RUN = 4
"""Coded blocks that a block of originals counts for."""
WIDEST = FLUSH - 10
"""Score errors beyond this give the trivial bound only; such blocks are promoted first, never skipped."""
FLUSHED = float(np.exp(-FLUSH)) * 1.001
"""More than a weight that became 0 can have been, next to the largest."""
LEAST = 1e-18
"""Weights count as at least this where they are squared: the square of a smaller one may be subnormal."""
HOPELESS = 1e6
"""Caps what a block shifts; a head that shifts more than a tenth of it has the trivial bound only."""
CLASS = 21
"""Low bits of a float32 in which costs of one bucket differ: four buckets an octave."""
SHORT_RUN = 512 * LANES
"""Blocks summed in float32, 512 a lane."""


@plain
def growth(d: Any) -> tuple[Any, Any]:
    """Return an upper bound of expm1(d) and a lower bound of exp(-d) for d >= 0.

    The first is 1e30 beyond WIDEST.
    """
    one, half = splat(np.float32(1)), splat(np.float32(0.5))
    small = fma(d, splat(np.float32(1.1 / 6)), one)
    small = fma(mul(d, splat(np.float32(1 / 5))), small, one)
    small = fma(mul(d, splat(np.float32(1 / 4))), small, one)
    small = fma(mul(d, splat(np.float32(1 / 3))), small, one)
    small = mul(d, fma(mul(d, half), small, one))
    shrunk = exponential(sub(splat(np.float32(0)), d))
    large = sub(divide(splat(np.float32(1.0001)), shrunk), one)
    third = fma(d, splat(np.float32(-1 / 6)), half)
    gentle = fma(d, sub(mul(d, third), one), one)
    up = pick_less(d, half, small, large)
    up = pick_less(d, splat(np.float32(WIDEST)), up, splat(np.float32(1e30)))
    return up, pick_less(d, half, gentle, mul(shrunk, splat(np.float32(0.9999))))


@plain
def capped(x: Any) -> Any:
    """Return min(x, HOPELESS), also of NaN."""
    top = splat(np.float32(HOPELESS))
    return pick_less(x, top, x, top)


@loose
def whole_weight(line: Line, width: int) -> float:
    """Return the sum of the weights of all blocks, in float64."""
    mass, factor, result = line.mass, line.factor, 0.0
    for b in range(width):
        result += np.float64(mass[b]) * np.float64(factor[b])
    return result


@loose
def skipped_weight(line: Line, width: int) -> float:
    """Return the part of it from blocks whose values c0 stands for."""
    mass, factor, keep, result = line.mass, line.factor, line.keep, 0.0
    for b in range(width):
        result += np.float64(mass[b]) * np.float64(factor[b]) * (1 - np.float64(keep[b]))
    return result


@merged
def normalise(line: Line, width: int) -> float:
    """Set every block's factor exp(peak - highest peak) and share.

    Return the total weight.
    """
    top = splat(LOW)
    for b in range(0, width, LANES):
        top = larger(load(line.peak, b), top)
    centre = splat(highest(top))
    for b in range(0, width, LANES):
        store(line.factor, b, exponential(sub(load(line.peak, b), centre)))
    weight = whole_weight(line, width)
    inverse = splat(np.float32(1 / weight))
    for b in range(0, width, LANES):
        store(line.share, b, mul(mul(load(line.mass, b), load(line.factor, b)), inverse))
    return weight


class ValueSums(NamedTuple):
    """Sums for the rounding bound; float64."""

    summands: float
    """Of share times the largest norm of what is added up."""
    charges: float
    """Of the relative factor times the value step of coded blocks."""
    radius: float
    """Largest distance of a value from c0."""
    farthest: float
    """That plus the norm of c0: 0 where all values are."""


@merged
def value_terms(line: Line, slot: Slot, width: int, weight: float, centre: float) -> ValueSums:
    """Write min(share * eta, sqrt(S2) * spectral norm) and S2 of blocks whose values are read from codes.

    V1 and V3 of theory section 6; `move` is empty.
    """
    inverse, centre_, one = splat(np.float32(1 / weight)), splat(np.float32(centre)), splat(np.float32(1))
    least, zero = splat(np.float32(LEAST)), splat(np.float32(0))
    summands, charges, farthest = 0.0, 0.0, zero
    for start in range(0, width, SHORT_RUN):
        summand = charge = zero
        for b in range(start, min(width, start + SHORT_RUN), LANES):
            keep, share = load(line.keep, b), load(line.share, b)
            coded = mul(load(line.value_coded, b), keep)
            relative, square = mul(load(line.factor, b), inverse), load(line.square, b)
            joint = mul(mul(relative, root(square)), load(slot.value_spectrum, b))
            store(line.cost, b, mul(smaller(mul(share, load(slot.eta, b)), joint), coded))
            seen = larger(relative, least)
            store(line.energy, b, mul(mul(mul(seen, seen), square), coded))
            store(line.move, b, zero)
            # an original, or c0 in place of it
            other = mul(fma(load(slot.radius, b), keep, centre_), sub(one, coded))
            summand = fma(share, fma(coded, load(slot.magnitude, b), other), summand)
            charge = fma(mul(relative, coded), load(slot.step, b), charge)
            farthest = larger(load(slot.radius, b), farthest)
        summands += np.float64(total(summand))
        charges += np.float64(total(charge))
    radius = np.float64(highest(farthest))
    return ValueSums(summands, charges, radius, radius + centre)


class KeySums(NamedTuple):
    """Sums over the blocks of one head; float64."""

    fixed: float
    """Contributions of blocks with exact keys."""
    low: float
    """Of share * exp(-delta): lower bound of the normaliser."""
    moved: float
    """Weight shifts."""
    flushed: float
    """Most weight that underflow may have lost."""
    widest: float
    """Largest delta."""


class Errors(NamedTuple):
    """What bounds the score errors of a block together, where delta bounds each."""

    norm: float
    """||q||, which the spectral norm of K - K' is to be multiplied by."""
    most: float
    """sqrt(S): norm of errors that are all 1."""


@plain
def errors_of(shape: Shape, tiers: Store, row: int) -> Errors:
    """Return that of query row `row`."""
    return Errors(tiers.norms[row], np.float32(np.sqrt(np.float64(shape.block)) * (1 + 2.0**-22)))


@plain
def breadth(line: Line, slot: Slot, b: int, errors: Errors) -> Any:
    """Return the norm of the score errors of LANES blocks over delta: so many tokens squared can be wrong.

    It is at most ||q|| times the spectral norm of K - K', and sqrt(S) times what of delta has other causes.
    """
    most = splat(errors.most)
    joint = fma(splat(errors.norm), load(slot.key_spectrum, b), mul(most, load(line.rest, b)))
    return smaller(divide(joint, load(line.delta, b)), most)


@plain
def key_terms(
    line: Line, slot: Slot, width: int, weight: float, away: float, tokens: int, errors: Errors
) -> KeySums:
    """Write min(cw * rv, sqrt(c2) * spectral norm) + cw * h, cw and c2 of blocks with coded keys.

    Where the score errors e of a block have a small norm, sum p |e| <= sqrt(S2) norm(e) by Cauchy-Schwarz,
    and sum (p e)^2 <= (max p)^2 norm(e)^2; the largest p is the block's factor. Values of one block move the
    output by no more than the norm of what their weights shift times the spectral norm of V - c0. Returns
    the sums of theory section 5.
    """
    lost = max(tokens * FLUSHED / weight, 1.2e-38)
    inverse, away_, lost_ = splat(np.float32(1 / weight)), splat(np.float32(away)), splat(np.float32(lost))
    one, zero, least = splat(np.float32(1)), splat(np.float32(0)), splat(np.float32(LEAST))
    limit, hopeless = splat(np.float32(WIDEST)), splat(np.float32(HOPELESS))
    fixed, low, moved, flushed, widest = 0.0, 0.0, 0.0, 0.0, zero
    for start in range(0, width, SHORT_RUN):
        fix, fit, shifted, gone = zero, zero, zero, zero
        for b in range(start, min(width, start + SHORT_RUN), LANES):
            delta, share, coded = load(line.delta, b), load(line.share, b), load(line.key_coded, b)
            square, wide = load(line.square, b), breadth(line, slot, b, errors)
            up, down = growth(delta)
            loss, lifted = mul(lost_, add(up, one)), mul(mul(load(line.factor, b), inverse), up)
            together = smaller(mul(root(square), wide), load(line.mass, b))
            shift = pick_less(delta, limit, capped(fma(lifted, together, loss)), hopeless)
            reach = larger(pick_less(delta, limit, capped(lifted), hopeless), least)
            # weights that underflowed stand in no square: what they may become counts like one more token
            energy = fma(mul(reach, reach), smaller(mul(wide, wide), square), mul(loss, loss))
            joint = mul(root(energy), load(slot.centre_spectrum, b))
            cost = fma(shift, away_, smaller(mul(shift, load(slot.radius, b)), joint))
            store(line.cost, b, mul(cost, coded))
            store(line.move, b, mul(shift, coded))
            store(line.energy, b, mul(energy, coded))
            fix, fit = fma(cost, sub(one, coded), fix), fma(share, down, fit)
            shifted, gone, widest = add(shifted, shift), add(gone, loss), larger(delta, widest)
        fixed, low = fixed + total(fix), low + total(fit)
        moved, flushed = moved + total(shifted), flushed + total(gone)
    return KeySums(fixed, low / MARGIN, moved, flushed, np.float64(highest(widest)))


@merged
def skip_terms(line: Line, slot: Slot, width: int, weight: float) -> None:
    """Write min(share * rv, sqrt(S2) * spectral norm) and S2 of blocks whose values are not read.

    `move` is empty.
    """
    inverse, one, zero = splat(np.float32(1 / weight)), splat(np.float32(1)), splat(np.float32(0))
    least = splat(np.float32(LEAST))
    for b in range(0, width, LANES):
        skipped, relative = sub(one, load(line.keep, b)), larger(mul(load(line.factor, b), inverse), least)
        energy = mul(mul(relative, relative), load(line.square, b))
        joint = mul(root(energy), load(slot.centre_spectrum, b))
        store(line.cost, b, mul(smaller(mul(load(line.share, b), load(slot.radius, b)), joint), skipped))
        store(line.energy, b, mul(energy, skipped))
        store(line.move, b, zero)


@plain
def largest_of(numbers: Any, width: int) -> float:
    """Return the largest of non-negative numbers."""
    top = splat(np.float32(0))
    for b in range(0, width, LANES):
        top = larger(load(numbers, b), top)
    return np.float64(highest(top))


@loose
def count_ones(marks: Any, blocks: int) -> int:
    """Return how many of `blocks` marks are 1.0, the others being 0.0."""
    result = np.float32(0)
    for b in range(blocks):
        result += marks[b]
    return np.int64(result)


@plain
def spread(line: Line, width: int, table: Any) -> int:
    """Sort blocks into buckets by cost, highest first, and sum cost, energy and move.

    Afterwards entry j of the table's rows holds the cost before bucket j, and energy and move from bucket j
    on, each summed from its own end: total minus prefix could go negative. Returns the bits of the highest
    cost, which `edge` tells buckets apart by.
    """
    # blocks of one bucket wait for each other's sums, so odd and even ones have sums of their own
    sums = ahead(table, 3 * TABLE)
    for j in range(8 * BUCKETS):
        sums[j] = 0.0
    # what is not above `floor` belongs to the last bucket; that is most of a peaked head, a vector at a time
    top, last = bits(np.float32(largest_of(line.cost, width))), BUCKETS - 1
    floor = as_float(np.uint32(max(top - (last << CLASS), 0)))
    rest_cost = rest_energy = rest_move = 0.0
    for start in range(0, width, SHORT_RUN):
        cost = energy = move = splat(np.float32(0))
        for first in range(start, min(width, start + SHORT_RUN), LANES):
            here = load(line.cost, first)
            if highest(here) <= floor:
                cost, energy = add(cost, here), add(energy, load(line.energy, first))
                move = add(move, load(line.move, first))
                continue
            for b in range(first, first + LANES):
                j = min(max((top - bits(line.cost[b])) >> CLASS, 0), last)
                add_three(sums, 2 * j + b % 2, line.cost, line.energy, line.move, b)
        rest_cost, rest_energy = rest_cost + total(cost), rest_energy + total(energy)
        rest_move += total(move)
    # what underflow of a square may have lost
    rest_energy += width * 1.3e-35
    for i, rest in enumerate((rest_cost, rest_energy, rest_move)):
        sums[8 * last + i] += rest
    fill(table, sums)
    return top


@merged
def fill(table: Any, sums: Any) -> None:
    """Write what stands before each bucket and from it on, of two times four sums a bucket."""
    costs, energies, moves = rows_of(table)
    before, squares, shifts = 0.0, 0.0, 0.0
    energies[BUCKETS] = moves[BUCKETS] = 0.0
    for j in range(BUCKETS):
        k = BUCKETS - 1 - j
        costs[j] = before
        before += sums[8 * j] + sums[8 * j + 4]
        squares += sums[8 * k + 1] + sums[8 * k + 5]
        shifts += sums[8 * k + 2] + sums[8 * k + 6]
        energies[k], moves[k] = squares, shifts
    costs[BUCKETS] = before
    for j in range(BUCKETS + 1, TABLE):
        costs[j] = np.inf  # no split


@plain
def edge(top: int, j: int) -> float:
    """Return what the costs of bucket `j` and of those after it are below, `top` being that of `spread`.

    The last bucket has no lower end: 0 for those behind it.
    """
    if j >= BUCKETS:
        return np.float32(0)
    return as_float(np.uint32(min(max(top - (j << CLASS) + 1, 0), 0x7F800000)))


@plain
def rows_of(table: Any) -> tuple[Any, Any, Any]:
    """Return the rows of a table: cost, energy, move."""
    return table, ahead(table, TABLE), ahead(table, 2 * TABLE)


@plain
def split_at(table: Any, j: int, spectrum: float, away: float) -> float:
    """Return the bound with the triangle inequality before bucket `j` and the spectral norm from it on."""
    costs, energies, moves = rows_of(table)
    return costs[j] + np.sqrt(spectrum * MARGIN * energies[j]) + away * moves[j]


class Split(NamedTuple):
    """A bound that treats blocks in two ways."""

    bound: float
    near: float
    """Blocks that cost less are bounded together, through the spectral norm."""


@plain
def best_split(table: Any, top: int, spectrum: float, away: float) -> Split:
    """Return the smallest split between buckets; `spread` returned `top`."""
    costs, energies, moves = rows_of(table)
    least, group = np.inf, 0
    for j in range(0, TABLE, LANES):
        found = least_split(costs, energies, moves, j, spectrum * MARGIN, away)
        if found < least:
            least, group = found, j
    best = group
    while best < group + LANES - 1 and not split_at(table, best, spectrum, away) <= least:
        best += 1
    return Split(least * MARGIN, edge(top, best))


@merged
def split_near(line: Line, width: int, near: float, spectrum: float, away: float) -> float:
    """Return the smallest of four splits: at cost `near`, at half and at twice of it, and all blocks alone.

    Without buckets, for blocks that are much like those for which `near` was best.
    """
    zero = splat(np.float32(0))
    one, two, four = splat(np.float32(near)), splat(np.float32(near * 0.5)), splat(np.float32(near * 2))
    costs = np.float64(0)
    cost1 = cost2 = cost4 = energy1 = energy2 = energy4 = move1 = move2 = move4 = width * 1.3e-35
    for start in range(0, width, SHORT_RUN):
        cost = c1 = c2 = c4 = e1 = e2 = e4 = m1 = m2 = m4 = zero
        for b in range(start, min(width, start + SHORT_RUN), LANES):
            here, energy, move = load(line.cost, b), load(line.energy, b), load(line.move, b)
            cost = add(cost, here)
            c1, c2 = add(c1, pick_less(here, one, zero, here)), add(c2, pick_less(here, two, zero, here))
            e1, e2 = add(e1, pick_less(here, one, energy, zero)), add(e2, pick_less(here, two, energy, zero))
            m1, m2 = add(m1, pick_less(here, one, move, zero)), add(m2, pick_less(here, two, move, zero))
            c4, e4 = add(c4, pick_less(here, four, zero, here)), add(e4, pick_less(here, four, energy, zero))
            m4 = add(m4, pick_less(here, four, move, zero))
        costs += total(cost)
        cost1, cost2, cost4 = cost1 + total(c1), cost2 + total(c2), cost4 + total(c4)
        energy1, energy2, energy4 = energy1 + total(e1), energy2 + total(e2), energy4 + total(e4)
        move1, move2, move4 = move1 + total(m1), move2 + total(m2), move4 + total(m4)
    inner, least = spectrum * MARGIN, np.inf
    for bound in (
        costs,
        cost1 + np.sqrt(inner * energy1) + away * move1,
        cost2 + np.sqrt(inner * energy2) + away * move2,
        cost4 + np.sqrt(inner * energy4) + away * move4,
    ):
        if bound < least:  # NaN counts as infinite
            least = bound
    return least * MARGIN


class Cut(NamedTuple):
    """Which blocks to promote: those whose cost is not below `high`."""

    high: float
    low: float
    """Of those between, which are one bucket,"""
    part: float
    """this share."""
    near: float
    """Where the rest splits best."""


@plain
def cut_at(top: int, j: int, part: float, near: float) -> Cut:
    """Return the cut that goes through bucket `j`, or behind the last one."""
    return Cut(edge(top, j), edge(top, j + 1), part, near)


@plain
def blocks_to_drop(table: Any, top: int, spectrum: float, away: float, target: float) -> Cut:
    """Return the fewest leading blocks without which the bound is at most `target`; it only steers."""
    least, with_it, best = np.inf, 0.0, BUCKETS
    for j in range(BUCKETS, -1, -1):
        found = split_at(table, j, spectrum, away)
        if found < least:
            least, best = found, j
        bound = (least - table[j]) * MARGIN
        if not bound <= target:
            # between this bucket's first and last block; the spectral part falls slower than in proportion
            share = (bound - target) / (bound - with_it) if bound < np.inf and bound > with_it else 1.0
            return cut_at(top, j, min(1.0, share * (2 - share)), edge(top, best))
        with_it = bound
    return cut_at(top, 0, 0.0, edge(top, best))


@merged
def rounding_bound(shape: Shape, sums: ValueSums, norm: float, weight: float, tokens: int) -> float:
    """Bound the rounding of the value pass and of the division (theory 7.1), the stored output left out."""
    exact = (RUN + EXACT_RUN) // EXACT_RUN * shape.block
    chain = (RUN * (shape.padded // 8 + 1) + exact + 40) * ROUNDOFF
    relative, root = chain / (1 - chain), np.sqrt(np.float64(shape.dim))
    error = relative * sums.summands + (relative + 8 * ROUNDOFF) * norm
    error += 0.51 * 15 * shape.block * root / WEIGHT_STEPS * sums.charges
    if sums.farthest > 0:
        error += root * tokens * 2.0**-126 / min(weight, 1.0)
    return error * MARGIN


@plain
def first_highest(numbers: Any, width: int) -> int:
    """Return where the largest of non-negative numbers stands first."""
    top = np.float32(largest_of(numbers, width))
    for first in range(0, width, LANES):
        if highest(load(numbers, first)) >= top:
            for b in range(first, first + LANES):
                if numbers[b] >= top:
                    return b
    return 0


@merged
def variation_around(
    line: Line, slot: Slot, width: int, weight: float, sums: KeySums, errors: Errors
) -> float:
    """Bound the total variation of a head that reads one token almost alone.

    Let w be the used weight of the heaviest token. If its exact weight is not larger, the others gain no more
    than sum w' (exp(delta) / Z_lo - 1) over them; if it is larger, they lose no more
    than 1 - w. However wrong the scores are, a head with w near 1 is known well.
    """
    first = first_highest(line.factor, width)
    # the heaviest token of a block weighs exp(0) = 1 before the block's factor
    one, relative = 1 - 2.0**-18, np.float64(line.factor[first]) / weight
    alone, mass = relative * one, np.float64(line.mass[first])
    up, _ = growth(splat(line.delta[first]))
    rise = relative * np.float64(highest(up))
    # its block moves by the sum over its other tokens, not by what was added for all of them
    wide = np.float64(errors.norm) * slot.key_spectrum[first] + np.float64(errors.most) * line.rest[first]
    wide = min(wide / line.delta[first], np.float64(errors.most))
    counted = rise * min(mass, np.sqrt(np.float64(line.square[first])) * wide) * (1 - 2.0**-14)
    others = max(0.0, sums.moved * (1 + 2.0**-14) - counted)
    others += rise * max(0.0, mass * (1 + 2.0**-14) - one)
    low, rest = min(1.0, sums.low), 1 - alone
    return max((others + rest * (1 - low)) / low, rest)


@merged
def key_bound(
    line: Line,
    slot: Slot,
    width: int,
    weight: float,
    sums: KeySums,
    split: float,
    radius: float,
    errors: Errors,
) -> float:
    """Return the bound on the key error, of theory section 5 with all blocks in A.

    `split` is that of blocks with coded keys. The last members of the minimum, 2 * radius * TV, are finite
    whatever the score errors.
    """
    variation = min(sums.moved, np.tanh(sums.widest / 2)) + sums.flushed / sums.low
    known = sums.widest < WIDEST and sums.moved < HOPELESS / 10 and sums.low > 0
    if known:
        variation = min(1.0, variation, variation_around(line, slot, width, weight, sums, errors)) * MARGIN
    variation = min(1.0, variation) if known and variation >= 0 else 1.0
    bound = 2 * radius * variation * MARGIN
    split = (split + sums.fixed * MARGIN) / sums.low
    return split if known and split < bound else bound
