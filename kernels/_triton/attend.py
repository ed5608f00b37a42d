"""The value pass: weights times values of what is read, split over the sequence.

Two launches share it: blocks read from their codes alone, while originals are on their way, and then the
promoted ones with the open tail.
"""

import triton
import triton.language as tl

from rcq_cli.kernels._triton.arithmetic import COUNTS, two_halves
from rcq_cli.kernels._triton.codes import decoded_values
from rcq_cli.kernels._triton.score import FACTOR, KEY, READ, ROW, TODO, VALUE, original_rows


@triton.jit(do_not_specialize=COUNTS)
def attend(
    packed, first, second, marks, stats, weights, flags, state, slots, pool, host, tail, partial, pitch,
    width, blocks, tail_tokens, capacity, host_pitch, per, LATE: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr,
    TWO: tl.constexpr,
):  # fmt: skip
    """Sum weights times values of part `program 0` of the blocks of KV head `program 1`.

    Coded values are float16 numbers and weights float16 pairs relative to the block's peak, scaled to 2^14:
    |w - hi - lo| <= 2^-22 w + 2^-27. Originals are multiplied in float32. Each block is summed by itself,
    then times its factor into a float32 total of `per` blocks.
    """
    part, h = tl.program_id(0), tl.program_id(1)
    parts, heads = tl.num_programs(0), tl.num_programs(1)
    r, t, c = tl.arange(0, RP), tl.arange(0, SP), tl.arange(0, DP)
    if tl.max(tl.load(state + (h * R + r) * ROW + TODO, r < R, 0.0), 0) > 0:
        total = tl.zeros([RP, DP], tl.float32)
        for i in range(per):
            b = part * per + i
            chosen = b < blocks + (1 if LATE else 0)
            exact = chosen
            if chosen:
                at = flags + h * width + b
                exact = tl.load(at + VALUE * heads * width) != 0
                late = exact | (tl.load(at + KEY * heads * width) != 0)
                chosen = (tl.load(at + READ * heads * width) != 0) & (late if LATE else (late == 0))
            if chosen:
                line = (h.to(tl.int64) * width + b) * (R * SP)
                w = tl.load(weights + line + r[:, None] * SP + t[None, :], (r < R)[:, None], 0.0)
                lift = tl.load(stats + (FACTOR * heads * R + h * R + r) * width + b, r < R, 0.0)
                if exact:
                    if b == blocks:
                        mask = (t < tail_tokens)[:, None] & (c < D)[None, :]
                        at = tail + ((heads + h) * S + t[:, None]) * D + c[None, :]
                        v = tl.load(at, mask, 0.0).to(tl.float32)
                    else:
                        slot = tl.load(slots + (heads + h) * pitch + b)
                        v = original_rows(
                            pool, host, slot, heads + h, h, b, capacity, host_pitch, S, SP, D, DP
                        )
                    here = tl.dot(w, v, input_precision="ieee")
                else:
                    row = (h * pitch + b).to(tl.int64)
                    coded = decoded_values(packed, first, second, marks, row, S, SP, D, DP, G, TWO)
                    high, low = two_halves(w * 16384.0)
                    here = (tl.dot(high, coded) + tl.dot(low, coded) * (1.0 / 2048.0)) * (1.0 / 16384.0)
                total += lift[:, None] * here
        place = partial + (((parts if LATE else 0) + part) * heads * R + h * R + r[:, None]) * D + c[None, :]
        tl.store(place, total, (r < R)[:, None] & (c < D)[None, :])
