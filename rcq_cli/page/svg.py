"""Charts as inline SVG text: no fonts, scripts or addresses from elsewhere; colours come from the page's CSS.

Every number a chart shows also stands in a `<title>` or as text, so that colour is never the only sign.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Dark to light; keeps its order without colour vision."""
WIDTH = 1060.0
DECADES = 12
"""Of a logarithmic axis at most; what lies below is drawn at its foot, with its number in the title."""


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


# -- lines over steps ---------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A series; None breaks it."""

    name: str
    values: Sequence[float | None]
    kind: str
    """CSS class: `line a`, `line b`, `dots`."""


class Band(NamedTuple):
    """Shares per step, drawn as stacked columns below the lines."""

    names: Sequence[str]
    shares: Sequence[Sequence[float]]


def timeline(
    steps: Sequence[int],
    lines: Sequence[Line],
    band: Band,
    limit: tuple[str, float] | None,
    marks: Sequence[int],
    about: str,
) -> str:
    """Return series on a logarithmic axis over steps; `marks` are places of violations, ringed in red."""
    known = [value for line in lines for value in line.values if value]
    known += [limit[1]] if limit else []
    low, high = math.floor(math.log10(min(known, default=0.1))), math.ceil(math.log10(max(known, default=1)))
    high = max(high, low + 1)
    low = max(low, high - DECADES)
    left, top, tall, wide = 64.0, 8.0, 190.0, WIDTH - 72.0
    count = max(len(steps) - 1, 1)

    def x_of(place: int) -> float:
        return left + wide * place / count

    def y_of(value: float) -> float:
        return top + tall * (high - max(math.log10(value), low)) / (high - low)

    out = []
    stride = max(1, math.ceil((high - low) / 8))
    for power in range(low, high + 1, stride):
        y = y_of(10.0**power)
        out += [
            tag("line", x1=left, x2=left + wide, y1=y, y2=y, class_="rule"),
            label(left - 6, y + 4, f"1e{power}", "end", "label small"),
        ]
    if limit:
        y = y_of(limit[1])
        out += [
            tag(
                "line", title(f"{limit[0]} {limit[1]:g}"), x1=left, x2=left + wide, y1=y, y2=y, class_="limit"
            ),
            label(left + wide, y - 4, f"{limit[0]} {limit[1]:g}", "end", "label small bad"),
        ]
    for line in lines:
        out += _drawn(line, steps, x_of, y_of)
    for place in marks:
        out.append(
            tag(
                "circle",
                title(f"violation at step {steps[place]}"),
                cx=x_of(place),
                cy=top + 10,
                r=7,
                class_="ring",
            )
        )
    out += _banded(band, steps, left, wide, top + tall + 12)
    y = top + tall + 62
    out += [
        label(left, y, f"step {steps[0]}", kind="label small"),
        label(left + wide, y, f"step {steps[-1]}", "end", "label small"),
    ]
    legend, y = _line_legend(lines, band, y + 12)
    return chart(y, *out, *legend, about=about)


def _drawn(line: Line, steps: Sequence[int], x_of: object, y_of: object) -> list[str]:
    assert callable(x_of)
    assert callable(y_of)
    points = [(i, value) for i, value in enumerate(line.values) if value]
    if line.kind == "dots":
        return [
            tag(
                "circle",
                title(f"{line.name} at step {steps[i]}: {value:.3g}"),
                cx=x_of(i),
                cy=y_of(value),
                r=2.2,
                class_="dots",
            )
            for i, value in points
        ]
    path, last = [], -2
    for i, value in points:
        path.append(f"{'L' if i == last + 1 else 'M'}{number(x_of(i))} {number(y_of(value))}")
        last = i
    return [tag("path", title(line.name), d=" ".join(path), class_=line.kind)] if path else []


def _banded(band: Band, steps: Sequence[int], left: float, wide: float, top: float) -> list[str]:
    out, column = [], wide / max(len(steps), 1)
    for i, shares in enumerate(band.shares):
        y = top + 32.0
        told = ", ".join(
            f"{name} {share:.1%}" for name, share in zip(band.names, shares, strict=True) if share
        )
        parts = []
        for r, share in enumerate(shares):
            if share:
                y -= 32 * share
                x = left + i * column
                parts.append(tag("rect", x=x, y=y, width=column + 0.3, height=32 * share, fill=colour(r / 4)))
        out.append(tag("g", title(f"step {steps[i]}: {told}"), *parts))
    return out


