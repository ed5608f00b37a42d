"""One certified step as one parallel kernel call.

Only exact heads and whole layers go through float64 or torch.
"""

import itertools
import threading
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rcq_cli.cache.packed import PackedStore
from rcq_cli.cache.slab import aligned
from rcq_cli.certify.exact import as_groups, exact_attention, store
from rcq_cli.certify.ladder import Budget
from rcq_cli.kernels import _cpu_state as state
from rcq_cli.kernels import cpu
from rcq_cli.kernels._cpu_score import META
from rcq_cli.kernels._cpu_vector import LANES
from rcq_cli.kernels._format import TierFormat
from rcq_cli.phases import covers, heard, phase, phased
from rcq_cli.protocols import Certificate, Step


class FusedCertificate(Certificate):
    """A certificate as the kernels wrote it: its tensors are made when the first of them is asked for.

    That costs fifty microseconds behind a model's weights, which few who generate text ever need.
    """

    __slots__ = ("_blocks", "_fields", "_within")

    @classmethod
    def written(cls, fields: Tensor, blocks: int, *, within: bool) -> "FusedCertificate":
        """Return the certificate that `fields` `[FIELDS, Hq]`, float64, describe.

        `within`: the kernels found all bounds within the budget, none had to be recomputed.
        """
        made = cls.__new__(cls)
        for name, value in (("_fields", fields), ("_blocks", blocks), ("_within", within)):
            object.__setattr__(made, name, value)
        return made

    def finite(self) -> bool:
        """Return whether every bound is finite, as all are that are within a budget."""
        return getattr(self, "_within", False) or super().finite()

    def __getattr__(self, name: str) -> Any:
        """Fill the slots, which are empty until one is read."""
        if name not in Certificate.__slots__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        fields, blocks = self._fields, self._blocks
        key, value, dropped, rounding, norm = fields[: state.NORM + 1].unbind(0)
        keys, values, skipped = fields[state.KEYS_USED : state.SKIPPED + 1].to(torch.int32).unbind(0)
        Certificate.__init__(
            self,
            key_bound=key,
            value_bound=value,
            dropped_bound=dropped,
            rounding_bound=rounding,
            total_bound=key + value + dropped + rounding,
            output_norm=norm,
            exact=fields[state.EXACT] > 0,
            rung=fields[state.RUNG].to(torch.int8),
            promoted_key_blocks=keys,
            promoted_value_blocks=values,
            skipped_value_blocks=skipped,
            blocks=blocks,
            paged_bytes=int(fields[state.PAGED].sum()),
        )
        return getattr(self, name)


class FusedStep:
    """One step on a packed store; promises what `CertifiedStep` promises."""

    def __init__(self, cache: PackedStore, query: Tensor, budget: Budget, explore: float, count: int) -> None:
        self.cache, self.query, self.budget = cache, query.contiguous(), budget
        self.explore, self.count = explore, count
        self.scratch_bytes = 0

    def run(self) -> Step:
        """Run the kernels, then the last rungs for heads that need them."""
        done = run_kernel(self.cache, self.query, self.budget, self.explore, self.count)
        self.scratch_bytes = done.scratch.nbytes
        if done.trouble:
            faults, fields = done.scratch.faults, done.fields.numpy()
            if np.count_nonzero(faults[:, 0]):
                self._faulty(faults, done.output, fields)
            else:
                self._exact_heads(done.output, fields)
        certificate = FusedCertificate.written(done.fields, self.cache.block_count, within=not done.trouble)
        return Step(done.output, certificate)

    @phased("fallback")
    def _exact_heads(self, output: Tensor, fields: np.ndarray) -> None:
        """Rung 3: replace heads by float64 attention on the originals, KV head by KV head."""
        assert self.cache.originals is not None
        keys, values = (slab.rows for slab in self.cache.originals)
        group = self.cache.shape.group
        heads = fields[state.EXACT].reshape(-1, group) > 0
        chosen = heads.any(1).nonzero()[0].tolist()
        self.cache.check_originals(chosen)
        for h in chosen:
            mine = h * group + heads[h].nonzero()[0]
            part = slice(h, h + 1)
            queries = self.query[mine].double()[None]
            truth = exact_attention(queries, keys[part], values[part], self.cache.geometry.scale)
            stored, error = store(truth.output[0], self.cache.dtype)
            output[mine] = stored
            fields[state.PAGED, h * group] = keys[0].nbytes + values[0].nbytes
            norm = stored.double().norm(dim=-1).numpy()
            self._recomputed(fields, mine, 3, (truth.bound[0] + error).numpy(), norm)
        # heads follow one another: what one needs is free before the next
        self.scratch_bytes += 6 * keys[0].numel() * 8

    @phased("fallback")
    def _faulty(self, faults: np.ndarray, output: Tensor, fields: np.ndarray) -> None:
        """Rung 4.

        Quarantine what is damaged and run the whole layer through the dense call on the originals.
        """
        cache = self.cache
        heads = torch.from_numpy(faults[:, 0].nonzero()[0])
        blocks = torch.from_numpy(faults[:, 1].copy())[heads]
        cache.check_originals()  # raises when they are what is damaged
        cache.quarantine(heads, blocks)
        assert cache.originals is not None
        keys, values = (slab.rows for slab in cache.originals)
        scale = cache.geometry.scale
        dense = cache.backend.dense(self.query, keys, values, scale)
        truth = exact_attention(as_groups(self.query, cache.shape.heads), keys, values, scale)
        stored = store(truth.output, cache.dtype)[0].flatten(0, 1)
        # the library may overflow where float64 does not
        output[:] = torch.where(torch.isfinite(dense).all(-1, keepdim=True), dense, stored)
        error = (truth.output.flatten(0, 1) - output.double()).norm(dim=-1) * (1 + 2.0**-40)
        fields[state.PAGED] = 0
        fields[state.PAGED, 0] = keys.nbytes + values.nbytes
        norm = output.double().norm(dim=-1).numpy()
        self._recomputed(fields, slice(None), 4, (error + truth.bound.flatten()).numpy(), norm)
        self.scratch_bytes += 6 * keys.numel() * 8

    def _recomputed(
        self, fields: np.ndarray, heads: Any, rung: int, bound: np.ndarray, norm: np.ndarray
    ) -> None:
        """Note that query heads were computed from the originals."""
        fields[: state.ROUNDING_BOUND, heads] = 0
        fields[state.ROUNDING_BOUND, heads], fields[state.NORM, heads] = bound, norm
        fields[state.KEYS_USED, heads] = fields[state.VALUES_USED, heads] = self.cache.block_count
        fields[state.SKIPPED, heads], fields[state.RUNG, heads], fields[state.EXACT, heads] = 0, rung, 1


