"""What a round reads, skips and promotes, decided for every query head on the device.

Nothing here carries a proof: masses, thresholds and the last known output only steer, and `judge` certifies
what was really read. Query heads of a group add their wishes to common flags.
"""

import triton
import triton.language as tl

from rcq_cli.kernels._triton.arithmetic import COUNTS, growth, or_infinite, shrinkage
from rcq_cli.kernels._triton.codes import MARGIN
from rcq_cli.kernels._triton.score import (
    AWAY,
    DELTA,
    FACTOR,
    KEY,
    MASS,
    NORM,
    NOTES,
    PEAK,
    PEAK_ROW,
    READ,
    ROW,
    SE,
    SQUARE,
    SV,
    TODO,
    VALUE,
    WIDE,
)

EPS, ABSOLUTE, EXPLORE, RELATIVE, SKIP, LAYER, PROMOTE, TAU = (tl.constexpr(i) for i in range(1, 9))
SPLITS = tl.constexpr(16)
BISECTIONS = tl.constexpr(14)
CARE = tl.constexpr(0.85)
VALUE_PART, VALUE_TARGET, SKIP_PART, KEY_FLOOR = (tl.constexpr(x) for x in (0.5, 0.45, 0.1, 0.1))


@triton.jit
def block_notes(notes, raw, extra, tail_notes, h, b, pitch, blocks, S: tl.constexpr):
    """Return float64 eta, rv, se, sv of blocks `b`; the tail stands at `blocks`, what lies beyond is zero.

    A block without spectral norms has what the longest row allows, sqrt(S) times its norm.
    """
    row, inside = h * pitch + b, b < blocks
    is_raw = tl.load(raw + row, inside, 0) != 0
    eta = tl.load(notes + row * NOTES + 2, inside, 0.0).to(tl.float64)
    rv = tl.load(notes + row * NOTES + 3, inside, 0.0).to(tl.float64)
    se = tl.load(notes + row * NOTES + SE, inside, 0.0).to(tl.float64)
    sv = tl.load(notes + row * NOTES + SV, inside & ~is_raw, float("inf")).to(tl.float64)
    rv = tl.where(is_raw, tl.load(extra + row * 2 + 1, inside, 0.0).to(tl.float64), rv)
    rv = tl.where(b == blocks, tl.load(tail_notes + h * 2 + 1).to(tl.float64), rv)
    eta, most = tl.where(is_raw, 0.0, eta), S**0.5 * MARGIN
    return eta, rv, tl.minimum(se, eta * most), tl.minimum(sv, rv * most)


@triton.jit
def split_at(cost, energy, move, limit, spectrum, away):
    """Return a bound: triangle inequality where cost >= limit, spectral norm and drift elsewhere."""
    first = cost >= limit
    head = tl.sum(tl.where(first, cost, 0.0), 0)
    tail = tl.sum(tl.where(first, 0.0, energy), 0)
    drift = tl.sum(tl.where(first, 0.0, move), 0)
    return or_infinite(head + tl.sqrt(spectrum * tail * MARGIN) + away * drift)


@triton.jit
def best_split(cost, energy, move, spectrum, away):
    """Return the least of SPLITS + 2 splits; each is a valid bound of the whole sum."""
    top = tl.max(cost, 0)
    best = tl.minimum(
        or_infinite(tl.sum(cost, 0)), split_at(cost, energy, move, float("inf"), spectrum, away)
    )
    for i in range(SPLITS):
        best = tl.minimum(best, split_at(cost, energy, move, top, spectrum, away))
        top = top * 0.25
    return best * MARGIN


@triton.jit
def cut_for(cost, energy, move, spectrum, away, target):
    """Return the largest cost such that what costs less is bounded by `target`; 0 where nothing is."""
    top = tl.max(cost, 0)
    high, low = tl.log2(tl.maximum(top, 1e-300)) + 1.0, tl.log2(tl.maximum(top, 1e-300)) - 40.0
    for i in range(BISECTIONS):
        middle = (high + low) * 0.5
        left = cost < tl.exp2(middle)
        plain = tl.sum(tl.where(left, cost, 0.0), 0)
        tail = tl.sum(tl.where(left, energy, 0.0), 0)
        drift = tl.sum(tl.where(left, move, 0.0), 0)
        bound = tl.minimum(plain, tl.sqrt(spectrum * tail) + away * drift)
        fits = bound <= target
        low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
    return tl.exp2(low)


@triton.jit
def layer_norm(norms, pitch: tl.constexpr, rows, MP: tl.constexpr):
    """Return the root mean square of the norms of all heads: every head at most this share off is enough."""
    i, total = tl.arange(0, MP), tl.sum(tl.zeros([MP], tl.float64), 0)
    for first in range(0, rows, MP):
        norm = tl.load(norms + (first + i) * pitch, first + i < rows, 0.0)
        total += tl.sum(norm * norm, 0)
    return tl.sqrt(total / rows)


