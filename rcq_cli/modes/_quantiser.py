"""Asymmetric min-max quantisation of one group, and tokens stored that way.

low = min, s = (max - low) / (2^b - 1), both rounded to the dtype of metadata first, s = 1 where that gives 0;
then q = clamp(round((x - low) / s), 0, 2^b - 1), half to even, and x' = q * s + low. With float32 metadata
|x - x'| <= s / 2 up to rounding; with float16 no such bound is claimed, and what exceeds its range saturates.
A group is encoded once. Codes are packed along channels, the first in the lowest bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rcq_cli.cache.slab import Slab

CHUNK_ELEMENTS = 2**18
"""Elements that are dequantised at a time: no step holds a dequantised cache."""


class Encoded(NamedTuple):
    """Groups along one dimension."""

    codes: Tensor
    """uint8, shaped like what was encoded; not packed."""
    scale: Tensor
    """The same without the dimension of the groups."""
    low: Tensor


def encode(x: Tensor, bits: int, meta: torch.dtype, dim: int = -1) -> Encoded:
    """Encode groups along `dim` to `bits` bits."""
    x, limit, levels = x.float(), torch.finfo(meta).max, 2**bits - 1
    least, most = x.amin(dim), x.amax(dim)
    scale = ((most - least) / levels).clamp_max(limit).to(meta)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    low = least.clamp(-limit, limit).to(meta)
    codes = ((x - low.float().unsqueeze(dim)) / scale.float().unsqueeze(dim)).round_().clamp_(0, levels)
    return Encoded(codes.to(torch.uint8), scale, low)


def decode(codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """Return the float32 values that unpacked codes `[..., n]` stand for."""
    return codes.float().mul_(scale.float()[..., None]).add_(low.float()[..., None])


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes below 2^bits along the last dimension, which 8 / bits divides."""
    parts = codes.unflatten(-1, (-1, 8 // bits)).unbind(-1)
    packed = parts[0]
    for place, part in enumerate(parts[1:], 1):
        packed = packed | part << place * bits
    return packed.contiguous()


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack`."""
    if bits == 8:
        return packed
    mask = 2**bits - 1
    return torch.stack([packed >> place & mask for place in range(0, 8, bits)], -1).flatten(-2)


class Layout(NamedTuple):
    """How tokens are grouped."""

    bits: int
    size: int
    """Elements per group."""
    per_channel: bool
    """Groups of `size` consecutive tokens of one channel; else of `size` channels of one token."""
    meta: torch.dtype = torch.float16

    def fitted(self, dim: int) -> Layout:
        """Return the layout for a head dim: groups of channels shrink to a size that divides it."""
        return self if self.per_channel else self._replace(size=math.gcd(self.size, dim))


class Part(Protocol):
    """Encoded tokens that can be read in pieces."""

    @property
    def tokens(self) -> int:
        """Return how many there are."""

    @property
    def unit(self) -> int:
        """Return the tokens that are encoded together."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return tokens `[start, stop)`, multiples of `unit`, as float32 `[Hkv, n, D]`."""


class CodedRows:
    """Encoded `[Hkv, n, D]` tokens that grow at the end."""

    def __init__(self, heads: int, dim: int, layout: Layout, device: Any) -> None:
        self.layout, self.shape = layout, (heads, dim)
        groups = dim if layout.per_channel else dim // layout.size
        shape = (layout.size, dim) if layout.per_channel else (groups, layout.size)
        self.codes = Slab(heads, (shape[0], shape[1] * layout.bits // 8), torch.uint8, device)
        self.scale, self.low = (Slab(heads, (groups,), layout.meta, device) for _ in range(2))

    @property
    def unit(self) -> int:
        """Return the tokens of one group."""
        return self.layout.size if self.layout.per_channel else 1

    @property
    def tokens(self) -> int:
        """Return the tokens encoded."""
        return self.codes.length * self.unit

    def extend(self, rows: Tensor) -> None:
        """Encode `[Hkv, n, D]` tokens, n a multiple of `unit`."""
        step = max(1, 4 * CHUNK_ELEMENTS // (rows.shape[0] * rows.shape[2] * self.unit)) * self.unit
        for first in range(0, rows.shape[1], step):
            part = rows[:, first : first + step]
            if self.layout.per_channel:
                groups, dim = part.unflatten(1, (-1, self.unit)), 2
            else:
                groups, dim = part.unflatten(2, (-1, self.layout.size)), 3
            codes, scale, low = encode(groups, self.layout.bits, self.layout.meta, dim)
            for slab, new in (
                (self.codes, pack(codes, self.layout.bits)),
                (self.scale, scale),
                (self.low, low),
            ):
                slab.extend(new)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more, exactly."""
        for slab in (self.codes, self.scale, self.low):
            slab.reserve(slab.length + tokens // self.unit)

    def read(self, start: int, stop: int) -> Tensor:
        """Return tokens `[start, stop)`, multiples of `unit`, as float32 `[Hkv, n, D]`."""
        span = slice(start // self.unit, stop // self.unit)
        packed, scale, low = (slab.rows[:, span] for slab in (self.codes, self.scale, self.low))
        codes = unpack(packed, self.layout.bits)
        if not self.layout.per_channel:
            return decode(codes, scale, low).flatten(2)
        return codes.float().mul_(scale.float()[:, :, None]).add_(low.float()[:, :, None]).flatten(1, 2)

    def fork(self) -> CodedRows:
        """Return a copy that shares what is encoded."""
        twin = CodedRows(*self.shape, self.layout, self.codes.data.device)
        twin.codes, twin.scale, twin.low = self.codes.fork(), self.scale.fork(), self.low.fork()
        return twin

    @property
    def meta_bytes(self) -> int:
        """Return the bytes of scales and offsets."""
        return self.scale.nbytes + self.low.nbytes

    @property
    def nbytes(self) -> int:
        """Return all bytes allocated."""
        return self.codes.nbytes + self.meta_bytes


Pair = tuple[Tensor, Tensor]
"""Native keys and values, `[Hkv, n, D]` each."""


def joined(native: Pair, keys: Tensor, values: Tensor) -> Pair:
    """Return native tokens with new ones behind them, in buffers of exactly their size."""
    return torch.cat((native[0], keys), 1), torch.cat((native[1], values), 1)


class Attended(NamedTuple):
    """Attention over encoded and native tokens."""

    output: Tensor
    """`[Hq, D]` in the dtype of the native tokens."""
    weights: Tensor
    """float32 `[Hkv, R, T]`, encoded tokens first, in the order they are stored."""
    scratch_bytes: int


def attend_coded(
    query: Tensor, keys: Sequence[Part], values: Sequence[Part], tails: Pair, scale: float
) -> Attended:
    """Return softmax attention of `[Hq, D]` queries over encoded tokens and native `[Hkv, n, D]` tails.

    Keys and values may be encoded up to different tokens, but stand in the same order. Arithmetic is float32.
    """
    groups = query.float().unflatten(0, (tails[0].shape[0], -1))
    scratch = 0
    scores = []
    for piece in _pieces(keys):
        scores.append(groups @ piece.transpose(1, 2))
        scratch = max(scratch, piece.nbytes)
    scores.append(groups @ tails[0].float().transpose(1, 2))
    weights = torch.cat(scores, -1).mul_(scale).softmax(-1)
    output = torch.zeros_like(groups)
    done = 0
    for piece in (*_pieces(values), tails[1].float()):
        count = piece.shape[1]
        output += weights[..., done : done + count] @ piece
        done += count
    limit = torch.finfo(query.dtype).max
    stored = output.clamp_(-limit, limit).to(query.dtype).flatten(0, 1)
    return Attended(stored, weights, scratch + 2 * weights.nbytes)


def _pieces(parts: Sequence[Part]) -> Iterator[Tensor]:
    for part in parts:
        if not part.tokens:
            continue
        one = part.read(0, part.unit)
        step = max(1, CHUNK_ELEMENTS // one.numel()) * part.unit
        for first in range(0, part.tokens, step):
            yield part.read(first, min(part.tokens, first + step))
