"""Outputs, and the certificate of each from the masses that were really used (theory 5 to 8 and 10)."""

import triton
import triton.language as tl

from rcq_cli.kernels._triton.arithmetic import COUNTS, finite, or_infinite, shrinkage
from rcq_cli.kernels._triton.codes import MARGIN
from rcq_cli.kernels._triton.plan import ABSOLUTE, EPS, LAYER, RELATIVE, best_split, block_notes, layer_norm
from rcq_cli.kernels._triton.score import (
    AWAY,
    DELTA,
    KEY,
    MASS,
    NORM,
    PEAK,
    PEAK_ROW,
    READ,
    ROW,
    SQUARE,
    TODO,
    VALUE,
    WIDE,
)

KEY_BOUND, VALUE_BOUND, DROPPED_BOUND, ROUNDING_BOUND, OUTPUT_NORM, KEYS, VALUES, SKIPPED, RUNG, OPEN = (
    tl.constexpr(i) for i in range(10)
)
LOG_FLUSH = tl.constexpr(-87.33654475055310)  # ln 2^-126


@triton.jit(do_not_specialize=COUNTS)
def judge(
    notes, raw, extra, tail_notes, centre, spectra, constants, stats, flags, state, partial, output, fields,
    seen, pitch, width, blocks, tail_tokens, FINAL: tl.constexpr, PARTS: tl.constexpr, NP: tl.constexpr,
    LARGEST: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    MP: tl.constexpr,
):  # fmt: skip
    """Store the output of query head `program 0` with its bounds, and whether they meet the budget.

    Without FINAL only output and norm are stored: with denominator `layer` the budget follows from all heads.
    Every quantity is float64; a bound that is NaN counts as infinite.
    """
    line = tl.program_id(0)
    rows = tl.num_programs(0)
    h, heads = line // R, rows // R
    if tl.load(state + line * ROW + TODO) > 0:
        b, c, p = tl.arange(0, MP), tl.arange(0, DP), tl.arange(0, NP)
        inside, coded = b <= blocks, b < blocks
        at = stats + line * width + b
        peak = tl.load(at + PEAK * rows * width, inside, float("-inf")).to(tl.float64)
        mass = tl.load(at + MASS * rows * width, inside, 0.0).to(tl.float64)
        square = tl.load(at + SQUARE * rows * width, inside, 0.0).to(tl.float64)
        delta = tl.load(at + DELTA * rows * width, inside, 0.0).to(tl.float64)
        top = tl.load(state + line * ROW + PEAK_ROW)
        flag = flags + h * width + b
        read = (tl.load(flag + READ * heads * width, inside, 1) != 0) & inside
        key_exact = tl.load(flag + KEY * heads * width, inside, 1) != 0
        value_exact = tl.load(flag + VALUE * heads * width, inside, 1) != 0
        occupied = inside & (mass > 0)
        active, skipped = occupied & read, occupied & ~read
        relative = tl.where(occupied, peak - top, 0.0)
        weight = tl.where(occupied, tl.exp(relative) * mass, 0.0)
        total = tl.sum(tl.where(active, weight, 0.0), 0)
        unknown = tl.sum(tl.where(inside & ~(finite(mass) & finite(delta)), 1, 0), 0) > 0

        # output: partial sums over the sequence, then the value that is stored
        cell = (p[:, None] < PARTS) & (c < D)[None, :]
        sums = tl.load(partial + (p[:, None] * rows + line) * D + c[None, :], cell, 0.0).to(tl.float64)
        exact = tl.sum(sums, 0) / total
        bounded = tl.minimum(tl.maximum(exact, -LARGEST), LARGEST)
        stored = bounded.to(tl.float32).to(output.dtype.element_ty)
        tl.store(output + line * D + c, stored, c < D)
        stored = stored.to(tl.float32).to(tl.float64)
        gap = tl.sqrt(tl.sum((exact - stored) * (exact - stored), 0)) * (1.0 + 2.0**-30)
        norm, size = tl.sqrt(tl.sum(stored * stored, 0)), tl.sqrt(tl.sum(exact * exact, 0))
        c0 = tl.load(centre + h * D + c, c < D, 0.0)
        away = tl.sqrt(tl.sum(tl.where(c < D, (stored - c0) * (stored - c0), 0.0), 0))
        tl.store(fields + OUTPUT_NORM * rows + line, norm)
        if FINAL:
            eta, rv, se, sv = block_notes(notes, raw, extra, tail_notes, h, b, pitch, blocks, S)
            wide = tl.load(at + WIDE * rows * width, inside, 0.0).to(tl.float64)
            count = tl.where(b == blocks, tail_tokens, S).to(tl.float64)

            # rounding of the value pass and the quotient; storing
            value_coded = coded & active & ~value_exact
            share = tl.where(active, weight, 0.0) / total
            longest = rv + tl.sqrt(tl.sum(c0 * c0, 0)) + tl.where(value_coded, eta, 0.0)
            mean = tl.sum(tl.where(active, share * longest, 0.0), 0) * MARGIN
            chain = tl.load(constants + RELATIVE)
            lost = (blocks * S + tail_tokens).to(tl.float64) * (2.0**-126 * D) / tl.minimum(total, 1.0)
            rounding = (
                chain * mean + (chain + 2.0**-20) * size + tl.where(mean > 0, lost, 0.0)
            ) * MARGIN + gap

            # values
            below, root = relative - tl.log(total), tl.sqrt(square)
            spread = tl.where(occupied, tl.exp(below), 0.0) * root
            cost = tl.where(value_coded, tl.minimum(share * eta, spread * se), 0.0)
            error = tl.where(value_coded & (eta > 0), spread * spread, 0.0)
            value = best_split(cost, error, cost * 0.0, tl.load(spectra + heads + h), 0.0)

            # keys and skipped values together
            reach = (away + value + rounding) * MARGIN
            flush = tl.minimum(relative, LOG_FLUSH + tl.maximum(relative, 0.0)) - tl.log(total)
            flushed = tl.where(occupied, count * tl.exp(flush + delta), 0.0)
            # a skipped token moves by all of its weight, an active one by exp(delta) - 1 of it
            lift = tl.exp(below + delta) * tl.where(skipped, 1.0, shrinkage(delta))
            # and where the errors of a block have a small norm, not all of its tokens do
            together = tl.where(skipped, mass, tl.minimum(mass, root * wide))
            spread = lift * tl.where(skipped, root, tl.minimum(root, wide)) + flushed
            moved = or_infinite(tl.where(occupied, lift * together + flushed, 0.0))
            energy = or_infinite(tl.where(occupied, spread * spread, 0.0))
            held = tl.where(occupied, tl.exp(below - delta) * mass, 0.0)
            low = tl.sum(held, 0) / MARGIN
            joint = or_infinite(tl.where(occupied, spread * sv, 0.0))
            cost = tl.minimum(or_infinite(moved * rv), joint) + moved * reach
            split = best_split(cost, energy, moved, tl.load(spectra + h), reach) / low

            # total variation: finite however wrong the scores are
            shift = tl.sum(tl.where(active, moved, 0.0), 0)
            lifted = tl.sum(tl.where(skipped, moved, 0.0), 0)
            kept = tl.sum(tl.where(active, held, 0.0), 0)
            widest = shrinkage(tl.max(tl.where(active, delta, 0.0), 0))
            tanh = widest / (2.0 - widest)  # tanh(x / 2) from 1 - exp(-x)
            gone = tl.sum(tl.where(active, flushed, 0.0), 0) / low
            dropped = tl.where(lifted > 0, lifted / (lifted + kept), 0.0)
            variation = or_infinite(tl.minimum(shift, tanh) + gone + dropped)
            # a head that reads one token almost alone: its heaviest token weighs exp(0) of its block
            first = tl.max(tl.where(active, relative, float("-inf")), 0)
            one = 1.0 - 2.0**-16
            alone = tl.exp(first) / total * one
            # its block counts with what its other tokens can do, not with what was counted for all of them
            spare = tl.maximum(mass * (1.0 + 2.0**-16) - one, 0.0)
            taken = tl.where(
                active & (relative == first), lift * tl.maximum(together * one - spare, 0.0), 0.0
            )
            others = tl.maximum(shift * (1.0 + 2.0**-16) - tl.max(taken, 0), 0.0)
            others = tl.where(finite(shift), others, float("inf"))
            floor, rest = tl.minimum(low, 1.0), 1.0 - alone
            lonely = tl.maximum((others + lifted + rest * (1.0 - floor)) / floor, rest)
            variation = tl.minimum(tl.minimum(variation, or_infinite(lonely)) * MARGIN, 1.0)
            radius = tl.max(tl.where(occupied, rv, 0.0), 0)
            joint = tl.minimum(or_infinite(split), 2.0 * radius * variation * MARGIN)
            joint = tl.where(unknown | ~finite(total), float("inf"), joint)
            side = tl.sum(tl.where(skipped, cost, 0.0), 0) / tl.sum(cost, 0)
            side = joint * tl.where(side == side, tl.minimum(side, 1.0), 0.0)
            tl.store(fields + KEY_BOUND * rows + line, joint - side)
            tl.store(fields + DROPPED_BOUND * rows + line, side)
            tl.store(fields + VALUE_BOUND * rows + line, value)
            tl.store(fields + ROUNDING_BOUND * rows + line, or_infinite(rounding))

            eps = tl.load(constants + EPS)
            limit = norm * eps / (1.0 + eps)
            if tl.load(constants + LAYER) > 0:
                limit = layer_norm(fields + OUTPUT_NORM * rows, 1, rows, MP) * eps / (1.0 + eps)
            limit = tl.where(tl.load(constants + ABSOLUTE) > 0, eps, limit) * (1.0 - 2.0**-40)
            met = joint + value + rounding <= limit
            pinned = (b == 0) | (b == blocks - 1) | (tl.load(raw + h * pitch + b, coded, 1) != 0)
            rung = tl.max(tl.where(coded & key_exact & ~pinned, 1, 0), 0)
            rung = tl.maximum(rung, tl.max(tl.where(coded & value_exact & ~pinned, 2, 0), 0))
            tl.store(fields + KEYS * rows + line, tl.sum((coded & key_exact).to(tl.float64), 0))
            tl.store(fields + VALUES * rows + line, tl.sum((coded & value_exact).to(tl.float64), 0))
            tl.store(fields + SKIPPED * rows + line, tl.sum((coded & ~read).to(tl.float64), 0))
            tl.store(fields + RUNG * rows + line, rung.to(tl.float64))
            tl.store(fields + OPEN * rows + line, tl.where(met, 0.0, 1.0))
            tl.store(state + line * ROW + TODO, tl.where(met, 0.0, 1.0))
            tl.store(state + line * ROW + NORM, norm)
            tl.store(state + line * ROW + AWAY, away)
            known = finite(norm) & finite(away)
            tl.store(seen + line * 2, tl.where(known, norm, -1.0))
            tl.store(seen + line * 2 + 1, tl.where(known, away, -1.0))
