"""Arithmetic that several kernels share, and how far each piece may be from exact arithmetic.

Floating-point contraction is off in every kernel (`OPTIONS`): a product and a sum are two roundings, so that
a value decoded while sealing and one decoded while reading are the same number.
"""

import triton
import triton.language as tl

WARPS = 8
OPTIONS = {"enable_fp_fusion": False, "num_warps": WARPS}
"""Compile options of every kernel."""
COUNTS = ["blocks", "tail_tokens", "step", "begin", "per"]
"""Arguments that change from step to step: no kernel is compiled anew for a special value of one."""
RINT = tl.constexpr(6755399441055744.0)  # 1.5 * 2**52: adding and taking it away rounds half to even


@triton.jit
def nearest(x):
    """Round float64 `x` (below 2^51) to an integer, ties to even."""
    return (x + RINT) - RINT


@triton.jit
def half_up(x):
    """Return the smallest float16 that is not below the float64 `x`; +inf on overflow."""
    rounded = x.to(tl.float32).to(tl.float16)
    bits = rounded.to(tl.int16, bitcast=True)
    step = tl.where(bits < 0, -1, 1).to(tl.int16)
    above = (bits + step).to(tl.float16, bitcast=True)
    tiny = tl.full(rounded.shape, 5.9604644775390625e-08, tl.float16)
    return tl.where(rounded.to(tl.float64) < x, tl.where(rounded == 0, tiny, above), rounded)


@triton.jit
def single_up(x):
    """Return the smallest float32 that is not below the float64 `x`; +inf on overflow."""
    rounded = x.to(tl.float32)
    bits = rounded.to(tl.int32, bitcast=True)
    above = (bits + tl.where(bits < 0, -1, 1)).to(tl.float32, bitcast=True)
    tiny = tl.full(rounded.shape, 1.1754943508222875e-38, tl.float32)
    return tl.where(rounded.to(tl.float64) < x, tl.where(rounded == 0, tiny, above), rounded)


@triton.jit
def finite(x):
    """Return whether `x` is neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def or_infinite(x):
    """Return `x`, NaN as +inf: a bound that cannot be evaluated bounds nothing."""
    return tl.where(x == x, x, float("inf"))


@triton.jit
def growth(x):
    """Return expm1(x) of float64 x >= 0, relative error below 2^-48: a series below 1/4, else exp(x) - 1."""
    small = tl.minimum(x, 0.25)
    series = small * 0.0 + 1.0
    for i in tl.static_range(13, 1, -1):
        series = 1.0 + series * small / i
    return tl.where(x < 0.25, series * small, tl.exp(x) - 1.0)


@triton.jit
def shrinkage(x):
    """Return -expm1(-x) of float64 x >= 0."""
    up = growth(tl.minimum(x, 700.0))
    return up / (1.0 + up)


@triton.jit
def two_halves(x):
    """Return float16 hi and lo with |x - hi - lo / 2^11| <= 2^-22 |x| + 2^-13, for |x| <= 2^15.

    x - hi is exact in float32 and at most 2^-11 |x|, so that lo neither overflows nor loses more than its own
    last bit. The absolute part also covers devices that take a subnormal operand (below 2^-14) for zero.
    """
    high = x.to(tl.float16)
    low = ((x - high.to(tl.float32)) * 2048.0).to(tl.float16)
    return high, low


@triton.jit
def power_of_two(x):
    """Return 2^floor(log2 x) of float32 x >= 0 within 2^-112 to 2^127, as float32."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 15), 254)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def odd(index):
    """Return an odd 64-bit multiplier for word `index` of a fingerprint."""
    return (index.to(tl.int64) * -7046029254386353131) | 1


@triton.jit
def print_words(words, index, mask):
    """Return the sum modulo 2^64 of words times odd numbers: a change inside one word always shows."""
    return tl.sum(tl.sum(tl.where(mask, words.to(tl.int64) * odd(index), 0), 1), 0)
