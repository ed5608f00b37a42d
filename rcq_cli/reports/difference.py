"""Two runs head-step by head-step: where the rungs and bounds went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rcq_cli.reports.timeline import rungs_text
from rcq_cli.table import MISSING, Cell, Column, Table, significant

Json = Any
Record = Mapping[str, Json]
FIGURES = {
    "rel_bound_p50": "relative bound, median",
    "rel_bound_max": "relative bound, largest",
    "rel_error_max": "relative true error, largest",
    "violations": "violations",
    "exact": "recomputed exactly",
    "promoted_key_blocks": "promoted key blocks",
    "promoted_value_blocks": "promoted value blocks",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The tables of `rcq trace diff`."""

    name: str = "difference"
    summary: str = "certificates of two runs, matched by sample, step, layer and head"

    def tables(self, found: Record) -> tuple[Table, ...]:
        """Return the figures side by side and the heads that moved most."""
        return (_figures(found), _heads(found))


def _figures(found: Record) -> Table:
    one, two = found["figures"]
    rows = [
        (Cell(title), _cell(one[name]), _cell(two[name]), _ratio(one[name], two[name]))
        for name, title in FIGURES.items()
    ]
    rows.insert(0, (Cell("rungs"), Cell(rungs_text(one["rungs"])), Cell(rungs_text(two["rungs"])), MISSING))
    columns = (
        Column("over the matched head-steps"),
        Column(f"A {found['modes'][0]}", right=True),
        Column(f"B {found['modes'][1]}", right=True),
        Column("B / A", right=True),
    )
    notes = [f"A {found['runs'][0]}", f"B {found['runs'][1]}"]
    notes.append(
        f"{found['rung_up']} head-steps went to a higher rung in B, {found['rung_down']} to a lower one"
    )
    if found["bound_ratio_p50"] is not None:
        notes.append(f"median of bound B / bound A: {significant(found['bound_ratio_p50'])}")
    loose = found["only_first"] + found["only_second"]
    if loose:
        notes.append(
            f"{found['only_first']} head-steps are in A alone, {found['only_second']} in B alone: "
            "answers of different length"
        )
    return Table(f"{found['matched']} matched head-steps", columns, tuple(rows), tuple(notes))


def _cell(value: Json) -> Cell:
    return MISSING if value is None else Cell(significant(value) if isinstance(value, float) else str(value))


def _ratio(one: Json, two: Json) -> Cell:
    return Cell(f"{two / one:.2f}x") if one and two is not None else MISSING


def _heads(found: Record) -> Table:
    columns = tuple(
        Column(name, right=True) for name in ("layer", "head", "to a higher rung", "to a lower rung", "of")
    )
    names = ("layer", "head", "rung_up", "rung_down", "head_steps")
    rows = tuple(tuple(Cell(str(head[name])) for name in names) for head in found["heads"])
    title = "heads whose rung changed most often" if rows else "no head changed its rung"
    return Table(title, columns if rows else (), rows)


REPORT = Difference()
