"""Where a decode step spends its time and what it moves: a stacked bar, the phases, the memory ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rcq_cli.table import (
    MISSING,
    Cell,
    Column,
    Table,
    binary_bytes,
    share,
    significant,
    tokens,
    without_empty_columns,
)

Json = Any
Record = Mapping[str, Json]

LETTERS = {
    "model": "m",
    "append": "a",
    "score": "s",
    "select": "l",
    "rank_check": "r",
    "page_in": "p",
    "attend": "t",
    "bound": "b",
    "fallback": "f",
    "unattributed": ".",
}
"""One letter a phase, so that the bar reads without colour and in any encoding."""
BAR = 72
STEPS = (
    Column("mode"),
    Column("ctx", right=True),
    Column("step p50", right=True),
    Column("p90", right=True),
    Column("p99", right=True),
    Column("max", right=True),
    Column("n", right=True),
    Column("dense p50", right=True),
    Column("ratio [95%]"),
    Column("verdict"),
)
PHASE_COLUMNS = (
    Column(""),
    Column("phase"),
    Column("p50", right=True),
    Column("p90", right=True),
    Column("share", right=True),
    Column("bytes", right=True),
    Column("GB/s", right=True),
    Column("of ceiling", right=True),
)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The tables of `rcq profile`."""

    name: str = "breakdown"
    summary: str = "phases of a step with bytes and bandwidth, and the memory ledger"

    def tables(self, document: Record, *, breakdown: bool = True) -> tuple[Table, ...]:
        """Return the steps of all cells and, with `breakdown`, phases and ledger of each."""
        cells = cells_of(document)
        out = [_steps(cells)]
        for cell in cells if breakdown else ():
            out += [_bar(cell), _phases(cell), *_layers(cell), _ledger(cell), *_attribution(cell)]
        if document.get("growth"):
            out.append(_growth(document["growth"]))
        return tuple(out)


def cells_of(document: Record) -> Sequence[Record]:
    """Return the cells of a profile document, whether it holds one or several."""
    cells: Sequence[Record] = document.get("cells", [document])
    return cells


def title_of(cell: Record) -> str:
    """Return what a cell is about, in one line."""
    what = cell.get("model") or f"one layer of {cell['geometry']}"
    parts = [
        f"{cell['mode']} at {tokens(cell['ctx'])}",
        str(what),
        f"{cell['dtype']}, backend {cell['backend']}",
    ]
    return ", ".join([*parts, f"{cell['threads']} thread" + "s" * (cell["threads"] != 1)])


def ms(value: float | None) -> str:
    """Write milliseconds."""
    return "-" if value is None else f"{significant(value)} ms"


def _steps(cells: Sequence[Record]) -> Table:
    notes = []
    for cell in cells:
        step, place = cell["step_ms"], f"{cell['mode']} at {tokens(cell['ctx'])}"
        warm = cell["warmup"]
        state = "settled" if warm["settled"] else "did not settle"
        notes.append(
            f"{place}: warm-up {warm['warmup_steps']} steps ({state}), first step "
            f"{ms(warm['cold_first_ms'])}, outliers kept: {step['outliers']}"
        )
        if cell.get("caches") == "cold":
            notes.append(f"{place}: the processor's caches were emptied before each step")
        if cell.get("dense_variant"):
            notes.append(f"{place}: dense is the fastest variant here, {cell['dense_variant']}")
        notes += [f"{place}: {why}" for why in [(cell.get("ratio") or {}).get("reason")] if why]
        unknown = [name for name in ("p50", "p90", "p99") if step.get(f"{name}_status")]
        if unknown:
            notes.append(f"{place}: {', '.join(unknown)} n/a, {step[f'{unknown[0]}_status']}")
    title = "decode step; ratio to dense from interleaved blocks without a clock inside"
    return Table(title, STEPS, tuple(_step_row(cell) for cell in cells), tuple(notes))


def _step_row(cell: Record) -> tuple[Cell, ...]:
    step, dense, ratio = cell["step_ms"], cell["dense_step_ms"], cell.get("ratio") or {}
    shown = "reference"
    if cell.get("ratio"):
        ci = cell["ratio_ci"]
        shown = f"{cell['ratio_to_dense']:.2f}x" + (f" [{ci[0]:.2f}, {ci[1]:.2f}]" if ci else "")
    verdict = str(ratio.get("verdict", "-"))
    style = {"faster": "good", "slower": "bad", "inconclusive": "doubt"}.get(verdict, "faint")
    return (
        Cell(cell["mode"], "strong"),
        Cell(tokens(cell["ctx"])),
        *(_known(step[name]) for name in ("p50", "p90", "p99", "max")),
        Cell(str(step["n"])),
        _known(dense["p50"]),
        Cell(shown),
        Cell(verdict, style),
    )


def _known(value: float | None) -> Cell:
    return MISSING if value is None else Cell(ms(value))


def bar_text(phases: Sequence[Record], width: int = BAR) -> str:
    """Return `width` letters in proportion to the shares; what rounds to nothing has no letter."""
    text, total = "", 0.0
    for row in phases:
        total += row["share"] or 0.0
        text += LETTERS[row["name"]] * (round(total * width) - len(text))
    return text


def _bar(cell: Record) -> Table:
    parts = [
        f"{LETTERS[row['name']]} {row['name']} {share(row['share'])}"
        for row in cell["phases"]
        if row["share"] is not None
    ]
    return Table(title_of(cell), (), (), (f"[{bar_text(cell['phases'])}]", ", ".join(parts)))