def _line_legend(lines: Sequence[Line], band: Band, y: float) -> tuple[list[str], float]:
    out, x = [], 64.0
    for line in lines:
        if line.kind == "dots":
            out.append(tag("circle", cx=x + 8, cy=y + 6, r=3, class_="dots"))
        else:
            out.append(tag("line", x1=x, x2=x + 16, y1=y + 6, y2=y + 6, class_=line.kind))
        out.append(label(x + 22, y + 10, line.name))
        x += 42 + 6.6 * len(line.name)
    y, x = y + 22, 64.0
    for r, name in enumerate(band.names):
        out.append(tag("rect", x=x, y=y, width=12, height=12, fill=colour(r / 4)))
        out.append(label(x + 17, y + 10.5, name))
        x += 34 + 7 * len(name)
    return out, y + 22


# -- points -------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A run in the plane of bytes and score."""

    name: str
    x: float
    y: float
    low: float
    high: float
    front: bool
    """No other point has fewer bytes and no smaller score."""


def pareto(points: Sequence[Point], x_name: str, y_name: str, about: str) -> str:
    """Return points with error bars; the frontier is joined, what it dominates is grey."""
    left, top, tall, wide = 64.0, 12.0, 260.0, WIDTH - 90.0
    right = max(point.x for point in points) * 1.12 or 1.0
    low, high = min(p.low for p in points), max(p.high for p in points)
    room = (high - low) * 0.08 or 0.05

    def x_of(value: float) -> float:
        return left + wide * value / right

    def y_of(value: float) -> float:
        return top + tall * (high + room - value) / (high - low + 2 * room)

    out = []
    for value in ticks(low, high):
        out += [
            tag("line", x1=left, x2=left + wide, y1=y_of(value), y2=y_of(value), class_="rule"),
            label(left - 6, y_of(value) + 4, f"{value:.6g}", "end", "label small"),
        ]
    for share in ticks(0.0, right):
        out.append(label(x_of(share), top + tall + 18, f"{share:.0%}", "middle", "label small"))
    front = sorted((p for p in points if p.front), key=lambda p: p.x)
    if len(front) > 1:
        path = " ".join(
            f"{'L' if i else 'M'}{number(x_of(p.x))} {number(y_of(p.y))}" for i, p in enumerate(front)
        )
        out.append(tag("path", title("frontier"), d=path, class_="line a"))
    for p in points:
        kind = "front" if p.front else "behind"
        told = f"{p.name}: {p.y:.4g} [{p.low:.4g}, {p.high:.4g}] at {p.x:.1%}"
        out += [
            tag("line", x1=x_of(p.x), x2=x_of(p.x), y1=y_of(p.low), y2=y_of(p.high), class_=f"error {kind}"),
            tag("circle", title(told), cx=x_of(p.x), cy=y_of(p.y), r=5, class_=kind),
        ]
    taken: list[tuple[float, float, float]] = []
    for p in points:
        away, anchor = (9, "start") if p.x < 0.8 * right else (-9, "end")
        x, wide_name = x_of(p.x) + away, 7.0 * len(p.name)
        start = x if anchor == "start" else x - wide_name
        y = _free(taken, start, start + wide_name, y_of(p.y) - 7)
        taken.append((start, start + wide_name, y))
        out.append(label(x, y, p.name, anchor, f"label {'front' if p.front else 'behind'}"))
    out.append(label(left + wide, top + tall + 36, x_name, "end"))
    out.append(label(left, top + tall + 36, y_name))
    return chart(top + tall + 44, *out, about=about)


def _free(taken: Sequence[tuple[float, float, float]], start: float, end: float, y: float) -> float:
    """Return the first place for a name from `y` downwards that covers none written before."""
    while any(a < end and start < b and abs(y - c) < 14 for a, b, c in taken):
        y += 15
    return y


def ticks(low: float, high: float) -> list[float]:
    """Return at most seven round numbers from `low` to `high`."""
    rough = max(high - low, 1e-9) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [(first + i) * step for i in range(int((high - first * step) / step + 1e-9) + 1)]


def frontier(values: Mapping[str, tuple[float, float]]) -> set[str]:
    """Return the names that no other beats in bytes or score without losing in the second."""
    return {
        name
        for name, (x, y) in values.items()
        if not any(
            (a <= x and b >= y) and (a < x or b > y) for other, (a, b) in values.items() if other != name
        )
    }
