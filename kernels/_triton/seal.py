"""Sealing: a block of originals to codes, metadata and what the certificate must know about them.

Everything is float64 except what is stored; annotations are measured on what was stored, as it is read.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels._triton.arithmetic import OPTIONS, finite, half_up, nearest, print_words, single_up
from rcq_cli.kernels._triton.codes import decoded_values, value_scale

TINY_HALF = tl.constexpr(2.0**-24)
TINY_SINGLE = tl.constexpr(2.0**-126)


class Sealed(NamedTuple):
    """Blocks as stored, which of them must stay raw, and float64 measurements per block."""

    blocks: dict[str, Tensor]
    raw: Tensor
    """bool `[H, M]`"""
    notes: Tensor
    """`[H, M, 3]` rk, kappa and the longest key"""
    left: Tensor
    """float64 `[H, M, S, D]` k - k'"""


@triton.jit
def _key_step(x, NARROW: tl.constexpr):
    if NARROW:
        return half_up(x).to(tl.float64)
    return single_up(x).to(tl.float64)


@triton.jit
def seal_keys(
    source, codes, scale, offset, raw, notes, left, head_pitch, S: tl.constexpr, SP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Encode block `program 0` of KV head `program 1` on the end-point grid (theory 1.1)."""
    b, h = tl.program_id(0), tl.program_id(1)
    row = (h * tl.num_programs(0) + b).to(tl.int64)
    t, c = tl.arange(0, SP), tl.arange(0, DP)
    inside, channel = (t < S)[:, None] & (c < D)[None, :], c < D
    at = h.to(tl.int64) * head_pitch + (b.to(tl.int64) * S + t[:, None]) * D + c[None, :]
    k = tl.load(source + at, inside, 0.0).to(tl.float64)
    low = tl.min(tl.where(inside, k, float("inf")), 0)
    high = tl.max(tl.where(inside, k, float("-inf")), 0)
    low, high = tl.where(channel, low, 0.0), tl.where(channel, high, 0.0)
    ideal = (high - low) / 255.0
    z = (low + 128.0 * ideal).to(tl.float32)
    if NARROW:
        z = z.to(tl.float16)
    z = z.to(tl.float64)
    cover = tl.maximum(tl.maximum(ideal, (high - z) / 127.5), (z - low) / 128.5)
    s = _key_step(tl.maximum(cover, TINY_HALF if NARROW else TINY_SINGLE), NARROW)
    code, missed = k * 0.0, channel
    for attempt in tl.static_range(5):
        # a tie that rounding decided the other way: one step wider covers it
        ratio = (k - z[None, :]) / s[None, :]
        ratio = tl.where(ratio == ratio, ratio, 0.0)
        code = nearest(tl.minimum(tl.maximum(ratio, -128.0), 127.0))
        off = tl.max(tl.where(inside, tl.abs(k - (code * s[None, :] + z[None, :])), 0.0), 0)
        missed = channel & ~(off <= s * 0.5 * (1.0 + 2.0**-14))
        if attempt < 4:
            s = tl.where(missed, _key_step(s * (1.0 + 2.0**-23), NARROW), s)
    bad = tl.max((missed | (channel & ~(finite(s) & finite(z)))).to(tl.int32), 0)
    s, z = tl.where(bad > 0, 0.0, s), tl.where(bad > 0, 0.0, z)
    rest = tl.where(inside, k - (code * s[None, :] + z[None, :]), 0.0)
    size = tl.where(inside, tl.abs(code) * s[None, :] + tl.abs(z)[None, :], 0.0)
    tl.store(codes + (row * S + t[:, None]) * D + c[None, :], code.to(tl.int8), inside)
    tl.store(left + (row * S + t[:, None]) * D + c[None, :], rest, inside)
    tl.store(scale + row * D + c, s.to(scale.dtype.element_ty), channel)
    tl.store(offset + row * D + c, z.to(offset.dtype.element_ty), channel)
    tl.store(raw + row, bad)
    tl.store(notes + row * 3, tl.sqrt(tl.max(tl.sum(rest * rest, 1), 0)))
    tl.store(notes + row * 3 + 1, tl.sqrt(tl.max(tl.sum(size * size, 1), 0)))
    tl.store(notes + row * 3 + 2, tl.sqrt(tl.max(tl.sum(k * k, 1), 0)))


@triton.jit
def value_meta(
    source, first, second, marks, raw, head_pitch, S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Write the value metadata of block `program 0` of KV head `program 1` (theory 1.2)."""
    b, h = tl.program_id(0), tl.program_id(1)
    row = (h * tl.num_programs(0) + b).to(tl.int64)
    t, c, j = tl.arange(0, SP), tl.arange(0, DP), tl.arange(0, GP)
    token = t < S
    line = source + h.to(tl.int64) * head_pitch + (b.to(tl.int64) * S + t[:, None]) * D
    inside = token[:, None] & (c < D)[None, :]
    v = tl.load(line + c[None, :], inside, 0.0).to(tl.float64)
    least = tl.min(tl.where((c < D)[None, :], v, float("inf")), 1)
    most = tl.max(tl.where((c < D)[None, :], v, float("-inf")), 1)
    if TWO:
        low = -half_up(-least)
        base = low.to(tl.float64)
        step = half_up(tl.maximum((most - base) / 255.0, TINY_HALF))
        unit = step.to(tl.float64)
        bad = tl.max((token & ~(finite(base) & finite(unit))).to(tl.int32), 0)
        tl.store(first + row * S + t, tl.where(bad > 0, 0.0, low.to(tl.float32)).to(tl.float16), token)
        tl.store(second + row * S + t, tl.where(bad > 0, 0.0, step.to(tl.float32)).to(tl.float16), token)
    else:
        base, unit = least, most
        bad = 0
        for g in range(D // G):
            here = (j < G)[None, :]
            x = tl.load(line + g * G + j[None, :], token[:, None] & here, 0.0).to(tl.float64)
            least = tl.min(tl.where(here, x, float("inf")), 1)
            most = tl.max(tl.where(here, x, float("-inf")), 1)
            step = half_up(tl.maximum((most - least) / 15.0, TINY_HALF)).to(tl.float64)
            start = least.to(tl.float32).to(tl.float16).to(tl.float64)
            bad = tl.maximum(bad, tl.max((token & ~(finite(step) & finite(start))).to(tl.int32), 0))
    for g in range(D // G):
        here = (j < G)[None, :]
        x = tl.load(line + g * G + j[None, :], token[:, None] & here, 0.0).to(tl.float64)
        least = tl.min(tl.where(here, x, float("inf")), 1)
        most = tl.max(tl.where(here, x, float("-inf")), 1)
        at = (row * S + t) * (D // G) + g
        if TWO:
            below = tl.floor((least - base) / unit)
            above = tl.ceil((most - base) / unit)
            below = tl.where(below == below, tl.minimum(tl.maximum(below, 0.0), 255.0), 0.0)
            above = tl.where(above == above, tl.minimum(tl.maximum(above, 0.0), 255.0), 0.0)
            tl.store(marks + 2 * at, tl.where(bad > 0, 0.0, below).to(tl.uint8), token)
            tl.store(marks + 2 * at + 1, tl.where(bad > 0, 0.0, above).to(tl.uint8), token)
        else:
            step = half_up(tl.maximum((most - least) / 15.0, TINY_HALF)).to(tl.float32)
            tl.store(first + at, tl.where(bad > 0, 0.0, step).to(tl.float16), token)
            start = tl.where(bad > 0, 0.0, least.to(tl.float32))
            tl.store(second + at, start.to(tl.float16), token)
    tl.store(raw + row, bad)


@triton.jit
def value_codes(
    source, packed, first, second, marks, head_pitch, S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, G: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Write the nearest codes of block `program 0` of KV head `program 1`, two to a byte."""
    b, h = tl.program_id(0), tl.program_id(1)
    row = (h * tl.num_programs(0) + b).to(tl.int64)
    t, pair = tl.arange(0, SP)[:, None], tl.arange(0, DP // 2)[None, :]
    mask = (t < S) & (pair < D // 2)
    line = source + h.to(tl.int64) * head_pitch + (b.to(tl.int64) * S + t) * D + 2 * pair
    s, z = value_scale(first, second, marks, row, t, 2 * pair, S, D, G, TWO)
    even = _value_code(tl.load(line, mask, 0.0), s, z)
    s, z = value_scale(first, second, marks, row, t, 2 * pair + 1, S, D, G, TWO)
    odd = _value_code(tl.load(line + 1, mask, 0.0), s, z)
    tl.store(packed + (row * S + t) * (D // 2) + pair, even | (odd << 4), mask)


@triton.jit
def _value_code(v, s, z):
    ratio = (v.to(tl.float64) - z.to(tl.float64)) / tl.where(s > 0, s, 1.0).to(tl.float64)
    ratio = tl.where((ratio == ratio) & (s > 0), ratio, 0.0)
    return nearest(tl.minimum(tl.maximum(ratio, 0.0), 15.0)).to(tl.uint8)


@triton.jit
def decode(
    packed, first, second, marks, out, source, centre, notes, head_pitch, S: tl.constexpr, SP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, TWO: tl.constexpr, COMPARE: tl.constexpr,
):  # fmt: skip
    """Write what block `program 0` of KV head `program 1` stands for, or what that misses, eta and rv.

    COMPARE writes residuals v - v' (float64) and measures them, and v - c0, per block.
    """
    b, h = tl.program_id(0), tl.program_id(1)
    row = (h * tl.num_programs(0) + b).to(tl.int64)
    t, c = tl.arange(0, SP), tl.arange(0, DP)
    inside = (t < S)[:, None] & (c < D)[None, :]
    value = decoded_values(packed, first, second, marks, row, S, SP, D, DP, G, TWO).to(tl.float64)
    if COMPARE:
        at = h.to(tl.int64) * head_pitch + (b.to(tl.int64) * S + t[:, None]) * D + c[None, :]
        v = tl.load(source + at, inside, 0.0).to(tl.float64)
        away = tl.where(inside, v - tl.load(centre + h * D + c, c < D, 0.0)[None, :], 0.0)
        value = tl.where(inside, v - value, 0.0)
        tl.store(notes + row * 2, tl.sqrt(tl.max(tl.sum(value * value, 1), 0)))
        tl.store(notes + row * 2 + 1, tl.sqrt(tl.max(tl.sum(away * away, 1), 0)))
    tl.store(out + (row * S + t[:, None]) * D + c[None, :], value, inside)


@triton.jit
def print_rows(
    source, prints, head_pitch, S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """Write the fingerprint of block `program 0` of KV head `program 1` of integer rows."""
    b, h = tl.program_id(0), tl.program_id(1)
    t, c = tl.arange(0, SP)[:, None], tl.arange(0, DP)[None, :]
    mask = (t < S) & (c < D)
    words = tl.load(source + h.to(tl.int64) * head_pitch + (b.to(tl.int64) * S + t) * D + c, mask, 0)
    tl.store(prints + h * tl.num_programs(0) + b, print_words(words, t * D + c, mask))


# -- launchers ----------------------------------------------------------------------------------------------


def power(n: int, least: int = 16) -> int:
    """Return the least power of two that is at least `n` and `least`."""
    return max(least, 1 << (n - 1).bit_length())


def sizes(block: int, dim: int) -> dict[str, int]:
    """Return the sizes of a block and of the tile that holds it."""
    return {"S": block, "SP": power(block), "D": dim, "DP": power(dim)}


def layouts(fmt: TierFormat, dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every named tensor of a block."""
    size, groups, half = fmt.block, dim // fmt.group, torch.float16
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "key_codes": ((size, dim), torch.int8),
        "key_scale": ((dim,), fmt.key_dtype),
        "key_offset": ((dim,), fmt.key_dtype),
        "value_codes": ((size, dim // 2), torch.uint8),
    }
    if fmt.value_meta == "two-level":
        shapes |= dict.fromkeys(("value_low", "value_step"), ((size,), half))
        return shapes | {"value_marks": ((size, groups, 2), torch.uint8)}
    return shapes | dict.fromkeys(("value_scale", "value_offset"), ((size, groups), half))


def encode_keys(keys: Tensor, fmt: TierFormat) -> Sealed:
    """Encode `[H, M, S, D]` keys whose blocks are contiguous per head."""
    heads, blocks, size, dim = keys.shape
    codes = torch.empty(keys.shape, dtype=torch.int8, device=keys.device)
    scale, offset = (keys.new_empty(heads, blocks, dim, dtype=fmt.key_dtype) for _ in range(2))
    raw = torch.empty(heads, blocks, dtype=torch.int32, device=keys.device)
    notes = keys.new_empty(heads, blocks, 3, dtype=torch.float64)
    left = torch.empty(keys.shape, dtype=torch.float64, device=keys.device)
    seal_keys[blocks, heads](
        keys, codes, scale, offset, raw, notes, left, keys.stride(0), NARROW=fmt.key_meta == "float16",
        **sizes(size, dim), **OPTIONS,
    )  # fmt: skip
    named = {"key_codes": codes, "key_scale": scale, "key_offset": offset}
    return Sealed(named, raw > 0, notes, left)


def encode_values(values: Tensor, fmt: TierFormat) -> tuple[dict[str, Tensor], Tensor]:
    """Encode `[H, M, S, D]` values whose blocks are contiguous per head; return blocks and raw flags."""
    heads, blocks, size, dim = values.shape
    made = {
        name: torch.empty(heads, blocks, *shape, dtype=dtype, device=values.device)
        for name, (shape, dtype) in layouts(fmt, dim).items()
        if name.startswith("value")
    }
    raw = torch.empty(heads, blocks, dtype=torch.int32, device=values.device)
    arrays, group = value_parts(made), {"G": fmt.group, "TWO": fmt.value_meta == "two-level"}
    value_meta[blocks, heads](
        values,
        *arrays[1:],
        raw,
        values.stride(0),
        GP=power(fmt.group, 2),
        **sizes(size, dim),
        **group,
        **OPTIONS,
    )
    value_codes[blocks, heads](values, *arrays, values.stride(0), **sizes(size, dim), **group, **OPTIONS)
    return made, raw > 0


def value_parts(codes: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return packed codes and the metadata of values; the last is a stand-in where there are two."""
    names = ("value_low", "value_step", "value_marks")
    if "value_low" not in codes:
        names = ("value_scale", "value_offset", "value_scale")
    return codes["value_codes"], *(codes[name] for name in names)


def decode_values(blocks: dict[str, Tensor], group: int) -> Tensor:
    """Return the float64 values `[..., S, D]` that the codes stand for, as the step reads them."""
    packed = blocks["value_codes"]
    lead, (size, half) = packed.shape[:-2], packed.shape[-2:]
    out = torch.empty(*lead, size, 2 * half, dtype=torch.float64, device=packed.device)
    if out.numel() == 0:
        return out
    parts = [part.contiguous() for part in value_parts(blocks)]
    _decode(parts, out, None, None, group, "value_low" in blocks, out.numel() // (2 * half * size), 1)
    return out


def residuals(values: Tensor, centre: Tensor, blocks: dict[str, Tensor], group: int) -> tuple[Tensor, Tensor]:
    """Return float64 v - v' `[H, M, S, D]`, and eta and rv `[H, M, 2]`."""
    heads, count, _, _ = values.shape
    out = torch.empty(values.shape, dtype=torch.float64, device=values.device)
    notes = torch.empty(heads, count, 2, dtype=torch.float64, device=values.device)
    parts = list(value_parts(blocks))
    _decode(parts, out, values, (centre, notes), group, "value_low" in blocks, count, heads)
    return out, notes


def _decode(
    parts: list[Tensor], out: Tensor, values: Tensor | None, against: Any, group: int, two: bool, blocks: int,
    heads: int,
) -> None:  # fmt: skip
    centre, notes = against if against else (out, out)
    source = out if values is None else values
    decode[blocks, heads](
        *parts, out, source, centre, notes, source.stride(0), G=group, TWO=two, COMPARE=values is not None,
        **sizes(*out.shape[-2:]), **OPTIONS,
    )  # fmt: skip


def fingerprints(rows: Tensor) -> Tensor:
    """Return int64 `[H, M]` fingerprints of `[H, M, S, D]` rows of one-, two- or four-byte elements."""
    heads, blocks, size, dim = rows.shape
    words = rows.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[rows.element_size()])
    prints = torch.empty(heads, blocks, dtype=torch.int64, device=rows.device)
    print_rows[blocks, heads](words, prints, words.stride(0), **sizes(size, dim), **OPTIONS)
    return prints
