"""Tables and documents as text: terminal, plain, Markdown, CSV, JSON, JSON lines; nothing is truncated."""

from __future__ import annotations

import csv
import io
import json
import os
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rcq_cli.glyphs import View
from rcq_cli.table import Cell, Column, Table

GAP = 2
"""Spaces between two columns."""

_STYLES = {
    "good": "green",
    "bad": "bold red",
    "doubt": "yellow",
    "faint": "dim",
    "strong": "bold",
    "title": "bold cyan",
}

# a dark-to-light ramp that keeps its order without colour vision; the number stands in each cell anyway
_RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def cell_width(text: str) -> int:
    """Return the terminal columns of `text`; East Asian wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def bands(widths: Sequence[int], limit: int | None) -> list[list[int]]:
    """Split columns into bands that fit `limit`, each opened by column 0; a wider column stands alone."""
    if limit is None:
        return [list(range(len(widths)))]
    out: list[list[int]] = []
    used = limit + 1
    for index in range(1, len(widths)):
        if used + GAP + widths[index] > limit:
            out.append([0])
            used = widths[0]
        out[-1].append(index)
        used += GAP + widths[index]
    return out or [[0]]


def table_lines(table: Table, view: View) -> Iterator[str]:
    """Yield the lines of `table`; columns that do not fit `view.width` go to a further band below."""
    if table.title:
        yield from (paint(line, "title", view) for line in _wrap(table.title, view.width, ""))
    widths = [
        max([cell_width(column.title), *(cell_width(row[i].text) for row in table.rows)])
        for i, column in enumerate(table.columns)
    ]
    for number, band in enumerate(bands(widths, view.width) if widths else ()):
        if number:
            yield ""
        yield _line([Cell(table.columns[i].title, "strong") for i in band], band, table.columns, widths, view)
        yield view.glyphs.line * (sum(widths[i] for i in band) + GAP * (len(band) - 1))
        for row in table.rows:
            yield _line([row[i] for i in band], band, table.columns, widths, view)
    for note in table.notes:
        yield from (paint(line, "faint", view) for line in _wrap(note, view.width, "  "))


def _line(
    cells: list[Cell], band: list[int], columns: Sequence[Column], widths: list[int], view: View
) -> str:
    parts = []
    for cell, index in zip(cells, band, strict=True):
        room = " " * (widths[index] - cell_width(cell.text))
        shown, style = (cell.text, cell.style) if cell.style != "spark" else (bars(cell.text, view), "")
        text = room + shown if columns[index].right else shown + room * (index != band[-1])
        parts.append(paint(text, style, view))
    return (" " * GAP).join(parts).rstrip()


def bars(levels: str, view: View) -> str:
    """Return levels 0 to 7 as the bars this stream can write; anything else stays."""
    return "".join(view.glyphs.spark[int(c)] if c in "01234567" else c for c in levels)


def _wrap(text: str, width: int | None, indent: str) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(text, max(width, 20), subsequent_indent=indent, break_long_words=False) or [""]


def paint(text: str, style: str, view: View) -> str:
    """Return `text` in the colours of `style`, unchanged where the stream shows none."""
    if not view.color or not style:
        return text
    from rich.color import ColorSystem
    from rich.style import Style

    depth = ColorSystem.STANDARD
    if os.environ.get("COLORTERM") in ("truecolor", "24bit"):
        depth = ColorSystem.TRUECOLOR
    elif "256color" in os.environ.get("TERM", ""):
        depth = ColorSystem.EIGHT_BIT
    return Style.parse(_rich_style(style)).render(text, color_system=depth)


def _rich_style(style: str) -> str:
    kind, _, level = style.partition(":")
    if kind != "heat":
        return _STYLES[kind]
    red, green, blue = _ramp(float(level))
    ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else "white"
    return f"{ink} on rgb({red},{green},{blue})"


def _ramp(level: float) -> tuple[int, int, int]:
    place = min(max(level, 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(place), len(_RAMP) - 2)
    red, green, blue = (
        round(a + (b - a) * (place - low)) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True)
    )
    return red, green, blue


def to_text(tables: Iterable[Table], view: View) -> str:
    """Return the tables one below the other, a blank line between them."""
    return "\n\n".join("\n".join(table_lines(table, view)) for table in tables) + "\n"


def to_markdown(tables: Iterable[Table]) -> str:
    """Return the tables as Markdown: a heading, the table, its notes as a list."""
    return "\n\n".join(_markdown(table) for table in tables) + "\n"


def _markdown(table: Table) -> str:
    def row(texts: Iterable[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

    parts = [f"### {table.title}"] if table.title else []
    if table.columns:
        lines = [row(column.title for column in table.columns)]
        lines.append(row("---:" if column.right else "---" for column in table.columns))
        lines.extend(row(cell.text for cell in cells) for cells in table.rows)
        parts.append("\n".join(lines))
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    return "\n\n".join(parts)


def to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as CSV: nested keys joined by a dot, intervals as `.low` and `.high`, null as empty."""
    flat = [dict(_flatten(record)) for record in records]
    names = list(dict.fromkeys(name for record in flat for name in record))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flatten(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        name = prefix + key
        if isinstance(value, Mapping):
            yield from _flatten(value, name + ".")
        elif isinstance(value, list) and len(value) == 2 and all(isinstance(v, int | float) for v in value):
            yield from ((f"{name}.low", value[0]), (f"{name}.high", value[1]))
        elif isinstance(value, list):
            yield name, json.dumps(value, allow_nan=False)
        else:
            yield name, value


def to_json(document: Any) -> str:
    """Return one JSON document in ASCII with a final newline; NaN and infinity raise `ValueError`."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def to_json_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Return one JSON object a line."""
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
