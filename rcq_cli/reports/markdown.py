"""A comparison as Markdown: header, one table per task, every reason as a footnote, then the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rcq_cli.reports import _columns, paired
from rcq_cli.table import (
    MISSING,
    Cell,
    Column,
    Table,
    decimal,
    significant,
    tokens,
    without_empty_columns,
)

Json = Any
Record = Mapping[str, Json]
Place = tuple[str, int | None, str]

_BEFORE = (
    Column("ctx", right=True),
    Column("mode"),
    Column("reference", right=True),
    Column("candidate", right=True),
)
_AFTER = (
    Column("lost/won", right=True),
    Column("flips", right=True),
    Column("critical", right=True),
    Column("device memory", right=True),
    Column("step time", right=True),
    Column("bound p50, p95"),
    Column("violations"),
    Column("verdict"),
)
_MARKS = {"pass": "PASS", "fail": "FAIL", "inconclusive": "INCONCLUSIVE"}


@dataclass(frozen=True, slots=True)
class Markdown:
    """The report for pull requests and job summaries."""

    name: str = "markdown"
    summary: str = "verdicts per task and context, with every reason, for pull requests"

    def tables(self, document: Record) -> tuple[Table, ...]:
        """Return one table per task of `document`, then baseline and gate; or the error it ended with."""
        if "error" in document:
            return (_broken(document),)
        pairs: Sequence[Record] = document["pairs"]
        cells = {(cell["task"], cell["ctx"], cell["mode"]): cell for cell in document["cells"]}
        tasks = dict.fromkeys((pair["task"], pair["metric"]) for pair in pairs)
        shown = paired.Shown.of(document)
        blocks = [
            _task([p for p in pairs if (p["task"], p["metric"]) == task], cells, shown) for task in tasks
        ]
        return (_verdict(document), *blocks, *paired.judged_by(document), *paired.closing(document))


def _verdict(document: Record) -> Table:
    gate = document["gate"]
    title = f"rcq: {'PASSED' if gate['passed'] else 'FAILED'} (exit code {document['exit_code']})"
    return Table(title, (), (), tuple(gate["failures"]) + tuple(document.get("warnings", ())))


def _broken(document: Record) -> Table:
    error = document["error"]
    notes = [f"{name}: {error[name]}" for name in ("why", "fix") if error[name]]
    return Table(
        f"rcq: exit code {document['exit_code']}: {error['what']} [{error['id']}]", (), (), tuple(notes)
    )


def _task(pairs: Sequence[Record], cells: Mapping[Place, Record], shown: paired.Shown) -> Table:
    first = pairs[0]
    sizes, margins = (dict.fromkeys(str(p[name]) for p in pairs) for name in ("n", "margin"))
    title = f"{first['task']}: {first['metric']}, n={', '.join(sizes)}, margin {', '.join(margins)}"
    notes = [
        f"{paired.pair_title(pair)}: {'; '.join(told)}" for pair in pairs if (told := paired.reasons(pair))
    ]
    rows = tuple(_row(p, cells.get((p["task"], p["ctx"], p["candidate"]), {}), shown) for p in pairs)
    columns = (*_BEFORE, *shown.differences(), *_AFTER)
    return without_empty_columns(Table(title, columns, rows, tuple(notes)), "nothing was measured there")


def _row(pair: Record, cell: Record, shown: paired.Shown) -> tuple[Cell, ...]:
    lost, won = pair["reference_only"], pair["candidate_only"]
    verdict = _MARKS[pair["verdict"]]
    expected = " (expected)" if pair.get("expected") and pair["verdict"] == "fail" else ""
    return (
        Cell("-" if pair["ctx"] is None else tokens(pair["ctx"])),
        Cell(pair["candidate"]),
        Cell(decimal(pair["reference_score"])),
        Cell(decimal(pair["candidate_score"])),
        paired.difference(pair),
        *shown.beside(pair),
        MISSING if lost is None or won is None else Cell(f"{lost}/{won}"),
        Cell(decimal(pair["flip_rate"])),
        MISSING if pair["critical"] is None else Cell(str(pair["critical"])),
        _times(pair.get("device_bytes_ratio")),
        _times(pair.get("latency_ratio")),
        _columns.bound(cell),
        _columns.violations(cell),
        Cell(verdict + expected),
    )


def _times(ratio: float | None) -> Cell:
    return MISSING if ratio is None else Cell(f"{significant(ratio)}x")


REPORT = Markdown()
