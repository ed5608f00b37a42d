"""What modes that drop tokens have in common: slots with true positions, selection per KV head, one ledger.

A slot holds the key (after RoPE, at its true position), the value and the position of one token. KV heads may
hold different tokens but always equally many, so tensors stay rectangular. Order of a decode step: append,
attend, update the scores, compress.
"""

from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.slab import Slab
from rcq_cli.cache.statistics import Statistics, group_probabilities, one_row
from rcq_cli.errors import BrokenRun, SpecError
from rcq_cli.modes._budget import token_bytes
from rcq_cli.protocols import Engagement, Geometry, LayerBytes, Step


class EvictingLayer:
    """One layer under an eviction mode; a mode overrides what it decides.

    Until the prompt ends everything is kept. Without statistics of the prompt a mode that needs them waits
    for the first query and judges the prompt by that row.
    """

    judges = True
    """Whether selection at the end of the prompt needs its attention."""
    watches = True
    """Whether the attention of decode steps matters."""
    score_bytes = 4
    """Bytes a slot holds beside key, value and position."""
    room = 1
    """Free slots after compression: those of the next step."""

    def __init__(self, geometry: Geometry, options: Any, backend: Any) -> None:
        self.geometry, self.options, self.backend = geometry, options, backend
        dtype = getattr(torch, geometry.dtype)
        heads, dim = geometry.kv_heads, geometry.head_dim
        self.keys, self.values = (Slab(heads, (dim,), dtype, geometry.device) for _ in "kv")
        self.positions = Slab(heads, (), torch.int32, geometry.device)
        self.tokens = 0
        self.budget = 0
        self.ended = self.waiting = False
        self.steps = self.steps_acted = self.evicted = 0
        self.scratch_bytes = 0

    # -- what a mode decides --------------------------------------------------------------------------------

    def minimum(self) -> int:
        """Return the fewest tokens this mode can work with."""
        return 1

    def default_budget(self) -> int:
        """Return the tokens to hold when no budget is given."""
        raise NotImplementedError

    def choose(self, seen: Statistics | None) -> Tensor | None:
        """Return the slots to keep `[Hkv, k]` at the end of the prompt, ascending; None for all."""
        raise NotImplementedError

    def observe(self, row: Tensor) -> None:
        """Take the group-mean probabilities `[Hkv, slots]` of a decode step."""

    def compress(self, row: Tensor | None) -> Tensor | None:
        """Return the slots to keep after a decode step, None for all; `row` is that step's."""
        del row
        return None

    def grow(self, count: int) -> None:
        """Make scores for `count` new slots."""

    def pick(self, index: Tensor) -> None:
        """Keep the scores of the slots `[Hkv, k]`."""

    def extra(self) -> list[Tensor]:
        """Return the tensors held beside keys, values and positions."""
        return []

    def copy_extra(self, twin: Any) -> None:
        """Give a fork its own scores."""

    # -- the state of a layer -------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Return the slots in use."""
        return self.keys.length

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Add `[Hkv, T, D]` keys and values."""
        count = keys.shape[1]
        self.keys.extend(keys)
        self.values.extend(values)
        positions = torch.arange(self.tokens, self.tokens + count, dtype=torch.int32, device=keys.device)
        self.positions.extend(positions.expand(keys.shape[0], count))
        self.tokens += count
        self.grow(count)

    def end_prefill(self, seen: Statistics | None) -> None:
        """Fix the budget and drop what does not fit; the prompt is complete."""
        self.ended = True
        extra = token_bytes(self.geometry, self.score_bytes)
        given = self.options.tokens(self.tokens, extra, self.minimum(), self.room)
        self.budget = self.default_budget() if given is None else given
        self.waiting = self.judges and seen is None and self.tokens > 0
        if not self.waiting:
            self._keep(self.choose(seen))

    def keys_to_read(self) -> Tensor:
        """Return the keys `[Hkv, held, D]` that a step multiplies with its queries."""
        return self.keys.rows

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the `[Hkv, D]` key and value of one token."""
        if not self.ended:
            self.end_prefill(None)
        self.prefill(key[:, None], value[:, None])

    def attend(self, query: Tensor) -> Step:
        """Return attention of `[Hq, D]` queries on the tokens held, then drop what no longer fits."""
        if not self.ended:
            self.end_prefill(None)
        self.steps += 1
        keys, scale = self.keys_to_read(), self.geometry.scale
        output = self.backend.dense(query, keys, self.values.rows, scale)
        self.steps_acted += self.evicted > 0
        if self.waiting:
            self.waiting = False
            self._keep(self.choose(one_row(query, keys, scale)))
            return Step(output, None)
        row = None
        if self.watches:
            row = checked(group_probabilities(query[:, None], keys, scale)[:, 0])
            self.scratch_bytes = max(self.scratch_bytes, 4 * query.shape[0] * keys.shape[1])
            self.observe(row)
        self._keep(self.compress(row))
        return Step(output, None)

    def _keep(self, index: Tensor | None) -> None:
        """Keep the slots `[Hkv, k]` and free the others, in new buffers: forks share the old ones."""
        if index is None or index.shape[1] == self.held:
            return
        self.evicted += (self.held - index.shape[1]) * index.shape[0]
        for slab in (self.keys, self.values, self.positions):
            _gather(slab, index, self.room)
        self.pick(index)
        self.scratch_bytes = max(self.scratch_bytes, self.keys.nbytes)

    def exact(self, query: Tensor) -> Tensor:
        """Raise `SpecError`: evicted originals are gone."""
        del query
        raise SpecError(
            "this mode evicts tokens, so there is nothing to audit against", fix="audit certified"
        )

    def fork(self) -> "EvictingLayer":
        """Return an independent copy; counters of steps start anew, what was evicted stays counted."""
        twin = type(self)(self.geometry, self.options, self.backend)
        twin.keys, twin.values, twin.positions = (
            slab.fork() for slab in (self.keys, self.values, self.positions)
        )
        twin.tokens, twin.budget, twin.ended, twin.waiting, twin.evicted, twin.scratch_bytes = (
            self.tokens, self.budget, self.ended, self.waiting, self.evicted, self.scratch_bytes,
        )  # fmt: skip
        self.copy_extra(twin)
        return twin

    def bytes(self) -> LayerBytes:
        """Return what is allocated now."""
        g = self.geometry
        meta = self.positions.nbytes + sum(t.untyped_storage().nbytes() for t in self.extra())
        return LayerBytes(
            device=self.keys.nbytes + self.values.nbytes + meta,
            host=0,
            metadata=meta,
            scratch=self.scratch_bytes,
            dense_equivalent=2 * g.kv_heads * self.tokens * g.head_dim * 2,
        )

    def engagement(self) -> Engagement:
        """Return whether tokens were dropped and that saved bytes; from counters of the moving code."""
        g = self.geometry
        dense = 2 * g.kv_heads * self.tokens * g.head_dim * self.keys.data.element_size()
        engaged = self.evicted > 0 and self.bytes().device < dense
        reason = ""
        if not engaged:
            reason = "no_decode_steps" if not self.steps else self._idle_reason()
        return Engagement(self.steps, self.steps_acted, 0, self.evicted, engaged, reason)

    def _idle_reason(self) -> str:
        if self.evicted:  # positions and scores outweigh the few tokens dropped
            return "short_context"
        if self.tokens <= self.minimum():
            return "short_context"
        return "budget_ge_context" if self.tokens <= self.budget else "inactive"


