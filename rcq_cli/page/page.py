"""The report: a document of results in, one self-contained HTML file out.

Pure: the same document gives the same bytes. Nothing in the file is fetched from anywhere, and everything
but sorting and switching reads without JavaScript.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from rcq_cli.page import drawn, svg
from rcq_cli.reports import _columns
from rcq_cli.reports.breakdown import REPORT as BREAKDOWN
from rcq_cli.reports.breakdown import title_of
from rcq_cli.reports.paired import REPORT as PAIRED
from rcq_cli.reports.summary import REPORT as SUMMARY
from rcq_cli.reports.timeline import REPORT as TIMELINE
from rcq_cli.table import Cell, Column, Table, binary_bytes, decimal, share, significant

Json = Any
Record = Mapping[str, Json]
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
MAP_CELLS = 6000
"""Heads drawn one by one over all runs; beyond that a map shows layers only."""
WRAP = "wrap"
"""Style of a cell whose text may take several lines."""


def render(document: Record) -> str:
    """Return the HTML of a report document (see `rcq_cli.page.content`)."""
    sections = [section for section in _sections(document) if section[2]]
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{escape(title)}</h2>{inner}</section>' for name, title, inner in sections
    )
    island = json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":"))
    island = island.replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(document['title'])}</title><style>{_file('page.css')}</style></head><body><main>"
        f"<header><h1>{escape(document['title'])}</h1>"
        f'<span class="soft">{escape(document["header"])}</span>'
        '<span class="only-js"><button id="theme" type="button">light / dark</button></span></header>'
        f"<nav>{links}</nav>{body}</main>"
        f'<script type="application/json" id="data">{island}</script>'
        f"<script>{_file('page.js')}</script></body></html>\n"
    )


def _file(name: str) -> str:
    return resources.files("rcq_cli.page").joinpath(name).read_text("utf-8")


def _sections(document: Record) -> Iterator[tuple[str, str, str]]:
    yield "verdict", "Verdict", _verdict(document)
    yield "contract", "Contract", _contract(document)
    yield "ledger", "Memory", _memory(document)
    yield "phases", "Where a step's time goes", _phases(document)
    yield "certificates", "Certificates", _certificates(document)
    yield "accuracy", "Accuracy", _accuracy(document)
    yield "pareto", "Memory against accuracy", drawn.pareto(document)
    yield (
        "machine",
        "Machine and software",
        _across(document["contract"]["runs"], document["environment"], ""),
    )
    yield "data", "Raw data", _raw(document)


# -- tables -------------------------------------------------------------------------------------------------


def table_html(table: Table) -> str:
    """Return a table with its title above and its notes below."""
    parts = [f"<h3>{escape(table.title)}</h3>"] if table.title else []
    if table.columns:
        head = "".join(
            f"<th{' class=right' if column.right else ''}>{escape(column.title)}</th>"
            for column in table.columns
        )
        rows = "".join("<tr>" + "".join(map(_cell, cells, table.columns)) + "</tr>" for cells in table.rows)
        parts.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        )
    parts += [f'<p class="note">{escape(note)}</p>' for note in table.notes]
    return "".join(parts)


def _cell(cell: Cell, column: Column) -> str:
    kind, _, level = cell.style.partition(":")
    text = cell.text.strip()
    if kind == "heat":
        value = float(level)
        style = f"background:{svg.colour(value)};color:{svg.ink(value)}"
        return f'<td class="heat" style="{style}">{escape(text)}</td>'
    if kind == "spark":
        text, kind = "".join(chr(0x2581 + int(c)) if c in "01234567" else " " for c in text), ""
    classes = " ".join(filter(None, ("right" if column.right else "", kind)))
    return f'<td class="{classes}">{escape(text)}</td>' if classes else f"<td>{escape(text)}</td>"


# -- sections -----------------------------------------------------------------------------------------------


def _verdict(document: Record) -> str:
    chips = [_pair_chip(pair, document) for pair in document["pairs"]]
    chips += [chip for cell in document["cells"] if (chip := _certificate_chip(cell, document))]
    chips += [_chip("doubt", "not compared", why) for why in document["refusals"]]
    chips += [
        _chip("bad", "problem", problem["what"]) for problem in document["problems"] if problem["code"] != 4
    ]
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in document["notes"])
    return f'<div class="strip">{"".join(chips)}</div>{notes}'


def _chip(kind: str, head: str, rest: str) -> str:
    return f'<div class="chip {kind}"><b>{escape(head)}</b>{escape(rest)}</div>'


def _place(record: Record, document: Record) -> str:
    """Return task and context of a cell or a pair, and the model where there are several."""
    several = len({run["model"] for run in document["runs"]}) > 1
    return _columns.place(record) + (f", {record['model']}" if several else "")


def _pair_chip(pair: Record, document: Record) -> str:
    verdict = str(pair.get("verdict") or "-")
    kind = {"pass": "good", "fail": "bad", "inconclusive": "doubt"}.get(verdict, "")
    what = f"{pair['candidate']} against {pair['reference']}, {_place(pair, document)}"
    if pair.get("expected") and verdict == "fail":
        kind, verdict = "doubt", "expected fail"
    change = (
        f"difference {decimal(pair['difference'], sign=True)}" if pair.get("difference") is not None else ""
    )
    return _chip(kind, f"{verdict.upper()} {what}", ", ".join(filter(None, (change, f"n = {pair.get('n')}"))))


def _certificate_chip(cell: Record, document: Record) -> str:
    found = cell.get("certificates")
    if not found:
        return ""
    place = f"{cell['mode']}, {_place(cell, document)}"
    if found["violations"]:
        what = f"{found['violations']} of {found['audited']} audited head-steps are above their bound"
        return _chip("bad", f"CERTIFICATE VIOLATED {place}", what)
    if not found["audited"]:
        return _chip("", f"not audited {place}", f"{found['head_steps']} head-steps bounded")
    rest = f"0 violations in {found['audited']} audits: at most {significant(3 / found['audited'], 2)} at 95%"
    return _chip("good", f"certificates hold {place}", rest)


def _contract(document: Record) -> str:
    contract = document["contract"]
    if not contract["runs"]:
        return ""
    rows = tuple((Cell(name), Cell(_short(value), WRAP)) for name, value in contract["common"].items())
    same = _narrow(Table("", (Column("field"), Column("value")), rows))
    count = f"{len(rows)} fields are the same in all {len(contract['runs'])} runs"
    differing = _across(contract["runs"], contract["differing"], "differs between runs")
    return _numbered(contract["runs"]) + differing + _folded(count, same)


def _numbered(runs: Sequence[str]) -> str:
    """Return the list that gives each run the number by which tables name it: folders are long."""
    return f'<ol class="runs">{"".join(f"<li>{escape(name)}</li>" for name in runs)}</ol>'


def _folded(name: str, inner: str) -> str:
    return f"<details><summary>{escape(name)}</summary>{inner}</details>"


def _across(runs: Sequence[str], fields: Mapping[str, Sequence[Json]], title: str) -> str:
    """Return a table with a column per run, or, where there are many, a row per value and its runs.

    Runs stand by their numbers in `_numbered`.
    """
    if not fields:
        return ""
    if len(runs) <= 3:
        columns = (Column("field"), *(Column(f"run {number}") for number in range(1, len(runs) + 1)))
        rows = [(Cell(name), *(Cell(_short(v), WRAP) for v in values)) for name, values in fields.items()]
        return table_html(Table(title, columns, tuple(rows)))
    rows = []
    for name, values in fields.items():
        places: dict[str, list[int]] = {}
        for number, value in enumerate(values, 1):
            places.setdefault(_short(value), []).append(number)
        for value, found in places.items():
            where = "all" if len(found) == len(runs) else _spans(found)
            rows.append((Cell(name), Cell(where), Cell(value, WRAP)))
    return _narrow(Table(title, (Column("field"), Column("runs"), Column("value")), tuple(rows)))


def _narrow(table: Table) -> str:
    """Return a table whose values, in the last column, get lines of their own in a narrow window."""
    return f'<div class="narrow">{table_html(table)}</div>'


def _spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers with their neighbours drawn together: `1-3, 5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _short(value: Json) -> str:
    """Return a value as text, a digest by its first digits: the whole one is in the data below."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    if len(text) >= 40 and not text.strip("0123456789abcdef"):
        return f"{text[:12]}..."
    return text