def unfused(fmt: TierFormat, budget: Budget) -> str | None:
    """Return why a step goes through the float64 ladder on the packed store instead, or None."""
    if budget.denominator == "layer":
        return "the layer's output is known only after all heads"
    if budget.first_share > 0:
        return "tau asks for promotion before the first look"
    return cpu.BACKEND.unfused(fmt)


class NaiveStep(NamedTuple):
    """What an unchecked step returns."""

    output: Tensor | None
    """`[Hq, D]`; None where float32 overflowed."""
    scratch_bytes: int


def naive_step(cache: PackedStore, query: Tensor) -> NaiveStep:
    """Return attention on what the codes stand for."""
    done = run_kernel(cache, query.contiguous(), None, 0.0, 0)
    return NaiveStep(None if done.trouble else done.output, done.scratch.nbytes)


class Ran(NamedTuple):
    """What the kernels left."""

    output: Tensor
    """`[Hq, D]`"""
    fields: Tensor
    """float64 `[FIELDS, Hq]`"""
    trouble: int
    """How many query heads have to be recomputed, and KV heads are damaged."""
    scratch: "Scratch"


def run_kernel(cache: PackedStore, query: Tensor, budget: Budget | None, explore: float, count: int) -> Ran:
    """Run one step; no budget: mode naive."""
    shape = cache.shape
    threads = cpu.share_threads()
    ranges = 1
    if shape.heads % threads and cache.block_count >= SHARED_BLOCKS:
        ranges = threads // gcd(shape.heads, threads)
    # phases are timed one by one; without a clock a thread runs all of them for its heads and never waits
    apart = ranges > 1 or heard()
    pieces = shape.heads if apart else min(threads, shape.heads)
    scratch = _scratch(shape, pieces, pieces * ranges, cache.block_count)
    output = torch.empty_like(query)
    fields = torch.empty((state.FIELDS, query.shape[0]), dtype=torch.float64)
    limits = (0, 0, 0, cache.geometry.scale, 0.0, 0.0, 0.0)  # certify, skip, rounds, scale, eps, abs, explore
    if budget is not None:
        absolute = budget.denominator == "abs"
        limits = (1, budget.skip, budget.rounds, cache.geometry.scale, budget.eps, absolute, explore)
    answer = query.data_ptr(), output.data_ptr(), fields.data_ptr()
    with cache.lock:
        call = cache.placed()
        if call.scratch != scratch.number:
            call.put(state.ROOM, *scratch.room)
            call.put(state.SCRATCH, *scratch.addresses)
            call.scratch = scratch.number
        call.put(state.STEP, cache.block_count, cache.tail_tokens, count, pieces, ranges, *limits, *answer)
        trouble = _run_phases(call.address, budget, pieces, ranges, apart=apart)
    return Ran(output, fields, trouble, scratch)


