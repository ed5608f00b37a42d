"""A tiered store that can give up a block: its keys stay as a ghost, everything else only in tier 2.

With the key, the annotations and the originals still there, the weight of a dropped block is known within a
proven factor, so what its absence costs can be certified, and it can be brought back. A ghost holds the INT8
keys of the block, or INT4 keys of half the size whose wider error its annotations state.
"""

from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.tiers import TieredStore
from rcq_cli.certify.spectral import spectral_norm
from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels._rounding import round_up, smallest, upper
from rcq_cli.kernels.reference import Blocks
from rcq_cli.protocols import LayerBytes

BITS = (8, 4)
_CHUNK = 1024
"""Ghosts that are unpacked at a time."""


class GhostStore(TieredStore):
    """A `TieredStore` whose codes are held for chosen blocks only, equally many per KV head.

    With `ghost_bits=8` the key codes are held for all blocks, with 4 the others have INT4 ones.
    """

    def __init__(self, *args: Any, ghost_bits: int = 8, **kwargs: Any) -> None:
        super().__init__(*args, joint=True, **kwargs)
        self.ghost_bits = ghost_bits
        if ghost_bits == 4:
            self.backend: Any = GhostBackend(self.backend)
        # row of each block among what is held, and among the INT4 ghosts; -1 where it is not there
        self.slots, self.ghost_slots = (
            torch.zeros(self.geometry.kv_heads, 0, dtype=torch.int32) for _ in range(2)
        )
        self.ghosts: Blocks = {}

    def at_hand(self) -> Tensor:
        """Return which blocks have their values in tier 1, bool `[Hkv, M]`."""
        return self.slots >= 0

    def _held(self, name: str) -> bool:
        """Return whether these tensors are there for blocks at hand only."""
        return self.ghost_bits == 4 or name.startswith("value_")

    def _seal_chunk(self, keys: Tensor, values: Tensor) -> None:
        held = int((self.slots[:1] >= 0).sum())
        super()._seal_chunk(keys, values)
        fresh = torch.arange(held, held + keys.shape[1], dtype=torch.int32).expand(keys.shape[0], -1)
        self.slots = torch.cat((self.slots, fresh), 1)
        self.ghost_slots = torch.cat((self.ghost_slots, torch.full_like(fresh, -1)), 1)

    def keep(self, chosen: Tensor) -> None:
        """Hold the codes of `[Hkv, M]` blocks and no others; what was given up is encoded anew.

        Every KV head must choose equally many. Encoding is deterministic, so codes are as they were.
        """
        index = chosen.nonzero(as_tuple=True)[1].unflatten(0, (chosen.shape[0], -1))
        heads = torch.arange(chosen.shape[0])[:, None].expand_as(index)
        rows = self._rows_of(heads.flatten(), index.flatten())
        if self.ghost_bits == 4:
            self._make_ghosts(~chosen)
        for name, block_rows in rows.items():
            slab = self.blocks[name]
            slab.data, slab.length = block_rows.unflatten(0, index.shape), index.shape[1]
        self.slots = _numbered(chosen)

    def _rows_of(self, heads: Tensor, blocks: Tensor) -> Blocks:
        """Return the held tensors of chosen pairs, `[n, ...]`, ghosts encoded from their originals."""
        here = self.slots[heads, blocks] >= 0
        slots = self.slots[heads, blocks].clamp_min(0).long()
        found = {name: slab.rows[heads, slots] for name, slab in self.blocks.items() if self._held(name)}
        if not bool(here.all()):
            originals = self.original_blocks(heads[~here], blocks[~here])
            keys, values = (rows[:, None].double() for rows in originals)
            encoded = self.backend.quantize_values(values, self.fmt)[0]
            if self.ghost_bits == 4:
                encoded = encoded | self.backend.quantize_keys(keys, self.fmt)[0]
            for name, rows in found.items():
                rows[~here] = encoded[name][:, 0]
        return found

    def _make_ghosts(self, away: Tensor) -> None:
        """Hold INT4 keys of the blocks `away`; one that INT4 cannot hold is read from the originals."""
        head, block = away.nonzero(as_tuple=True)
        known = self.ghost_slots[head, block] >= 0
        slots = self.ghost_slots[head, block].clamp_min(0).long()
        fresh = self.original_blocks(head[~known], block[~known])[0].double()
        encoded, bad = encode_ghosts(fresh, self.fmt)
        self.quarantine(head[~known][bad], block[~known][bad])
        rows = {}
        for name, new in encoded.items():
            old = self.ghosts.get(name, new.new_zeros(away.shape[0], 1, *new.shape[1:]))
            rows[name] = old[head, slots]
            rows[name][~known] = new
        count = int(away[0].sum())
        shape = (away.shape[0], count)
        self.ghosts = {name: data.unflatten(0, shape) for name, data in rows.items()} if count else {}
        self.ghost_slots = _numbered(away)

    def codes(self) -> Blocks:
        """Return the key tensors of all completed blocks, `[Hkv, M, ...]` views.

        With INT4 ghosts those of the blocks at hand and of the ghosts, with the rows of every block.
        """
        keys = {name: slab.rows for name, slab in self.blocks.items() if name.startswith("key_")}
        if not self.ghosts:
            return keys
        return keys | self.ghosts | {"slots": self.slots, "ghost_slots": self.ghost_slots}

    def pick(self, heads: Tensor, blocks: Tensor) -> Blocks:
        """Return the named tensors of chosen pairs that are at hand, `[n, ...]` copies."""
        slots = self.slots[heads, blocks].long()
        return {
            name: slab.rows[heads, slots if self._held(name) else blocks]
            for name, slab in self.blocks.items()
        }

    def bounds(self) -> Any:
        """Return the annotations of all completed blocks and of the tail; of ghosts those of their keys."""
        notes = super().bounds()
        if not self.ghosts:
            return notes
        ghost = (self.ghost_slots >= 0) & ~self.raw.rows
        rows = self.ghost_slots.clamp_min(0).long()[..., None].expand(-1, -1, 3)
        stated = self.ghosts["ghost_notes"].double().gather(1, rows).unbind(-1)
        for column, stated_column in zip(("rk", "kappa", "sk"), stated, strict=True):
            known = getattr(notes, column)
            known[:, :-1] = torch.where(ghost, stated_column, known[:, :-1])
        return notes

    def damaged(self, heads: Tensor, blocks: Tensor) -> Tensor:
        """Return which chosen pairs changed since sealing, `[n]`; of a ghost only the keys are checked.

        They are checked by their scores: the checksum covers values that are not there.
        """
        here = self.at_hand()[heads, blocks]
        found = torch.zeros_like(here)
        if bool(here.any()):
            found[here] = super().damaged(heads[here], blocks[here])
        return found

    def changed_blocks(self, head: int) -> Tensor:
        """Return which blocks of a KV head differ from what was sealed, `[M]`; ghosts are encoded anew."""
        blocks = torch.arange(self.block_count)
        heads = torch.full_like(blocks, head)
        rows = {name: slab.rows[heads, blocks] for name, slab in self.blocks.items() if not self._held(name)}
        changed = self._differs(rows | self._rows_of(heads, blocks), heads, blocks)
        ghost = (self.ghost_slots[head] >= 0).nonzero()[:, 0]
        if len(ghost):
            keys = self.original_blocks(heads[ghost], ghost)[0].double()
            slots = self.ghost_slots[head, ghost].long()
            for name, fresh in encode_ghosts(keys, self.fmt)[0].items():
                changed[ghost] |= (self.ghosts[name][head, slots] != fresh).flatten(1).any(1)
        return changed

    def fork(self) -> "GhostStore":
        """Return an independent copy that shares what is never rewritten."""
        twin = super().fork()
        assert isinstance(twin, GhostStore)
        twin.ghost_bits, twin.ghosts = self.ghost_bits, self.ghosts
        twin.slots, twin.ghost_slots = self.slots, self.ghost_slots
        return twin

    def bytes(self, scratch: int = 0) -> LayerBytes:
        """Return the ledger, ghosts and the tables of rows included."""
        held = super().bytes(scratch)
        tables = self.slots.nbytes + (self.ghost_slots.nbytes if self.ghost_bits == 4 else 0)
        ghosts = sum(rows.nbytes for rows in self.ghosts.values())
        codes = self.ghosts["ghost_codes"].nbytes if self.ghosts else 0
        return LayerBytes(
            device=held.device + tables + ghosts,
            host=held.host,
            metadata=held.metadata + tables + ghosts - codes,
            scratch=held.scratch,
            dense_equivalent=held.dense_equivalent,
        )