def _phases(cell: Record) -> Table:
    notes: dict[str, list[str]] = {}
    for row in cell["phases"]:
        if row["status"] != "ok":
            told = f"{row['status']}" + (f" ({row['detail']})" if row["detail"] else "")
            notes.setdefault(told, []).append(row["name"])
    lines = [f"{', '.join(names)}: {told}" for told, names in notes.items()]
    band = cell["bandwidth"]
    if band.get("read_gb_per_s"):
        lines.append(
            f"ceiling: {significant(band['read_gb_per_s'])} GB/s read, measured in this run "
            f"({band['read_gb_per_s_source']})"
        )
    if any((row["ceiling_share"] or 0) > 1 for row in cell["phases"]):
        lines.append("above 100%: the bytes of that phase stay in the processor's caches between steps")
    rows = tuple(_phase_row(row) for row in cell["phases"])
    return without_empty_columns(
        Table("phases of the step", PHASE_COLUMNS, rows, tuple(lines)), "nothing was measured there"
    )


def _phase_row(row: Record) -> tuple[Cell, ...]:
    if row["status"] != "ok":
        return (Cell(LETTERS[row["name"]], "faint"), Cell(row["name"], "faint"), *[MISSING] * 6)
    above = (row["ceiling_share"] or 0) > 1
    return (
        Cell(LETTERS[row["name"]]),
        Cell(row["name"]),
        _known(row["p50_ms"]),
        _known(row["p90_ms"]),
        Cell(share(row["share"])),
        MISSING if row["bytes"] is None else Cell(binary_bytes(row["bytes"])),
        MISSING if row["gb_per_s"] is None else Cell(significant(row["gb_per_s"])),
        MISSING
        if row["ceiling_share"] is None
        else Cell(share(row["ceiling_share"]), "doubt" if above else ""),
    )


def _ledger(cell: Record) -> Table:
    memory = cell["memory"]
    dense = memory["dense_equivalent_bytes"]
    rows = [
        (Cell(entry["tier"]), Cell(entry["item"]), Cell(binary_bytes(entry["bytes"])), MISSING)
        for entry in memory["ledger"]
    ]
    for name, item in (
        ("tier1_bytes", "tier 1"),
        ("device_total_bytes", "device in all, scratch included"),
        ("system_total_bytes", "system in all, host included"),
    ):
        ratio = Cell(share(memory[name] / dense)) if dense else MISSING
        rows.append((Cell("total", "strong"), Cell(item, "strong"), Cell(binary_bytes(memory[name])), ratio))
    columns = (
        Column("tier"),
        Column("item"),
        Column("bytes", right=True),
        Column("of dense 16 bit", right=True),
    )
    return Table("memory ledger, as allocated", columns, tuple(rows), tuple(_memory_notes(memory)))


def _memory_notes(memory: Record) -> list[str]:
    peaks = [
        f"{name} {binary_bytes(peak['value'])}" for name, peak in memory["peaks"].items() if peak["value"]
    ]
    notes = [
        "process: peak "
        f"{binary_bytes(memory['vm_hwm_bytes'])} (VmHWM since the cache was made), "
        f"anonymous {binary_bytes(memory['rss_anon_bytes'])}, "
        f"file-backed {binary_bytes(memory['rss_file_bytes'])}"
    ]
    notes += [f"peaks before: {', '.join(peaks)}"] if peaks else []
    for name, title in (("allocator", "torch allocator"), ("nvml", "NVML process memory")):
        reading = memory[name]
        shown = binary_bytes(reading["value"]) if reading["value"] is not None else reading["status"]
        notes.append(f"{title}: {shown}" + (f" ({reading['detail']})" if reading["detail"] else ""))
    return notes


def _layers(cell: Record) -> list[Table]:
    rows = cell.get("layers")
    if not rows:
        return []
    names = [name for name in LETTERS if any(name in row["phases_mean_ms"] for row in rows)]
    columns = [Column("layer", right=True), Column("p50", right=True)]
    columns += [Column(name, right=True) for name in names]
    shown = tuple(
        (
            Cell(str(row["layer"])),
            _known(row["p50_ms"]),
            *(_known(row["phases_mean_ms"].get(name)) for name in names),
        )
        for row in rows
    )
    told = f"attention alone, over {rows[0]['steps']} steps whose layers were told apart; phases are means"
    few = rows[0].get("p50_ms_status")
    return [Table("layers", tuple(columns), shown, (told, *([f"p50 n/a, {few}"] if few else ())))]


def _attribution(cell: Record) -> list[Table]:
    if not cell.get("attribution"):
        return []
    rows = tuple(
        (Cell(entry["operation"]), Cell(share(entry["share"])), Cell(significant(entry["calls"])))
        for entry in cell["attribution"]
    )
    columns = (Column("operation"), Column("share", right=True), Column("calls per step", right=True))
    notes = ("from a profiled pass of its own: it slows a step down, so it tells names and shares, no times",)
    return [Table("operations", columns, rows, notes)]


def _growth(rows: Sequence[Record]) -> Table:
    columns = (Column("mode"), Column("step", right=True), Column("attention", right=True))
    found = tuple(
        (
            Cell(row["mode"]),
            Cell(f"{row['step_exponent']:.2f}"),
            MISSING if row["attention_exponent"] is None else Cell(f"{row['attention_exponent']:.2f}"),
        )
        for row in rows
    )
    return Table("growth: time ~ context ^ exponent", columns, found, ("1 is linear",))


REPORT = Breakdown()
