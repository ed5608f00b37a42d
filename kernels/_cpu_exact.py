# ruff: noqa: ARG001 - Numba fixes the parameters of an intrinsic, used or not
"""Scores of originals in float32: promoted blocks and the open tail."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rcq_cli.kernels._cpu_integer import accumulators
from rcq_cli.kernels._cpu_state import TEAM, Shape, Store
from rcq_cli.kernels._cpu_vector import (
    FLOAT_LANES,
    LANES,
    ORIGINALS,
    WIDE,
    Original,
    across,
    add_of,
    address,
    fma_of,
    highest,
    i64,
    larger,
    load,
    pick_less,
    plain,
    size,
    splat,
    variant,
)

TOKENS = 4
"""Originals that are scored at a time: the lanes of so many sums become one number each together."""
_i64 = ir.IntType(64)
_FOUR = ir.VectorType(ir.FloatType(), TOKENS)


def _products_kernel(team: int, kind: Original) -> Any:
    """Return the kernel of TOKENS originals times `team` queries.

    products(source, one, two, three, four, query, first, dim, scores, to, row): originals at those bytes,
    queries one after the other from `query[first]`; q . k of query i in `scores[to + i * row:]`.
    """

    def products(
        typing: Any, source: Any, one: Any, two: Any, three: Any, four: Any, query: Any, first: Any, dim: Any,
        scores: Any, to: Any, row: Any,
    ) -> Any:  # fmt: skip

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            source, *starts, query, first, dim, scores, to, row = values
            width = team if WIDE else min(team, 2)  # more sums do not fit the registers
            for low in range(0, team, width):
                rows = range(low, min(low + width, team))
                cells = [accumulators(builder, TOKENS, FLOAT_LANES) for _ in rows]
                queries = [builder.add(first, builder.mul(dim, _i64(i))) for i in rows]
                with cgutils.for_range(builder, builder.udiv(dim, _i64(LANES))) as loop:
                    c = builder.mul(loop.index, _i64(LANES))
                    at = builder.mul(c, _i64(kind.bytes))
                    keys = [kind.read(builder, source, builder.add(start, at)) for start in starts]
                    for begin, sums in zip(queries, cells, strict=True):
                        where = address(builder, query, builder.add(begin, c), FLOAT_LANES)
                        q = builder.load(where, align=1)
                        for key, cell in zip(keys, sums, strict=True):
                            builder.store(fma_of(builder, q, key, builder.load(cell)), cell)
                for i, sums in zip(rows, cells, strict=True):
                    numbers = across(builder, [builder.load(cell) for cell in sums], add_of)
                    index = builder.add(to, builder.mul(row, _i64(i)))
                    builder.store(numbers, address(builder, scores, index, _FOUR), align=1)
            return context.get_dummy_value()

        parameters = source, i64, i64, i64, i64, query, i64, i64, scores, i64, i64
        return types.void(*parameters), code

    return intrinsic(products)


def _scorer(kind: Original) -> Any:
    one, two, three, four = (_products_kernel(team, kind) for team in range(1, TEAM + 1))
    item = kind.bytes

    def score(
        shape: Shape, tiers: Store, source: Any, at: int, tokens: int, h: int, low: int, high: int,
        scores: Any, to: int,
    ) -> None:  # fmt: skip
        """Score `tokens` originals of one kind, the last one again where they fill no whole TOKENS."""
        dim, padded, query, size, last = shape.dim, shape.padded, tiers.query, shape.dim * item, tokens - 1
        for t in range(0, tokens, TOKENS):
            a, b = at + t * size, at + min(t + 1, last) * size
            c, d = at + min(t + 2, last) * size, at + min(t + 3, last) * size
            for r in range(low, high, TEAM):
                first, place, team = (h * shape.group + r) * dim, to + r * padded + t, high - r
                if team == 1:
                    one(source, a, b, c, d, query, first, dim, scores, place, padded)
                elif team == 2:
                    two(source, a, b, c, d, query, first, dim, scores, place, padded)
                elif team == 3:
                    three(source, a, b, c, d, query, first, dim, scores, place, padded)
                else:
                    four(source, a, b, c, d, query, first, dim, scores, place, padded)

    return variant(score, kind.name)


_score_single, _score_bfloat, _score_half = (_scorer(kind) for kind in ORIGINALS)


@plain
def exact_scores(
    shape: Shape, tiers: Store, source: Any, at: int, tokens: int, h: int, low: int, high: int, scores: Any,
    to: int,
) -> bool:  # fmt: skip
    """Score `tokens` originals at byte `at` for rows `low` to `high`: `scores[to + row * P + token]`.

    Returns whether all are finite.
    """
    if shape.kind == 0:
        _score_single(shape, tiers, source, at, tokens, h, low, high, scores, to)
    elif shape.kind == 1:
        _score_bfloat(shape, tiers, source, at, tokens, h, low, high, scores, to)
    else:
        _score_half(shape, tiers, source, at, tokens, h, low, high, scores, to)
    bad, top = splat(np.float32(0)), splat(np.float32(1e37))
    zero, one = bad, splat(np.float32(1))
    for r in range(to + low * shape.padded, to + high * shape.padded, shape.padded):
        for t in range(r + tokens, r + shape.padded):
            scores[t] = np.float32(0)
        for t in range(r, r + shape.padded, LANES):  # NaN is not below anything
            bad = larger(bad, pick_less(size(load(scores, t)), top, zero, one))
    return highest(bad) == 0
