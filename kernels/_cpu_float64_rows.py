# ruff: noqa: ARG001 - Numba fixes the parameters of an intrinsic, used or not
"""Rows of four tokens in float64: read from originals or codes, multiplied and added up.

Rows are reached through pointers: a view of an array costs as much as a short row.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rcq_cli.kernels._cpu_vector import (
    address,
    ahead,
    bfloat,
    bytes_at,
    floats_at,
    half,
    loose,
    plain,
    shorts_at,
)

ROWS = 4
"""Tokens that are worked on at once."""
_HALF_GROUP = 8
"""Channels of a group of 16 that are low nibbles."""
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def kind_of(dtype: torch.dtype) -> int:
    """Return how `widen` reads `dtype`; 0, too, for what it does not read."""
    return _KINDS.get(dtype, 0)


@plain
def widen(kind: int, base: int, first: int, count: int, rows: Any) -> None:
    """Write `count` numbers, from element `first` behind an address on, to `rows`."""
    if kind == 0:
        singles = ahead(floats_at(base), first)
        for i in range(count):
            rows[i] = singles[i]
    elif kind == 1:
        halves = ahead(shorts_at(base), first)
        for i in range(count):
            rows[i] = half(halves[i])
    else:
        brains = ahead(shorts_at(base), first)
        for i in range(count):
            rows[i] = bfloat(brains[i])


@intrinsic
def _half_groups(typing: Any, codes: Any, scale: Any, offset: Any, rows: Any, low: Any, high: Any) -> Any:
    """Write code * scale + offset of eight low nibbles from element `low` of `rows` on, and of the high ones.

    LLVM does not see that stores to `rows` leave the codes alone, and would take one code at a time.
    """

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        codes, scale, offset, rows, low, high = values
        narrow, wide = ir.VectorType(ir.IntType(8), _HALF_GROUP), ir.VectorType(ir.IntType(32), _HALF_GROUP)
        lanes = ir.VectorType(ir.DoubleType(), _HALF_GROUP)
        both = builder.load(builder.bitcast(codes, narrow.as_pointer()), align=1)
        nibbles = (
            builder.and_(both, ir.Constant(narrow, [15] * _HALF_GROUP)),
            builder.lshr(both, ir.Constant(narrow, [4] * _HALF_GROUP)),
        )
        for half_group, first in zip(nibbles, (low, high), strict=True):
            number = builder.sitofp(builder.zext(half_group, wide), lanes)
            # with a float16 scale the product is exact: code and scale have 15 bits together
            result = builder.fadd(builder.fmul(number, _splat(builder, scale)), _splat(builder, offset))
            builder.store(result, address(builder, rows, first, lanes), align=8)
        return context.get_dummy_value()

    return types.void(codes, types.float64, types.float64, rows, types.intp, types.intp), code


def _splat(builder: Any, x: Any) -> Any:
    one = builder.insert_element(
        ir.Constant(ir.VectorType(x.type, _HALF_GROUP), ir.Undefined), x, ir.IntType(32)(0)
    )
    return builder.shuffle_vector(
        one, one, ir.Constant(ir.VectorType(ir.IntType(32), _HALF_GROUP), [0] * _HALF_GROUP)
    )


@plain
def decode(codes: int, scale: int, offset: int, meta: int, dim: int, rows: Any) -> None:
    """Write what the codes of ROWS tokens stand for: of each, even channels before odd ones.

    Their float16 scales and offsets, one per group of 16 channels, begin at element `meta`.
    """
    packed, groups = bytes_at(codes), dim // (2 * _HALF_GROUP)
    steps, zeros = ahead(shorts_at(scale), meta), ahead(shorts_at(offset), meta)
    for i in range(ROWS):
        for g in range(groups):
            s, z = np.float64(half(steps[i * groups + g])), np.float64(half(zeros[i * groups + g]))
            low, first = i * dim + g * _HALF_GROUP, (i * groups + g) * _HALF_GROUP
            _half_groups(ahead(packed, first), s, z, rows, low, low + dim // 2)


@plain
def decode_two_level(
    codes: int, low: int, step: int, marks: int, token: int, dim: int, group: int, rows: Any
) -> None:
    """Write what the codes of ROWS tokens from `token` on stand for, as `decode` does.

    Two-level metadata: a float16 range per token, two marks in it per `group` channels (a multiple of 16).
    """
    packed, chunks = bytes_at(codes), dim // (2 * _HALF_GROUP)
    lows, steps, places = ahead(shorts_at(low), token), ahead(shorts_at(step), token), bytes_at(marks)
    for i in range(ROWS):
        base, unit = np.float64(half(lows[i])), np.float64(half(steps[i]))
        mine = ahead(places, (token + i) * 2 * (dim // group))
        for chunk in range(chunks):
            g = chunk * 2 * _HALF_GROUP // group
            a, b = np.float64(np.uint8(mine[2 * g])), np.float64(np.uint8(mine[2 * g + 1]))
            from_, first = (token + i) * (dim // 2) + chunk * _HALF_GROUP, i * dim + chunk * _HALF_GROUP
            _half_groups(
                ahead(packed, from_), (b - a) * unit / 15, base + a * unit, rows, first, first + dim // 2
            )


@loose
def dots(rows: Any, vector: Any, dim: int) -> Any:
    """Return the products of ROWS rows with one vector."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    for i in range(dim):
        a += rows[i] * vector[i]
        b += rows[dim + i] * vector[i]
        c += rows[2 * dim + i] * vector[i]
        d += rows[3 * dim + i] * vector[i]
    return a, b, c, d


@loose
def add_rows(rows: Any, dim: int, weights: Any, first: int, factor: float, into: Any) -> None:
    """Add ROWS rows, times the weights from `first` on and a factor, to `into`."""
    a, b = factor * weights[first], factor * weights[first + 1]
    c, d = factor * weights[first + 2], factor * weights[first + 3]
    for i in range(dim):
        into[i] += (a * rows[i] + b * rows[dim + i]) + (c * rows[2 * dim + i] + d * rows[3 * dim + i])
