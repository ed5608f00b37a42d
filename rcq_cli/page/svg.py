"""Charts as inline SVG text: no fonts, scripts or addresses from elsewhere; colours come from the page's CSS.

Every number a chart shows also stands in a `<title>` or as text, so that colour is never the only sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Dark to light; keeps its order without colour vision."""
WIDTH = 1060.0


def tag(name: str, *children: str, **attributes: str | float | None) -> str:
    """Return an element; `_` in a name stands for `-`, a trailing one is dropped, None is left out.

    Text children must be escaped by `text`.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = number(value) if isinstance(value, int | float) else escape(str(value))
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    opening = " ".join(parts)
    return f"<{opening}>{''.join(children)}</{name}>" if children else f"<{opening}/>"


def number(value: float) -> str:
    """Write a coordinate with at most two decimals."""
    return "0" if abs(value) < 0.005 else f"{value:.2f}".rstrip("0").rstrip(".")


def text(value: object) -> str:
    """Return text that is safe between tags."""
    return escape(str(value), quote=False)


def title(value: object) -> str:
    """Return what a pointer or a screen reader is told."""
    return f"<title>{text(value)}</title>"


def label(x: float, y: float, value: object, anchor: str = "start", kind: str = "label") -> str:
    """Return a line of text."""
    return tag("text", text(value), x=x, y=y, text_anchor=anchor if anchor != "start" else None, class_=kind)


def colour(level: float) -> str:
    """Return the colour of a level from 0 to 1."""
    place = min(max(level, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    mixed = [round(a + (b - a) * (place - low)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink(level: float) -> str:
    """Return black or white, whichever reads on `colour(level)`."""
    value = colour(level)
    red, green, blue = (int(value[i : i + 2], 16) for i in (1, 3, 5))
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else "#fff"


def chart(height: float, *children: str, about: str, width: float = WIDTH) -> str:
    """Return a drawing that fits the page; `about` says what it shows."""
    return tag(
        "svg",
        title(about),
        *children,
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        class_="chart",
        style=f"max-width:{number(width)}px",
    )


# -- stacked bars -------------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """A part of a bar."""

    name: str
    value: float
    told: str
    """Its number as text."""


class Bar(NamedTuple):
    """A stacked bar and, beside it, an outline to compare with."""

    name: str
    segments: Sequence[Segment]
    outline: Segment | None = None


def stacked(bars: Sequence[Bar], about: str) -> str:
    """Return horizontal stacked bars with their names above them and a legend below."""
    names = list(dict.fromkeys(part.name for bar in bars for part in bar.segments))
    outlines = [bar.outline.value for bar in bars if bar.outline]
    widest = max([sum(part.value for part in bar.segments) for bar in bars] + outlines) or 1.0
    scale = (WIDTH - 4) / widest
    out, y = [], 4.0
    for bar in bars:
        out.append(label(2, y + 12, bar.name, kind="label strong"))
        x = 2.0
        for part in bar.segments:
            wide = part.value * scale
            kind = f"fill p{names.index(part.name) % 10}"
            told = title(f"{bar.name}: {part.name} {part.told}")
            out.append(tag("rect", told, x=x, y=y + 18, width=wide, height=24, class_=kind))
            x += wide
        if bar.outline:
            out.append(
                tag(
                    "rect",
                    title(f"{bar.outline.name} {bar.outline.told}"),
                    x=2,
                    y=y + 16,
                    width=bar.outline.value * scale,
                    height=28,
                    class_="outline",
                )
            )
        y += 56
    legend, y = _legend(names, y)
    return chart(y, *out, *legend, about=about)


def _legend(names: Sequence[str], y: float) -> tuple[list[str], float]:
    out, x = [], 2.0
    for i, name in enumerate(names):
        wide = 34 + 7.2 * len(name)
        if x + wide > WIDTH:
            x, y = 2.0, y + 22
        out.append(tag("rect", x=x, y=y, width=12, height=12, class_=f"fill p{i % 10}"))
        out.append(label(x + 17, y + 10.5, name))
        x += wide
    return out, y + 22


# -- grids --------------------------------------------------------------------------------------------------


class GridCell(NamedTuple):
    """A field of a grid; `level` is its colour."""

    level: float
    shown: str
    told: str


def grid(
    rows: Sequence[tuple[str, Sequence[GridCell | None]]],
    columns: Sequence[str],
    about: str,
    size: float = 26,
) -> str:
    """Return a grid of coloured fields with a number in each; None is an empty field."""
    left, top = 54.0, 22.0
    wide = min(size * 2.4, (WIDTH - left) / max(len(columns), 1))
    out = [
        label(left + (i + 0.5) * wide, 14, name, "middle", "label small") for i, name in enumerate(columns)
    ]
    for r, (name, cells) in enumerate(rows):
        y = top + r * size
        out.append(label(left - 6, y + size * 0.66, name, "end", "label small"))
        for c, cell in enumerate(cells):
            if cell is None:
                continue
            x = left + c * wide
            out.append(
                tag(
                    "g",
                    title(cell.told),
                    tag("rect", x=x, y=y, width=wide - 1, height=size - 1, fill=colour(cell.level)),
                    tag(
                        "text",
                        text(cell.shown),
                        x=x + wide / 2,
                        y=y + size * 0.66,
                        text_anchor="middle",
                        class_="small",
                        fill=ink(cell.level),
                    ),
                )
            )
    return chart(top + len(rows) * size + 4, *out, about=about, width=left + len(columns) * wide + 4)