def checked(scores: Tensor) -> Tensor:
    """Return `scores`; NaN raises `BrokenRun`, for it would sort like a number."""
    if bool(torch.isnan(scores).any()):
        raise BrokenRun(
            "a selection score is NaN",
            why="keys or queries overflow float32 in a product",
            fix="try --dtype float32",
            id="RCQ-RUN-NAN",
        )
    return scores


def top(scores: Tensor, count: int) -> Tensor:
    """Return the `count` highest of `[H, n]` scores per row, as ascending indices; ties to the lower one.

    `topk` has no rule for ties and differs between devices.
    """
    order = torch.sort(checked(scores), dim=-1, descending=True, stable=True).indices
    return order[:, :count].sort(-1).values


def all_but_lowest(scores: Tensor, count: int) -> Tensor:
    """Return all but the `count` lowest of `[H, n]` scores, as ascending indices; of a tie the lower goes."""
    order = torch.sort(checked(scores), dim=-1, stable=True).indices
    return order[:, count:].sort(-1).values


def ends(heads: int, first: int, last: int, slots: int, device: Any) -> Tensor:
    """Return the indices `[H, first + last]` of the first and the last slots."""
    both = torch.cat((torch.arange(first), torch.arange(slots - last, slots)))
    return both.to(device).expand(heads, -1)


def with_last(index: Tensor, last: int, slots: int) -> Tensor:
    """Return `[H, k]` indices followed by those of the `last` slots."""
    recent = torch.arange(slots - last, slots, device=index.device)
    return torch.cat((index, recent.expand(index.shape[0], -1)), 1)


def gathered(tensor: Tensor, index: Tensor) -> Tensor:
    """Return `[H, k, ...]` rows of `[H, n, ...]` chosen by `[H, k]`."""
    # whole rows at a time: torch's gather looks up every element
    first = torch.arange(tensor.shape[0], device=index.device)[:, None] * tensor.shape[1]
    return tensor.flatten(0, 1).index_select(0, (index + first).flatten()).unflatten(0, index.shape)


def _gather(slab: Slab, index: Tensor, room: int) -> None:
    # free slots hold a copy of the last row until they are written
    padded = torch.cat((index, index[:, -1:].expand(-1, room)), 1)
    slab.data, slab.length = gathered(slab.data, padded), index.shape[1]
