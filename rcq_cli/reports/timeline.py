"""Certificates of one run: bound against true error over steps, rungs by layer and head, the worst steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rcq_cli.table import MISSING, Cell, Column, Table, share, significant, tokens

Json = Any
Record = Mapping[str, Json]
BINS = 64
"""Columns of a line of bars; a longer run is gathered into as many."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The tables of `rcq trace show`."""

    name: str = "timeline"
    summary: str = "bound against true error over steps, rungs by layer and head, the worst steps"

    def tables(self, shown: Record) -> tuple[Table, ...]:
        """Return the tables of one shown run."""
        if shown.get("head_step"):
            return (_one(shown),)
        return (_series(shown), _map(shown), _worst(shown))


def gathered(values: Sequence[float | None], take: Callable[..., float]) -> list[float | None]:
    """Return at most `BINS` values: what `take` makes of the known ones of each stretch."""
    size = max(1, math.ceil(len(values) / BINS))
    out: list[float | None] = []
    for start in range(0, len(values), size):
        known = [value for value in values[start : start + size] if value is not None]
        out.append(take(known) if known else None)
    return out


def levels(values: Sequence[float | None]) -> str:
    """Return a digit 0 to 7 per value on a logarithmic scale; a dash for what is not known or is 0."""
    known = [math.log10(value) for value in values if value]
    low, high = min(known, default=0.0), max(known, default=0.0)
    width = (high - low) or 1.0
    return "".join(
        str(min(7, int(8 * (math.log10(value) - low) / width))) if value else "-" for value in values
    )


def _series(shown: Record) -> Table:
    rows = shown["series"]
    lines = (
        ("relative bound, largest", "bound_max", max),
        ("relative bound, median", "bound_p50", max),
        ("relative true error, largest", "error_max", max),
        ("bound / true error, least", "tightest", min),
    )
    columns = (
        Column("over steps"),
        Column("least", right=True),
        Column("largest", right=True),
        Column(f"steps {rows[0]['step']} to {rows[-1]['step']}, logarithmic"),
    )
    body = tuple(_line(title, [row[name] for row in rows], take) for title, name, take in lines)
    where = "" if shown["ctx"] is None else f"@{tokens(shown['ctx'])}"
    title = f"{shown['task']}{where}, {shown['mode']}, {shown['model']}: {shown['head_steps']} head-steps"
    return Table(title, columns, body, tuple(_notes(shown)))


def _line(title: str, values: Sequence[float | None], take: Callable[..., float]) -> tuple[Cell, ...]:
    known = [value for value in values if value is not None]
    if not known:
        return (Cell(title), MISSING, MISSING, MISSING)
    ends = (Cell(significant(min(known), 2)), Cell(significant(max(known), 2)))
    return (Cell(title), *ends, Cell(levels(gathered(values, take)), "spark"))


def _notes(shown: Record) -> list[str]:
    notes = [f"rungs: {rungs_text(shown['rungs'])}; {shown['exact']} head-steps recomputed exactly"]
    audited, violations = shown["audited"], shown["violations"]
    if not audited:
        notes.append("not audited: the true error is unknown; record with --audit")
    elif violations:
        notes.append(f"VIOLATED: {violations} of {audited} audited head-steps are above their bound")
    else:
        notes.append(
            f"0 violations in {audited} audited head-steps: at most {significant(3 / audited, 2)} of all, 95%"
        )
    if shown.get("eps") is not None:
        notes.append(f"budget eps {shown['eps']:g} of the exact output, per query head and step")
    return notes


def rungs_text(counts: Sequence[int]) -> str:
    """Write how many head-steps ended on each rung; rungs nobody used are left out."""
    total = sum(counts) or 1
    return "  ".join(f"{rung}: {share(n / total)}" for rung, n in enumerate(counts) if n)


def _map(shown: Record) -> Table:
    columns = (
        Column("layer", right=True),
        Column("highest rung of each head"),
        Column("head-steps by rung"),
    )
    rows = []
    for layer in shown["map"]:
        digits = "".join(str(max(i for i, n in enumerate(counts) if n)) for counts in layer["rungs"])
        total = [sum(column) for column in zip(*layer["rungs"], strict=True)]
        rows.append((Cell(str(layer["layer"])), Cell(digits), Cell(rungs_text(total))))
    heads = shown["map"][0]["heads"]
    return Table(f"rungs by layer and query head, heads {heads[0]} to {heads[-1]}", columns, tuple(rows))


_WORST = ("rel_bound", "rel_error", "key_bound", "value_bound", "dropped_bound", "rounding_bound")


def _worst(shown: Record) -> Table:
    columns = (
        Column("sample"),
        *(Column(name, right=True) for name in ("step", "layer", "head", "rung")),
        *(Column(name.replace("_", " ").replace("rel", "relative"), right=True) for name in _WORST),
        Column("audit"),
    )
    rows = tuple(_worst_row(record) for record in shown["worst"])
    return Table(
        "the head-steps to look at first", columns, rows, ("absolute bounds are L2 norms of values",)
    )


def _worst_row(record: Record) -> tuple[Cell, ...]:
    audit = Cell("VIOLATED", "bad") if record["violated"] else Cell("holds", "good")
    if record["true_error"] is None:
        audit = audit if record["violated"] else Cell("not audited", "faint")
    return (
        Cell(record["sample_id"]),
        *(Cell(str(record[name])) for name in ("step", "layer", "head", "rung")),
        *(MISSING if record[name] is None else Cell(significant(record[name], 2)) for name in _WORST),
        audit,
    )


def _one(shown: Record) -> Table:
    record = shown["head_step"]
    rows = []
    for name, value in record.items():
        if name.endswith("_status") and name.removesuffix("_status") in record:
            continue
        status = record.get(f"{name}_status")
        text = status if value is None else significant(value, 6) if isinstance(value, float) else str(value)
        rows.append((Cell(name), Cell(str(text), "bad" if name == "violated" and value else "")))
    title = f"step {record['step']}, layer {record['layer']}, query head {record['head']}"
    return Table(title, (Column("field"), Column("value")), tuple(rows))


REPORT = Timeline()