@triton.jit(do_not_specialize=COUNTS)
def plan(
    notes, raw, extra, tail_notes, centre, spectra, constants, stats, flags, state, pitch, width,
    blocks, FIRST: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    MP: tl.constexpr,
):  # fmt: skip
    """Plan a round for query head `program 0`.

    First values: promoted where their bound takes more than half of the budget. Then a tenth of the budget
    goes to blocks whose values nobody needs. Keys get what is left. The budget follows from the output of the
    round or step before; where there was none, everything is read and nothing promoted.
    """
    line = tl.program_id(0)
    rows = tl.num_programs(0)
    h, heads = line // R, rows // R
    if tl.load(state + line * ROW + TODO) > 0:
        b = tl.arange(0, MP)
        inside, coded = b <= blocks, b < blocks
        at = stats + line * width + b
        peak = tl.load(at + PEAK * rows * width, inside, float("-inf")).to(tl.float64)
        mass = tl.load(at + MASS * rows * width, inside, 0.0).to(tl.float64)
        root = tl.sqrt(tl.load(at + SQUARE * rows * width, inside, 0.0).to(tl.float64))
        delta = tl.load(at + DELTA * rows * width, inside, 0.0).to(tl.float64)
        wide = tl.load(at + WIDE * rows * width, inside, 0.0).to(tl.float64)
        if FIRST:
            top = tl.max(tl.where(mass > 0, peak, float("-inf")), 0)
            tl.store(state + line * ROW + PEAK_ROW, top)
            factor = tl.exp(peak - top).to(tl.float32)
            tl.store(at + FACTOR * rows * width, factor, inside)
        else:
            factor = tl.load(at + FACTOR * rows * width, inside, 0.0)
        factor = factor.to(tl.float64)
        heaviest = factor / tl.sum(factor * mass, 0)
        share = heaviest * mass
        norm, away = tl.load(state + line * ROW + NORM), tl.load(state + line * ROW + AWAY)
        read = flags + (READ * heads + h) * width + b
        want_key, want_value = read + KEY * heads * width, read + VALUE * heads * width
        one = tl.full([MP], 1, tl.uint8)
        tau = tl.load(constants + TAU)
        if FIRST & (tau > 0):
            # the heaviest keys up to a share of the mass, whatever the bound says
            heavy = coded & (share >= cut_for(share, share * 0.0, share, 0.0, 1.0, 1.0 - tau))
            tl.store(want_key, one, heavy)
            tl.store(read, one, heavy)
        if norm < 0:
            tl.store(read, one, coded)
        else:
            key_coded = coded & (tl.load(want_key, coded, 1) == 0)
            value_coded = coded & (tl.load(want_value, coded, 1) == 0)
            eta, rv, se, sv = block_notes(notes, raw, extra, tail_notes, h, b, pitch, blocks, S)
            eps = tl.load(constants + EPS)
            limit = norm * eps / (1.0 + eps)
            if tl.load(constants + LAYER) > 0:
                limit = layer_norm(state + NORM, ROW, rows, MP) * eps / (1.0 + eps)
            limit = tl.where(tl.load(constants + ABSOLUTE) > 0, eps, limit) * (CARE if FIRST else 1.0)
            c = tl.arange(0, DP)
            c0 = tl.load(centre + h * D + c, c < D, 0.0)
            mean = tl.sum(share * (rv + eta), 0) + tl.sqrt(tl.sum(c0 * c0, 0))
            left = limit - tl.load(constants + RELATIVE) * (mean + norm)
            may_promote = tl.load(constants + PROMOTE) > 0
            # what score errors of a block cost and what skipping it does: early, as registers are few
            up = growth(tl.minimum(delta, 500.0))
            dropped = share * (up + 1.0) * (rv + away)
            up *= heaviest
            shift, grown = up * tl.minimum(mass, root * wide), up * tl.minimum(root, wide)
            dear = tl.minimum(shift * rv, grown * sv) + shift * away
            low = tl.sum(share * (1.0 - shrinkage(delta)), 0)
            # values
            spread = tl.where(value_coded, heaviest * root, 0.0)
            cost = tl.minimum(tl.where(value_coded, share * eta, 0.0), spread * se)
            error = spread * spread
            spectrum = tl.load(spectra + heads + h)
            bound = best_split(cost, error, cost * 0.0, spectrum, 0.0)
            promoted = coded & (b < 0)
            if may_promote & (bound > VALUE_PART * left):
                cut = cut_for(cost, error, cost * 0.0, spectrum, 0.0, VALUE_TARGET * left)
                promoted = value_coded & (cost >= cut) & (cost > 0)
                tl.store(want_value, one, promoted)
                tl.store(read, one, promoted)
                bound = VALUE_TARGET * left
            # skipping
            cost = tl.where(key_coded, dropped, 0.0)
            allowance = SKIP_PART * tl.maximum(tl.minimum(left - bound, limit), 0.0)
            cut = cut_for(cost, cost * 0.0, cost, 0.0, 1.0, allowance)
            cut = tl.where(tl.load(constants + SKIP) > 0, cut, 0.0)
            needed = coded & ((cost >= cut) | ~key_coded)
            tl.store(read, one, needed)
            skipped = coded & ~needed
            # keys
            rest = tl.sum(tl.where(key_coded, 0.0, dear), 0) + allowance
            free = key_coded & ~skipped
            cost, grown, shift = (
                tl.where(free, dear, 0.0),
                tl.where(free, grown * grown, 0.0),
                tl.where(free, shift, 0.0),
            )
            target = tl.maximum(tl.maximum(left - bound, 0.0) * low - rest, KEY_FLOOR * limit * low)
            spectrum = tl.load(spectra + h)
            lifted = coded & (b < 0)
            if may_promote & (best_split(cost, grown, shift, spectrum, away) > target):
                cut = cut_for(cost, grown, shift, spectrum, away, target)
                lifted = free & (cost >= cut) & (cost > 0)
                tl.store(want_key, one, lifted)
                tl.store(read, one, lifted)
            asked = tl.sum(promoted.to(tl.int32), 0) + tl.sum(lifted.to(tl.int32), 0)
            if (not FIRST) & (asked > blocks):
                # more would be read than dense attention reads: the last rung takes this head
                tl.store(state + line * ROW + TODO, 0.0)
