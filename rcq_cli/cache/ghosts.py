"""A tiered store that can give up the values of a block: its INT8 keys stay as a ghost, its values in tier 2.

With the key, the annotations and the originals still there, the weight of a dropped block is known within a
proven factor, so what its absence costs can be certified, and it can be brought back.
"""

from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.tiers import TieredStore
from rcq_cli.kernels.reference import Blocks
from rcq_cli.protocols import LayerBytes

VALUES = "value_"


class GhostStore(TieredStore):
    """A `TieredStore` whose value codes are held for chosen blocks only, equally many per KV head."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # row of each block in the value tensors, -1 for a ghost
        self.slots = torch.zeros(self.geometry.kv_heads, 0, dtype=torch.int32)

    def at_hand(self) -> Tensor:
        """Return which blocks have their values in tier 1, bool `[Hkv, M]`."""
        return self.slots >= 0

    def _seal_chunk(self, keys: Tensor, values: Tensor) -> None:
        held = int((self.slots[:1] >= 0).sum())
        super()._seal_chunk(keys, values)
        fresh = torch.arange(held, held + keys.shape[1], dtype=torch.int32)
        self.slots = torch.cat((self.slots, fresh.expand(keys.shape[0], -1)), 1)

    def keep(self, chosen: Tensor) -> None:
        """Hold the values of `[Hkv, M]` blocks and no others; what was given up is encoded anew.

        Every KV head must choose equally many. Encoding is deterministic, so codes are as they were.
        """
        index = chosen.nonzero(as_tuple=True)[1].unflatten(0, (chosen.shape[0], -1))
        heads = torch.arange(chosen.shape[0])[:, None].expand_as(index)
        rows = self._values_of(heads.flatten(), index.flatten())
        for name, block_rows in rows.items():
            slab = self.blocks[name]
            slab.data, slab.length = block_rows.unflatten(0, index.shape), index.shape[1]
        slots = torch.full_like(self.slots, -1)
        order = torch.arange(index.shape[1], dtype=torch.int32).expand_as(index)
        self.slots = slots.scatter(1, index, order)

    def _values_of(self, heads: Tensor, blocks: Tensor) -> Blocks:
        """Return the value tensors of chosen pairs, `[n, ...]`, ghosts encoded from their originals."""
        here = self.slots[heads, blocks] >= 0
        slots = self.slots[heads, blocks].clamp_min(0).long()
        found = {name: slab.rows[heads, slots] for name, slab in self._value_slabs().items()}
        if not bool(here.all()):
            values = self.original_blocks(heads[~here], blocks[~here])[1].double()
            encoded, _ = self.backend.quantize_values(values[:, None], self.fmt)
            for name, rows in found.items():
                rows[~here] = encoded[name][:, 0]
        return found

    def _value_slabs(self) -> dict[str, Any]:
        return {name: slab for name, slab in self.blocks.items() if name.startswith(VALUES)}

    def codes(self) -> Blocks:
        """Return the key tensors of all completed blocks, `[Hkv, M, ...]` views."""
        return {name: slab.rows for name, slab in self.blocks.items() if not name.startswith(VALUES)}

    def pick(self, heads: Tensor, blocks: Tensor) -> Blocks:
        """Return the named tensors of chosen pairs that have their values here, `[n, ...]` copies."""
        slots = self.slots[heads, blocks].long()
        return {
            name: slab.rows[heads, slots if name.startswith(VALUES) else blocks]
            for name, slab in self.blocks.items()
        }

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
        """Return which blocks of a KV head differ from what was sealed, `[M]`; ghosts get values back."""
        blocks = torch.arange(self.block_count)
        heads = torch.full_like(blocks, head)
        rows = {
            name: slab.rows[heads, blocks]
            for name, slab in self.blocks.items()
            if not name.startswith(VALUES)
        }
        return self._differs(rows | self._values_of(heads, blocks), heads, blocks)

    def fork(self) -> "GhostStore":
        """Return an independent copy that shares what is never rewritten."""
        twin = super().fork()
        assert isinstance(twin, GhostStore)
        twin.slots = self.slots
        return twin

    def bytes(self, scratch: int = 0) -> LayerBytes:
        """Return the ledger, the table of slots included."""
        held = super().bytes(scratch)
        return LayerBytes(
            device=held.device + self.slots.nbytes,
            host=held.host,
            metadata=held.metadata + self.slots.nbytes,
            scratch=held.scratch,
            dense_equivalent=held.dense_equivalent,
        )
