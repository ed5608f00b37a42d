"""One certified step of one layer as launches: nothing here waits for the device.

score, then per round: plan; on the copy stream assign and page_in (and once verify and probes), beside them
the value pass over coded blocks; then rescore, the value pass over promoted ones, judge. Heads that have met
their budget leave every later launch at once.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels._triton import attend, judge, pages, plan, score
from rcq_cli.kernels._triton.arithmetic import OPTIONS
from rcq_cli.kernels._triton.seal import (
    decode_values,
    encode_keys,
    encode_values,
    fingerprints,
    layouts,
    power,
    residuals,
    sizes,
    value_parts,
)

PER = 8
"""Blocks per program of the score pass."""
PARTS = 64
"""Parts the sequence is cut into for the value pass, at most."""
SLOT_SHARE = 0.06
"""Slots for originals on the device, as a share of the blocks there is room for, keys and values each."""
FIELDS = 10
KEY_BOUND, VALUE_BOUND, DROPPED_BOUND, ROUNDING_BOUND, NORM, KEYS, VALUES, SKIPPED, RUNG, OPEN = range(FIELDS)


class Tiers(NamedTuple):
    """What a store hands to the kernels. Blocks are `[Hkv, pitch, ...]`, `blocks` of them complete."""

    fmt: TierFormat
    codes: dict[str, Tensor]
    notes: Tensor
    """float16 `[Hkv, pitch, 7]`: rk, kappa, eta, rv, sk, se, sv"""
    raw: Tensor
    extra: Tensor
    """float32 `[Hkv, pitch, 2]`: longest key and rv, read where a block is raw"""
    checks: Tensor
    """int64 `[Hkv, pitch, 3]` fingerprints: original keys, original values, tier 1"""
    tail: Tensor
    centre: Tensor
    spectra: Tensor
    """float64 `[2, Hkv]`: lambda_V and lambda_E"""
    host_keys: Tensor
    host_values: Tensor
    """`[Hkv, capacity, D]` in pinned host memory"""
    blocks: int
    tail_tokens: int

    @property
    def pitch(self) -> int:
        """Return the number of blocks there is room for."""
        return self.notes.stride(0) // self.notes.shape[2]


class Limits(NamedTuple):
    """What a step has to meet."""

    scale: float
    eps: float
    absolute: bool
    layer: bool
    skip: bool
    rounds: int
    explore: float
    tau: float


class Link:
    """The stream on which originals come in, beside the one that computes; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def aside(self) -> AbstractContextManager[Any]:
        """Run what follows on the copy stream, after everything launched so far."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)

    def join(self) -> None:
        """Let what follows wait, on the device, for what was launched aside."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class Resident:
    """Originals kept on the device for one layer, and the last known outputs that steer its plans."""

    def __init__(self, heads: int, group: int, pitch: int, fmt: TierFormat, like: Tensor, dim: int) -> None:
        device = like.device
        self.pitch, self.step = pitch, 0
        self.capacity = max(4, int(SLOT_SHARE * pitch))
        rows = (2, heads, self.capacity)
        self.slots = torch.full((2, heads, pitch), -1, dtype=torch.int32, device=device)
        self.owner = torch.full(rows, -1, dtype=torch.int32, device=device)
        self.used = torch.full(rows, -1, dtype=torch.int32, device=device)
        self.fresh, self.queue = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
        self.pool = torch.empty(*rows, fmt.block, dim, dtype=like.dtype, device=device)
        self.seen = torch.full((heads * group, 2), -1.0, dtype=torch.float64, device=device)

    @property
    def nbytes(self) -> int:
        """Return the bytes held on the device."""
        held = (self.slots, self.owner, self.used, self.fresh, self.queue, self.pool, self.seen)
        return sum(tensor.nbytes for tensor in held)


