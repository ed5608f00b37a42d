"""One certified step as one parallel kernel call.

Only exact heads and whole layers go through float64 or torch.
"""

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
from rcq_cli.kernels._cpu_integer import TEAM
from rcq_cli.kernels._cpu_score import META
from rcq_cli.kernels._cpu_vector import LANES
from rcq_cli.kernels._format import TierFormat
from rcq_cli.phases import covers, heard, phase, phased
from rcq_cli.protocols import Certificate, Step

_local = threading.local()


class FusedStep:
    """One step on a packed store; promises what `CertifiedStep` promises."""

    def __init__(self, cache: PackedStore, query: Tensor, budget: Budget, explore: float, count: int) -> None:
        self.cache, self.query, self.budget = cache, query.contiguous(), budget
        self.explore, self.count = explore, count
        self.scratch_bytes = 0

    def run(self) -> Step:
        """Run the kernels, then the last rungs for heads that need them."""
        cache = self.cache
        output, fields, scratch = run_kernel(cache, self.query, self.budget, self.explore, self.count)
        self.scratch_bytes = scratch.nbytes
        if np.count_nonzero(scratch.faults[:, 0]):
            return self._faulty(scratch.faults, fields)
        exact = fields[state.EXACT] != 0
        if np.count_nonzero(exact):
            self._exact_heads(output, fields, exact)
        return Step(output, self._certificate(fields, exact))

    @phased("fallback")
    def _exact_heads(self, output: Tensor, fields: np.ndarray, exact: np.ndarray) -> None:
        """Rung 3: replace `exact` heads by float64 attention on the originals, KV head by KV head."""
        assert self.cache.originals is not None
        keys, values = (slab.rows for slab in self.cache.originals)
        group = self.cache.shape.group
        heads = exact.reshape(-1, group)
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
            fields[: state.ROUNDING_BOUND, mine] = 0
            fields[state.ROUNDING_BOUND, mine] = (truth.bound[0] + error).numpy()
            fields[state.NORM, mine] = stored.double().norm(dim=-1).numpy()
            fields[state.RUNG, mine] = 3
        # heads follow one another: what one needs is free before the next
        self.scratch_bytes += 6 * keys[0].numel() * 8

    @phased("fallback")
    def _faulty(self, faults: np.ndarray, fields: np.ndarray) -> Step:
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
        output = cache.backend.dense(self.query, keys, values, scale)
        truth = exact_attention(as_groups(self.query, cache.shape.heads), keys, values, scale)
        stored = store(truth.output, cache.dtype)[0].flatten(0, 1)
        # the library may overflow where float64 does not
        output = torch.where(torch.isfinite(output).all(-1, keepdim=True), output, stored)
        error = (truth.output.flatten(0, 1) - output.double()).norm(dim=-1) * (1 + 2.0**-40)
        fields[: state.ROUNDING_BOUND] = 0
        fields[state.ROUNDING_BOUND] = (error + truth.bound.flatten()).numpy()
        fields[state.NORM] = output.double().norm(dim=-1).numpy()
        fields[state.RUNG], fields[state.PAGED] = 4, 0
        fields[state.PAGED, 0] = keys.nbytes + values.nbytes
        self.scratch_bytes += 6 * keys.numel() * 8
        return Step(output, self._certificate(fields, np.ones(len(output), dtype=bool)))

    def _certificate(self, fields: np.ndarray, exact: np.ndarray) -> Certificate:
        blocks, tensor = self.cache.block_count, torch.from_numpy
        used = fields[state.KEYS_USED : state.SKIPPED + 1].astype(np.int32)
        if np.count_nonzero(exact):
            used[:2, exact], used[2, exact] = blocks, 0
        return Certificate(
            key_bound=tensor(fields[state.KEY_BOUND]),
            value_bound=tensor(fields[state.VALUE_BOUND]),
            dropped_bound=tensor(fields[state.DROPPED_BOUND]),
            rounding_bound=tensor(fields[state.ROUNDING_BOUND]),
            total_bound=tensor(fields[0] + fields[1] + fields[2] + fields[3]),
            output_norm=tensor(fields[state.NORM]),
            exact=tensor(exact),
            rung=tensor(fields[state.RUNG].astype(np.int8)),
            promoted_key_blocks=tensor(used[0]),
            promoted_value_blocks=tensor(used[1]),
            skipped_value_blocks=tensor(used[2]),
            blocks=blocks,
            paged_bytes=int(fields[state.PAGED].sum()),
        )


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
    output, fields, scratch = run_kernel(cache, query.contiguous(), None, 0.0, 0)
    return NaiveStep(None if fields[state.EXACT].any() else output, scratch.nbytes)


def run_kernel(
    cache: PackedStore, query: Tensor, budget: Budget | None, explore: float, count: int
) -> tuple[Tensor, np.ndarray, "Scratch"]:
    """Run one step; return output `[Hq, D]`, fields `[FIELDS, Hq]` and the scratch. No budget: mode naive."""
    shape = cache.shape
    threads = cpu.share_threads()
    ranges = 1
    if shape.heads % threads and cache.block_count >= SHARED_BLOCKS:
        ranges = threads // gcd(shape.heads, threads)
    # phases are timed one by one; without a clock a thread runs all of them for its heads and never waits
    apart = ranges > 1 or heard()
    pieces = shape.heads if apart else min(threads, shape.heads)
    scratch = _scratch(shape, pieces, pieces * ranges, cache.block_count)
    output, fields = torch.empty_like(query), np.zeros((state.FIELDS, len(query)))
    with cache.lock:
        turn, answer = (count, pieces, ranges), (query, output, fields)
        address = _fill(cache, budget, explore, turn, answer, scratch)
        _run_phases(address, budget, pieces, ranges, apart=apart)
    return output, fields, scratch


