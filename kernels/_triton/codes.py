"""How tier 1 is read: keys from INT8 codes, values from INT4 codes, in the arithmetic that sealing measured.

Layouts are those of the reference backend (`kernels/README.md`), blocks contiguous per KV head. A block is
addressed by `row = h * pitch + b`, where `pitch` is the number of blocks there is room for.
"""

import triton
import triton.language as tl

from rcq_cli.kernels._triton.arithmetic import power_of_two, two_halves

# roundoff charged for tensor cores, which truncate and reorder (theory 7.2)
CORE = tl.constexpr(2.0**-22)
# exp of a difference up to 104 in float32, a factor up to the row's peak, and underflow of products, in nats
EXP_SLACK = tl.constexpr(2.5e-5)
MARGIN = tl.constexpr(1.0 + 2.0**-12)
# products of a channel that underflow, times a code
UNDERFLOW = tl.constexpr(2.0**-118)


@triton.jit
def value_scale(
    first, second, marks, row, t, c, S: tl.constexpr, D: tl.constexpr, G: tl.constexpr, TWO: tl.constexpr
):  # fmt: skip
    """Return float32 scale and offset of the values at tokens `t` [SP, 1] and channels `c` [1, n].

    Two-level: low + a * step and (b - a) * step / 15; else stored per token and group. Every operation is
    rounded to float32, in this order, wherever a value is decoded.
    """
    mask = (t < S) & (c < D)
    group = c // G
    if TWO:
        low = tl.load(first + row * S + t, t < S, 0.0).to(tl.float32)
        step = tl.load(second + row * S + t, t < S, 0.0).to(tl.float32)
        at = marks + ((row * S + t) * (D // G) + group) * 2
        a = tl.load(at, mask, 0).to(tl.float32)
        b = tl.load(at + 1, mask, 0).to(tl.float32)
        return (b - a) * step * (1.0 / 15.0), low + a * step
    at = (row * S + t) * (D // G) + group
    return tl.load(first + at, mask, 0.0).to(tl.float32), tl.load(second + at, mask, 0.0).to(tl.float32)


@triton.jit
def decoded_values(
    packed, first, second, marks, row, S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    G: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Return the float16 values [SP, DP] of a block; rows and channels beyond it are zero.

    The rounding to float16 belongs to the code: eta is measured behind it.
    """
    t = tl.arange(0, SP)[:, None]
    pair = tl.arange(0, DP // 2)[None, :]
    mask = (t < S) & (pair < D // 2)
    byte = tl.load(packed + (row * S + t) * (D // 2) + pair, mask, 0)
    s, z = value_scale(first, second, marks, row, t, 2 * pair, S, D, G, TWO)
    even = (byte & 15).to(tl.float32) * s + z
    s, z = value_scale(first, second, marks, row, t, 2 * pair + 1, S, D, G, TWO)
    odd = (byte >> 4).to(tl.float32) * s + z
    even, odd = tl.where(mask, even, 0.0), tl.where(mask, odd, 0.0)
    return tl.interleave(even, odd).to(tl.float16)


@triton.jit
def coded_scores(
    query, codes, scale, offset, row, factor, S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Return float32 scores [SP, RP] of a block and what they may be off by beside rk and slack, [RP].

    q * s is formed in float32, brought to 2^14 by a power of two and split into two float16 parts, exact
    integers against it on the tensor cores, float32 sums. The second result is half a step per channel,
    D0 = sum |q s| / 2; the third what the split loses, a code of 128 at most times the error of each channel,
    128 * (2^-22 sum |q s| + D * 2^-13 * unit), `unit` at most 2^-14 max |q s| unless that is below 2^-112.
    `query` is [RP, DP].
    """
    t, c = tl.arange(0, SP), tl.arange(0, DP)
    here = tl.load(codes + (row * S + t[:, None]) * D + c[None, :], (t < S)[:, None] & (c < D)[None, :], 0)
    step = tl.load(scale + row * D + c, c < D, 0.0).to(tl.float32)
    shift = tl.load(offset + row * D + c, c < D, 0.0).to(tl.float32)
    folded = query * step[None, :]
    size = tl.abs(folded)
    largest, whole = tl.max(size, 1), tl.sum(size, 1)
    unit = power_of_two(largest) * (1.0 / 16384.0)
    high, low = two_halves(folded * (1.0 / unit)[:, None])
    here = here.to(tl.float16)
    dots = tl.dot(here, tl.trans(high)) + tl.dot(here, tl.trans(low)) * (1.0 / 2048.0)
    constant = tl.sum(query * shift[None, :], 1)
    scores = (dots * unit[None, :] + constant[None, :]) * factor
    lost = whole * (128.0 * 2.0**-22) + unit * (D * 2.0**-6) + D * UNDERFLOW
    return scores, whole * 0.5, lost


@triton.jit
def exact_scores(query, keys, factor):
    """Return float32 scores [SP, RP] of original keys [SP, DP]."""
    return tl.dot(keys, tl.trans(query), input_precision="ieee") * factor


@triton.jit
def slack_of(norm, reach, factor, D: tl.constexpr):
    """Return how far rounding may take a score and its exponential, in nats (theory 7.1 and 7.2).

    theta(D + 16) ||q|| (kappa + rk) |scale|: the dot product in any order, dequantisation, both parts, scale.
    """
    theta = (D + 16) * CORE / (1 - (D + 16) * CORE)
    return (norm * reach * (theta * MARGIN) + D * UNDERFLOW) * tl.abs(factor) + EXP_SLACK


@triton.jit
def breadth(norm, sk, rest, delta, factor, S: tl.constexpr):
    """Return the norm of the score errors of a block over the largest one, at most sqrt(S), [RP].

    Errors due to K - K' have norm ||q|| |scale| sk at most; `rest` of `delta` has other causes.
    """
    most = S**0.5 * MARGIN
    wide = (norm * sk * tl.abs(factor) + rest * most) * MARGIN / delta
    return tl.where(wide < most, wide, most)


@triton.jit
def query_rows(q, h, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Return the float32 queries [RP, DP] of KV head `h`, and upper bounds of their norms [RP]."""
    r, c = tl.arange(0, RP), tl.arange(0, DP)
    mask = (r < R)[:, None] & (c < D)[None, :]
    rows = tl.load(q + (h * R + r)[:, None] * D + c[None, :], mask, 0.0).to(tl.float32)
    return rows, tl.sqrt(tl.sum(rows * rows, 1)) * MARGIN + 1e-18