def encode_ghosts(keys: Tensor, fmt: TierFormat) -> tuple[Blocks, Tensor]:
    """Encode `[n, S, D]` float64 keys to INT4; return the tensors and which of the blocks INT4 cannot hold.

    code = clamp(rint((k - z) / s), -8, 7), k' = code * s + z, with z = lo + 8 * (hi - lo) / 15 and s rounded
    up so that |k - k'| <= s / 2 per element, as for INT8 keys. `ghost_notes` are max ||k - k'||, max
    || |s * code| + |z| || and ||K - K'||_2 per block.
    """
    dtype = fmt.key_dtype
    lo, hi = keys.amin(1), keys.amax(1)
    ideal = (hi - lo) / 15
    offset = (lo + 8 * ideal).to(dtype)
    z = offset.double()
    cover = torch.maximum(torch.maximum(ideal, (hi - z) / 7.5), (z - lo) / 8.5)
    scale = round_up(cover.clamp_min(smallest(dtype)), dtype)
    for _ in range(5):
        s = scale.double()
        codes = ((keys - z[:, None]) / s[:, None]).round().nan_to_num(0).clamp(-8, 7)
        residual = keys - (codes * s[:, None] + z[:, None])
        missed = residual.abs().amax(1) > s / 2 * (1 + 2.0**-14)
        if not missed.any():
            break
        # a tie that rounding decided the other way: one step wider covers it
        scale = torch.where(missed, round_up(s * (1 + 2.0**-23), dtype), scale)
    magnitude = (codes.abs() * s[:, None] + z.abs()[:, None]).norm(dim=-1).amax(-1)
    notes = torch.stack((residual.norm(dim=-1).amax(-1), magnitude, spectral_norm(residual)), -1)
    notes = upper(notes, torch.float16)
    bad = missed.any(-1) | ~torch.isfinite(torch.cat((scale, offset, notes), -1).double()).all(-1)
    nibbles = (codes + 8).to(torch.uint8)
    rows = {
        "ghost_codes": nibbles[..., 0::2] | nibbles[..., 1::2] << 4,
        "ghost_scale": scale,
        "ghost_offset": offset,
        "ghost_notes": notes,
    }
    return {
        name: torch.where(_like(bad, data), torch.zeros_like(data), data) for name, data in rows.items()
    }, bad


