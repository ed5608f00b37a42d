"""How the lists of modes, tasks, models and probes are answered in every output format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rcq_cli.options import describe
from rcq_cli.shell import SCHEMA, Result, Shell
from rcq_cli.table import Cell, Column, Table

Json = Any


class Entry(NamedTuple):
    """One line of a list."""

    name: str
    facts: Mapping[str, Json]
    """Columns between the name and the summary, the same for every entry."""
    summary: str


def answer_entries(shell: Shell, plural: str, entries: Sequence[Entry]) -> None:
    """Answer with one line per entry: name, facts, summary."""
    records = [{"name": e.name, **e.facts, "summary": e.summary} for e in entries]
    answer_records(shell, plural, records)


def answer_options(shell: Shell, noun: str, name: str, summary: str, options: type) -> None:
    """Answer with the options of one entry: name, type, default, help."""
    records = [
        {"option": o.name, "type": o.type, "default": o.default, "help": o.help} for o in describe(options)
    ]
    title = f"{name}: {summary}"
    answer_records(shell, "options", records, title=title, extra={noun: name, "summary": summary})


def answer_records(
    shell: Shell,
    key: str,
    records: Sequence[Mapping[str, Json]],
    *,
    title: str = "",
    extra: Mapping[str, Json] | None = None,
) -> None:
    """Answer with flat records under `key` of the document."""
    document = {"schema": SCHEMA, "command": shell.command, **(extra or {}), key: list(records)}
    shell.answer(Result(document, lambda: (record_table(title, records),), records))


def record_table(title: str, records: Sequence[Mapping[str, Json]]) -> Table:
    """Return flat records as a table whose columns are their keys; numbers stand on the right."""
    if not records:
        return Table(title, (Column("nothing to show"),), ())
    keys = list(records[0])
    columns = tuple(Column(key, right=_numeric([r[key] for r in records])) for key in keys)
    rows = tuple(tuple(_cell(record[key]) for key in keys) for record in records)
    return Table(title, columns, rows)


def _numeric(values: Sequence[Json]) -> bool:
    present = [value for value in values if value is not None]
    return bool(present) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in present)


def _cell(value: Json) -> Cell:
    if value is None or value == "":
        return Cell("-", "faint")
    return Cell(str(value).lower() if isinstance(value, bool) else str(value))
