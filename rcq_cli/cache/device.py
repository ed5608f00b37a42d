"""The tiered store that backend `triton-fused` reads: tier 1 on the device, originals in pinned host memory.

Nothing here waits for the device while tokens are appended: counts live on the host, everything measured
stays on the device.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.slab import Slab
from rcq_cli.cache.tiers import ANNOTATIONS, TieredStore
from rcq_cli.certify.spectral import SpectralBound, spectral_norm
from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels._rounding import MARGIN, round_up, upper
from rcq_cli.protocols import Geometry, LayerBytes

REFRESH_SHARE = 200
"""A spectral bound is refreshed when one row in so many is new."""


class PinnedSlab(Slab):
    """A slab in host memory that a device reads over its link; copies into it are not waited for."""

    def __init__(self, heads: int, tail: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        super().__init__(heads, tail, dtype)
        self.device = torch.device(device)
        self.pending = False

    def extend(self, rows: Tensor) -> None:
        """Add `[H, n, ...]` rows at the end."""
        self.make_room(rows.shape[1])
        need = self.length + rows.shape[1]
        for head, target in zip(rows, self.data[:, self.length : need], strict=True):
            target.copy_(head, non_blocking=True)
        self.length, self.pending = need, self.device.type == "cuda"

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows in all; waits for the device, which may still read and write."""
        if capacity <= self.data.shape[1]:
            return
        shape = (self.data.shape[0], capacity, *self.data.shape[2:])
        grown = torch.empty(shape, dtype=self.data.dtype, pin_memory=self.device.type == "cuda")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        grown[:, : self.length] = self.rows
        self.data = grown

    @property
    def rows(self) -> Tensor:
        """Return the `[H, length, ...]` rows, all of them written."""
        if self.pending:
            torch.cuda.synchronize(self.device)
            self.pending = False
        return self.data[:, : self.length]

    def fork(self) -> "PinnedSlab":
        """Return a copy that shares the rows; its first growth moves it to a buffer of its own."""
        twin = PinnedSlab(0, (), self.data.dtype, str(self.device))
        twin.data, twin.length = self.rows, self.length
        return twin


class DeviceSpectrum(SpectralBound):
    """A spectral bound whose refreshes follow from counts, so that nobody waits for a comparison."""

    def __init__(self, heads: int, dim: int, device: str) -> None:
        super().__init__(heads, dim, device)
        self.total = self.fresh = 0

    def add(self, rows: Tensor) -> None:
        """Add float64 rows `[H, n, D]`."""
        self.fresh += rows.shape[1]
        self.total += rows.shape[1]
        super().add(rows)

    def due(self) -> bool:
        """Return whether enough rows are new."""
        return self.fresh * REFRESH_SHARE >= self.total

    def refresh(self) -> None:
        """Bound everything anew."""
        super().refresh()
        self.fresh = 0