def _fill(
    cache: PackedStore,
    budget: Budget | None,
    explore: float,
    turn: tuple[int, int, int],
    answer: tuple[Tensor, Tensor, np.ndarray],
    scratch: "Scratch",
) -> int:
    """Write what this step is given into the store's call, and return its address.

    `turn` is count, pieces and ranges of the step.
    """
    call, scale, (query, output, fields) = cache.call(), cache.geometry.scale, answer
    call.words[state.ANSWER] = query.data_ptr(), output.data_ptr(), fields.ctypes.data
    call.words[state.ROOM], call.words[state.SCRATCH] = scratch.room, scratch.addresses
    if budget is None:
        call.words[state.STEP] = *turn, 0, 0, 0
        call.limits[:] = scale, 0.0, 0.0, 0.0
    else:
        call.words[state.STEP] = *turn, 1, budget.skip, budget.rounds
        call.limits[:] = scale, budget.eps, budget.denominator == "abs", explore
    return call.address


def _run_phases(address: int, budget: Budget | None, pieces: int, ranges: int, *, apart: bool) -> None:
    """Run the kernel on the call at that address: whole heads, or phase by phase."""
    piece = cpu.compiled(cpu.step_piece).address
    if not apart:
        cpu.run(piece, address, cpu.WHOLE, pieces, 0)
        return
    with phase("score"):
        cpu.run(piece, address, cpu.PREPARE, pieces, 0)
        cpu.run(piece, address, cpu.SCORE, pieces * ranges, 0)
    if budget is not None:  # a block is compared with its originals, where they lie, as soon as it is chosen
        covers("select", "rank_check", "page_in")
    for number in range(max(1, budget.rounds if budget else 0)):
        with phase("select"):
            cpu.run(piece, address, cpu.PLAN, pieces, number)
        with phase("attend"):
            cpu.run(piece, address, cpu.SUM, pieces * ranges, number)
        with phase("bound"):
            if not cpu.run(piece, address, cpu.JUDGE, pieces, number):
                break


class Scratch:
    """Arrays of one step on up to `blocks` blocks, kept from step to step."""

    def __init__(self, shape: state.Shape, slots: int, items: int, blocks: int) -> None:
        rows, dim, padded, groups, team = shape.rows, shape.dim, shape.padded, shape.groups, TEAM
        heads, lanes = shape.heads * rows, LANES
        # an odd number of cache lines: rows that are written together must not share their sets
        width = state.used_width.py_func(blocks) + 16
        width += 16 if width // 16 % 2 == 0 else 0
        metas = META * state.STRIP * -(-rows // team)
        floats = max(4 * dim + metas, (team + dim) * padded) + 64
        ints = max(state.STRIP * rows * dim, groups * team * padded) // 2 + 64
        gather = rows * (dim + groups * lanes + lanes) + state.APART
        weights = (blocks + 1) * rows * padded + 64
        self.room = np.array((width, weights, floats, ints, gather))
        """Lengths of rows: statistics, weights, floats, ints, accumulators."""
        f, d, u, i = np.float32, np.float64, np.uint8, np.int64
        sizes: tuple[tuple[int, Any], ...] = (
            (heads * dim, f), (heads + lanes, f), (heads + lanes, f), (heads, u), (heads, u),
            (heads * state.PLANS, d), (heads * dim, d), (2 * shape.heads, i), (slots * weights, f),
            (slots * rows * state.STATS * width, f), (slots * state.NOTES * width, f),
            (slots * rows * width, u), (slots * state.MARKS * width, u),
            (slots * state.TABLES, d), (items * floats, f), (items * ints, np.int32),
            (items * (2 * rows * padded + 64), f), (items * gather, f),
            (items * (rows * dim + state.APART), d), (items * state.APART, i), (items * state.APART, f),
        )  # fmt: skip
        self.arrays = [aligned(np.zeros, count * np.dtype(kind).itemsize).view(kind) for count, kind in sizes]
        self.addresses = np.array([array.ctypes.data for array in self.arrays])
        self.faults = self.arrays[7].reshape(-1, 2)
        self.nbytes = sum(array.nbytes for array in self.arrays)


SHARED_BLOCKS = 256
"""Blocks from which on threads share a KV head rather than leave one idle: below, meeting costs them more."""
KEPT = 4
"""Scratches a thread keeps: layers of several shapes and contexts may take turns."""


def _scratch(shape: state.Shape, slots: int, items: int, blocks: int) -> Scratch:
    """Return scratch of this thread for `blocks` blocks; its size depends on nothing that ran before."""
    kept: dict[Any, Scratch] = _local.__dict__.setdefault("scratch", {})
    key = (shape, slots, items, room_for(blocks))
    if key not in kept:
        kept[key] = Scratch(*key)
        if len(kept) > KEPT:
            del kept[next(iter(kept))]
    return kept[key]


def room_for(blocks: int) -> int:
    """Return for how many blocks scratch is made: up to 15 more than needed, or up to an eighth more."""
    step = max(16, 1 << max(0, blocks.bit_length() - 4))
    return -(-max(1, blocks) // step) * step
