"""What a float64 policy step on the tiered store takes from the compiled pieces of `_cpu_float64`.

Policy and formulas stay those of the ladder; these pieces read what is stored where it lies.
"""

import torch
from torch import Tensor

from rcq_cli.cache.tiers import TieredStore, refuse_changed
from rcq_cli.certify.ladder import CertifiedStep
from rcq_cli.kernels import _cpu_float64


class CompiledStore(TieredStore):
    """The tiered store of one layer; checksums are taken where the data lies."""

    def damaged(self, heads: Tensor, blocks: Tensor) -> Tensor:
        """Return which chosen pairs hold codes, metadata or annotations that changed since sealing, `[n]`."""
        parts = [*self.codes().values(), self.annotations.rows]
        return _cpu_float64.checksums(parts, heads, blocks) != self.checks.rows[heads, blocks, 0]

    def changed_originals(self, head: int) -> Tensor:
        """Return which sealed blocks of a KV head have other originals than when they were sealed, `[M]`."""
        blocks = torch.arange(self.block_count)
        return self._changed(torch.full_like(blocks, head), blocks)

    def _by_block(self) -> list[Tensor]:
        """Return views of the originals of sealed blocks, two of `[Hkv, M, S, D]`."""
        assert self.originals is not None
        shape = (self.block_count, self.fmt.block)
        return [slab.rows[:, : shape[0] * shape[1]].unflatten(1, shape) for slab in self.originals]

    def _changed(self, heads: Tensor, blocks: Tensor) -> Tensor:
        return _cpu_float64.checksums(self._by_block(), heads, blocks) != self.checks.rows[heads, blocks, 1]

    def in_blocks(self, heads: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of all original keys and values, `[Hkv, M, S, D]`.

        Raises `BrokenRun` when those of the chosen pairs are not what was stored.
        """
        refuse_changed(self._changed(heads, blocks), heads, blocks)
        keys, values = self._by_block()
        return keys, values

    def original_blocks(self, heads: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return original keys and values of chosen pairs, `[n, S, D]`, checked against their checksums."""
        keys, values = self.in_blocks(heads, blocks)
        return keys[heads, blocks], values[heads, blocks]


class CompiledStep(CertifiedStep):
    """The parts of a step that touch every token."""

    cache: CompiledStore

    def allowed(self) -> Tensor:
        """Return how far the coded scores of a block may be from the exact ones, `[Hkv, R, M]`."""
        raise NotImplementedError

    def _weigh_blocks(self) -> None:
        _cpu_float64.weigh(self.scores, self.weights, self.peak, self.mass, self.square)

    def _rescore(self, head: Tensor, block: Tensor, take: Tensor) -> None:
        keys, _ = self.cache.in_blocks(head, block)
        self._page(len(head) * keys[0, 0].numel() * keys.element_size())
        bad = _cpu_float64.promote(
            self.query, self.scale, keys, (head, block), take, self.allowed(), self.scores
        )
        self._distrust(bad | self.cache.damaged(head, block), head, block)
        # all of them: what did not change is cheaper to repeat than to leave out
        self._weigh_blocks()

    def _sum_codes(self, head: Tensor, block: Tensor) -> None:
        copied = _cpu_float64.sum_values(self.weights, self.cache.codes(), (head, block), self.sums)
        self.scratch_bytes = max(self.scratch_bytes, copied)
