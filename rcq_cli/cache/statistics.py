"""What eviction modes learn of the attention of a prefill, collected in bounded memory.

Probabilities are exact, causal and float32, on uncompressed keys; query head h belongs to KV head h // R and
a group counts with its mean. Column sums need every query row and are added up while the prompt runs; for
everything else the few query rows concerned are kept and evaluated when a mode asks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rcq_cli.protocols import Needs

BLOCK_BYTES = 2**26
"""Largest temporary: the float32 scores of one block of query rows."""
MAX_BLOCK_ROWS = 256


def needs_of(mode: Any, options: Any) -> Needs | None:
    """Return what `mode` wants to know of a prefill; None when it compresses without knowing its end."""
    ask = getattr(mode, "needs", None)
    return None if ask is None else ask(options)


def probe_rows(share: float, seed: int, tokens: int) -> Tensor:
    """Return the sorted probe rows of a prompt: its last ceil(share * N) and as many drawn from the others.

    The draw is without replacement from a generator of `seed` alone.
    """
    count = min(tokens, math.ceil(share * tokens))
    others = tokens - count
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(others, generator=generator)[: min(count, others)]
    return torch.cat((drawn, torch.arange(others, tokens))).sort().values


def group_probabilities(query: Tensor, keys: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
    """Return the group-mean probabilities of `[Hq, n, D]` query rows on `[Hkv, T, D]` keys: `[Hkv, n, T]`.

    With `positions` `[n]` row i sees keys 0 .. positions[i]; without, every row sees all.
    """
    heads = keys.shape[0]
    scores = query.float().unflatten(0, (heads, -1)).flatten(1, 2) @ keys.float().transpose(1, 2)
    scores = scores.mul_(scale).unflatten(1, (-1, query.shape[1]))
    if positions is not None:
        hidden = torch.arange(keys.shape[1], device=keys.device) > positions[:, None]
        scores = scores.masked_fill_(hidden, -torch.inf)
    return scores.softmax(-1).mean(1)


@dataclass(frozen=True)
class Statistics:
    """What was seen of the attention of one layer's prompt."""

    tokens: int
    scale: float
    positions: Tensor
    """int64 `[n]`, ascending: the rows whose queries were kept."""
    queries: Tensor
    """`[Hq, n, D]` after RoPE."""
    columns: Tensor | None
    """float32 `[Hkv, T]` column sums over `rows_seen` rows, None when no mode asked for them."""
    rows_seen: int
    """Rows behind the column sums: all of the prompt, or one where only the first decode query is known."""
    ns: int = 0
    """Time the column sums took while the prompt ran."""

    def probabilities(self, keys: Tensor, wanted: Tensor) -> Tensor:
        """Return the `[Hkv, <= len, T]` group-mean probabilities of `wanted` rows, as far as kept."""
        found = torch.isin(self.positions, wanted)
        rows, positions = self.queries[:, found], self.positions[found]
        keys = keys.float()
        parts = [
            group_probabilities(rows[:, part], keys, self.scale, positions[part])
            for part in _blocks(rows.shape[1], rows.shape[0] * keys.shape[1])
        ]
        return torch.cat(parts, 1)

    def last(self, keys: Tensor, count: int) -> Tensor:
        """Return the probabilities of the last `count` rows, `[Hkv, <= count, T]`."""
        return self.probabilities(keys, torch.arange(max(0, self.tokens - count), self.tokens))


def one_row(query: Tensor, keys: Tensor, scale: float) -> Statistics:
    """Return statistics from the newest token's `[Hq, D]` query alone: the prompt's rows are unknown."""
    tokens = keys.shape[1]
    columns = group_probabilities(query[:, None], keys, scale)[:, 0]
    return Statistics(tokens, scale, torch.tensor([tokens - 1]), query[:, None], columns, 1)


class Collector:
    """Collects the union of what several modes need from one layer, chunk by chunk.

    `tokens` is the length of the whole prompt, without which probe rows cannot be drawn. The outcome does
    not depend on how the prompt is cut into chunks (column sums: up to float32 rounding).
    """

    def __init__(self, needs: Iterable[Needs], tokens: int, scale: float) -> None:
        needs = tuple(needs)
        self.tokens, self.scale = tokens, scale
        last = max((need.last_rows for need in needs), default=0)
        wanted = [torch.arange(max(0, tokens - last), tokens)]
        wanted += [probe_rows(n.probe_share, n.probe_seed, tokens) for n in needs if n.probe_share]
        self.wanted = torch.cat(wanted).unique()
        self.sums = any(need.column_sums for need in needs)
        self.seen = 0
        self.kept: list[Tensor] = []
        self.columns: Tensor | None = None
        self.ns = 0

    def add(self, query: Tensor, keys: Tensor) -> None:
        """Take the `[Hq, L, D]` queries of a chunk and all `[Hkv, n, D]` keys so far, its own included."""
        first, self.seen = self.seen, self.seen + query.shape[1]
        mine = self.wanted[(self.wanted >= first) & (self.wanted < self.seen)] - first
        if len(mine):
            self.kept.append(query[:, mine])
        if self.sums:
            started = time.perf_counter_ns()
            self._add_columns(query, keys[:, : self.seen], first)
            self.ns += time.perf_counter_ns() - started

    def _add_columns(self, query: Tensor, keys: Tensor, first: int) -> None:
        columns = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
        if self.columns is not None:
            columns[:, :first] = self.columns
        keys = keys.float()
        for part in _blocks(query.shape[1], query.shape[0] * keys.shape[1]):
            positions = torch.arange(first + part.start, first + part.stop, device=keys.device)
            visible = keys[:, : first + part.stop]
            rows = group_probabilities(query[:, part], visible, self.scale, positions)
            columns[:, : visible.shape[1]] += rows.sum(1)
        self.columns = columns

    def result(self) -> Statistics:
        """Return what was collected; the whole prompt must have been added."""
        assert self.seen == self.tokens, f"{self.seen} of {self.tokens} rows were collected"
        queries = torch.cat(self.kept, 1) if self.kept else torch.empty(0, 0, 0)
        return Statistics(
            self.tokens, self.scale, self.wanted, queries, self.columns, self.tokens, ns=self.ns
        )


def covers(given: Sequence[Needs], wanted: Needs) -> bool:
    """Say whether what was collected for `given` holds everything that `wanted` asks for."""
    probes = {(need.probe_share, need.probe_seed) for need in given}
    return (
        (not wanted.column_sums or any(need.column_sums for need in given))
        and max((need.last_rows for need in given), default=0) >= wanted.last_rows
        and (not wanted.probe_share or (wanted.probe_share, wanted.probe_seed) in probes)
        and (not wanted.rotation or any(need.rotation for need in given))
    )


def _blocks(rows: int, row_elements: int) -> Iterable[slice]:
    """Return slices of rows whose float32 scores stay below `BLOCK_BYTES`."""
    step = max(1, min(MAX_BLOCK_ROWS, BLOCK_BYTES // (4 * max(1, row_elements))))
    return [slice(i, min(rows, i + step)) for i in range(0, rows, step)]