def _memory(document: Record) -> str:
    bars = []
    for cell in document["cells"]:
        held = cell.get("bytes")
        if not held:
            continue
        parts = {
            "codes, keys and values": held["device"] - held["metadata"],
            "metadata": held["metadata"],
            "scratch": held["scratch"],
            "host": held["host"],
        }
        segments = [svg.Segment(name, size, binary_bytes(size)) for name, size in parts.items() if size]
        dense = held["dense_equivalent"]
        outline = svg.Segment("a dense cache of 16-bit elements", dense, binary_bytes(dense))
        total = f"tier 1 {binary_bytes(held['device'])}"
        bars.append(svg.Bar(f"{cell['mode']}, {_place(cell, document)}: {total}", segments, outline))
    if not bars:
        return ""
    about = (
        "bytes held at the end of a sample, by kind; the dashed outline is a dense cache of 16-bit elements"
    )
    told = f'<p class="soft">{escape(about.capitalize())}.</p>'
    return told + svg.stacked(bars, about) + table_html(_memory_table(document))


def _memory_table(document: Record) -> Table:
    columns = (
        Column("cell"),
        Column("mode"),
        *(Column(name, right=True) for name in ("tier 1", "device in all", "system in all", "dense 16 bit")),
    )
    rows = []
    for cell in document["cells"]:
        held = cell.get("bytes")
        if held:
            dense = held["dense_equivalent"]
            shown = (
                f"{binary_bytes(size)} ({share(size / dense)})" if dense else binary_bytes(size)
                for size in drawn.axis_bytes(held).values()
            )
            rows.append(
                (
                    Cell(_place(cell, document)),
                    Cell(cell["mode"]),
                    *(Cell(text) for text in shown),
                    Cell(binary_bytes(dense)),
                )
            )
    return Table("", columns, tuple(rows))


