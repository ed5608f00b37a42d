"""What the CPU kernels are given: sizes, and pointers to the store, the scratch and the answer."""

import struct
from typing import Any, NamedTuple

import numpy as np
import torch

from rcq_cli.kernels._cpu_vector import (
    ahead,
    bytes_at,
    doubles_at,
    floats_at,
    ints_at,
    longs_at,
    plain,
    shorts_at,
    word,
)


class Shape(NamedTuple):
    """Sizes of one layer; all int."""

    heads: int
    """Hkv"""
    group: int
    """R, query heads of one KV head."""
    dim: int
    block: int
    """S"""
    padded: int
    """P, a multiple of 16."""
    groups: int
    """D / G"""
    key_bytes: int
    """Bytes of a key record."""
    value_bytes: int
    """Bytes of a value record."""
    narrow_keys: int
    """1: key metadata in float16."""
    two_level: int
    """1: two-level value metadata."""
    kind: int
    """Dtype of originals, query and output: 0 float32, 1 bfloat16, 2 float16."""
    fold_steps: int
    """Steps of the folded query; the int32 sum of D products stays in range."""


class Turn(NamedTuple):
    """What changes from step to step; all int."""

    key_pitch: int
    """Elements from one head to the next, here and in the next five."""
    value_pitch: int
    note_pitch: int
    raw_pitch: int
    raw_bound_pitch: int
    check_pitch: int
    original_pitch: int
    """In bytes."""
    tail_pitch: int
    """In tokens: how many the open tail has room for."""
    width: int
    """Length of a row of per-block scratch."""
    weight_row: int
    """Weights of one slot."""
    float_row: int
    """Floats, ints, and accumulators of one item."""
    int_row: int
    gather_row: int
    blocks: int
    tail: int
    """Tokens of the open tail."""
    count: int
    """Steps taken so far: seeds the exploration."""
    threads: int
    ranges: int
    """Block ranges of a KV head that run side by side; 1: a thread runs whole heads."""
    certify: int
    """0: no promotion, skipping or bounds (mode naive)."""
    skip: int
    rounds: int
    """Rounds of promotion; 0: none."""


class Limits(NamedTuple):
    """Float64 knobs of a step."""

    scale: float
    eps: float
    absolute: float
    """1.0: eps is absolute."""
    explore: float


class Store(NamedTuple):
    """Pointers to the store, to scratch that is not divided, and to query and answer."""

    source: Any
    """Bytes of the query `[Hq, D]`."""
    output: Any
    """Bytes of the output `[Hq, D]`."""
    fields: Any
    """float64 `[FIELDS, Hq]`"""
    keys: Any
    values: Any
    notes: Any
    """uint16 `[.., NOTES]`: float16 rk, kappa, eta, rv, largest |z| + s * code norm, largest value scale,
    spectral norms of K - K', of V - V' and of V - c0."""
    raw: Any
    raw_bounds: Any
    checks: Any
    """int64 `[.., 4]`: key record, value record, original keys, original values."""
    original_keys: Any
    original_values: Any
    tail: Any
    """Bytes of `[2, Hkv, tail_pitch, D]`."""
    centre: Any
    """float64 `[Hkv, D]`"""
    value_parts: Any
    """float64 `[2, Hkv]`: two numbers whose sum is lambda_V,"""
    residual_parts: Any
    """and lambda_E."""
    query: Any
    """float32 `[Hkv, R, D]`, times the scale."""
    norms: Any
    """float32 `[Hkv, R]`: norm of the scaled query, rounded up,"""
    slacks: Any
    """and rounding slack per unit of key norm."""
    failed: Any
    """uint8 `[Hkv, R]`: float32 overflowed."""
    todo: Any
    """uint8 `[Hkv, R]`: not yet within the budget."""
    plans: Any
    """float64 `[Hkv, R, PLANS]`: total weight, norm of the output, its distance from c0, limit, what is left,
    care, bound of the values, and where the bounds of values, skipped blocks and keys split best."""
    outputs: Any
    """float64 `[Hkv, R, D]`"""
    faults: Any
    """int64 `[Hkv, 2]`: 0 none, 1 tier 1 damaged, 2 originals damaged; and the block."""


