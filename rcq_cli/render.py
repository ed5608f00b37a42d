"""Tables and documents as text: terminal, plain, Markdown, CSV, JSON, JSON lines; nothing is truncated."""

from __future__ import annotations

import csv
import io
import json
import os
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from rcq_cli.glyphs import View
from rcq_cli.table import Cell, Table

GAP = 2
"""Spaces between two columns."""
NARROWEST = 16
"""Room in which a folded column can still be read."""

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


class Place(NamedTuple):
    """A column in a band, and the room it has there."""

    column: int
    width: int


def bands(widths: Sequence[int], limit: int | None) -> list[list[Place]]:
    """Split columns into bands that fit `limit`, each opened by column 0.

    A column that is too wide to stand beside column 0 gets the room that is left, and is folded there.
    """
    if limit is None:
        return [[Place(i, width) for i, width in enumerate(widths)]]
    first = Place(0, _opening(widths, limit))
    alone = limit - first.width - GAP
    out: list[list[Place]] = []
    room = 0
    for index, width in enumerate(widths[1:], 1):
        if min(width, NARROWEST if width > alone else width) > room:
            out.append([first])
            room = alone
        place = Place(index, max(min(width, room), 1))
        out[-1].append(place)
        room -= place.width + GAP
    return out or [[first]]


def _opening(widths: Sequence[int], limit: int) -> int:
    """Return the room of column 0: its width, less where the widest other one would get too little."""
    others = min(max(widths[1:], default=0), NARROWEST)
    least = max((limit - GAP) // 2, limit - GAP - others) if others else limit
    return max(min(widths[0], least), 1)


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
        yield from _lines([Cell(column.title, "strong") for column in table.columns], band, table, view)
        yield view.glyphs.line * (sum(place.width for place in band) + GAP * (len(band) - 1))
        for row in table.rows:
            yield from _lines(row, band, table, view)
    for note in table.notes:
        yield from (paint(line, "faint", view) for line in _wrap(note, view.width, "  "))


def _lines(row: Sequence[Cell], band: Sequence[Place], table: Table, view: View) -> Iterator[str]:
    """Yield the lines of one row in one band: as many as its most folded cell has."""
    folded = [_folded(row[place.column].text, place.width) for place in band]
    for texts in zip_longest(*folded, fillvalue=""):
        parts = []
        for text, place in zip(texts, band, strict=True):
            room = " " * (place.width - cell_width(text))
            style = row[place.column].style
            shown, style = (text, style) if style != "spark" else (bars(text, view), "")
            right = table.columns[place.column].right
            parts.append(paint(room + shown if right else shown + room * (place != band[-1]), style, view))
        yield (" " * GAP).join(parts).rstrip()


def _folded(text: str, width: int) -> list[str]:
    """Return the text in pieces of at most `width` columns, cut between words where that is possible."""
    if cell_width(text) <= width:
        return [text]
    wide = 1 if cell_width(text) == len(text) else 2
    return textwrap.wrap(text, max(width // wide, 1)) or [""]


def bars(levels: str, view: View) -> str:
    """Return levels 0 to 7 as the bars this stream can write; anything else stays."""
    return "".join(view.glyphs.spark[int(c)] if c in "01234567" else c for c in levels)


def _wrap(text: str, width: int | None, indent: str) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(text, max(width, 20), subsequent_indent=indent) or [""]


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
