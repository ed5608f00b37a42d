"""Drawings of a report's records: what the sections of the page show besides tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rcq_cli.page import plots, svg
from rcq_cli.reports import _columns
from rcq_cli.table import share, tokens

Json = Any
Record = Mapping[str, Json]
POINTS = 240
"""Steps a timeline draws; a longer one is gathered."""
AXES = (
    ("tier1", "tier 1 (device memory of the cache)"),
    ("device", "device in all, scratch included"),
    ("system", "device and host"),
)


def axis_bytes(held: Record) -> dict[str, int]:
    """Return the three totals that belong together."""
    return {
        "tier1": held["device"],
        "device": held["device"] + held["scratch"],
        "system": held["device"] + held["scratch"] + held["host"],
    }


def timeline(shown: Record) -> str:
    """Return bounds and errors of a trace over its steps, and the rungs below."""
    rows = shown["series"]
    size = max(1, -(-len(rows) // POINTS))
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]

    def largest(name: str) -> list[float | None]:
        return [max((r[name] for r in group if r[name] is not None), default=None) for group in groups]

    shares = []
    for group in groups:
        counts = [sum(column) for column in zip(*(row["rungs"] for row in group), strict=True)]
        shares.append([count / (sum(counts) or 1) for count in counts])
    lines = (
        plots.Line("relative bound, largest", largest("bound_max"), "line a"),
        plots.Line("relative bound, median", largest("bound_p50"), "line b"),
        plots.Line("relative true error, largest", largest("error_max"), "dots"),
    )
    marks = [i for i, group in enumerate(groups) if any(row["violations"] for row in group)]
    limit = None if not shown.get("eps") else ("eps", float(shown["eps"]))
    band = plots.Band([f"rung {rung}" for rung in range(5)], shares)
    steps = [group[0]["step"] for group in groups]
    return plots.timeline(
        steps, lines, band, limit, marks, "relative bound and true error over decode steps, rungs below"
    )


def head_map(shown: Record, *, each: bool) -> str:
    """Return the rungs of every head of a trace; `each` False: of every layer only."""
    rows = []
    for layer in shown["map"]:
        counts = layer["rungs"]
        if not each:
            counts = [[sum(column) for column in zip(*counts, strict=True)]]
        cells = [
            _map_cell(f"layer {layer['layer']}, head {head}", entry)
            for head, entry in zip(layer["heads"] if each else ["all"], counts, strict=True)
        ]
        rows.append((f"L{layer['layer']}", cells))
    columns = [str(head) for head in shown["map"][0]["heads"]] if each else ["all heads"]
    about = "highest rung of each query head; the colour is the share of its head-steps above rung 0"
    return f'<p class="soft">{escape(about.capitalize())}.</p>' + svg.grid(rows, columns, about, 20)


def _map_cell(place: str, counts: Sequence[int]) -> svg.GridCell:
    total = sum(counts) or 1
    top = max((rung for rung, count in enumerate(counts) if count), default=0)
    told = ", ".join(f"rung {rung}: {share(count / total)}" for rung, count in enumerate(counts) if count)
    return svg.GridCell(1 - counts[0] / total, str(top), f"{place}: {told}")


def heatmap(found: Record) -> str:
    """Return score by depth and context of one mode."""
    columns = [tokens(ctx) for ctx in found["contexts"]]
    rows = [
        (
            f"{row['depth']:g}%",
            [
                None
                if cell is None
                else svg.GridCell(
                    cell["score"],
                    f"{cell['score']:.2f}",
                    f"depth {row['depth']:g}%, {name}: {cell['score']:.3f}, n = {cell['n']}, "
                    f"95% [{cell['ci'][0]:.2f}, {cell['ci'][1]:.2f}]",
                )
                for name, cell in zip(columns, row["cells"], strict=True)
            ],
        )
        for row in found["rows"]
    ]
    about = f"score by needle depth and context, {found['mode']}, {found['model']}"
    return f"<h3>{escape(about)}</h3>" + svg.grid(rows, columns, about)


def pareto(document: Record) -> str:
    """Return score against bytes of the cells of each place that has several; empty where none has."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for cell in document["cells"]:
        usable = cell.get("bytes") and cell.get("score") is not None and cell["bytes"]["dense_equivalent"]
        if usable and cell.get("higher_is_better", True):
            key = (_columns.place(cell), _columns.model_name(cell), cell["metric"])
            groups.setdefault(key, []).append(cell)
    parts = []
    for (place, model, metric), cells in groups.items():
        if len(cells) < 2:
            continue
        parts.append(f"<h3>{escape(place)}, {escape(model)}</h3>")
        for axis, name in AXES:
            drawn = plots.pareto(
                _points(cells, axis), f"{name}, of dense", metric, f"{metric} against {name}"
            )
            parts.append(f'<div data-axis="{axis}">{drawn}</div>')
    if not parts:
        return ""
    buttons = "".join(
        f'<button type="button" data-show="{axis}">{escape(name)}</button>' for axis, name in AXES
    )
    return f'<div class="only-js">{buttons}</div>' + "".join(parts)


def _points(cells: Sequence[Record], axis: str) -> list[plots.Point]:
    places = {
        str(i): (axis_bytes(c["bytes"])[axis] / c["bytes"]["dense_equivalent"], c["score"])
        for i, c in enumerate(cells)
    }
    front = plots.frontier(places)
    points = []
    for i, cell in enumerate(cells):
        x, y = places[str(i)]
        low, high = cell.get("score_ci") or (y, y)
        points.append(plots.Point(cell["mode"], x, y, low, high, str(i) in front))
    return points