class Slot(NamedTuple):
    """Scratch of one KV head while it is worked on; rows of blocks are `Turn.width` long."""

    weights: Any
    """float32 `[blocks + 1, R, P]`: exp(score - peak of the block)."""
    stats: Any
    """float32 `[R, STATS, width]`: what `line_of` names; R as a multiple of TEAM."""
    reach: Any
    """float32 kappa + rk"""
    key_radius: Any
    """rk"""
    eta: Any
    radius: Any
    """rv"""
    magnitude: Any
    """Largest norm of what is added up for a value."""
    step: Any
    """Largest value scale."""
    key_spectrum: Any
    """Spectral norm of K - K'."""
    value_spectrum: Any
    """Spectral norm of V - V'."""
    centre_spectrum: Any
    """Spectral norm of V - c0."""
    flags: Any
    """uint8 `[R, width]`: KEY_WANTED, VALUE_WANTED."""
    want_keys: Any
    pins: Any
    reads: Any
    """uint8 over the rows to do: READ_CODES, READ_ORIGINALS (or the tail)."""
    table: Any
    """float64 `[TABLES]`: `[3, TABLE]`, and the sums it is made of."""


class Item(NamedTuple):
    """Scratch of one piece of work."""

    floats: Any
    """Metadata of a block of keys and of its folded queries, or its value scales."""
    ints: Any
    """Query or weight pairs, and the integer sums."""
    pads: Any
    """float32 `[2, R, P]`: coded and exact scores of a block."""
    gathered: Any
    """float32 accumulators of the value pass."""
    sums: Any
    """float64 `[R, D]`"""
    rows: Any
    """int64 `[TEAM]`: rows of a team."""
    to: Any
    """int64 `[TEAM]`: where their weights start,"""
    places: Any
    """and their accumulators of sums,"""
    lows: Any
    """of low ends of tokens,"""
    offsets: Any
    """and of low ends of groups."""
    factors: Any
    """float32 `[TEAM]`"""
    scales: Any
    """float32 `[TEAM]`: what an integer sum stands for, times the factor."""


class Line(NamedTuple):
    """Float32 rows over blocks (the last one is the open tail) of one query head."""

    peak: Any
    """Largest score of the block."""
    mass: Any
    """Sum of exp(score - peak)."""
    square: Any
    """Sum of its squares."""
    delta: Any
    """Bound on the score errors."""
    factor: Any
    """exp(peak - highest peak)"""
    share: Any
    """mass * factor over the total."""
    cost: Any
    """A contribution to a bound, here and in the next two: triangle form,"""
    move: Any
    """weight shifted,"""
    energy: Any
    """squared for the spectral form."""
    keep: Any
    """1.0, or 0.0 where c0 stands for the values, which are not read."""
    key_coded: Any
    """1.0, or 0.0 where scores are exact."""
    value_coded: Any
    """1.0, or 0.0 where values are read from the originals."""
    coded_delta: Any
    """What `delta` was for the scores from codes."""
    rest: Any
    """What of `delta` is not due to K - K'."""


KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`Shape.kind` by dtype."""
STATS, NOTES, MARKS = len(Line._fields), 9, 3
(
    PLAN_WEIGHT, PLAN_NORM, PLAN_AWAY, PLAN_LIMIT, PLAN_LEFT, PLAN_CARE, PLAN_VALUE, NEAR_VALUE, NEAR_SKIP,
    NEAR_KEY, PLANS,
) = range(11)  # fmt: skip
KEY_WANTED, VALUE_WANTED = 1, 2
READ_CODES, READ_ORIGINALS = 1, 2
(
    KEY_BOUND, VALUE_BOUND, DROPPED_BOUND, ROUNDING_BOUND, NORM, KEYS_USED, VALUES_USED, SKIPPED, RUNG, PAGED,
    EXACT, FIELDS,
) = range(12)  # fmt: skip
TROUBLE = 1 << 32
"""What judging a KV head adds to its answer for each query head to recompute, and for a fault."""
TEAM = 4
"""Query heads that share one read of the codes."""
APART = 64
"""Numbers between what two threads write: never one cache line, nor the pair fetched with it."""
STRIP = 4
"""Blocks whose scores are formed side by side."""
BUCKETS = 64
"""Classes of a contribution; the last holds everything smaller."""
TABLE = BUCKETS + 16
"""Sums per class and what lies behind the last one, in whole vectors."""
TABLES = 3 * TABLE + 8 * BUCKETS
_TURN, _LIMITS, _STORE = 12, 33, 37
_SLOT = _STORE + len(Store._fields)
_ITEM = _SLOT + 6
_SEALING = _ITEM + 7
_END = _SEALING + 2
_QUERY = _STORE + Store._fields.index("query")
assert (
    len(Shape._fields),
    len(Shape._fields) + len(Turn._fields),
    len(Shape._fields) + len(Turn._fields) + len(Limits._fields),
) == (_TURN, _LIMITS, _STORE)


class Part:
    """Numbers of a call that are written together: `kinds` (of `struct`) from word `first` on."""

    __slots__ = ("first", "pack")

    def __init__(self, first: int, kinds: str) -> None:
        self.pack, self.first = struct.Struct(kinds).pack_into, 8 * first


def _part(first: str, last: str, fields: tuple[str, ...], start: int) -> Part:
    begin = fields.index(first)
    return Part(start + begin, f"{fields.index(last) + 1 - begin}q")


_BLOCKS = _TURN + Turn._fields.index("blocks")
PITCHES = _part("key_pitch", "tail_pitch", Turn._fields, _TURN)
ORIGINAL_PITCH = _part("original_pitch", "original_pitch", Turn._fields, _TURN)
ROOM = _part("width", "gather_row", Turn._fields, _TURN)
COUNTS = _part("blocks", "tail", Turn._fields, _TURN)
STEP = Part(_BLOCKS, f"{_LIMITS - _BLOCKS}q{len(Limits._fields)}d3q")
"""All that is new in every step: counts, limits and answer, which follow one another."""
ANSWER = _part("source", "fields", Store._fields, _STORE)
TIERS = _part("keys", "residual_parts", Store._fields, _STORE)
ORIGINALS = _part("original_keys", "original_values", Store._fields, _STORE)
SCRATCH = Part(_QUERY, f"{_SEALING - _QUERY}q")
"""What is not divided, then weights, stats, notes, flags, marks and tables of slots, then floats, ints, pads,
gathered, sums, picks and factors of items."""
RECENT, RESIDUALS = Part(_SEALING, "q"), Part(_SEALING + 1, "q")
"""Where appending is given the recent Gram matrices, and sealing where V - V' goes."""


class Call:
    """All that a kernel is given: int64 words, written in place from step to step.

    A kernel receives `address`, which stays the same; float64 knobs share the words.
    """

    def __init__(self, shape: Shape) -> None:
        self.words = np.zeros(_END, np.int64)
        self.words[: len(shape)] = shape
        self.address: int = self.words.ctypes.data
        self.scratch = 0
        """Number of the scratch whose addresses it holds; 0: none."""

    def put(self, part: Part, *numbers: float) -> None:
        """Write the numbers of a part."""
        part.pack(self.words, part.first, *numbers)

    def copy(self) -> "Call":
        """Return a call of its own with the same words."""
        twin = Call(Shape(*self.words[:_TURN].tolist()))
        twin.words[:], twin.scratch = self.words, self.scratch
        return twin


@plain
def shape_at(call: Any) -> Shape:
    """Return the sizes of a call."""
    return Shape(
        call[0], call[1], call[2], call[3], call[4], call[5], call[6], call[7], call[8], call[9], call[10],
        call[11],
    )  # fmt: skip


@plain
def turn_at(call: Any) -> Turn:
    """Return the counts of a call."""
    t = ahead(call, _TURN)
    return Turn(
        t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10], t[11], t[12], t[13], t[14], t[15],
        t[16], t[17], t[18], t[19], t[20],
    )  # fmt: skip


@plain
def limits_at(address: int) -> Limits:
    """Return the knobs of the call at that address."""
    x = ahead(doubles_at(address), _LIMITS)
    return Limits(x[0], x[1], x[2], x[3])


@plain
def store_at(call: Any) -> Store:
    """Return the pointers of the store, and of what is not divided."""
    a = ahead(call, _STORE)
    return Store(
        bytes_at(a[0]), bytes_at(a[1]), doubles_at(a[2]), bytes_at(a[3]), bytes_at(a[4]), shorts_at(a[5]),
        bytes_at(a[6]), doubles_at(a[7]), longs_at(a[8]), bytes_at(a[9]), bytes_at(a[10]), bytes_at(a[11]),
        doubles_at(a[12]), doubles_at(a[13]), doubles_at(a[14]), floats_at(a[15]), floats_at(a[16]),
        floats_at(a[17]), bytes_at(a[18]), bytes_at(a[19]), doubles_at(a[20]), doubles_at(a[21]),
        longs_at(a[22]),
    )  # fmt: skip


