"""Scores: every block from its codes in one pass, and promoted ones again from their originals.

Per block and query head the pass leaves weights exp(s - peak), their peak, sum and sum of squares, Delta, the
bound on what a score may be off by, with the rounding of everything up to the weight in it, and the norm of
all these errors of a block over Delta.
"""

import triton
import triton.language as tl

from rcq_cli.kernels._triton.arithmetic import COUNTS, odd, print_words
from rcq_cli.kernels._triton.codes import MARGIN, breadth, coded_scores, exact_scores, query_rows, slack_of

PEAK, MASS, SQUARE, DELTA, FACTOR, WIDE = (tl.constexpr(i) for i in range(6))
NOTES, SK, SE, SV = (tl.constexpr(i) for i in (7, 4, 5, 6))
READ, KEY, VALUE = (tl.constexpr(i) for i in range(3))
TODO, NORM, AWAY, PEAK_ROW = (tl.constexpr(i) for i in range(4))
ROW = tl.constexpr(4)
DAMAGED_CODES, DAMAGED_ORIGINALS = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def annotations(notes, raw, extra, row, S: tl.constexpr):
    """Return rk, kappa, sk and whether a block is raw; a raw one is only read from its originals."""
    is_raw = tl.load(raw + row) != 0
    rk = tl.load(notes + row * NOTES).to(tl.float32)
    kappa = tl.load(notes + row * NOTES + 1).to(tl.float32)
    sk = tl.minimum(tl.load(notes + row * NOTES + SK).to(tl.float32), rk * (S**0.5 * MARGIN))
    zero = rk * 0.0
    return (
        tl.where(is_raw, zero, rk),
        tl.where(is_raw, tl.load(extra + row * 2), kappa),
        tl.where(is_raw, zero, sk),
        is_raw,
    )


@triton.jit
def put_weights(
    scores, count, blank, delta, wide, h, b, stats, weights, rows, width, R: tl.constexpr, RP: tl.constexpr,
    SP: tl.constexpr,
):  # fmt: skip
    """Write weights and statistics of a block from the scores [SP, RP] of its `count` tokens; return peaks.

    A score that is not finite makes the mass NaN, which no certificate survives; blank blocks weigh nothing.
    """
    t, r = tl.arange(0, SP), tl.arange(0, RP)
    inside = (t < count)[:, None]
    broken = tl.max((inside & ~(tl.abs(scores) < float("inf"))).to(tl.int32), 0) > 0
    usable = (t < tl.where(blank, 0, count))[:, None]
    peak = tl.max(tl.where(usable, scores, float("-inf")), 0)
    weight = tl.where(usable, tl.exp(scores - peak[None, :]), 0.0)
    mass = tl.where(broken, float("nan"), tl.sum(weight, 0))
    at = (h * R + r) * width + b
    tl.store(stats + PEAK * rows * width + at, peak, r < R)
    tl.store(stats + MASS * rows * width + at, mass, r < R)
    tl.store(stats + SQUARE * rows * width + at, tl.sum(weight * weight, 0), r < R)
    tl.store(stats + DELTA * rows * width + at, delta, r < R)
    tl.store(stats + WIDE * rows * width + at, wide, r < R)
    line = (h.to(tl.int64) * width + b) * (R * SP)
    tl.store(weights + line + r[None, :] * SP + t[:, None], weight, (r < R)[None, :])
    return peak


