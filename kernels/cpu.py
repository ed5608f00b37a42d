"""Fast CPU kernels: sealing, and one certified step, in Numba with vector instructions written out.

One specialisation serves every geometry, block size and dtype: sizes are arguments, originals are bytes.
Layouts stand in `kernels/README.md`; the parts of a step are `_cpu_score`, `_cpu_promote`, `_cpu_gather` and
`_cpu_plan`.
"""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from rcq_cli.kernels._cpu_gather import value_range
from rcq_cli.kernels._cpu_integer import TILE
from rcq_cli.kernels._cpu_plan import choose, finish, pin, start
from rcq_cli.kernels._cpu_promote import block_print
from rcq_cli.kernels._cpu_score import prepare, score_range
from rcq_cli.kernels._cpu_sealing import append_token, seal_block
from rcq_cli.kernels._cpu_state import (
    KINDS,
    TROUBLE,
    Item,
    Limits,
    Shape,
    Slot,
    Store,
    Turn,
    item_at,
    limits_at,
    recent_at,
    residuals_at,
    shape_at,
    slot_at,
    store_at,
    turn_at,
)
from rcq_cli.kernels._cpu_vector import (
    AVX2,
    LANES,
    X86,
    bytes_at,
    callback,
    entry,
    features,
    fma,
    invoke,
    load,
    load_bfloat,
    load_half,
    longs_at,
    plain,
    splat,
    total,
)
from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels.reference import Reference
from rcq_cli.protocols import Geometry

Work = Callable[[int, int, int, int], int]
"""A piece of work."""
WHOLE, PREPARE, SCORE, PLAN, SUM, JUDGE = range(6)
"""Phases of a step: all of it for whole KV heads, or one part, after which all threads meet."""


@plain
def run_phase(
    shape: Shape, turn: Turn, limits: Limits, tiers: Store, item: Item, slot: Slot, phase: int, h: int,
    part: int, number: int,
) -> int:  # fmt: skip
    """Run one part of a step for KV head `h`; return what `finish` says, which judges it."""
    if phase == PREPARE:
        prepare(shape, limits, tiers, h)
        start(shape, turn, tiers, slot, h)
    elif phase == SCORE:
        score_range(shape, turn, tiers, item, slot, h, part)
    elif phase == PLAN:
        if number == 0:
            pin(shape, turn, limits, tiers, item, slot, h)
        choose(shape, turn, limits, tiers, item, slot, h, number)
    elif phase == SUM:
        value_range(shape, turn, tiers, item, slot, h, part)
    elif phase == JUDGE:
        return finish(shape, turn, limits, tiers, slot, item.sums, h, number + 1 >= turn.rounds)
    return 0


