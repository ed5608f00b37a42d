"""What one mode measured: a row per task and context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rcq_cli.reports import _columns
from rcq_cli.table import MISSING, Cell, Column, Table, share, significant, without_empty_columns

Json = Any

COLUMNS = (
    Column("cell"),
    Column("mode"),
    Column("n", right=True),
    Column("metric"),
    Column("score [95%]"),
    Column("fill", right=True),
    Column("device memory", right=True),
    Column("host memory", right=True),
    Column("step p50", right=True),
    Column("tokens/s", right=True),
    Column("bound p50, p95"),
    Column("rungs used"),
    Column("violations"),
    Column("status"),
)


@dataclass(frozen=True, slots=True)
class Summary:
    """The table of `rcq eval`."""

    name: str = "summary"
    summary: str = "score, memory, time and certificates of each cell"

    def tables(self, document: Mapping[str, Json]) -> tuple[Table, ...]:
        """Return one table per model of the cells of `document`."""
        cells: Sequence[Mapping[str, Json]] = document["cells"]
        names = list(dict.fromkeys(_columns.model_name(cell) for cell in cells))
        return tuple(
            _table(name, [cell for cell in cells if _columns.model_name(cell) == name]) for name in names
        )


def _table(name: str, cells: Sequence[Mapping[str, Json]]) -> Table:
    rows = tuple(_row(cell) for cell in cells)
    notes = [f"{_columns.place(c)} {c['mode']}: {note}" for c in cells for note in _notes(c)]
    table = Table(f"model {name}", COLUMNS, rows, tuple(notes))
    return without_empty_columns(table, "nothing was measured there")


def _row(cell: Mapping[str, Json]) -> tuple[Cell, ...]:
    fill, rate, status = cell.get("fill_ratio_min"), cell.get("tokens_per_s"), cell["status"]
    return (
        Cell(_columns.place(cell)),
        Cell(cell["mode"]),
        Cell(str(cell["n"])),
        Cell(cell.get("metric") or "-"),
        _columns.score(cell),
        MISSING if fill is None else Cell(share(fill)),
        _columns.device(cell),
        _columns.host(cell),
        _columns.step_ms(cell),
        MISSING if rate is None else Cell(significant(rate)),
        _columns.bound(cell),
        _columns.rungs(cell),
        _columns.violations(cell),
        Cell(status, "good" if status == "complete" else "bad"),
    )


def _notes(cell: Mapping[str, Json]) -> list[str]:
    notes = [_columns.engaged(cell)]
    further = {name: value for name, value in (cell.get("metrics") or {}).items() if value is not None}
    if further:
        told = ", ".join(f"{name} {significant(value, 4)}" for name, value in further.items())
        notes.append(f"further metrics: {told}")
    return [note for note in notes if note]


REPORT = Summary()
