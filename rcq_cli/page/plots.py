"""Plots with axes as inline SVG: series over steps, and runs in the plane of bytes and score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rcq_cli.page.svg import WIDTH, chart, colour, label, number, tag, title

DECADES = 12
"""Of a logarithmic axis at most; what lies below is drawn at its foot, with its number in the title."""

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
