# ruff: noqa: ARG001 - Numba fixes the parameters of an intrinsic, used or not
"""Kernels in vector instructions: folding queries, codes times queries, hashing."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rcq_cli.kernels._cpu_vector import (
    AVX2,
    FLOAT_LANES,
    INTS,
    LANES,
    WIDE,
    X86,
    across,
    add_of,
    address,
    call,
    f32,
    fma_of,
    i64,
    joined,
    larger_of,
    prefetch_at,
    round_of,
    size_of,
    splat_of,
)

TILE = 16
"""Tokens that blocks are padded to, and channels that the kernel of values takes at a time."""
SPAN = 2 * LANES
"""Tokens that the kernel of scores takes at a time, TILE where no whole number of these fits."""
LINE = 64
"""Bytes of a cache line."""
FOLD_ASKS = 12
"""Bytes a channel of a later block that are asked for while queries are folded."""
TINY = 1e-30
"""A folded query that is nowhere larger counts as zero."""
_i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_f32 = ir.FloatType()


def multiply_pairs(builder: Any, x: Any, y: Any) -> Any:
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


def accumulators(builder: Any, count: int, kind: Any = INTS) -> list[Any]:
    """Return `count` vectors that are 0."""
    cells = [cgutils.alloca_once(builder, kind) for _ in range(count)]
    for cell in cells:
        builder.store(ir.Constant(kind, None), cell)
    return cells


def add_to(builder: Any, cell: Any, product: Any) -> None:
    builder.store(builder.add(builder.load(cell), product), cell)


def shorts_of(builder: Any, words: list[Any]) -> Any:
    """Return the low halves of TILE words in one vector."""
    return builder.trunc(joined(builder, words), ir.VectorType(_i16, TILE))


def fold_kernel(team: int) -> Any:
    """Return the kernel that folds `team` queries into the scales of a block of keys.

    fold(floats, dim, query, first, steps, ints, meta, codes, soon): scale at `floats[:dim]`, offset at
    `floats[dim:]`; one query after the other from `query[first]`. Writes q s in units of its largest /
    `steps`, as int16, one query after the other, to `ints`; and to `floats[meta:]` four numbers each, one a
    query: units, sums of |q s|, q . z. Asks for FOLD_ASKS bytes a channel from byte `soon` of `codes` on.
    """

    def fold(
        typing: Any, floats: Any, dim: Any, query: Any, first: Any, steps: Any, ints: Any, meta: Any,
        codes: Any, soon: Any,
    ) -> Any:  # fmt: skip

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            floats, dim, query, first, steps, ints, meta, codes, soon = values
            cells = [[cgutils.alloca_once(builder, FLOAT_LANES) for _ in range(3)] for _ in range(team)]
            for cell in (cell for row in cells for cell in row):
                builder.store(ir.Constant(FLOAT_LANES, None), cell)

            def at(pointer: Any, *offsets: Any) -> Any:
                index = offsets[0]
                for offset in offsets[1:]:
                    index = builder.add(index, offset)
                return builder.load(address(builder, pointer, index, FLOAT_LANES), align=1)

            def ask(offset: Any) -> None:
                prefetch_at(builder, address(builder, codes, builder.add(soon, offset), _i8))

            rows = [builder.add(first, builder.mul(dim, _i64(i))) for i in range(team)]
            width = team if WIDE else 2  # more queries at a time do not fit the registers
            for low in range(0, team, width):
                with cgutils.for_range(builder, builder.udiv(dim, _i64(LANES))) as loop:
                    c = builder.mul(loop.index, _i64(LANES))
                    if low == 0:
                        ask(builder.mul(c, _i64(4)))
                    scale, offset = at(floats, c), at(floats, dim, c)
                    chosen = zip(rows[low : low + width], cells[low : low + width], strict=True)
                    for row, (top, absolute, shift) in chosen:
                        q = at(query, row, c)
                        size = size_of(builder, builder.fmul(q, scale))
                        builder.store(larger_of(builder, size, builder.load(top)), top)
                        builder.store(builder.fadd(builder.load(absolute), size), absolute)
                        builder.store(fma_of(builder, q, offset, builder.load(shift)), shift)
            spare = 4 - team
            sums = [
                [builder.load(cell) for cell in (*column, *column[:1] * spare)]
                for column in zip(*cells, strict=True)
            ]
            peaks = across(builder, sums[0], larger_of)
            zero, most = ir.Constant(peaks.type, None), splat_of(builder, steps, 4)
            some = builder.fcmp_ordered(">", peaks, ir.Constant(peaks.type, [TINY] * 4))
            units, inverses = (
                builder.select(some, builder.fdiv(*pair), zero) for pair in ((peaks, most), (most, peaks))
            )
            numbers = units, *(across(builder, column, add_of) for column in sums[1:])
            for k, four in enumerate(numbers):
                where = address(builder, floats, builder.add(meta, _i64(4 * k)), four.type)
                builder.store(four, where, align=1)
            inverses = [splat_of(builder, builder.extract_element(inverses, _i32(i))) for i in range(team)]
            with cgutils.for_range(builder, builder.udiv(dim, _i64(TILE))) as loop:
                c = builder.mul(loop.index, _i64(TILE))
                parts = [builder.add(c, _i64(n)) for n in range(0, TILE, LANES)]
                scales = [at(floats, part) for part in parts]
                later = builder.add(builder.mul(dim, _i64(4)), builder.mul(c, _i64(8)))
                ask(later)
                for i, (row, inverse) in enumerate(zip(rows, inverses, strict=True)):
                    if i == team // 2:
                        ask(builder.add(later, _i64(LINE)))
                    folded = [builder.fmul(at(query, row, n), s) for n, s in zip(parts, scales, strict=True)]
                    rounded = [round_of(builder, x, inverse) for x in folded]
                    shorts = shorts_of(builder, rounded)
                    to = builder.add(builder.mul(dim, _i64(i)), c)
                    pointer = builder.gep(builder.bitcast(ints, _i16.as_pointer()), [to])
                    builder.store(shorts, builder.bitcast(pointer, shorts.type.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(floats, i64, query, i64, f32, ints, i64, codes, i64), code

    return intrinsic(fold)


HASH_BYTES = 32
"""What is hashed is a multiple of this long."""
_HASH_CHAINS, _HASH_STEP = 4, 2 * 10139


@intrinsic
def hash_words(typing: Any, data: Any, at: Any, count: Any, seed: Any, ahead: Any) -> Any:
    """Return a multilinear hash modulo 2^64 of `count` bytes (a multiple of HASH_BYTES) at byte `at`.

    Each 16-bit number is multiplied by an odd one of its own, modulo 2^32, and each sum of such products by
    another, so a change inside one number always shows. Asks for the bytes `ahead` of those it reads.
    """

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data, at, count, seed, ahead = values
        shorts, wide = ir.VectorType(_i16, 2 * LANES), ir.VectorType(_i64, LANES)
        line = 4 * LANES
        turn = _HASH_CHAINS * line

        def numbers(count: int, bits: int) -> list[int]:
            """Return odd numbers that are not alike."""
            return [((i + 1) * 0x9E3779B97F4A7C15 >> 64 - bits) % 2**bits | 1 for i in range(count)]

        def steps(times: int) -> Any:
            return ir.Constant(shorts, [times * _HASH_STEP % 2**16] * 2 * LANES)

        begun = splat_of(builder, builder.trunc(builder.mul(seed, _i64(2)), _i16), 2 * LANES)
        odd = builder.add(begun, ir.Constant(shorts, numbers(2 * LANES, 16)))
        factors = cgutils.alloca_once_value(builder, odd)
        sums = accumulators(builder, _HASH_CHAINS)
        with cgutils.for_range(builder, builder.udiv(count, _i64(turn))) as loop:
            where, own = builder.add(at, builder.mul(loop.index, _i64(turn))), builder.load(factors)
            for i, total in enumerate(sums):
                here = builder.add(where, _i64(i * line))
                if i * line % LINE == 0:
                    prefetch_at(builder, address(builder, data, builder.add(here, ahead), _i8))
                words = builder.load(address(builder, data, here, INTS), align=1)
                add_to(builder, total, multiply_pairs(builder, words, builder.add(own, steps(i))))
            builder.store(builder.add(own, steps(_HASH_CHAINS)), factors)
        left = builder.urem(count, _i64(turn))
        rest = builder.add(at, builder.sub(count, left))
        with cgutils.for_range(builder, builder.udiv(left, _i64(HASH_BYTES))) as loop:
            here = builder.add(rest, builder.mul(loop.index, _i64(HASH_BYTES)))
            words = builder.load(address(builder, data, here, ir.VectorType(_i32, 8)), align=1)
            order = ir.Constant(INTS, list(range(LANES)))
            words = builder.shuffle_vector(words, ir.Constant(words.type, None), order)
            own = builder.load(factors)
            add_to(builder, sums[0], multiply_pairs(builder, words, own))
            builder.store(builder.add(own, steps(1)), factors)
        weights = numbers(_HASH_CHAINS * LANES, 32)
        result = ir.Constant(wide, None)
        for i, total in enumerate(sums):
            own = ir.Constant(wide, weights[i * LANES : (i + 1) * LANES])
            result = builder.add(result, builder.mul(builder.zext(builder.load(total), wide), own))
        return call(builder, f"llvm.vector.reduce.add.v{LANES}i64", _i64, result)

    return types.int64(data, i64, i64, i64, i64), code


def dots_kernel(team: int, span: int) -> Any:
    """Return the kernel of scores: `span` tokens times `team` queries, exact in int32.

    dots(codes, at, stride, soon, query, first, pairs, sums, to, row): codes at byte `at`, `stride` bytes a
    channel pair; int16 query pairs in `query` from word `first`, one head after the other; integers to where
    `sums[to + head * row + token]` is, a number as long. Asks for half as many bytes as it reads, which are
    needed later, from byte `soon` on.
    """

    def dots(
        typing: Any, codes: Any, at: Any, stride: Any, soon: Any, query: Any, first: Any, pairs: Any,
        sums: Any, to: Any, row: Any,
    ) -> Any:  # fmt: skip

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            codes, at, stride, soon, query, first, pairs, sums, to, row = values
            vectors, unroll = span // LANES, 2 if WIDE else 1
            cells = accumulators(builder, team * vectors * unroll)
            shorts = ir.VectorType(_i16, 2 * LANES)
            with cgutils.for_range(builder, builder.udiv(pairs, _i64(unroll))) as loop:
                for u in range(unroll):
                    pair = builder.add(builder.mul(loop.index, _i64(unroll)), _i64(u))
                    base = builder.add(at, builder.mul(pair, stride))
                    later = builder.add(soon, builder.mul(pair, _i64(span)))
                    if u % 2 == 0:
                        prefetch_at(builder, address(builder, codes, later, _i8))
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
                            add_to(builder, cell, multiply_pairs(builder, data[v], q))
            for h in range(team):
                for v in range(vectors):
                    parts = [builder.load(cells[(u * team + h) * vectors + v]) for u in range(unroll)]
                    result = parts[0] if unroll == 1 else builder.add(*parts)
                    index = builder.add(builder.add(to, builder.mul(row, _i64(h))), _i64(v * LANES))
                    builder.store(result, address(builder, sums, index, INTS), align=1)
            return context.get_dummy_value()

        return types.void(codes, i64, i64, i64, query, i64, i64, sums, i64, i64), code

    return intrinsic(dots)
