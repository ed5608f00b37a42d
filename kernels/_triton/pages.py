"""Originals that stay on the device: which blocks own a slot, and bringing in the missing ones.

The host never learns which blocks a step promotes: `assign` hands slots out, least recently used first, and
`page_in` reads pinned host memory over the link. A block without a slot is read from the host where it is
needed, so slots decide about speed alone.
"""

import triton
import triton.language as tl

from rcq_cli.kernels._triton.arithmetic import COUNTS, print_words
from rcq_cli.kernels._triton.score import DAMAGED_ORIGINALS, KEY, ROW, TODO

PAGED, HITS = tl.constexpr(0), tl.constexpr(1)


@triton.jit(do_not_specialize=COUNTS)
def assign(
    flags, state, slots, owner, used, fresh, queue, counts, pitch, width, blocks, capacity, step,
    R: tl.constexpr, RP: tl.constexpr, MP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Give slots of kind `program 0` (keys, values) of KV head `program 1` to wanted blocks without one."""
    kind, h = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    lane = kind * heads + h
    b, i, r = tl.arange(0, MP), tl.arange(0, CP), tl.arange(0, RP)
    inside = b < blocks
    tl.store(fresh + lane * capacity + i, tl.zeros([CP], tl.int32), i < capacity)
    if tl.max(tl.load(state + (h * R + r) * ROW + TODO, r < R, 0.0), 0) > 0:
        wanted = tl.load(flags + ((KEY + kind) * heads + h) * width + b, inside, 0) != 0
        slot = tl.load(slots + (kind * heads + h) * pitch + b, inside, -1)
        hit, miss = wanted & (slot >= 0), wanted & (slot < 0)
        tl.store(used + lane * capacity + slot, tl.zeros([MP], tl.int32) + step, hit)
        place = tl.cumsum(miss.to(tl.int32), 0) - 1
        tl.store(queue + lane * capacity + place, b, miss & (place < capacity))
        missing = tl.sum(miss.to(tl.int32), 0)
        tl.debug_barrier()
        held = i < capacity
        last = tl.load(used + lane * capacity + i, held, 2147483647)
        rank = tl.zeros([CP], tl.int32)
        for j in range(capacity):
            other = tl.load(used + lane * capacity + j)
            before = (other < last) | ((other == last) & (j < i))
            rank += (before & (other < step)).to(tl.int32)
        taken = held & (last < step) & (rank < missing)
        block = tl.load(queue + lane * capacity + rank, taken, 0)
        before = tl.load(owner + lane * capacity + i, taken, -1)
        tl.debug_barrier()
        line = slots + (kind * heads + h) * pitch
        tl.store(line + before, tl.zeros([CP], tl.int32) - 1, taken & (before >= 0))
        tl.store(line + block, i, taken)
        tl.store(owner + lane * capacity + i, block, taken)
        tl.store(used + lane * capacity + i, tl.zeros([CP], tl.int32) + step, taken)
        tl.store(fresh + lane * capacity + i, tl.zeros([CP], tl.int32) + 1, taken)
        tl.atomic_add(counts + PAGED, missing.to(tl.int64))
        tl.atomic_add(counts + HITS, tl.sum(hit.to(tl.int64), 0))


@triton.jit
def page_in(
    host_keys, host_values, pool, owner, fresh, checks, faults, pitch, capacity, host_pitch,
    S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Copy the block that took slot `program 0` of KV head `program 1`, kind `program 2`, and verify it.

    Rows are integers of the width of an element.
    """
    slot, h, kind = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    lane = kind * heads + h
    if tl.load(fresh + lane * capacity + slot) != 0:
        b = tl.load(owner + lane * capacity + slot)
        t, c = tl.arange(0, SP)[:, None], tl.arange(0, DP)[None, :]
        mask = (t < S) & (c < D)
        at = h.to(tl.int64) * host_pitch + b.to(tl.int64) * (S * D) + t * D + c
        if kind == 0:
            words = tl.load(host_keys + at, mask, 0)
        else:
            words = tl.load(host_values + at, mask, 0)
        tl.store(pool + (lane * capacity + slot).to(tl.int64) * (S * D) + t * D + c, words, mask)
        if print_words(words, t * D + c, mask) != tl.load(checks + (h * pitch + b) * 3 + kind):
            tl.store(faults + h, b * 4 + DAMAGED_ORIGINALS)