class Workspace:
    """Arrays of one step, shared by the layers of one shape; `blocks` says for how many they suffice."""

    def __init__(
        self, heads: int, group: int, padded: int, blocks: int, dim: int, device: torch.device
    ) -> None:
        rows, self.width, self.blocks = heads * group, blocks + 1, blocks

        def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.stats = floats(6, rows, self.width)
        self.weights = floats(heads, self.width, group, padded)
        self.flags = floats(3, heads, self.width, dtype=torch.uint8)
        self.state = floats(rows, 4, dtype=torch.float64)
        self.tail_notes = floats(heads, 2)
        self.partial = floats(2 * PARTS, rows, dim)
        self.arrays = (
            self.stats, self.weights, self.flags, self.state, self.tail_notes, self.partial,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Return the bytes held."""
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class Launched:
    """Tensors of a step whose launches are under way."""

    output: Tensor
    fields: Tensor
    """float64 `[FIELDS, Hq]`"""
    faults: Tensor
    """int64 `[Hkv]`: 0, or 4 * block + 1 (tier 1 damaged) or 2 (originals damaged)"""
    counts: Tensor
    """int64 `[2]`: blocks brought in, and blocks that were there already"""

    def status(self) -> Tensor:
        """Return everything the host may want to know as one float64 tensor: faults, counts, open heads."""
        return torch.cat((self.faults.double(), self.counts.double(), self.fields[OPEN]))


class StepKernels:
    """The launches of one step on one layer."""

    def __init__(self, tiers: Tiers, resident: Resident, query: Tensor, limits: Limits) -> None:
        heads, dim = tiers.tail.shape[1], query.shape[1]
        group, device = len(query) // heads, query.device
        self.tiers, self.resident, self.query, self.limits = tiers, resident, query, limits
        self.heads, self.group = heads, group
        self.size = sizes(tiers.fmt.block, dim)
        self.rows = {"R": group, "RP": power(group)}
        self.values = {"G": tiers.fmt.group, "TWO": "value_low" in tiers.codes}
        self.work = workspace(heads, group, self.size["SP"], tiers.blocks, dim, device)
        self.link = link(device)
        self.per = max(1, -(-(tiers.blocks + 1) // PARTS))
        self.parts = -(-(tiers.blocks + 1) // self.per)
        self.constants = constants(limits, tiers.fmt.block, self.per, device)
        fields = torch.zeros(FIELDS, len(query), dtype=torch.float64, device=device)
        counts = torch.zeros(heads + 2, dtype=torch.int64, device=device)
        self.out = Launched(torch.empty_like(query), fields, counts[:heads], counts[heads:])

    def begin(self) -> Launched:
        """Launch the score pass and the first round."""
        self.resident.step += 1
        t, w, s, r = self.tiers, self.work, self.size, self.resident
        score.score[self._tiles(), self.heads](
            self.query, *self._keys(), *self._notes(), t.tail, t.centre, self.constants, r.seen, w.stats,
            w.weights, w.flags, w.state, w.tail_notes, self.out.faults, t.pitch, w.width, t.blocks,
            t.tail_tokens, PER=PER, **self.rows, **s, **OPTIONS,
        )  # fmt: skip
        return self.round(0)

    def round(self, number: int) -> Launched:
        """Launch round `number`: plan, bring in, sum, judge."""
        self._plan(number == 0)
        with self.link.aside():
            self._bring_in()
        self._attend(late=False)
        self.link.join()
        if self.tiers.blocks:
            self._rescore(probe=False)
        if number == 0 and self.tiers.blocks:
            with self.link.aside():
                self._verify()
                self._rescore(probe=True)
        self._attend(late=True)
        if self.limits.layer:
            self._judge(final=False)
        self._judge(final=True)
        if number == 0:
            self.link.join()
        return self.out

    # -- launches -------------------------------------------------------------------------------------------

    def _tiles(self) -> int:
        return max(1, -(-self.tiers.blocks // PER))

    def _keys(self) -> tuple[Tensor, ...]:
        return tuple(self.tiers.codes[name] for name in ("key_codes", "key_scale", "key_offset"))

    def _coded_values(self) -> tuple[Tensor, ...]:
        return value_parts(self.tiers.codes)

    def _notes(self) -> tuple[Tensor, ...]:
        return self.tiers.notes, self.tiers.raw, self.tiers.extra

    def _columns(self) -> dict[str, int]:
        return {"MP": power(self.tiers.blocks + 1)}

    def _plan(self, first: bool) -> None:
        t, w, s = self.tiers, self.work, self.size
        plan.plan[self.heads * self.group,](
            *self._notes(), w.tail_notes, t.centre, t.spectra, self.constants, w.stats, w.flags, w.state,
            t.pitch, w.width, t.blocks, FIRST=first, R=self.group, S=s["S"], D=s["D"], DP=s["DP"],
            **self._columns(), **OPTIONS,
        )  # fmt: skip

    def _bring_in(self) -> None:
        t, w, r = self.tiers, self.work, self.resident
        if not t.blocks:
            return
        pages.assign[2, self.heads](
            w.flags, w.state, r.slots, r.owner, r.used, r.fresh, r.queue, self.out.counts, t.pitch, w.width,
            t.blocks, r.capacity, r.step, **self.rows, **self._columns(), CP=power(r.capacity), **OPTIONS,
        )  # fmt: skip
        words = {2: torch.int16, 4: torch.int32}[t.tail.element_size()]
        pages.page_in[r.capacity, self.heads, 2](
            t.host_keys.view(words), t.host_values.view(words), r.pool.view(words), r.owner, r.fresh,
            t.checks, self.out.faults, t.pitch, r.capacity, t.host_keys.stride(0), **self.size, **OPTIONS,
        )  # fmt: skip

    def _rescore(self, probe: bool) -> None:
        t, w, r = self.tiers, self.work, self.resident
        score.rescore[self._tiles(), self.heads](
            self.query, *self._keys(), *self._notes(), self.constants, w.stats, w.weights, w.flags, w.state,
            self.out.faults, r.slots, r.pool, t.host_keys, t.pitch, w.width, t.blocks, r.capacity,
            t.host_keys.stride(0), r.step, PER=PER, PROBE=probe, **self.rows, **self.size, **OPTIONS,
        )  # fmt: skip

    def _verify(self) -> None:
        t, w = self.tiers, self.work
        verify_blocks(
            t, w.flags, self.out.faults, self.constants, w.width, 0, t.blocks, self.resident.step, store=False
        )

    def _attend(self, late: bool) -> None:
        t, w, r = self.tiers, self.work, self.resident
        attend.attend[self.parts, self.heads](
            *self._coded_values(), w.stats, w.weights, w.flags, w.state, r.slots, r.pool, t.host_values,
            t.tail, w.partial, t.pitch, w.width, t.blocks, t.tail_tokens, r.capacity, t.host_values.stride(0),
            self.per, LATE=late, **self.rows, **self.size, **self.values, **OPTIONS,
        )  # fmt: skip

    def _judge(self, final: bool) -> None:
        t, w, s = self.tiers, self.work, self.size
        judge.judge[self.heads * self.group,](
            *self._notes(), w.tail_notes, t.centre, t.spectra, self.constants, w.stats, w.flags, w.state,
            w.partial, self.out.output, self.out.fields, self.resident.seen, t.pitch, w.width, t.blocks,
            t.tail_tokens, FINAL=final, PARTS=2 * self.parts, NP=power(2 * self.parts, 2),
            LARGEST=torch.finfo(self.query.dtype).max, R=self.group, S=s["S"], D=s["D"], DP=s["DP"],
            **self._columns(), **OPTIONS,
        )  # fmt: skip


def verify_blocks(
    tiers: Tiers, flags: Tensor, faults: Tensor, limits: Tensor, width: int, begin: int, end: int, step: int,
    *, store: bool,
) -> None:  # fmt: skip
    """Take tier-1 fingerprints of blocks `begin` to `end`, or compare those of promoted and probed ones."""
    heads, groups = tiers.notes.shape[0], tiers.tail.shape[-1] // tiers.fmt.group
    keys = (tiers.codes[name] for name in ("key_codes", "key_scale", "key_offset"))
    score.verify[-(-(end - begin) // PER), heads](
        *keys, *value_parts(tiers.codes), tiers.notes, tiers.raw, tiers.checks, flags, faults, limits,
        tiers.pitch, width, end, begin, step, PER=PER, STORE=store, GP=power(groups, 2), G=tiers.fmt.group,
        TWO="value_low" in tiers.codes, NARROW=tiers.fmt.key_meta == "float16",
        **sizes(*tiers.tail.shape[-2:]), **OPTIONS,
    )  # fmt: skip


def rounding_share(block: int, per: int) -> float:
    """Return what rounding may take from a mean of values, relative to their mean norm (theory 7.1, 7.2).

    Tensor cores over a block, hi and lo weights, a float32 chain of `per` blocks; parts are added in float64.
    """

    def theta(n: float, unit: float) -> float:
        return n * unit / (1 - n * unit)

    return 1.01 * (theta(block + 16, 2.0**-22) + theta(per + 16, 2.0**-24) + 2.0**-22 + block * 2.0**-27)


@cache
def constants(limits: Limits, block: int, per: int, device: torch.device) -> Tensor:
    """Return what the kernels read of `limits`, float64, in the order of `plan.EPS` and the following."""
    numbers = (
        limits.scale, limits.eps, float(limits.absolute), limits.explore, rounding_share(block, per),
        float(limits.skip), float(limits.layer), float(limits.rounds > 0), limits.tau,
    )  # fmt: skip
    return torch.tensor(numbers, dtype=torch.float64).to(device)


@cache
def link(device: torch.device) -> Link:
    """Return the copy stream of a device."""
    return Link(device)


_work: dict[Any, Workspace] = {}


def workspace(heads: int, group: int, padded: int, blocks: int, dim: int, device: torch.device) -> Workspace:
    """Return arrays that are large enough."""
    key = (heads, group, padded, dim, device)
    if key not in _work or _work[key].blocks < blocks:
        _work[key] = Workspace(heads, group, padded, blocks + blocks // 8 + 8, dim, device)
    return _work[key]


@cache
def core_error(device: torch.device) -> float:
    """Return the largest error of a device's score sums over what the certificate charges for them.

    Random and cancelling sums against float64 (theory 7.2). Beyond one half the device is not to be trusted.
    """
    gen, dim, size = torch.Generator().manual_seed(7), 128, 32
    codes = torch.randint(-128, 128, (4, size, dim), generator=gen, dtype=torch.int8)
    query = torch.randn(16, dim, generator=gen)
    codes[2:, :, 1::2] = codes[2:, :, ::2]
    query[8:, 1::2] = -query[8:, ::2]
    scale, offset = torch.full((4, dim), 0.01).half(), torch.zeros(4, dim).half()
    out = torch.empty(4, 16, size, device=device)
    inputs = [tensor.to(device) for tensor in (query, codes, scale, offset)]
    score.try_cores[4,](*inputs, out, S=size, SP=size, D=dim, **OPTIONS)
    folded = query.double() * scale[0].double()
    exact = torch.einsum("rc,btc->brt", folded, codes.double())
    whole = torch.einsum("rc,btc->brt", folded.abs(), codes.double().abs())
    allowed = (dim + 16) * 2.0**-22 * whole + 2.0**-15 * folded.abs().sum(1)[None, :, None]
    return float(((out.cpu().double() - exact).abs() / allowed).max())


def take_prints(tiers: Tiers, begin: int) -> None:
    """Store the tier-1 fingerprints of all blocks from `begin` on."""
    unused = tiers.checks
    numbers = tiers.centre  # any float64 tensor: nothing is drawn while storing
    verify_blocks(tiers, unused, unused, numbers, 0, begin, tiers.blocks, 0, store=True)


def prints_of(tiers: Tiers, head: int) -> Tensor:
    """Return int64 `[1, pitch, 3]` with the present tier-1 fingerprints of a KV head in the last column."""
    one = slice(head, head + 1)
    mine = tiers._replace(
        codes={name: rows[one] for name, rows in tiers.codes.items()},
        notes=tiers.notes[one],
        raw=tiers.raw[one],
        checks=torch.zeros_like(tiers.checks[one]),
        tail=tiers.tail[:, one],
    )
    take_prints(mine, 0)
    return mine.checks


__all__ = [
    "DROPPED_BOUND", "KEYS", "KEY_BOUND", "NORM", "OPEN", "ROUNDING_BOUND", "RUNG", "SKIPPED", "VALUES",
    "VALUE_BOUND", "Limits", "Resident", "StepKernels", "Tiers", "core_error", "decode_values", "encode_keys",
    "encode_values", "fingerprints", "layouts", "prints_of", "residuals", "take_prints",
]  # fmt: skip