@triton.jit(do_not_specialize=COUNTS)
def score(
    q, codes, scale, offset, notes, raw, extra, tail, centre, constants, seen, stats, weights, flags, state,
    tail_notes, faults, pitch, width, blocks, tail_tokens, PER: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Score PER blocks of KV head `program 1`; the last program scores the open tail and resets the head."""
    tile, h = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    factor = tl.load(constants).to(tl.float32)
    query, norm = query_rows(q, h, R, RP, D, DP)
    most = tl.full([RP], S**0.5 * MARGIN, tl.float32)
    for i in range(PER):
        b = tile * PER + i
        if b < blocks:
            row = (h * pitch + b).to(tl.int64)
            rk, kappa, sk, is_raw = annotations(notes, raw, extra, row, S)
            s, half_step, lost = coded_scores(query, codes, scale, offset, row, factor, S, SP, D, DP)
            slack = slack_of(norm, kappa + rk, factor, D)
            rest = lost * (tl.abs(factor) * MARGIN) + slack
            delta = tl.minimum(half_step, norm * rk) * (tl.abs(factor) * MARGIN) + rest
            wide = breadth(norm, sk, rest, delta, factor, S)
            # a raw block has no codes; it weighs nothing until its originals are scored
            put_weights(s, S, is_raw, delta, wide, h, b, stats, weights, heads * R, width, R, RP, SP)
            pinned = ((b == 0) | (b == blocks - 1) | is_raw).to(tl.uint8)
            for flag in tl.static_range(3):
                tl.store(flags + (flag * heads + h) * width + b, pinned)
    if tile == tl.num_programs(0) - 1:
        t, c, r = tl.arange(0, SP), tl.arange(0, DP), tl.arange(0, RP)
        mask = (t < tail_tokens)[:, None] & (c < D)[None, :]
        at = tail + h * S * D + t[:, None] * D + c[None, :]
        k = tl.load(at, mask, 0.0).to(tl.float32)
        v = tl.load(at + heads * S * D, mask, 0.0).to(tl.float32)
        c0 = tl.load(centre + h * D + c, c < D, 0.0).to(tl.float32)
        away = tl.where(mask, v - c0[None, :], 0.0)
        reach = tl.sqrt(tl.max(tl.sum(k * k, 1), 0)) * MARGIN + 1e-18
        tl.store(tail_notes + h * 2, reach)
        tl.store(tail_notes + h * 2 + 1, tl.sqrt(tl.max(tl.sum(away * away, 1), 0)) * MARGIN + 1e-18)
        s = exact_scores(query, k, factor)
        slack = slack_of(norm, reach, factor, D)
        put_weights(
            s, tail_tokens, False, slack, most, h, blocks, stats, weights, heads * R, width, R, RP, SP
        )
        for flag in tl.static_range(3):
            tl.store(flags + (flag * heads + h) * width + blocks, (tail_tokens > 0).to(tl.uint8))
        line = state + (h * R + r) * ROW
        tl.store(line + TODO, tl.full([RP], 1.0, tl.float64), r < R)
        tl.store(line + NORM, tl.load(seen + (h * R + r) * 2, r < R, 0.0), r < R)
        tl.store(line + AWAY, tl.load(seen + (h * R + r) * 2 + 1, r < R, 0.0), r < R)
        tl.store(faults + h, 0)


@triton.jit
def try_cores(query, codes, scale, offset, out, S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr):
    """Write the scores of block `program 0` of one KV head by 16 queries, to measure tensor cores."""
    b, t, r, c = tl.program_id(0), tl.arange(0, SP), tl.arange(0, 16), tl.arange(0, D)
    rows = tl.load(query + r[:, None] * D + c[None, :])
    scores, _, _ = coded_scores(rows, codes, scale, offset, b.to(tl.int64), 1.0, S, SP, D, D)
    tl.store(out + (b * 16 + r[None, :]) * S + t[:, None], scores, (t < S)[:, None])


@triton.jit
def original_rows(
    pool, host, slot, lane, h, b, capacity, host_pitch, S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Return the float32 originals [SP, DP] of a block: from its slot in pool `lane`, else from the host."""
    t, c = tl.arange(0, SP), tl.arange(0, DP)
    mask = (t < S)[:, None] & (c < D)[None, :]
    at = t[:, None] * D + c[None, :]
    if slot >= 0:
        rows = tl.load(pool + (lane * capacity + slot).to(tl.int64) * (S * D) + at, mask, 0.0)
    else:
        rows = tl.load(host + h.to(tl.int64) * host_pitch + b.to(tl.int64) * (S * D) + at, mask, 0.0)
    return rows.to(tl.float32)


@triton.jit
def chance(step, h, b):
    """Return a number in [0, 1) that depends on step, KV head and block."""
    x = (step.to(tl.int64) * 8191 + h) * 1000003 + b
    x = odd(x) * 3202034522624059733
    return ((x >> 33) & 0x3FFFFFFF).to(tl.float32) * (1.0 / 1073741824.0)


@triton.jit(do_not_specialize=COUNTS)
def rescore(
    q, codes, scale, offset, notes, raw, extra, constants, stats, weights, flags, state, faults, slots, pool,
    host, pitch, width, blocks, capacity, host_pitch, step, PER: tl.constexpr, PROBE: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Score promoted blocks from their originals, after comparing both scores: |s - s'| <= Delta + slack.

    A difference beyond that proves damage. With PROBE a random share of the other blocks is compared and
    nothing else written.
    """
    tile, h = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    r, t = tl.arange(0, RP), tl.arange(0, SP)
    todo = tl.max(tl.load(state + (h * R + r) * ROW + TODO, r < R, 0.0), 0)
    if PROBE:
        todo = todo * 0.0 + 1.0
    if todo > 0:
        factor = tl.load(constants).to(tl.float32)
        explore = tl.load(constants + 3).to(tl.float32)
        query, norm = query_rows(q, h, R, RP, D, DP)
        most = tl.full([RP], S**0.5 * MARGIN, tl.float32)
        for i in range(PER):
            b = tile * PER + i
            chosen = b < blocks
            if chosen:
                chosen = tl.load(flags + (KEY * heads + h) * width + b) != 0
                if PROBE:
                    chosen = (chance(step, h, b) < explore) & (chosen == 0)
            if chosen:
                row = (h * pitch + b).to(tl.int64)
                rk, kappa, _, is_raw = annotations(notes, raw, extra, row, S)
                slot = tl.load(slots + row)
                rows = original_rows(pool, host, slot, h, h, b, capacity, host_pitch, S, SP, D, DP)
                exact = exact_scores(query, rows, factor)
                slack = slack_of(norm, kappa + rk, factor, D)
                s, half_step, lost = coded_scores(query, codes, scale, offset, row, factor, S, SP, D, DP)
                allowed = (tl.minimum(half_step, norm * rk) + lost) * (tl.abs(factor) * MARGIN) + 2 * slack
                off = (t < S)[:, None] & (r < R)[None, :] & ~(tl.abs(exact - s) <= allowed[None, :])
                # a score that overflowed proves nothing: that head is computed in float64 anyway
                off = off & (tl.abs(exact) < float("inf")) & (tl.abs(s) < float("inf"))
                if (tl.max(tl.max(off.to(tl.int32), 1), 0) > 0) & (is_raw == 0):
                    tl.store(faults + h, b * 4 + DAMAGED_CODES)
                if not PROBE:
                    peak = put_weights(
                        exact, S, False, slack, most, h, b, stats, weights, heads * R, width, R, RP, SP
                    )
                    line = h * R + r
                    top = tl.load(state + line * ROW + PEAK_ROW, r < R, 0.0)
                    lifted = tl.exp(peak.to(tl.float64) - top).to(tl.float32)
                    tl.store(stats + (FACTOR * heads * R + line) * width + b, lifted, r < R)


@triton.jit
def block_print(
    codes, scale, offset, packed, first, second, marks, notes, row, S: tl.constexpr, SP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, TWO: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Return the fingerprint of everything tier 1 holds of a block."""
    t, c = tl.arange(0, SP)[None, :], tl.arange(0, DP)[None, :]
    n, g, down = tl.arange(0, 8)[None, :], tl.arange(0, GP)[None, :], tl.arange(0, SP)[:, None]
    mask = (down < S) & (c < D)
    total = print_words(tl.load(codes + (row * S + down) * D + c, mask, 0), down * D + c, mask)
    half = (down < S) & (c < D // 2)
    byte = tl.load(packed + (row * S + down) * (D // 2) + c, half, 0)
    total += print_words(byte, S * D + down * D + c, half)
    for part in tl.static_range(2):
        words = tl.load((scale if part == 0 else offset) + row * D + c, c < D, 0.0)
        words = words.to(tl.int16 if NARROW else tl.int32, bitcast=True)
        total += print_words(words, (2 * S + part) * D + c, c < D)
        meta = first if part == 0 else second
        if TWO:
            words = tl.load(meta + row * S + t, t < S, 0.0).to(tl.int16, bitcast=True)
            total += print_words(words, (2 * S + 2) * D + part * S + t, t < S)
            here = (down < S) & (g < D // G)
            words = tl.load(marks + ((row * S + down) * (D // G) + g) * 2 + part, here, 0)
        else:
            here = (down < S) & (g < D // G)
            words = tl.load(meta + (row * S + down) * (D // G) + g, here, 0.0).to(tl.int16, bitcast=True)
        total += print_words(words, (3 * S + part * S + 4 + down) * D + g, here)
    words = tl.load(notes + row * NOTES + n, n < NOTES, 0.0).to(tl.int16, bitcast=True)
    return total + print_words(words, (5 * S + 8) * D + n, n < NOTES)


@triton.jit(do_not_specialize=COUNTS)
def verify(
    codes, scale, offset, packed, first, second, marks, notes, raw, checks, flags, faults, constants, pitch,
    width, blocks, begin, step, PER: tl.constexpr, STORE: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, TWO: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Take fingerprints of blocks from `begin` on (STORE), or compare those of promoted and probed blocks."""
    tile, h = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    explore = tl.load(constants + 3).to(tl.float32)
    for i in range(PER):
        b = begin + tile * PER + i
        chosen = b < blocks
        if chosen:  # noqa: SIM102 - the inner one is decided when compiling
            if STORE == 0:
                wanted = tl.load(flags + (KEY * heads + h) * width + b)
                wanted = wanted | tl.load(flags + (VALUE * heads + h) * width + b)
                chosen = ((wanted != 0) | (chance(step, h, b) < explore)) & (
                    tl.load(raw + h * pitch + b) == 0
                )
        if chosen:
            row = (h * pitch + b).to(tl.int64)
            found = block_print(
                codes,
                scale,
                offset,
                packed,
                first,
                second,
                marks,
                notes,
                row,
                S,
                SP,
                D,
                DP,
                G,
                GP,
                TWO,
                NARROW,
            )
            if STORE:
                tl.store(checks + row * 3 + 2, found)
            elif found != tl.load(checks + row * 3 + 2):
                tl.store(faults + h, b * 4 + DAMAGED_CODES)
