"""Tables between reports and renderers, and how numbers are written in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    title: str
    right: bool = False
    """Numbers stand on the right."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry: what is shown and how."""

    text: str
    style: str = ""
    """`good`, `bad`, `doubt`, `faint`, `strong`, `heat:0.35` or nothing; never the only sign. `spark`: the
    text is levels 0 to 7, drawn as bars."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title; the first column names the row and opens every band of a table that is too wide.

    Without columns it is its title and notes.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    """Sentences below the table: every reason behind a missing value or a verdict."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: a row has {len(row)} cells for {len(self.columns)} columns")


def without_empty_columns(table: Table, why: str = "") -> Table:
    """Drop the columns that hold `-` in every row, and say which and why below the table."""
    empty = [
        i for i in range(1, len(table.columns)) if table.rows and all(r[i].text == "-" for r in table.rows)
    ]
    if not empty:
        return table
    kept = [i for i in range(len(table.columns)) if i not in empty]
    titles = ", ".join(table.columns[i].title for i in empty)
    return Table(
        table.title,
        tuple(table.columns[i] for i in kept),
        tuple(tuple(row[i] for i in kept) for row in table.rows),
        (*table.notes, f"not shown: {titles}{': ' + why if why else ''}"),
    )


MISSING = Cell("-", "faint")


def tokens(count: int | None) -> str:
    """Write a context length as it is typed: 65536 as `64k`, 1048576 as `1m`, 1000 as `1000`."""
    if count is None:
        return "-"
    for size, unit in ((1 << 20, "m"), (1 << 10, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def binary_bytes(count: float | None) -> str:
    """Write bytes with a binary prefix and three significant digits, `1.75 MiB`."""
    if count is None:
        return "-"
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    return f"{value:.{0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2}f}"


def significant(value: float | None, digits: int = 3) -> str:
    """Write a number with `digits` significant digits, exponents in their shortest form.

    What is nearly 1 but not 1 keeps two digits of what is missing.
    """
    if value is None or not math.isfinite(value):
        return "-"
    if value < 1 and float(f"{value:.{digits}g}") == 1:
        digits = math.floor(-math.log10(1 - value)) + 2
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e")


def share(value: float | None) -> str:
    """Write a share as per cent; what rounds to nothing is `<0.1%`, what is not all is not `100%`."""
    if value is None:
        return "-"
    percent = 100 * value
    if 0 < percent < 0.1:
        return "<0.1%"
    if 99.9 < percent < 100:
        return ">99.9%"
    return f"{percent:.1f}".removesuffix(".0") + "%"


def p_value(value: float | None) -> str:
    """Write a p-value: three decimals, or an exponent below 0.001."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value >= 0.001 else significant(value, 2)


def interval(ends: Sequence[float | None] | None, sign: bool = False) -> str:
    """Write `[low, high]` with three decimals."""
    if ends is None or any(end is None for end in ends):
        return ""
    return "[" + ", ".join(decimal(end, sign=sign) for end in ends) + "]"


def decimal(value: float | None, *, sign: bool = False) -> str:
    """Write a score: three decimals, from 1000 on three significant digits; never `-0.000`."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return significant(value)
    text = f"{value:+.3f}" if sign else f"{value:.3f}"
    return text.replace("-0.000", "+0.000" if sign else "0.000")


def duration(seconds: float) -> str:
    """Write a time as `mm:ss`, or `hh:mm:ss` from an hour on."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return (f"{hours:02d}:" if hours else "") + f"{rest // 60:02d}:{rest % 60:02d}"


def entry(value: Any, text: str, style: str = "") -> Cell:
    """Return a cell for `value`, the faint `-` when there is none."""
    return MISSING if value is None else Cell(text, style)