def _phases(document: Record) -> str:
    if not document["profiles"]:
        return ""
    bars = []
    for cell in document["profiles"]:
        mean = cell["step_ms"]["mean"]
        segments = [
            svg.Segment(
                row["name"], row["share"] * mean, f"{share(row['share'])}, p50 {row['p50_ms']:.3g} ms"
            )
            for row in cell["phases"]
            if row["share"]
            if row["p50_ms"] is not None
        ]
        dense = (cell.get("dense_step_ms") or {}).get("p50")
        outline = svg.Segment("dense, median step", dense, f"{dense:.3g} ms") if dense else None
        bars.append(svg.Bar(f"{title_of(cell)}: mean step {mean:.3g} ms", segments, outline))
    stacked = svg.stacked(bars, "time of a decode step by phase; the dashed outline is a dense step")
    tables = BREAKDOWN.tables({"cells": document["profiles"]})
    # the bar of letters is for terminals
    return stacked + "".join(table_html(t) for t in tables if not (t.notes and t.notes[0].startswith("[")))


def _certificates(document: Record) -> str:
    heads = sum(len(layer["heads"]) for shown in document["traces"] for layer in shown["map"])
    parts = []
    for shown in document["traces"]:
        series, worst = TIMELINE.tables(shown)[0], TIMELINE.tables(shown)[2]
        parts += [
            table_html(Table(series.title, (), (), series.notes)),
            drawn.timeline(shown),
            drawn.head_map(shown, each=heads <= MAP_CELLS),
            table_html(worst),
        ]
    if parts:
        told = "A certificate holds for one head and step of one attention output, not for the text."
        parts.append(f'<p class="note">{told}</p>')
    return "".join(parts)


def _accuracy(document: Record) -> str:
    tables = list(SUMMARY.tables(document)) if document["cells"] else []
    if document["pairs"]:
        tables += PAIRED.tables(document)
    maps = "".join(f"<div>{drawn.heatmap(found)}</div>" for found in document["heatmaps"])
    return "".join(map(table_html, tables)) + f'<div class="row">{maps}</div>'


def _raw(document: Record) -> str:
    runs = tuple(
        (Cell(run["name"]), Cell(run["status"]), Cell(run["digest"][:12])) for run in document["runs"]
    )
    columns = (Column("run folder"), Column("status"), Column("spec digest"))
    told = "Every number above stands as JSON in the element with the id data of this file."
    return f'{table_html(Table("", columns, runs))}<p class="note">{told}</p>'
