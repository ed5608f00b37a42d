"""One certified step of a layer whose dropped blocks left ghosts, plain and in compiled pieces.

Policy and formulas are the ladder's. What is added is what `recas-certified` asks of a step beside its
output: the attention of every token, its score, and between which limits the mass of some blocks lies.
"""

from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.ghosts import GhostStore
from rcq_cli.cache.tiers import refuse_changed
from rcq_cli.certify.bounds import Masses, Split
from rcq_cli.certify.exact import store
from rcq_cli.certify.ladder import Bounds, CertifiedStep
from rcq_cli.kernels import _cpu_float64_blocks, _cpu_float64_bounds, _cpu_float64_kept
from rcq_cli.kernels._cpu_float64 import Array
from rcq_cli.kernels._cpu_float64_bounds import Weighed
from rcq_cli.kernels._cpu_float64_kept import Reading
from rcq_cli.kernels._cpu_float64_rows import ROWS
from rcq_cli.kernels._format import TierFormat
from rcq_cli.modes._compiled import CompiledStep, CompiledStore
from rcq_cli.phases import phase, phased
from rcq_cli.protocols import Geometry
from rcq_cli.recas.joint import dropped_interval

CHANNELS = 16
"""Compiled pieces read groups of a multiple of so many channels."""


class GhostStep(CertifiedStep):
    """A step of the ladder in plain torch."""

    cache: Any

    def attention(self) -> Tensor:
        """Return the weight `[Hkv, T]` of every token by the scores of this step, a mean over the group."""
        return self._all_scores().softmax(-1).mean(1)

    def mean_scores(self) -> Tensor:
        """Return the score `[Hkv, T]` of every token, a mean over the group."""
        return self._all_scores().mean(1)

    def _all_scores(self) -> Tensor:
        return torch.cat((self.scores.flatten(2), self.tail_scores), -1)

    def mass_outside(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the limits of the mass outside `blocks` `[Hkv, M]`, `[Hkv, R]` each; the tail is inside."""
        masses, _, _ = self.masses()
        tail = torch.ones(blocks.shape[0], 1, dtype=torch.bool)
        outside = ~torch.cat((blocks, tail), 1)
        exact_keys = torch.cat((self.exact_keys, tail), 1)
        errors = torch.where(exact_keys[:, None], self.slack, self.delta_coded)
        return dropped_interval(masses._replace(skipped=outside[:, None].expand_as(masses.skipped)), errors)


class CompiledGhosts(GhostStore, CompiledStore):
    """A store with INT8 ghosts that compiled pieces read where it lies."""

    def rows_of_values(self) -> Array:
        """Return in which row of the codes the values of each block are, int32 `[Hkv, M]`; -1 for ghosts."""
        return self.slots.numpy()


class CompiledGhostStep(GhostStep, CompiledStep):
    """The same step with compiled pieces."""

    cache: CompiledGhosts

    def allowed(self) -> Tensor:
        """Return how far the coded scores of a block may be from the exact ones, `[Hkv, R, M]`."""
        return (self.delta_coded + self.slack)[..., :-1]

    def _plan(self) -> None:
        CertifiedStep._plan(self)
        self.unsummed = torch.zeros_like(self.read)
        self.is_weighed, self.tail_is_summed = False, self.cache.tail_tokens == 0
        self.current: Weighed | None = None

    def _weigh(self, pairs: tuple[Tensor, Tensor] | None = None) -> None:
        """Note that scores have changed; `_settle` exponentiates, when someone asks."""
        del pairs
        self.is_weighed, self.current = False, None

    def _read_values(self, chosen: Tensor) -> None:
        """Note that the values of `[Hkv, M]` blocks are read; `_settle` does it, when someone asks."""
        self.read |= chosen
        self.unsummed |= chosen
        self.current = None
        away = chosen & ~self.at_hand
        self.readmitted |= away
        self.exact_values |= away

    def _settle(self) -> None:
        """Bring weights and sums over values up to date: exact where promoted, else from the codes."""
        if not self.is_weighed:
            CompiledStep._weigh(self)
            self.is_weighed = True
        if self.tail_is_summed and not bool(self.unsummed.any()):
            return
        with phase("attend"):
            tail = self.tails[1], 0 if self.tail_is_summed else self.cache.tail_tokens
            reading = Reading(self.unsummed, self.exact_values)
            changed = _cpu_float64_kept.sum_blocks(
                self.weights, self.layer, reading, self.cache.fmt.group, tail, self.sums
            )
            head, block = (self.unsummed & self.exact_values).nonzero(as_tuple=True)
            refuse_changed(changed[head, block], head, block)
            self._page(len(head) * self.layer.values.width * self.layer.values.size)
        self.unsummed, self.tail_is_summed = torch.zeros_like(self.read), True

    def weighed(self) -> Weighed:
        """Return the block masses in units of the total of what is read."""
        self._settle()
        if self.current is None:
            self.current = super().weighed()
        return self.current

    @phased("select")
    def _heaviest(self, share: float) -> Tensor:
        """Shortest prefix of blocks per head with `share` of the mass, joined over a group: `[Hkv, M]`."""
        if share <= 0 or not self.blocks:
            return torch.zeros_like(self.read)
        self._settle()
        return _cpu_float64_blocks.heaviest(self.log_mass, share)

    @staticmethod
    def _dearest(cost: Tensor, allowance: Tensor) -> Tensor:
        """Blocks that do not fit when the cheapest are skipped up to `allowance` per head: `[Hkv, M]`."""
        return _cpu_float64_blocks.dearest(cost, allowance)

    def masses(self) -> tuple[Masses, Tensor, Tensor]:
        """Return the block masses in units of the active total, the combining factors and that total."""
        found = self.weighed()
        tail = self.read.new_zeros(self.read.shape[0], 1)  # never skipped, and there before any block
        skipped = torch.cat((~self.read, tail), 1)
        skipped = skipped[:, None].expand_as(found.share)
        return Masses(*found[:3], skipped, found.log_peak), found.share, found.total

    @phased("bound")
    def evaluate(self) -> tuple[Tensor, Tensor, Bounds]:
        """Return the stored output `[Hkv, R, D]`, its norm and all bounds for the present state."""
        masses = self.weighed()
        exact_output = (masses.share[..., None, :] @ self.sums)[..., 0, :]
        output, storing = store(exact_output, self.cache.dtype)
        norm = output.double().norm(dim=-1)
        limit = self._limit(norm)
        found, rounding = self.proven(masses, (exact_output, output, storing), limit)
        splits = (Split(*split) for split in (found.key_split, found.value_split))
        parts = (found.key, found.dropped, found.value, rounding, found.floor)
        return output, norm, Bounds(*parts, limit, found.contribution, *splits)

    @phased("select")
    def attention(self) -> Tensor:
        """Return the weight `[Hkv, T]` of every token by the scores of this step, a mean over the group."""
        self._settle()
        return _cpu_float64_kept.attention(self.weights, self.peak, self.mass, self.cache.tokens)

    def _all_scores(self) -> Tensor:
        return self.scores.flatten(2)[..., : self.cache.tokens]

    @phased("bound")
    def mass_outside(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the limits of the mass outside `blocks` `[Hkv, M]`, `[Hkv, R]` each; the tail is inside."""
        errors = self.slack, self.delta_coded
        low, high = _cpu_float64_bounds.limits(self.weighed(), ~blocks, errors, self.exact_keys)
        return low, high


def open_store(
    geometry: Geometry, fmt: TierFormat, backend: Any, ghost_bits: int
) -> tuple[GhostStore, type[GhostStep]]:
    """Return an empty store and the kind of step that reads it: compiled where the pieces fit its layout."""
    fits = ghost_bits == 8 and fmt.group % CHANNELS == 0 and fmt.block % ROWS == 0
    if backend.name == "cpu" and fits and fmt.value_meta == "two-level":
        return CompiledGhosts(geometry, fmt, backend), CompiledGhostStep
    return GhostStore(geometry, fmt, backend, ghost_bits=ghost_bits), GhostStep
