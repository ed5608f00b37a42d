"""The tiered store of one layer: compressed blocks on the device, originals in host memory, an open tail.

A block of S tokens is encoded once, when its last token arrives, annotated from what was stored, and never
rewritten. Symbols follow the certified-attention paper (arXiv:2605.20868, sections 3 and 4): per block
rk = max ||k - k'||, kappa = max || |s * code| + |z| ||, eta = max ||v - v'|| (absolute), rv = max ||v - c0||.
Over the tokens of a block together, sk, se and sv are spectral norms of K - K', V - V' and V - c0.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rcq_cli.cache.slab import Slab
from rcq_cli.certify.spectral import SpectralBound, spectral_norm
from rcq_cli.errors import BrokenRun
from rcq_cli.kernels._format import CHECKSUM_FACTOR, TierFormat
from rcq_cli.kernels._rounding import MARGIN, upper
from rcq_cli.kernels.reference import Blocks, Reference
from rcq_cli.protocols import Geometry, LayerBytes

ANNOTATIONS, JOINT = ("rk", "kappa", "eta", "rv"), ("sk", "se", "sv")
_CHUNK_ELEMENTS = 2**21


class Annotations(NamedTuple):
    """Float64 bounds per block, `[Hkv, M + 1]`; the last column is the open tail."""

    rk: Tensor
    kappa: Tensor
    eta: Tensor
    rv: Tensor
    sk: Tensor | None = None
    """None, like the two below, where the store has no spectral norms of blocks."""
    se: Tensor | None = None
    sv: Tensor | None = None


class TieredStore:
    """Tier 1 (codes, metadata, annotations, tail) and tier 2 (originals) of one layer.

    `originals=False` keeps no tier 2 (mode `naive`), `joint=True` annotates blocks with spectral norms too.
    Keys and values are `[Hkv, T, D]`, keys after RoPE.
    """

    def __init__(
        self,
        geometry: Geometry,
        fmt: TierFormat,
        backend: Reference,
        *,
        originals: bool = True,
        joint: bool = False,
    ) -> None:
        fmt.check(geometry.head_dim)
        self.geometry, self.fmt, self.backend = geometry, fmt, backend
        heads, dim = geometry.kv_heads, geometry.head_dim
        self.dtype = getattr(torch, geometry.dtype)
        self.blocks: dict[str, Slab] = {}
        self.joint = (4, 5, 6) if joint else ()
        """Columns of the annotations with sk, se and sv, as far as there are such."""
        self.annotations = Slab(heads, (self.columns,), torch.float16, geometry.device)
        self.raw = Slab(heads, (), torch.bool)
        self.raw_bounds = Slab(heads, (2,), torch.float64)  # kappa and rv of raw blocks
        self.checks = Slab(heads, (2,), torch.int64)  # checksums of tier 1 and of the originals
        self.originals = tuple(Slab(heads, (dim,), self.dtype) for _ in "kv") if originals else None
        self.tail, self.tail_tokens = self._open_tail(self.first_rows), 0
        self.centre: Tensor | None = None  # c0, fixed by the first prefill
        self._first_centre: Tensor | None = None  # to see whether it changed
        self.value_spectrum = SpectralBound(heads, dim)
        self.residual_spectrum = SpectralBound(heads, dim)
        self.tokens = 0
        self.coded_elems = 0

    @property
    def columns(self) -> int:
        """Return how many annotations a block has room for."""
        return len(ANNOTATIONS) + len(self.joint)

    @property
    def first_rows(self) -> int:
        """Return how many tokens a new tail has room for: a whole block would be .4 % of 8,192 tokens."""
        return 8

    # -- writing --------------------------------------------------------------------------------------------

    def extend(self, keys: Tensor, values: Tensor, *, seal: bool = True) -> None:
        """Add `[Hkv, T, D]` keys and values; blocks that become full are encoded at once.

        With `seal=False` a tail that this fills stays open until the next call (it may hold one whole block).
        """
        if keys.shape[1] == 0:
            return
        if self.centre is None:
            self.centre = _centre(values, prefill=keys.shape[1] > 1)
            self._first_centre = None if self.originals is None else self.centre.clone()
        if self.originals is not None:
            for slab, rows in zip(self.originals, (keys, values), strict=True):
                slab.extend(rows)
            self.value_spectrum.add(values.double() - self.centre[:, None])
        self.tokens += keys.shape[1]
        size, done = self.fmt.block, 0
        while done < keys.shape[1]:
            self.seal_full_tail()
            whole = (keys.shape[1] - done) // size if self.tail_tokens == 0 else 0
            if whole > (0 if seal else 1):
                stop = done + (whole if seal else whole - 1) * size
                self._seal(keys[:, done:stop], values[:, done:stop])
            else:
                stop = min(keys.shape[1], done + size - self.tail_tokens)
                span = slice(self.tail_tokens, self.tail_tokens + stop - done)
                self.make_tail_room(stop - done)
                self.tail[0, :, span], self.tail[1, :, span] = keys[:, done:stop], values[:, done:stop]
                self.tail_tokens = span.stop
            done = stop
        if seal:
            self.seal_full_tail()

    def append(self, key: Tensor, value: Tensor, *, seal: bool = True) -> None:
        """Add the `[Hkv, D]` key and value of one token, as `extend` does."""
        self.extend(key[:, None], value[:, None], seal=seal)

    def seal_full_tail(self) -> None:
        """Encode the open tail if its last token has arrived."""
        if self.tail_tokens == self.fmt.block:
            self._seal(self.tail[0], self.tail[1])
            self.tail_tokens = 0
            if self.tail.shape[2] > self.first_rows:
                self.tail = self._open_tail(self.first_rows)

    def make_tail_room(self, count: int) -> None:
        """Make room for `count` more tokens in the open tail, twice as much when it has to grow."""
        rows, need = self.tail.shape[2], self.tail_tokens + count
        if need > rows:
            grown = self._open_tail(max(need, 2 * rows))
            grown[:, :, : self.tail_tokens] = self.tail[:, :, : self.tail_tokens]
            self.tail = grown

    def _open_tail(self, rows: int) -> Tensor:
        """Return a tail with room for `rows` tokens, at most a block of them, `[2, Hkv, n, D]`."""
        g, rows = self.geometry, min(rows, self.fmt.block)
        return torch.empty(2, g.kv_heads, rows, g.head_dim, dtype=self.dtype, device=g.device)

    def _seal(self, keys: Tensor, values: Tensor) -> None:
        """Encode `[Hkv, M * S, D]` keys and values, annotate them from what was stored, publish."""
        size = self.fmt.block
        step = max(1, _CHUNK_ELEMENTS // (keys.shape[0] * size * keys.shape[2])) * size
        for start in range(0, keys.shape[1], step):
            pair = [t[:, start : start + step].unflatten(1, (-1, size)) for t in (keys, values)]
            self._seal_chunk(*pair)
            if start == 0:  # once for all chunks: room made bit by bit has slack
                rest = (keys.shape[1] - step) // size
                for slab in self._slabs():
                    slab.reserve(slab.length + rest)

    def _slabs(self) -> tuple[Slab, ...]:
        """Return everything that grows block by block."""
        return (*self.blocks.values(), self.annotations, self.raw, self.raw_bounds, self.checks)

    def _seal_chunk(self, keys: Tensor, values: Tensor) -> None:
        k, v = keys.double(), values.double()
        key_blocks, raw_keys = self.backend.quantize_keys(k, self.fmt)
        value_blocks, raw_values = self.backend.quantize_values(v, self.fmt)
        blocks = key_blocks | value_blocks
        assert self.centre is not None
        left, residual = k - self.backend.keys(blocks), v - self.backend.values(blocks)
        centred = v - self.centre[:, None, None]
        longest = [rows.norm(dim=-1).amax(-1) for rows in (left, residual, centred)]
        longest.insert(1, self.backend.key_magnitude(blocks))
        together = [spectral_norm(rows) for rows in (left, residual, centred)[: len(self.joint)]]
        exact = torch.stack((*longest, *together), -1)
        stored = pad(upper(exact, torch.float16), (0, self.columns - exact.shape[-1]))
        # a spectral norm that overflows says nothing, but the block needs none
        raw = raw_keys | raw_values | ~torch.isfinite(stored[..., : len(ANNOTATIONS)]).all(-1)
        for name, rows in blocks.items():
            if name not in self.blocks:
                self.blocks[name] = Slab(rows.shape[0], rows.shape[2:], rows.dtype, self.geometry.device)
            self.blocks[name].extend(rows)
        # of a raw block they are read only if its flag is lost: then nothing is known of it
        self.annotations.extend(torch.where(raw[..., None], torch.inf, stored))
        self.raw.extend(raw.cpu())
        self.raw_bounds.extend(torch.stack((k.norm(dim=-1).amax(-1), exact[..., 3]), -1).cpu() * MARGIN)
        if self.originals is not None:
            self.residual_spectrum.add(torch.where(raw[..., None, None], 0.0, residual).flatten(1, 2))
            tier1 = _checksum(
                [rows.flatten(2) for rows in (*blocks.values(), self.annotations.rows[:, -raw.shape[1] :])]
            )
            self.checks.extend(torch.stack((tier1, _checksum([keys.flatten(2), values.flatten(2)])), -1))
        self.coded_elems += keys.numel() + values.numel()

    # -- reading --------------------------------------------------------------------------------------------

    @property
    def block_count(self) -> int:
        """Return M, the completed blocks."""
        return self.raw.length

    def codes(self) -> Blocks:
        """Return the named tensors of all completed blocks, `[Hkv, M, ...]` views."""
        return {name: slab.rows for name, slab in self.blocks.items()}

    def at_hand(self) -> Tensor:
        """Return which blocks have their values in tier 1, bool `[Hkv, M]`: here all of them."""
        return torch.ones_like(self.raw.rows)

    def pick(self, heads: Tensor, blocks: Tensor) -> Blocks:
        """Return the named tensors of chosen (KV head, block) pairs, `[n, ...]` copies."""
        return {name: slab.rows[heads, blocks] for name, slab in self.blocks.items()}

    def original_blocks(self, heads: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return original keys and values of chosen pairs, `[n, S, D]`, checked against their checksums.

        Raises `BrokenRun` when an original is not what was stored: nothing exact is left to fall back on.
        """
        assert self.originals is not None
        limit = self.block_count * self.fmt.block
        keys, values = (
            slab.data[:, :limit].unflatten(1, (self.block_count, self.fmt.block))[heads, blocks]
            for slab in self.originals
        )
        found = _checksum([keys.flatten(1), values.flatten(1)], leading=1)
        refuse_changed(found != self.checks.rows[heads, blocks, 1], heads, blocks)
        return keys.to(self.geometry.device), values.to(self.geometry.device)

    def damaged(self, heads: Tensor, blocks: Tensor) -> Tensor:
        """Return which chosen pairs hold codes, metadata or annotations that changed since sealing, `[n]`."""
        return self._differs(self.pick(heads, blocks), heads, blocks)

    def _differs(self, rows: Blocks, heads: Tensor, blocks: Tensor) -> Tensor:
        parts = [*rows.values(), self.annotations.rows[heads, blocks]]
        return _checksum([part.flatten(1) for part in parts], leading=1) != self.checks.rows[heads, blocks, 0]

    def check_originals(self, heads: Iterable[int] | None = None) -> None:
        """Compare the originals of all sealed blocks, or of those of some KV heads, with their checksums.

        What is recomputed rests on them alone. Raises `BrokenRun` for the first block that changed.
        """
        for head in range(self.geometry.kv_heads) if heads is None else heads:
            bad = self.changed_originals(head).nonzero()
            if len(bad):
                raise corrupted(head, int(bad[0]))

    def changed_originals(self, head: int) -> Tensor:
        """Return which sealed blocks of a KV head have other originals than when they were sealed, `[M]`."""
        assert self.originals is not None
        count, size = self.block_count, self.fmt.block
        rows = [
            slab.data[head, : count * size].unflatten(0, (count, size)).flatten(1) for slab in self.originals
        ]
        return _checksum(rows, leading=1) != self.checks.rows[head, :, 1]

    def check_intact(self) -> None:
        """Raise `BrokenRun` unless both tiers hold what was put into them.

        A step notices a damaged block when it promotes or explores it. What nobody looked at may have been
        read while it was wrong, so an answer counts only when this passes after its last step.
        """
        self.check_originals()
        for head in range(self.geometry.kv_heads):
            bad = self.changed_blocks(head).nonzero()
            if len(bad):
                raise damaged(f"block {int(bad[0])}, KV head {head}")
        assert self.originals is not None
        newest = torch.stack([slab.rows[:, self.tokens - self.tail_tokens :] for slab in self.originals])
        if not torch.equal(_bits(newest), _bits(self.tail[:, :, : self.tail_tokens].cpu())):
            raise damaged("the open tail")
        self._check_spectra()

    def _check_spectra(self) -> None:
        """Raise `BrokenRun` unless c0 and the spectral bounds are those of the values that were stored."""
        if self.centre is None or self._first_centre is None:
            return
        if not torch.equal(_bits(self.centre), _bits(self._first_centre)):
            raise damaged("the mean of the values")
        assert self.originals is not None
        sound = self.value_spectrum.intact() and self.residual_spectrum.intact()
        for head, (rows, centre) in enumerate(zip(self.originals[1].rows, self.centre.cpu(), strict=True)):
            sound = sound and self.value_spectrum.made_of(head, rows.double() - centre)
        if not sound:
            raise damaged("a spectral bound")

    def changed_blocks(self, head: int) -> Tensor:
        """Return which sealed blocks of a KV head differ in tier 1 from what was sealed, `[M]`."""
        blocks = torch.arange(self.block_count)
        return self.damaged(torch.full_like(blocks, head), blocks)

    def quarantine(self, heads: Tensor, blocks: Tensor) -> None:
        """Mark pairs as raw: from now on they are only ever read from the originals."""
        self.raw.data[heads, blocks] = True

    def bounds(self) -> Annotations:
        """Return the annotations of all completed blocks and, last, of the open tail."""
        stored = self.annotations.rows.double()
        raw = self.raw.rows
        zero = torch.zeros_like(raw, dtype=torch.float64)
        columns = [
            torch.where(raw, zero, stored[..., 0]),
            torch.where(raw, self.raw_bounds.rows[..., 0], stored[..., 1]),
            torch.where(raw, zero, stored[..., 2]),
            torch.where(raw, self.raw_bounds.rows[..., 1], stored[..., 3]),
        ]
        keys, values = self.tail_rows()
        nothing = keys.new_zeros(keys.shape[0], 1)
        tails = [nothing, _largest(keys), nothing, _largest(values - self.centred_on()[:, None])]
        return self._jointly(Annotations(*(torch.cat(pair, 1) for pair in zip(columns, tails, strict=True))))

    def _jointly(self, notes: Annotations) -> Annotations:
        """Add the spectral norms, if there are any; none exceeds sqrt(S) times the largest norm of a row."""
        if not self.joint:
            return notes
        most, found = math.sqrt(self.fmt.block) * MARGIN, []
        for i, radius in enumerate((notes.rk, notes.eta, notes.rv)):
            found.append(radius * most)
            if i < len(self.joint):
                stored = self.annotations.rows[..., self.joint[i]].double()
                stored = torch.where(self.raw.rows, torch.inf, stored)
                found[i][:, :-1] = torch.minimum(found[i][:, :-1], stored)
        return notes._replace(**dict(zip(JOINT, found, strict=True)))

    def tail_rows(self) -> tuple[Tensor, Tensor]:
        """Return the float64 keys and values of the open tail, `[Hkv, n, D]`."""
        return self.tail[0, :, : self.tail_tokens].double(), self.tail[1, :, : self.tail_tokens].double()

    def centred_on(self) -> Tensor:
        """Return c0, float64 `[Hkv, D]`."""
        assert self.centre is not None
        return self.centre

    # -- housekeeping ---------------------------------------------------------------------------------------

    def fork(self) -> "TieredStore":
        """Return an independent copy that shares sealed blocks and originals until either side grows."""
        twin = type(self)(self.geometry, self.fmt, self.backend, originals=self.originals is not None)
        twin.blocks = {name: slab.fork() for name, slab in self.blocks.items()}
        twin.annotations, twin.raw_bounds, twin.checks = (
            slab.fork() for slab in (self.annotations, self.raw_bounds, self.checks)
        )
        twin.raw.extend(self.raw.rows)
        twin.joint = self.joint
        if self.originals is not None:
            twin.originals = tuple(slab.fork() for slab in self.originals)
        twin.tail, twin.tail_tokens = self.tail.clone(), self.tail_tokens
        twin.centre, twin._first_centre = self.centre, self._first_centre
        twin.tokens, twin.coded_elems = self.tokens, self.coded_elems
        twin.value_spectrum, twin.residual_spectrum = (
            self.value_spectrum.fork(),
            self.residual_spectrum.fork(),
        )
        return twin

    def bytes(self, scratch: int = 0) -> LayerBytes:
        """Return the ledger; `scratch` is the largest temporary of a step, promoted copies included."""
        g = self.geometry
        codes = sum(slab.nbytes for name, slab in self.blocks.items() if name.endswith("_codes"))
        meta = sum(slab.nbytes for name, slab in self.blocks.items() if not name.endswith("_codes"))
        meta += self.annotations.nbytes + (0 if self.centre is None else self.centre.nbytes // 2)
        # a raw block is read from originals that a device would hold: its codes are of no use
        raw = int(self.raw.rows.sum()) * self.fmt.block * g.head_dim * 2 * self.tail.element_size()
        host = 0
        if self.originals is not None:
            host += sum(slab.nbytes for slab in self.originals) + self.raw_bounds.nbytes + self.checks.nbytes
            host += self.value_spectrum.nbytes + self.residual_spectrum.nbytes
            host += 0 if self._first_centre is None else self._first_centre.nbytes
            meta += self.value_spectrum.value.nbytes + self.residual_spectrum.value.nbytes
        return LayerBytes(
            device=codes + meta + self.raw.nbytes + self.tail.nbytes + raw,
            host=host,
            metadata=meta + self.raw.nbytes,
            scratch=scratch,
            dense_equivalent=2 * g.kv_heads * self.tokens * g.head_dim * 2,
        )


def corrupted(head: int, block: int) -> BrokenRun:
    """Return the error of originals that are not what was stored: nothing exact is left to fall back on."""
    return BrokenRun(
        f"originals of block {block}, KV head {head}, are corrupted",
        why="their checksum differs from the one taken when they were stored",
        fix="check the host memory of this machine and run again",
        id="RCQ-RUN-21",
    )


def refuse_changed(changed: Tensor, heads: Tensor, blocks: Tensor) -> None:
    """Raise `BrokenRun` for the first (KV head, block) pair whose originals `changed`, `[n]`."""
    if bool(changed.any()):
        first = int(changed.nonzero()[0])
        raise corrupted(int(heads[first]), int(blocks[first]))


def damaged(place: str) -> BrokenRun:
    """Return the error of a tier 1 that changed while it was in use."""
    return BrokenRun(
        f"tier 1 was damaged while it was in use: {place}",
        why="what was stored differs from what was sealed, so earlier steps may have read it",
        fix="check the memory of this machine and run again (--resume answers only what is missing)",
        id="RCQ-RUN-22",
    )


def _bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def _centre(values: Tensor, *, prefill: bool) -> Tensor:
    """c0: the mean value of the first prefill in float32, zero without one; any vector is sound."""
    mean = values.double().mean(1) if prefill else torch.zeros_like(values[:, 0], dtype=torch.float64)
    rounded = mean.clamp(-3e38, 3e38).float()
    return rounded.double()


def _largest(rows: Tensor) -> Tensor:
    """Upper bound of the largest norm over `[H, n, D]`, `[H, 1]`; 0 for no rows."""
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0], 1)
    return rows.norm(dim=-1).amax(-1, keepdim=True) * MARGIN


def _checksum(parts: list[Tensor], leading: int = 2) -> Tensor:
    """Multilinear hash modulo 2^64 of the bytes of `parts` along their last dimension.

    Every 8-byte word is multiplied by its own odd number, so a change inside one word always shows and any
    other change is missed with a chance near 2^-60. All blocks at once, unlike a CRC loop.
    """
    total = torch.zeros(parts[0].shape[:leading], dtype=torch.int64)
    seed = 1
    for part in parts:
        raw = (
            part.contiguous().view(torch.uint8).cpu()
            if part.dtype != torch.uint8
            else part.contiguous().cpu()
        )
        pad = -raw.shape[-1] % 8
        if pad:
            raw = torch.cat((raw, raw.new_zeros(*raw.shape[:-1], pad)), -1)
        words = raw.view(torch.int64)
        index = torch.arange(seed, seed + words.shape[-1], dtype=torch.int64)
        total = total + (words * ((index * CHECKSUM_FACTOR) | 1)).sum(-1)
        seed += words.shape[-1]
    return total
