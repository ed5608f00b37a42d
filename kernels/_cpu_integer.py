# ruff: noqa: ARG001 - Numba fixes the parameters of an intrinsic, used or not
"""The two integer kernels, written as vector instructions: codes times queries, and codes times weights."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rcq_cli.kernels._cpu_vector import (
    AVX2,
    INTS,
    LANES,
    WIDE,
    X86,
    address,
    call,
    i64,
    prefetch_at,
    splat_of,
)

TILE = 16
"""Tokens that the score kernel takes at a time, and channels that the value kernel takes."""
TEAM = 4
"""Query heads that share one read of the codes."""
_i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (8, 16, 32, 64))


def _multiply_pairs(builder: Any, x: Any, y: Any) -> Any:
    """Return x0*y0 + x1*y1 per pair of 16-bit numbers, `<LANES x i32>`."""
    shorts = ir.VectorType(_i16, 2 * LANES)
    x, y = builder.bitcast(x, shorts), builder.bitcast(y, shorts)
    if X86 and (AVX2 or WIDE):
        name = "llvm.x86.avx512.pmaddw.d.512" if WIDE else "llvm.x86.avx2.pmadd.wd"
        return call(builder, name, INTS, x, y)
    products = []
    for offset in (0, 1):
        mask = ir.Constant(INTS, [2 * i + offset for i in range(LANES)])
        parts = [builder.sext(builder.shuffle_vector(v, v, mask), INTS) for v in (x, y)]
        products.append(builder.mul(*parts))
    return builder.add(*products)


def _accumulators(builder: Any, count: int) -> list[Any]:
    cells = [cgutils.alloca_once(builder, INTS) for _ in range(count)]
    for cell in cells:
        builder.store(ir.Constant(INTS, None), cell)
    return cells


def _accumulate(builder: Any, cell: Any, product: Any) -> None:
    builder.store(builder.add(builder.load(cell), product), cell)


def dots_kernel(team: int) -> Any:
    """Return the kernel of scores: TILE tokens times `team` queries, exact in int32.

    dots(codes, at, stride, ahead, query, first, pairs, to, row): codes at byte `at`, `stride` bytes a channel
    pair, those needed next `ahead` bytes further on; int16 query pairs in `query` from word `first`, one head
    after the other; sums to `query[to + head * row + token]`.
    """

    def dots(
        typing: Any, codes: Any, at: Any, stride: Any, ahead: Any, query: Any, first: Any, pairs: Any,
        to: Any, row: Any,
    ) -> Any:  # fmt: skip

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            codes, at, stride, ahead, query, first, pairs, to, row = values
            vectors, unroll = TILE // LANES, 2 if WIDE else 1
            cells = _accumulators(builder, team * vectors * unroll)
            shorts = ir.VectorType(_i16, 2 * LANES)
            with cgutils.for_range(builder, builder.udiv(pairs, _i64(unroll))) as loop:
                for u in range(unroll):
                    pair = builder.add(builder.mul(loop.index, _i64(unroll)), _i64(u))
                    base = builder.add(at, builder.mul(pair, stride))
                    prefetch_at(builder, address(builder, codes, builder.add(base, ahead), _i8))
                    data = []
                    for v in range(vectors):
                        where = address(
                            builder,
                            codes,
                            builder.add(base, _i64(v * 2 * LANES)),
                            ir.VectorType(_i8, 2 * LANES),
                        )
                        data.append(builder.sext(builder.load(where, align=1), shorts))
                    for h in range(team):
                        index = builder.add(builder.add(first, pair), builder.mul(pairs, _i64(h)))
                        q = splat_of(builder, builder.load(address(builder, query, index, _i32), align=1))
                        for v in range(vectors):
                            cell = cells[(u * team + h) * vectors + v]
                            _accumulate(builder, cell, _multiply_pairs(builder, data[v], q))
            for h in range(team):
                for v in range(vectors):
                    parts = [builder.load(cells[(u * team + h) * vectors + v]) for u in range(unroll)]
                    result = parts[0] if unroll == 1 else builder.add(*parts)
                    index = builder.add(builder.add(to, builder.mul(row, _i64(h))), _i64(v * LANES))
                    builder.store(result, address(builder, query, index, INTS), align=1)
            return context.get_dummy_value()

        return types.void(codes, i64, i64, i64, query, i64, i64, i64, i64), code

    return intrinsic(dots)


def mix_kernel(team: int) -> Any:
    """Return the kernel of values: TILE channels of a block times `team` rows of weights, exact in int32.

    mix(words, at, stride, ahead, octets, weights, first, row, to, out_row): words of eight codes at byte
    `at`, `stride` bytes an octet of tokens, those needed next `ahead` bytes on; weight pairs (tokens p and
    p + P/2) in `weights` from word `first`, `row` words a head; sums to `weights[to + head * out_row +
    channel]`.
    """

    def mix(
        typing: Any,
        words: Any,
        at: Any,
        stride: Any,
        ahead: Any,
        octets: Any,
        weights: Any,
        first: Any,
        row: Any,
        to: Any,
        out_row: Any,
    ) -> Any:

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            words, at, stride, ahead, octets, weights, first, row, to, out_row = values
            vectors = TILE // LANES
            cells = _accumulators(builder, team * vectors)
            nibbles = ir.Constant(INTS, [0x000F000F] * LANES)
            with cgutils.for_range(builder, octets) as loop:
                base = builder.add(at, builder.mul(loop.index, stride))
                prefetch_at(builder, address(builder, words, builder.add(base, ahead), _i8))
                data = []
                for v in range(vectors):
                    where = address(
                        builder,
                        words,
                        builder.add(base, _i64(v * 4 * LANES)),
                        INTS,
                    )
                    data.append(builder.load(where, align=1))
                pair = builder.add(first, builder.mul(loop.index, _i64(4)))
                for k in range(4):
                    shift = ir.Constant(INTS, [4 * k] * LANES)
                    codes = [builder.and_(builder.lshr(x, shift) if k else x, nibbles) for x in data]
                    for h in range(team):
                        index = builder.add(builder.add(pair, _i64(k)), builder.mul(row, _i64(h)))
                        weight = splat_of(
                            builder, builder.load(address(builder, weights, index, _i32), align=1)
                        )
                        for v in range(vectors):
                            product = _multiply_pairs(builder, codes[v], weight)
                            _accumulate(builder, cells[h * vectors + v], product)
            for h in range(team):
                for v in range(vectors):
                    index = builder.add(builder.add(to, builder.mul(out_row, _i64(h))), _i64(v * LANES))
                    where = address(builder, weights, index, INTS)
                    builder.store(builder.load(cells[h * vectors + v]), where, align=1)
            return context.get_dummy_value()

        return types.void(words, i64, i64, i64, i64, weights, i64, i64, i64, i64), code

    return intrinsic(mix)