class DeviceStore(TieredStore):
    """Tier 1 in the layout of the reference, sealed by kernels; raw flags and measurements on the device."""

    def __init__(self, geometry: Geometry, fmt: TierFormat, backend: Any, *, originals: bool = True) -> None:
        super().__init__(geometry, fmt, backend, originals=originals, joint=True)
        heads, dim, place = geometry.kv_heads, geometry.head_dim, geometry.device
        self.kernels = backend.kernels()
        shapes = self.kernels.layouts(fmt, dim)
        self.blocks = {name: Slab(heads, shape, dtype, place) for name, (shape, dtype) in shapes.items()}
        self.raw = Slab(heads, (), torch.bool, place)
        self.raw_bounds = Slab(heads, (2,), torch.float32, place)
        self.checks = Slab(heads, (3,), torch.int64, place)
        self.originals = tuple(PinnedSlab(heads, (dim,), self.dtype, place) for _ in "kv")
        self.value_spectrum = DeviceSpectrum(heads, dim, place)
        self.residual_spectrum = DeviceSpectrum(heads, dim, place)
        self.resident: Any = None

    @property
    def first_rows(self) -> int:
        """Return how many tokens a new tail has room for: all, as kernels find its rows at fixed places."""
        return self.fmt.block

    # -- writing --------------------------------------------------------------------------------------------

    def _seal_chunk(self, keys: Tensor, values: Tensor) -> None:
        assert self.centre is not None
        keys, values = (_per_head(rows) for rows in (keys, values))
        begin, fmt = self.block_count, self.fmt
        sealed = self.kernels.encode_keys(keys, fmt)
        coded, raw_values = self.kernels.encode_values(values, fmt)
        residual, measured = self.kernels.residuals(values, self.centre, coded, fmt.group)
        centred = values.double() - self.centre[:, None, None]
        together = spectral_norm(torch.stack((sealed.left, residual, centred)))
        exact = torch.cat((sealed.notes[..., :2], measured, together.movedim(0, -1)), -1)
        stored = upper(exact, torch.float16)
        raw = sealed.raw | raw_values | ~torch.isfinite(stored[..., : len(ANNOTATIONS)]).all(-1)
        for name, rows in (sealed.blocks | coded).items():
            self.blocks[name].extend(rows)
        self.annotations.extend(torch.where(raw[..., None], torch.zeros_like(stored), stored))
        self.raw.extend(raw)
        longest = torch.stack((sealed.notes[..., 2], exact[..., 3]), -1) * MARGIN
        self.raw_bounds.extend(round_up(longest, torch.float32))
        self.residual_spectrum.add(torch.where(raw[..., None, None], 0.0, residual).flatten(1, 2))
        prints = [self.kernels.fingerprints(rows) for rows in (keys, values)]
        self.checks.extend(torch.stack((*prints, torch.zeros_like(prints[0])), -1))
        self.kernels.take_prints(self.tiers(), begin)
        self.coded_elems += keys.numel() + values.numel()

    # -- what kernels are given -----------------------------------------------------------------------------

    def tiers(self) -> Any:
        """Return what the kernels read; valid until the store changes."""
        assert self.originals is not None
        assert self.centre is not None
        return self.kernels.Tiers(
            fmt=self.fmt,
            codes={name: slab.data for name, slab in self.blocks.items()},
            notes=self.annotations.data,
            raw=self.raw.data,
            extra=self.raw_bounds.data,
            checks=self.checks.data,
            tail=self.tail,
            centre=self.centre,
            spectra=torch.stack((self.value_spectrum.value, self.residual_spectrum.value)),
            host_keys=self.originals[0].data,
            host_values=self.originals[1].data,
            blocks=self.block_count,
            tail_tokens=self.tail_tokens,
        )

    def slots(self, tiers: Any) -> Any:
        """Return the originals kept on the device, made anew when the store has outgrown them."""
        if self.resident is None or self.resident.pitch < tiers.pitch:
            before = self.resident
            group = self.geometry.group
            self.resident = self.kernels.Resident(
                self.geometry.kv_heads, group, tiers.pitch, self.fmt, self.tail, self.geometry.head_dim
            )
            if before is not None:
                self.resident.seen, self.resident.step = before.seen, before.step
        return self.resident

    def original_blocks(self, heads: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return original keys and values of chosen pairs, `[n, S, D]`, compared with their fingerprints."""
        self.check_originals(sorted(set(heads.tolist())))
        assert self.originals is not None
        limit, size, place = self.block_count * self.fmt.block, self.fmt.block, self.geometry.device
        keys, values = (
            slab.rows[:, :limit].unflatten(1, (-1, size))[heads.cpu(), blocks.cpu()].to(place)
            for slab in self.originals
        )
        return keys, values

    def changed_originals(self, head: int) -> Tensor:
        """Return which sealed blocks of a KV head have other originals than when they were sealed, `[M]`."""
        assert self.originals is not None
        if not self.block_count:
            return torch.zeros(0, dtype=torch.bool)
        limit, size, place = self.block_count * self.fmt.block, self.fmt.block, self.geometry.device
        rows = (slab.rows[head : head + 1, :limit].to(place).contiguous() for slab in self.originals)
        found = [self.kernels.fingerprints(part.unflatten(1, (-1, size)))[0] for part in rows]
        return (torch.stack(found, -1) != self.checks.rows[head, :, :2]).any(-1)

    def changed_blocks(self, head: int) -> Tensor:
        """Return which sealed blocks of a KV head differ in tier 1 from what was sealed, `[M]`."""
        if not self.block_count:
            return torch.zeros(0, dtype=torch.bool)
        found = self.kernels.prints_of(self.tiers(), head)
        return found[0, : self.block_count, 2] != self.checks.rows[head, :, 2]

    def damaged(self, heads: Tensor, blocks: Tensor) -> Tensor:
        """Return which chosen pairs hold codes, metadata or annotations that changed since sealing, `[n]`."""
        changed = [self.changed_blocks(head) for head in range(self.geometry.kv_heads)]
        return torch.stack(changed)[heads, blocks]

    # -- housekeeping ---------------------------------------------------------------------------------------

    def bytes(self, scratch: int = 0) -> LayerBytes:
        """Return the ledger; what checks and bounds are made of lies on the device here."""
        held = super().bytes(scratch)
        moved = self.raw_bounds.nbytes + self.checks.nbytes
        moved += self.value_spectrum.nbytes + self.residual_spectrum.nbytes
        moved += 0 if self._first_centre is None else self._first_centre.nbytes
        return replace(
            held, device=held.device + moved, metadata=held.metadata + moved, host=held.host - moved
        )


def _per_head(rows: Tensor) -> Tensor:
    """Return `[H, M, S, D]` rows whose blocks follow one another within a head."""
    _, _, size, dim = rows.shape
    return rows if rows.stride()[1:] == (size * dim, dim, 1) else rows.contiguous()