def _like(flags: Tensor, rows: Tensor) -> Tensor:
    return flags.reshape(-1, *(1,) * (rows.ndim - 1))


def _numbered(chosen: Tensor) -> Tensor:
    """Return the number of each chosen block within its head, -1 for the others, int32 `[Hkv, M]`."""
    return torch.where(chosen, chosen.cumsum(1) - 1, -1).to(torch.int32)


class GhostBackend:
    """A backend that also scores INT4 ghosts: their codes are INT8 codes of a coarser grid."""

    def __init__(self, inner: Any) -> None:
        self.inner: Any = inner.inner if isinstance(inner, GhostBackend) else inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def score_blocks(self, query: Tensor, blocks: Blocks) -> Tensor:
        """Return q . k' of `[Hkv, R, D]` float64 queries with every token: `[Hkv, R, M, S]`, not scaled."""
        return self._of_all(self.inner.score_blocks, query, blocks)

    def half_steps(self, query: Tensor, blocks: Blocks) -> Tensor:
        """Return 0.5 * sum_c |q_c| s_bc per head and block, `[Hkv, R, M]`."""
        return self._of_all(self.inner.half_steps, query, blocks)

    def _of_all(self, work: Any, query: Tensor, blocks: Blocks) -> Tensor:
        if "ghost_codes" not in blocks:
            return work(query, blocks)
        keys = {name: rows for name, rows in blocks.items() if name.startswith("key_")}
        count = blocks["ghost_codes"].shape[1]
        parts = [_unpacked(blocks, slice(start, start + _CHUNK)) for start in range(0, count, _CHUNK)]
        found = torch.cat([work(query, part) for part in (keys, *parts)], 2)
        held = keys["key_codes"].shape[1]
        row = torch.where(blocks["slots"] >= 0, blocks["slots"], held + blocks["ghost_slots"]).long()
        row = row[:, None].expand(-1, query.shape[1], -1)
        if found.ndim == 4:
            row = row[..., None].expand(-1, -1, -1, found.shape[3])
        return found.gather(2, row)


def _unpacked(blocks: Blocks, part: slice) -> Blocks:
    """Return INT4 ghosts as INT8 key tensors."""
    packed = blocks["ghost_codes"][:, part]
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int8) - 8
    return {
        "key_codes": codes,
        "key_scale": blocks["ghost_scale"][:, part],
        "key_offset": blocks["ghost_offset"][:, part],
    }
