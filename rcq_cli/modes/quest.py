"""Nothing is evicted; a step reads the pages that could hold its best keys. Source: arXiv:2406.10774.

The box of a page bounds the scores in it, and says almost nothing about their mass: it is no certificate.
Stored bytes are above dense; what is saved is traffic.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.slab import Slab
from rcq_cli.certify.exact import as_groups, exact_attention
from rcq_cli.modes._tiered import check_range
from rcq_cli.protocols import Engagement, Geometry, LayerBytes, Step


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `quest` and `quest-group`."""

    page: int = 16
    """tokens per page"""
    read_tokens: int = 1024
    """tokens each head may read per step"""
    dense_layers: int = 2
    """first layers of the model that read everything"""

    def __post_init__(self) -> None:
        check_range("page", self.page, 1, 4096)
        check_range("read_tokens", self.read_tokens, 1, 2**40)
        check_range("dense_layers", self.dense_layers, 0, 2**20)


def page_bounds(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return sum_c max(q_c low_c, q_c high_c) of `[Hkv, R, D]` queries: `[Hkv, R, pages]`, not scaled.

    No key between `low` and `high` `[Hkv, pages, D]` has a larger product with the query.
    """
    return query.clamp_min(0) @ high.transpose(1, 2) + query.clamp_max(0) @ low.transpose(1, 2)


class QuestLayer:
    """One layer under `quest`; `shared` gives all query heads of a KV head the same pages."""

    shared = False

    def __init__(self, geometry: Geometry, options: Options, backend: Any) -> None:
        self.geometry, self.options, self.backend = geometry, options, backend
        dtype = getattr(torch, geometry.dtype)
        heads, dim = geometry.kv_heads, geometry.head_dim
        self.keys, self.values, self.low, self.high = (
            Slab(heads, (dim,), dtype, geometry.device) for _ in range(4)
        )
        self.open: tuple[Tensor, Tensor] | None = None  # box of the page that is not full
        self.always_dense = geometry.layer is not None and geometry.layer < options.dense_layers
        self.steps = self.steps_selected = self.read_bytes = 0
        self.scratch_bytes = 0

    @property
    def tokens(self) -> int:
        """Return the tokens seen."""
        return self.keys.length

    @property
    def pages(self) -> int:
        """Return the pages, the open one included."""
        return self.low.length + (self.open is not None)

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Add `[Hkv, T, D]` keys and values, and box them."""
        self.keys.extend(keys)
        self.values.extend(values)
        size = self.options.page
        filled = (self.tokens - keys.shape[1]) % size
        if filled:
            self._widen(keys[:, : size - filled], closes=filled + keys.shape[1] >= size)
            keys = keys[:, size - filled :]
        whole = keys.shape[1] // size
        if whole:
            pages = keys[:, : whole * size].unflatten(1, (whole, size))
            self.low.extend(pages.amin(2))
            self.high.extend(pages.amax(2))
        if keys.shape[1] > whole * size:
            self._widen(keys[:, whole * size :], closes=False)

    def _widen(self, keys: Tensor, *, closes: bool) -> None:
        """Let the open page take `[Hkv, n, D]` keys; a full one is stored."""
        low, high = keys.amin(1), keys.amax(1)
        if self.open is not None:
            low, high = torch.minimum(low, self.open[0]), torch.maximum(high, self.open[1])
        self.open = None if closes else (low, high)
        if closes:
            self.low.extend(low[:, None])
            self.high.extend(high[:, None])

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the `[Hkv, D]` key and value of one token."""
        self.prefill(key[:, None], value[:, None])

    def attend(self, query: Tensor) -> Step:
        """Return attention of `[Hq, D]` queries on the tokens of the selected pages."""
        self.steps += 1
        g, size = self.geometry, self.options.page
        keys, values = self.keys.rows, self.values.rows
        count = min(max(3, self.options.read_tokens // size), self.pages)
        if self.always_dense or count == self.pages:
            self.read_bytes += keys.nbytes + values.nbytes
            return Step(self.backend.dense(query, keys, values, g.scale), None)
        self.steps_selected += 1
        chosen = self._choose(query, count)  # [Hkv, R or 1, count]
        head = torch.arange(g.kv_heads, device=keys.device)[:, None, None]
        slots = (chosen[..., None] * size + torch.arange(size, device=keys.device)).flatten(-2)
        # the newest page is chosen and stands last; what it lacks is cut off
        slots = slots[..., : count * size - (self.pages * size - self.tokens)]
        picked = [rows[head, slots].flatten(0, 1) for rows in (keys, values)]
        self._account(chosen, picked)
        return Step(self.backend.dense(query, picked[0], picked[1], g.scale), None)

    def _choose(self, query: Tensor, count: int) -> Tensor:
        """Return the pages `[Hkv, R or 1, count]`, ascending: the newest one and the best others."""
        boxes = [slab.rows for slab in (self.low, self.high)]
        if self.open is not None:
            boxes = [torch.cat((rows, last[:, None]), 1) for rows, last in zip(boxes, self.open, strict=True)]
        sign = -1.0 if self.geometry.scale < 0 else 1.0
        groups = query.float().unflatten(0, (self.geometry.kv_heads, -1)) * sign
        bounds = page_bounds(groups, boxes[0].float(), boxes[1].float())
        if self.shared:
            bounds = bounds.amax(1, keepdim=True)
        bounds[..., -1] = torch.inf
        order = torch.sort(bounds, dim=-1, descending=True, stable=True).indices
        return order[..., :count].sort(-1).values

    def _account(self, chosen: Tensor, picked: list[Tensor]) -> None:
        """Count what a kernel has to load: the union over the query heads of a KV head, and the boxes."""
        union = torch.zeros(chosen.shape[0], self.pages, dtype=torch.bool, device=chosen.device)
        union.scatter_(1, chosen.flatten(1), True)
        token = 2 * self.geometry.head_dim * self.keys.data.element_size()
        missing = self.pages * self.options.page - self.tokens
        read = int(union.sum()) * self.options.page - missing * union.shape[0]
        self.read_bytes += (read + self.pages * chosen.shape[0]) * token
        self.scratch_bytes = max(self.scratch_bytes, sum(rows.nbytes for rows in picked))

    def exact(self, query: Tensor) -> Tensor:
        """Return float64 attention on everything, `[Hq, D]`."""
        groups = as_groups(query, self.geometry.kv_heads)
        truth = exact_attention(groups, self.keys.rows, self.values.rows, self.geometry.scale)
        return truth.output.flatten(0, 1)

    def fork(self) -> "QuestLayer":
        """Return an independent copy."""
        twin = type(self)(self.geometry, self.options, self.backend)
        twin.keys, twin.values, twin.low, twin.high = (
            slab.fork() for slab in (self.keys, self.values, self.low, self.high)
        )
        twin.open = self.open
        return twin

    def bytes(self) -> LayerBytes:
        """Return what is allocated now."""
        g = self.geometry
        boxes = self.low.nbytes + self.high.nbytes
        boxes += 0 if self.open is None else sum(t.nbytes for t in self.open)
        return LayerBytes(
            device=self.keys.nbytes + self.values.nbytes + boxes,
            host=0,
            metadata=boxes,
            scratch=self.scratch_bytes,
            dense_equivalent=2 * g.kv_heads * self.tokens * g.head_dim * 2,
        )

    def engagement(self) -> Engagement:
        """Return whether steps left pages out, and what they read."""
        engaged = self.steps_selected > 0 and not self.always_dense
        reason = ""
        if not engaged:
            fits = self.pages <= max(3, self.options.read_tokens // self.options.page)
            idle = "no_managed_layers" if self.always_dense else "budget_ge_context" if fits else "inactive"
            reason = idle if self.steps else "no_decode_steps"
        details = {"read_bytes": self.read_bytes}
        return Engagement(
            self.steps, self.steps_selected, 0, 0, engaged, reason, exempt=self.always_dense, details=details
        )


class GroupLayer(QuestLayer):
    """One layer under `quest-group`."""

    shared = True


class Quest:
    """Pages by the bound on their scores."""

    label = "none"
    certifies = False
    Options = Options

    def __init__(self, name: str, layer: type[QuestLayer], summary: str) -> None:
        self.name, self.layer, self.summary = name, layer, summary

    def open(self, geometry: Geometry, options: Any, backend: Any) -> QuestLayer:
        """Make the empty cache of one layer."""
        return self.layer(geometry, options, backend)


MODE = Quest("quest", QuestLayer, "keeps everything, reads the pages whose bound on the score is highest")
