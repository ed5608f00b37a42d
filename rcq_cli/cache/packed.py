"""The tiered store in the records that backend `cpu` reads.

One byte record of keys and one of values per block.
"""

from dataclasses import replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.device import DeviceStore
from rcq_cli.cache.slab import Slab
from rcq_cli.cache.tiers import TieredStore, refuse_changed
from rcq_cli.kernels import _cpu_state as state
from rcq_cli.kernels import cpu
from rcq_cli.kernels._cpu_integer import TILE
from rcq_cli.kernels._cpu_state import Shape
from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels.reference import Blocks
from rcq_cli.protocols import Geometry, LayerBytes

_CHUNK_ELEMENTS = 2**21


class PackedStore(TieredStore):
    """Tier 1 as records (`kernels/README.md`), sealed by one parallel kernel call.

    Everything else as in `TieredStore`.
    """

    def __init__(
        self, geometry: Geometry, fmt: TierFormat, backend: cpu.Cpu, *, originals: bool = True
    ) -> None:
        super().__init__(geometry, fmt, backend, originals=originals)
        cpu.warm()
        heads = geometry.kv_heads
        self.shape = shape_of(geometry, fmt)
        self.blocks = {
            "keys": Slab(heads, (self.shape.key_bytes,), torch.uint8),
            "values": Slab(heads, (self.shape.value_bytes,), torch.uint8),
        }
        self.joint = (6, 7, 8) if originals else ()
        self.annotations = Slab(heads, (state.NOTES,), torch.float16)
        self.checks = Slab(heads, (4,), torch.int64)
        self._call, self._moves = state.Call(self.shape), 0
        self.lock = Lock()
        """Held while a kernel reads the call: threads may attend on one store at once."""

    # -- writing --------------------------------------------------------------------------------------------

    def extend(self, keys: Tensor, values: Tensor, *, seal: bool = True) -> None:
        """Add `[Hkv, T, D]` keys and values."""
        if keys.shape[1] == 1:
            self.append(keys[:, 0], values[:, 0], seal=seal)
        else:
            super().extend(keys, values, seal=seal)

    def append(self, key: Tensor, value: Tensor, *, seal: bool = True) -> None:
        """Add the `[Hkv, D]` key and value of one token, in one call of a kernel."""
        if self.centre is None or not key.dtype == value.dtype == self.dtype:
            super().extend(key[:, None], value[:, None], seal=seal)
            return
        self.seal_full_tail()
        self._append(key.contiguous(), value.contiguous())
        if seal:
            self.seal_full_tail()

    def _open_tail(self, rows: int) -> Tensor:
        self._moves = 0
        return super()._open_tail(rows)

    def _append(self, key: Tensor, value: Tensor) -> None:
        for slab in self.originals or ():
            slab.make_room(1)
        self.make_tail_room(1)
        call, spectrum = self.call(), self.value_spectrum
        call.put(state.ANSWER, key.data_ptr(), value.data_ptr(), spectrum.parts.data_ptr())
        call.put(state.RECENT, spectrum.recent.data_ptr())
        due = cpu.compiled(cpu.append_piece).ctypes(call.address, 0, self.shape.heads, self.tokens)
        for slab in self.originals or ():
            slab.length += 1
        self.tail_tokens, self.tokens = self.tail_tokens + 1, self.tokens + 1
        if due:
            spectrum.refresh()

    def _seal(self, keys: Tensor, values: Tensor) -> None:
        size = self.fmt.block
        step = max(1, _CHUNK_ELEMENTS // (keys.shape[0] * size * keys.shape[2])) * size
        for slab in self._slabs():
            slab.make_room(keys.shape[1] // size)
        heads, dim = keys.shape[0], keys.shape[2]
        gram = torch.zeros(heads, dim, dim, dtype=torch.float64)
        for start in range(0, keys.shape[1], step):
            residuals = self._seal_part(keys[:, start : start + step], values[:, start : start + step])
            if self.originals is not None:
                gram += residuals.transpose(1, 2) @ residuals
        # once for all parts: a refresh of the spectral bound costs more than sealing a few blocks
        self.residual_spectrum.add_gram(gram)

    def _seal_part(self, keys: Tensor, values: Tensor) -> Tensor:
        """Seal whole blocks; return the rows V - V'."""
        count = keys.shape[1] // self.fmt.block
        pair = [t if t.stride()[1:] == (t.shape[2], 1) else t.contiguous() for t in (keys, values)]
        if pair[0].stride(0) != pair[1].stride(0):
            pair = [t.contiguous() for t in pair]
        residuals = torch.empty(keys.shape, dtype=torch.float64)
        call = self.call().copy()
        call.put(state.ORIGINALS, *(t.data_ptr() for t in pair))
        call.put(state.ORIGINAL_PITCH, pair[0].stride(0) * pair[0].element_size())
        call.put(state.RESIDUALS, residuals.data_ptr())
        cpu.share_threads()
        cpu.run(cpu.seal_piece, call.address, 0, self.shape.heads * count, count)
        for slab in self._slabs():
            slab.length += count
        self.coded_elems += keys.numel() + values.numel()
        return residuals

    def _slabs(self) -> tuple[Slab, ...]:
        slabs = (*self.blocks.values(), self.annotations, self.raw, self.raw_bounds)
        return slabs if self.originals is None else (*slabs, self.checks)

    # -- what kernels are given -----------------------------------------------------------------------------

    def call(self) -> state.Call:
        """Return what kernels are given of this store; valid until the store changes."""
        call = self.placed()
        call.put(state.COUNTS, self.block_count, self.tail_tokens)
        return call

    def placed(self) -> state.Call:
        """Return the same without counts: a step writes its own."""
        if self._moves != Slab.moves:
            self._moves = Slab.moves
            self._place()
        return self._call

    def _place(self) -> None:
        """Write where things are: some slab grew, or was handed to a fork."""
        call, held = self._call, [slab.data for slab in self._slabs()]
        pitches = [data.stride(0) for data in held[:6]]
        if self.originals is None:  # mode naive has neither checks nor originals
            pitches, held = [*pitches[:5], 0, 0], held + [self.tail] * 3
        else:
            held += [slab.data for slab in self.originals]
            pitches.append(held[6].stride(0) * self.tail.element_size())
        assert self.centre is not None
        spectra = (self.value_spectrum.parts, self.residual_spectrum.parts)
        call.put(state.PITCHES, *pitches, self.tail.shape[2])
        call.put(state.TIERS, *(t.data_ptr() for t in (*held, self.tail, self.centre, *spectra)))

    # -- reading --------------------------------------------------------------------------------------------

    def codes(self) -> Blocks:
        """Return copies of all blocks under the names and shapes of the reference backend."""
        return self._unpack(*(slab.rows for slab in self.blocks.values()))

    def pick(self, heads: Tensor, blocks: Tensor) -> Blocks:
        """Return chosen (KV head, block) pairs under the names and shapes of the reference backend."""
        return self._unpack(*(slab.rows[heads, blocks] for slab in self.blocks.values()))

    def _unpack(self, keys: Tensor, values: Tensor) -> Blocks:
        s = self.shape
        lead, size = keys.shape[:-1], self.fmt.block
        codes, meta = keys.split((s.padded * s.dim, s.key_bytes - s.padded * s.dim), -1)
        codes = codes.view(torch.int8).reshape(*lead, s.dim // 2, s.padded, 2).transpose(-3, -2).flatten(-2)
        scale, offset = meta.contiguous().view(self.fmt.key_dtype).split(s.dim, -1)
        blocks = {"key_codes": codes[..., :size, :], "key_scale": scale, "key_offset": offset}
        words, meta = values.split((s.padded * s.dim // 2, s.value_bytes - s.padded * s.dim // 2), -1)
        words = words.contiguous().view(torch.int32).reshape(*lead, s.padded // 8, 1, s.dim)
        shifts = 4 * torch.arange(4)[:, None]
        halves = [(words >> (shifts + 16 * i)) & 15 for i in range(2)]
        nibbles = torch.cat([half.flatten(-3, -2) for half in halves], -2)[..., :size, :].to(torch.uint8)
        blocks["value_codes"] = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
        if s.two_level:
            floats, marks = meta.split((4 * s.padded, 2 * s.groups * s.padded), -1)
            low, step = floats.contiguous().view(torch.float16).reshape(*lead, 2, s.padded).unbind(-2)
            marks = marks.reshape(*lead, 2, s.groups, s.padded).movedim(-1, -3).transpose(-2, -1)
            named = {"value_low": low, "value_step": step, "value_marks": marks}
        else:
            floats = meta.contiguous().view(torch.float16).reshape(*lead, 2, s.groups, s.padded)
            scale, offset = floats.transpose(-2, -1).unbind(-3)
            named = {"value_scale": scale, "value_offset": offset}
        return blocks | {name: rows.narrow(len(lead), 0, size) for name, rows in named.items()}

    def original_blocks(self, heads: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return original keys and values of chosen pairs, checked against their checksums."""
        changed = (self._prints(heads, blocks) != self.checks.rows[heads, blocks])[:, 2:].any(1)
        refuse_changed(changed, heads, blocks)
        assert self.originals is not None
        limit, size = self.block_count * self.fmt.block, self.fmt.block
        keys, values = (
            slab.data[:, :limit].unflatten(1, (-1, size))[heads, blocks] for slab in self.originals
        )
        return keys, values

    def damaged(self, heads: Tensor, blocks: Tensor) -> Tensor:
        """Return which of the chosen pairs hold records or annotations that changed since sealing."""
        return (self._prints(heads, blocks) != self.checks.rows[heads, blocks])[:, :2].any(1)

    def changed_originals(self, head: int) -> Tensor:
        """Return which sealed blocks of a KV head have other originals than when they were sealed, `[M]`."""
        return self._changed(head, (2, 3))

    def changed_blocks(self, head: int) -> Tensor:
        """Return which sealed blocks of a KV head differ in tier 1 from what was sealed, `[M]`."""
        return self._changed(head, (0, 1))

    def _changed(self, head: int, parts: tuple[int, int]) -> Tensor:
        """Look at all blocks at once; one by one only where something is wrong."""
        blocks = torch.arange(self.block_count)
        if not self.block_count or not any(self._count_changed(head, part) for part in parts):
            return torch.zeros_like(blocks, dtype=torch.bool)
        heads = torch.full_like(blocks, head)
        differs = self._prints(heads, blocks) != self.checks.rows[heads, blocks]
        return differs[:, parts[0] : parts[1] + 1].any(1)

    def _count_changed(self, head: int, part: int) -> int:
        cpu.share_threads()
        return cpu.run(cpu.check_piece, self.call().address, 4 * head + part, self.block_count, 0)

    def _prints(self, heads: Tensor, blocks: Tensor) -> Tensor:
        piece, address = cpu.compiled(cpu.print_piece).ctypes, self.call().address
        pairs = zip(heads.tolist(), blocks.tolist(), strict=True)
        return torch.tensor(
            [[piece(address, part, b, h) for part in range(4)] for h, b in pairs], dtype=torch.int64
        ).reshape(-1, 4)

    def bytes(self, scratch: int = 0) -> LayerBytes:
        """Return the ledger of this layer; records are told apart into codes and metadata."""
        held = super().bytes(scratch)
        codes = self.blocks["keys"].data[..., 0].numel() * self.shape.padded * self.shape.dim * 3 // 2
        return replace(held, metadata=held.metadata - codes)


def shape_of(geometry: Geometry, fmt: TierFormat) -> Shape:
    """Return the sizes the kernels need."""
    dim, padded = geometry.head_dim, -(-fmt.block // TILE) * TILE
    groups = dim // fmt.group
    narrow, two_level = fmt.key_meta == "float16", fmt.value_meta == "two-level"
    value_meta = 4 * padded + 2 * groups * padded if two_level else 4 * groups * padded
    return Shape(
        heads=geometry.kv_heads,
        group=geometry.group,
        dim=dim,
        block=fmt.block,
        padded=padded,
        groups=groups,
        key_bytes=padded * dim + 2 * dim * (2 if narrow else 4),
        value_bytes=padded * dim // 2 + value_meta,
        narrow_keys=int(narrow),
        two_level=int(two_level),
        kind=state.KINDS[getattr(torch, geometry.dtype)],
        fold_steps=min(32766, 2**31 // (128 * dim) - 1),
    )


def make_store(geometry: Geometry, fmt: TierFormat, backend: Any, *, originals: bool = True) -> TieredStore:
    """Return the store whose layout `backend` reads."""
    if backend.name == "triton-fused" and originals:
        return DeviceStore(geometry, fmt, backend)
    kind = PackedStore if backend.name == "cpu" else TieredStore
    if kind is PackedStore:
        return PackedStore(geometry, fmt, backend, originals=originals)
    return TieredStore(geometry, fmt, backend, originals=originals, joint=originals)