@plain
def whole_teams(group: int) -> int:
    """Return `group` rounded up to a multiple of TEAM."""
    return (group + TEAM - 1) // TEAM * TEAM


@plain
def slot_at(shape: Shape, turn: Turn, call: Any, index: int) -> Slot:
    """Return slot `index` of the scratch."""
    a = ahead(call, _SLOT)
    width = turn.width
    notes = ahead(floats_at(a[2]), index * NOTES * width)
    marks = ahead(bytes_at(a[4]), index * MARKS * width)
    return Slot(
        ahead(floats_at(a[0]), index * turn.weight_row),
        ahead(floats_at(a[1]), index * whole_teams(shape.group) * STATS * width),
        notes,
        ahead(notes, width),
        ahead(notes, 2 * width),
        ahead(notes, 3 * width),
        ahead(notes, 4 * width),
        ahead(notes, 5 * width),
        ahead(notes, 6 * width),
        ahead(notes, 7 * width),
        ahead(notes, 8 * width),
        ahead(bytes_at(a[3]), index * shape.group * width),
        marks,
        ahead(marks, width),
        ahead(marks, 2 * width),
        ahead(doubles_at(a[5]), index * TABLES),
    )


@plain
def item_at(shape: Shape, turn: Turn, call: Any, index: int) -> Item:
    """Return item `index` of the scratch."""
    a = ahead(call, _ITEM)
    picks, factors = ahead(longs_at(a[5]), index * APART), ahead(floats_at(a[6]), index * APART)
    return Item(
        ahead(floats_at(a[0]), index * turn.float_row),
        ahead(ints_at(a[1]), index * turn.int_row),
        ahead(floats_at(a[2]), index * (2 * shape.group * shape.padded + 64)),
        ahead(floats_at(a[3]), index * turn.gather_row),
        ahead(doubles_at(a[4]), index * (shape.group * shape.dim + APART)),
        picks,
        ahead(picks, 4),
        ahead(picks, 8),
        ahead(picks, 12),
        ahead(picks, 16),
        factors,
        ahead(factors, 4),
    )


@plain
def lambda_of(shape: Shape, parts: Any, h: int) -> float:
    """Return the spectral bound of KV head `h`, the sum of its two parts."""
    return parts[h] + parts[shape.heads + h]


@plain
def recent_at(call: Any) -> Any:
    """Return where appending keeps the recent Gram matrices: float64 `[Hkv, D, D]`."""
    return doubles_at(ahead(call, _SEALING)[0])


@plain
def residuals_at(call: Any) -> Any:
    """Return where sealing writes V - V': float64 `[Hkv, count * S, D]`."""
    return doubles_at(ahead(call, _SEALING)[1])


@plain
def line_of(turn: Turn, slot: Slot, r: int) -> Line:
    """Return the statistics of query head `r` of the slot's KV head."""
    w = turn.width
    first = ahead(slot.stats, r * STATS * w)
    return Line(
        first, ahead(first, w), ahead(first, 2 * w), ahead(first, 3 * w), ahead(first, 4 * w),
        ahead(first, 5 * w), ahead(first, 6 * w), ahead(first, 7 * w), ahead(first, 8 * w),
        ahead(first, 9 * w), ahead(first, 10 * w), ahead(first, 11 * w), ahead(first, 12 * w),
        ahead(first, 13 * w),
    )  # fmt: skip


@plain
def next_of(marks: Any, b: int, end: int, kinds: int) -> int:
    """Return the first block from `b` on whose mark has one of the bits `kinds`, or `end`."""
    while b < end:
        if b + 4 <= end and word(marks, b) == 0:
            b += 4
        elif marks[b] & kinds:
            return b
        else:
            b += 1
    return end


@plain
def used_width(blocks: int) -> int:
    """Return how far loops over blocks run: blocks and tail, rounded up to 16."""
    return (blocks + 16) // 16 * 16