def _run_phases(address: int, budget: Budget | None, pieces: int, ranges: int, *, apart: bool) -> int:
    """Run the kernel on the call at that address: whole heads, or phase by phase; return the trouble."""
    if not apart:
        return cpu.run(cpu.step_piece, address, cpu.WHOLE, pieces, 0) // state.TROUBLE
    with phase("score"):
        cpu.run(cpu.step_piece, address, cpu.PREPARE, pieces, 0)
        cpu.run(cpu.step_piece, address, cpu.SCORE, pieces * ranges, 0)
    if budget is not None:  # a block is compared with its originals, where they lie, as soon as it is chosen
        covers("select", "rank_check", "page_in")
    for number in range(max(1, budget.rounds if budget else 0)):
        with phase("select"):
            cpu.run(cpu.step_piece, address, cpu.PLAN, pieces, number)
        with phase("attend"):
            cpu.run(cpu.step_piece, address, cpu.SUM, pieces * ranges, number)
        with phase("bound"):
            left = cpu.run(cpu.step_piece, address, cpu.JUDGE, pieces, number)
        if left % state.TROUBLE == 0:
            break
    return left // state.TROUBLE


_numbers = itertools.count(1)


class Scratch:
    """Arrays of one step on up to `blocks` blocks, kept from step to step."""

    def __init__(self, shape: state.Shape, slots: int, items: int, blocks: int) -> None:
        rows, dim, padded, groups, team = shape.group, shape.dim, shape.padded, shape.groups, state.TEAM
        whole = state.whole_teams.py_func(rows)
        heads, lanes = shape.heads * rows, LANES
        # an odd number of cache lines: rows that are written together must not share their sets
        width = state.used_width.py_func(blocks) + 16
        width += 16 if width // 16 % 2 == 0 else 0
        metas = META * state.STRIP * whole // team
        floats = max(4 * dim + metas, (team + dim) * padded) + 64
        ints = max(state.STRIP * rows * dim, groups * team * padded) // 2 + 64
        gather = rows * (dim + groups * lanes + lanes) + state.APART
        weights = (blocks + 1) * rows * padded + 64
        self.room = (width, weights, floats, ints, gather)
        """Lengths of rows: statistics, weights, floats, ints, accumulators."""
        f, d, u, i = np.float32, np.float64, np.uint8, np.int64
        sizes: tuple[tuple[int, Any], ...] = (
            (heads * dim, f), (heads + lanes, f), (heads + lanes, f), (heads, u), (heads, u),
            (heads * state.PLANS, d), (heads * dim, d), (2 * shape.heads, i), (slots * weights, f),
            (slots * whole * state.STATS * width, f), (slots * state.NOTES * width, f),
            (slots * rows * width, u), (slots * state.MARKS * width, u),
            (slots * state.TABLES, d), (items * floats, f), (items * ints, np.int32),
            (items * (2 * rows * padded + 64), f), (items * gather, f),
            (items * (rows * dim + state.APART), d), (items * state.APART, i), (items * state.APART, f),
        )  # fmt: skip
        self.arrays = [aligned(np.zeros, count * np.dtype(kind).itemsize).view(kind) for count, kind in sizes]
        self.addresses = [array.ctypes.data for array in self.arrays]
        self.faults = self.arrays[7].reshape(-1, 2)
        self.nbytes = sum(array.nbytes for array in self.arrays)
        self.number = next(_numbers)
        """Never that of another one, as an address may be."""


SHARED_BLOCKS = 256
"""Blocks from which on threads share a KV head rather than leave one idle: below, meeting costs them more."""
KEPT = 4
"""Scratches a thread keeps: layers of several shapes and contexts may take turns."""


class _Kept(threading.local):
    """The scratches of a thread, by what they are for."""

    def __init__(self) -> None:
        self.scratches: dict[Any, Scratch] = {}


_kept = _Kept()


def _scratch(shape: state.Shape, slots: int, items: int, blocks: int) -> Scratch:
    """Return scratch of this thread for `blocks` blocks; its size depends on nothing that ran before."""
    key = (shape, slots, items, room_for(blocks))
    kept = _kept.scratches
    if key not in kept:
        kept[key] = Scratch(*key)
        if len(kept) > KEPT:
            del kept[next(iter(kept))]
    return kept[key]


def room_for(blocks: int) -> int:
    """Return for how many blocks scratch is made: up to 15 more than needed, or up to an eighth more."""
    step = max(16, 1 << max(0, blocks.bit_length() - 4))
    return -(-max(1, blocks) // step) * step
