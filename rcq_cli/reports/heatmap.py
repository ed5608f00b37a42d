"""Needle depth x context: the share of right answers with its number and a tint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rcq_cli.table import MISSING, Cell, Column, Table, tokens

Json = Any


class Rows(NamedTuple):
    """The sample rows of one run."""

    ctx: int
    mode: str
    score_key: str
    rows: Sequence[Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Where in a context a needle is lost; depth 0 is the beginning, 100 the end."""

    name: str = "heatmap"
    summary: str = "score by needle depth and context"

    def tables(self, runs: Iterable[Rows]) -> tuple[Table, ...]:
        """Return one map per mode; samples that failed or have no depth are left out."""
        by_mode: dict[str, list[Rows]] = {}
        for run in runs:
            by_mode.setdefault(run.mode, []).append(run)
        maps = (_map(mode, group) for mode, group in by_mode.items())
        return tuple(table for table in maps if table.rows)


def _map(mode: str, runs: Sequence[Rows]) -> Table:
    scores: dict[tuple[float, int], list[float]] = {}
    for run in runs:
        for row in run.rows:
            depth, found = (row.get("meta") or {}).get("depth"), (row.get("scores") or {}).get(run.score_key)
            if depth is not None and found is not None:
                scores.setdefault((depth, run.ctx), []).append(found)
    depths = sorted({depth for depth, _ in scores})
    contexts = sorted({ctx for _, ctx in scores})
    columns = (Column("depth", right=True), *(Column(tokens(ctx), right=True) for ctx in contexts))
    rows = tuple(
        (Cell(f"{depth:g}%"), *(_cell(scores.get((depth, ctx))) for ctx in contexts)) for depth in depths
    )
    sizes = sorted({len(found) for found in scores.values()})
    n = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}" if sizes else "0"
    return Table(f"score by needle depth and context, {mode}, n={n} in each cell", columns, rows)


def _cell(found: Sequence[float] | None) -> Cell:
    if not found:
        return MISSING
    mean = sum(found) / len(found)
    return Cell(f" {mean:.2f} ", f"heat:{mean:.3f}")


REPORT = Heatmap()
