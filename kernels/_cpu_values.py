# ruff: noqa: ARG001 - Numba fixes the parameters of an intrinsic, used or not
"""Kernels in vector instructions for coded values: weights times scales, codes times weights."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rcq_cli.kernels._cpu_integer import LINE, TILE, accumulators, add_to, multiply_pairs
from rcq_cli.kernels._cpu_vector import (
    FLOAT_LANES,
    INTS,
    LANES,
    NARROW,
    address,
    f32,
    fma_of,
    i64,
    pairs_of,
    prefetch_at,
    splat_of,
)

_i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_f16, _f32 = ir.HalfType(), ir.FloatType()
SCALE_ASKS = 128
"""Bytes a group of values of a later block that are asked for while weights are scaled."""


def _gain(builder: Any, cell: Any, x: Any, y: Any) -> None:
    """Add x * y to a vector."""
    builder.store(fma_of(builder, x, y, builder.load(cell)), cell)


def _put(builder: Any, pointer: Any, index: Any, vector: Any) -> None:
    builder.store(vector, address(builder, pointer, index, vector.type), align=1)


def _reader(builder: Any, pointer: Any, lanes: int = LANES) -> Callable[[Any, ir.Type], Any]:
    """Return a function that reads numbers of a type at an index of `pointer`."""

    def read(index: Any, kind: ir.Type) -> Any:
        return builder.load(address(builder, pointer, index, ir.VectorType(kind, lanes)), align=1)

    return read


def _plus(builder: Any, *numbers: Any) -> Any:
    result = numbers[0]
    for number in numbers[1:]:
        result = builder.add(result, number if isinstance(number, ir.Value) else _i64(number))
    return result


def _times(builder: Any, number: Any, factor: int) -> Any:
    return builder.mul(number, _i64(factor))


def _entries(builder: Any, pointer: Any, count: int) -> list[Any]:
    """Return the first numbers of an array."""
    return [builder.load(builder.gep(pointer, [_i64(i)])) for i in range(count)]


def scale_kernel(team: int, two_level: bool) -> Any:
    """Return the kernel that multiplies weights by the steps of values.

    scale(values, meta, soon, padded, groups, weights, to, factors, unit, back, floats, ints, gathered, lows,
    offsets): metadata at byte `meta`; weights of member i at `weights[to[i]:]`. Writes pairs of weight * step
    * unit, rounded, to `ints[(group * team + i) * P/2:]`, and adds factor * weight * offset to
    `gathered[offsets[i] + group * LANES:]`. Asks for SCALE_ASKS bytes a group from byte `soon` on.

    Metadata of two levels: low and width of every token in float16; per group and token the low end, then
    the high end, in bytes. There a step is width * (high - low), the lows go to `gathered[lows[i]:]`, the
    offsets are the low ends times width * unit, times `back`, and `floats` is scratch. Of one level: per
    group and token the step, then the offset, in float16.
    """

    def scale(
        typing: Any, values: Any, meta: Any, soon: Any, padded: Any, groups: Any, weights: Any, to: Any,
        factors: Any, unit: Any, back: Any, floats: Any, ints: Any, gathered: Any, lows: Any, offsets: Any,
    ) -> Any:  # fmt: skip

        def passes(builder: Any, arguments: Any, lanes: int) -> None:
            """Emit the kernel for `lanes` token pairs at a time."""
            (
                values, meta, soon, padded, groups, weights, to, factors, unit, back, floats, ints, gathered,
                lows, offsets,
            ) = arguments  # fmt: skip
            reals, integers = ir.VectorType(_f32, lanes), ir.VectorType(_i32, lanes)
            byte, scratch, weight, sums = (
                _reader(builder, x, lanes) for x in (values, floats, weights, gathered)
            )
            starts, lows, offsets = (_entries(builder, x, team) for x in (to, lows, offsets))
            own = [splat_of(builder, x, lanes) for x in _entries(builder, factors, team)]
            unit, pairs = splat_of(builder, unit, lanes), builder.lshr(padded, _i64(1))
            cells = accumulators(builder, team, reals)
            marks = builder.mul(groups, padded)

            def token_levels() -> None:
                """Multiply weights by the widths of their tokens, and add up what the lows come to."""
                with cgutils.for_range(builder, builder.udiv(padded, _i64(lanes))) as loop:
                    t = _times(builder, loop.index, lanes)
                    here = _plus(builder, meta, _times(builder, t, 2))
                    low = builder.fpext(byte(here, _f16), reals)
                    wide = builder.fpext(byte(_plus(builder, here, _times(builder, padded, 2)), _f16), reals)
                    wide = builder.fmul(wide, unit)
                    for i, (start, cell) in enumerate(zip(starts, cells, strict=True)):
                        w = weight(_plus(builder, start, t), _f32)
                        _gain(builder, cell, w, low)
                        place = _plus(builder, _times(builder, padded, i), t)
                        _put(builder, floats, place, builder.fmul(w, wide))
                for cell, place, factor in zip(cells, lows, own, strict=True):
                    found = fma_of(builder, builder.load(cell), factor, sums(place, _f32))
                    _put(builder, gathered, place, found)

            def levels(at: Any) -> tuple[Any, Any]:
                """Return steps and offsets of a group, those of its tokens from mark `at` on."""
                if two_level:
                    start = _plus(builder, meta, _times(builder, padded, 4), at)
                    low = builder.zext(byte(start, _i8), integers)
                    high = builder.zext(byte(_plus(builder, start, marks), _i8), integers)
                    return builder.sitofp(builder.sub(high, low), reals), builder.sitofp(low, reals)
                start = _plus(builder, meta, _times(builder, at, 2))
                step = builder.fpext(byte(start, _f16), reals)
                low = builder.fpext(byte(_plus(builder, start, _times(builder, marks, 2)), _f16), reals)
                return builder.fmul(step, unit), low

            if two_level:
                token_levels()
                own = [builder.fmul(x, splat_of(builder, back, lanes)) for x in own]
            with cgutils.for_range(builder, groups) as outer:
                g = outer.index
                for line in range(0, SCALE_ASKS, LINE):
                    later = _plus(builder, soon, _times(builder, g, SCALE_ASKS), line)
                    prefetch_at(builder, address(builder, values, later, _i8))
                for cell in cells:
                    builder.store(ir.Constant(reals, None), cell)
                with cgutils.for_range(builder, builder.udiv(pairs, _i64(lanes))) as loop:
                    p = _times(builder, loop.index, lanes)
                    here = _plus(builder, builder.mul(g, padded), p)
                    both = [levels(x) for x in (here, _plus(builder, here, pairs))]
                    for i, (start, cell) in enumerate(zip(starts, cells, strict=True)):
                        place = _plus(builder, _times(builder, padded, i) if two_level else start, p)
                        source = scratch if two_level else weight
                        halves = [source(x, _f32) for x in (place, _plus(builder, place, pairs))]
                        for x, (_, low) in zip(halves, both, strict=True):
                            _gain(builder, cell, x, low)
                        products = [(x, step) for x, (step, _) in zip(halves, both, strict=True)]
                        row = builder.mul(_plus(builder, _times(builder, g, team), i), pairs)
                        _put(builder, ints, _plus(builder, row, p), pairs_of(builder, *products))
                for cell, place, factor in zip(cells, offsets, own, strict=True):
                    at = _plus(builder, place, _times(builder, g, LANES))
                    _put(builder, gathered, at, fma_of(builder, builder.load(cell), factor, sums(at, _f32)))

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            if LANES == NARROW:
                passes(builder, arguments, LANES)
                return context.get_dummy_value()
            # half a block fills no wide vector where P / 2 is no multiple of one
            left = builder.urem(builder.lshr(arguments[3], _i64(1)), _i64(LANES))
            with builder.if_else(builder.icmp_unsigned("==", left, _i64(0))) as (then, otherwise):
                with then:
                    passes(builder, arguments, LANES)
                with otherwise:
                    passes(builder, arguments, NARROW)
            return context.get_dummy_value()

        parameters = (
            values, i64, i64, i64, i64, weights, to, factors, f32, f32, floats, ints, gathered, lows, offsets,
        )  # fmt: skip
        return types.void(*parameters), code

    return intrinsic(scale)


def nibble_of(builder: Any, words: Any, k: int) -> Any:
    """Return nibble `k` of every 16-bit half of the words."""
    if k == 3:  # nothing stands above it
        shorts = ir.VectorType(_i16, 2 * LANES)
        top = builder.lshr(builder.bitcast(words, shorts), ir.Constant(shorts, [12] * 2 * LANES))
        return builder.bitcast(top, INTS)
    shifted = builder.lshr(words, ir.Constant(INTS, [4 * k] * LANES)) if k else words
    return builder.and_(shifted, ir.Constant(INTS, [0x000F000F] * LANES))


def mix_kernel(team: int) -> Any:
    """Return the kernel of values: TILE channels of a block times `team` rows of weights, exact in int32.

    mix(words, at, stride, soon, step, octets, weights, first, row, gathered, to, channel, scales): words of
    eight codes at byte `at`, `stride` bytes an octet of tokens; weight pairs (tokens p and p + P/2) in
    `weights` from word `first`, `row` words a member; adds the sums of member i times `scales[i]` to
    `gathered[to[i] + channel:]`. Asks for `step` bytes an octet from byte `soon` on.
    """

    def mix(
        typing: Any, words: Any, at: Any, stride: Any, soon: Any, step: Any, octets: Any, weights: Any,
        first: Any, row: Any, gathered: Any, to: Any, channel: Any, scales: Any,
    ) -> Any:  # fmt: skip

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            (
                words, at, stride, soon, step, octets, weights, first, row, gathered, to, channel, scales,
            ) = values  # fmt: skip
            vectors, sums = TILE // LANES, _reader(builder, gathered)
            chains = max(1, 4 // (team * vectors))  # one sum would wait for itself
            cells = accumulators(builder, team * vectors * chains)
            with cgutils.for_range(builder, octets) as loop:
                base = builder.add(at, builder.mul(loop.index, stride))
                later = builder.add(soon, builder.mul(loop.index, step))
                prefetch_at(builder, address(builder, words, later, _i8))
                data = [
                    builder.load(address(builder, words, _plus(builder, base, v * 4 * LANES), INTS), align=1)
                    for v in range(vectors)
                ]
                pair = _plus(builder, first, _times(builder, loop.index, 4))
                for k in range(4):
                    codes = [nibble_of(builder, x, k) for x in data]
                    for h in range(team):
                        index = _plus(builder, pair, k, _times(builder, row, h))
                        weight = builder.load(address(builder, weights, index, _i32), align=1)
                        weight = splat_of(builder, weight)
                        for v in range(vectors):
                            product = multiply_pairs(builder, codes[v], weight)
                            add_to(builder, cells[(h * vectors + v) * chains + k % chains], product)
            factors, places = _entries(builder, scales, team), _entries(builder, to, team)
            for h, (factor, place) in enumerate(zip(factors, places, strict=True)):
                for v in range(vectors):
                    index = _plus(builder, place, channel, v * LANES)
                    first_ = (h * vectors + v) * chains
                    parts = [builder.load(cell) for cell in cells[first_ : first_ + chains]]
                    found = builder.sitofp(_plus(builder, *parts), FLOAT_LANES)
                    found = fma_of(builder, found, splat_of(builder, factor), sums(index, _f32))
                    _put(builder, gathered, index, found)
            return context.get_dummy_value()

        parameters = words, i64, i64, i64, i64, i64, weights, i64, i64, gathered, to, i64, scales
        return types.void(*parameters), code

    return intrinsic(mix)