def step_piece(address: int, phase: int, index: int, number: int) -> int:
    """Run `phase` of round `number` for piece `index` of the step that the call at `address` describes.

    Judging returns the query heads that are left, and TROUBLE for each to recompute and for a fault.
    """
    call = longs_at(address)
    shape, turn, limits, tiers = shape_at(call), turn_at(call), limits_at(address), store_at(call)
    if phase == WHOLE:
        item, slot, trouble = item_at(shape, turn, call, index), slot_at(shape, turn, call, index), 0
        for h in range(index, shape.heads, turn.threads):
            at, number = PREPARE, 0
            while at <= JUDGE:
                found = run_phase(shape, turn, limits, tiers, item, slot, at, h, 0, number)
                again = at == JUDGE and found % TROUBLE > 0 and number + 1 < turn.rounds
                at, number = (PLAN, number + 1) if again else (at + 1, number)
            trouble += found // TROUBLE
        return TROUBLE * trouble
    split = phase in (SCORE, SUM)
    h, part = (index // turn.ranges, index % turn.ranges) if split else (index, 0)
    item, slot = item_at(shape, turn, call, h * turn.ranges + part), slot_at(shape, turn, call, h)
    return run_phase(shape, turn, limits, tiers, item, slot, phase, h, part, number)


def seal_piece(address: int, phase: int, index: int, number: int) -> int:
    """Seal block `index % number` of KV head `index // number`."""
    call = longs_at(address)
    shape = shape_at(call)
    seal_block(
        shape, turn_at(call), store_at(call), index // number, index % number, number, residuals_at(call)
    )
    return phase


def append_piece(address: int, phase: int, index: int, number: int) -> int:
    """Store token `number` of KV heads `phase` to `index` in the originals and in the open tail.

    The rows are at `source` and `output`; `fields` and `query` hold `parts` and `recent` of the spectral
    bound of values. Returns how many heads need a refresh of it.
    """
    call = longs_at(address)
    shape, turn, tiers, due = shape_at(call), turn_at(call), store_at(call), 0
    for h in range(phase, index):
        due += append_token(shape, turn, tiers, recent_at(call), h, number)
    return due


def print_piece(address: int, phase: int, index: int, number: int) -> int:
    """Return fingerprint `phase` of block `index` of KV head `number`."""
    call = longs_at(address)
    return block_print(shape_at(call), turn_at(call), store_at(call), number, index, phase, 0)


def check_piece(address: int, phase: int, index: int, number: int) -> int:
    """Add to `number` 1 if fingerprint `phase % 4` of block `index`, KV head `phase // 4`, has changed."""
    call = longs_at(address)
    shape, turn, tiers = shape_at(call), turn_at(call), store_at(call)
    h, part = phase // 4, phase % 4
    known = tiers.checks[h * turn.check_pitch + 4 * index + part]
    return number + (1 if block_print(shape, turn, tiers, h, index, part, 0) != known else 0)


def finite_piece(address: int, kind: int, count: int, number: int) -> int:
    """Add to `number` 1 if all of the `count` numbers at `address` are finite.

    `kind` is that of `Shape`, `count` a multiple of LANES.
    """
    numbers, zero = bytes_at(address), splat(np.float32(0))
    products = zero  # infinity and NaN times 0 are NaN, and stay it
    for i in range(0, count, LANES):
        if kind == 0:
            x = load(numbers, 4 * i)
        elif kind == 1:
            x = load_bfloat(numbers, 2 * i)
        else:
            x = load_half(numbers, 2 * i)
        products = fma(x, zero, products)
    return number + (1 if total(products) == 0 else 0)


@cache
def compiled(piece: Work) -> Any:
    """Return a piece with its `address` and as a function of `ctypes`.

    Compiles it, or reads it from the disk cache, on the first call.
    """
    return callback(piece)


@entry(parallel=True)
def spread_out(function: int, address: int, phase: int, pieces: int, number: int) -> int:
    """Call the function at that address for every piece, on all threads.

    Return the sum of what it returns.
    """
    result = 0
    for index in prange(pieces):
        result += invoke(function, address, phase, index, number)
    return result


def run(piece: Work, address: int, phase: int, pieces: int, number: int) -> int:
    """Run a piece of work for every index below `pieces`, on all threads; return the sum of its answers."""
    function = compiled(piece)
    if pieces == 1:  # no thread has to be woken
        return int(function.ctypes(address, phase, 0, number))
    return int(spread_out(function.address, address, phase, pieces, number))


class _Shared(threading.local):
    """What a thread found when it last shared its threads."""

    wanted = threads = 0


_shared = _Shared()


def share_threads() -> int:
    """Let kernels use as many threads as PyTorch does, which keeps its number; return how many they use.

    The pool is shared: Numba sets the number of both when its threads start, and by a run on more of them.
    """
    wanted = torch.get_num_threads()
    if wanted != _shared.wanted:
        threads = min(wanted, numba.config.NUMBA_NUM_THREADS)
        numba.set_num_threads(threads)
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)
        _shared.wanted, _shared.threads = wanted, threads
    return _shared.threads


@cache
def warm() -> None:
    """Compile everything, or read it from the disk cache, so that no later call does."""
    share_threads()
    for piece in (step_piece, seal_piece, append_piece, print_piece, check_piece, finite_piece):
        run(piece, 0, WHOLE, 0, 0)


FEW = 2**16
"""Numbers that one thread looks at faster than PyTorch gets going."""


class Cpu(Reference):
    """Fused Numba kernels; the float64 operations of the reference where those do not apply."""

    name: ClassVar[str] = "cpu"

    def unsupported(self, geometry: Geometry) -> str | None:
        """Return why these kernels cannot serve `geometry` here, or None."""
        if torch.device(geometry.device).type != "cpu":
            return f"it runs on the CPU, the cache is on {geometry.device}"
        if X86 and not (AVX2 and "+f16c" in features() and "+fma" in features()):
            return "this processor has no AVX2, FMA and F16C"
        if geometry.head_dim % TILE:
            return f"head dim {geometry.head_dim} is no multiple of {TILE}"
        if getattr(torch, geometry.dtype) not in KINDS:
            return f"it has no kernels for {geometry.dtype}"
        return None

    def finite(self, numbers: Tensor) -> bool:
        """Return whether all are; a few of them, as in a query, cost a microsecond.

        Modes that run no kernel never `warm` them, and nothing is compiled for them here.
        """
        count, kind = numbers.numel(), KINDS.get(numbers.dtype)
        if (
            not warm.cache_info().currsize
            or kind is None
            or count > FEW
            or count % LANES
            or not numbers.is_contiguous()
        ):
            return super().finite(numbers)
        return bool(compiled(finite_piece).ctypes(numbers.data_ptr(), kind, count, 0))

    def unfused(self, fmt: TierFormat) -> str | None:
        """Return why a step on this format goes through the float64 operations, or None."""
        if fmt.group % TILE:
            return f"group {fmt.group} is no multiple of {TILE}"
        return None


BACKEND = Cpu()
