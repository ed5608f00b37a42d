"""Modes judged in pairs: one block per task and context, modes as rows, the reference first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rcq_cli.reports import _columns
from rcq_cli.table import (
    MISSING,
    Cell,
    Column,
    Table,
    decimal,
    entry,
    interval,
    p_value,
    significant,
    without_empty_columns,
)
from rcq_cli.verdict import MID_P

Json = Any

_COLUMNS = (
    Column("flips"),
    Column("device memory", right=True),
    Column("host memory", right=True),
    Column("step time", right=True),
    Column("bound p50, p95"),
    Column("rungs used"),
    Column("violations"),
)
APART = "step times of runs apart: what else the machine did then is part of their ratio"
_STYLE = {"pass": "good", "fail": "bad", "inconclusive": "doubt"}


class Shown(NamedTuple):
    """Which statistics of a binary cell stand in the tables."""

    newcombe: bool
    mid_p: bool
    percent: str
    """Two-sided level of the differences."""

    @classmethod
    def of(cls, document: Mapping[str, Json]) -> Shown:
        """Read it from `judgement` of a document; one without it is of Tango and the exact test."""
        judgement = document.get("judgement") or {}
        percent = f"{100 * (1 - 2 * judgement.get('alpha', 0.025)):g}%"
        return cls(judgement.get("interval_beside") == "newcombe", judgement.get("mcnemar") == MID_P, percent)

    def differences(self) -> tuple[Column, ...]:
        """Return the column of the verdict's interval, and that of Newcombe's where it was asked for."""
        beside = (Column(f"Newcombe [{self.percent}]"),) if self.newcombe else ()
        return (Column(f"difference [{self.percent}]"), *beside)

    def beside(self, pair: Mapping[str, Json]) -> tuple[Cell, ...]:
        """Return what stands in the column of Newcombe's interval, if there is one."""
        ends = pair.get("newcombe_ci")
        return (entry(ends, interval(ends, sign=True)),) if self.newcombe else ()


@dataclass(frozen=True, slots=True)
class Paired:
    """The table of `rcq compare`."""

    name: str = "paired"
    summary: str = "each mode against the reference: difference, verdict, memory, time and certificates"

    def tables(self, document: Mapping[str, Json]) -> tuple[Table, ...]:
        """Return a block per task and context of `document`, and model where pairs name it; then the gate."""
        cells: Sequence[Mapping[str, Json]] = document["cells"]
        pairs: Sequence[Mapping[str, Json]] = document["pairs"]
        apart = any("model" in pair for pair in pairs)
        places = dict.fromkeys((c["task"], c.get("ctx"), c["model"] if apart else None) for c in cells)
        shown = Shown.of(document)
        blocks = [
            _block([c for c in cells if _at(c, place)], [p for p in pairs if _at(p, place)], shown)
            for place in places
        ]
        return (*_banner(document), *blocks, *judged_by(document), *closing(document))


def judged_by(document: Mapping[str, Json]) -> tuple[Table, ...]:
    """Say which statistics the tables show where they are not the default ones."""
    shown = Shown.of(document)
    notes = []
    if shown.newcombe:
        notes.append(
            "Newcombe's interval is a cross-check: it knows no clusters and decides nothing; "
            "`difference` holds the interval of the verdict (Tango's score interval, widened for clusters)"
        )
    if shown.mid_p:
        notes.append(
            "p is McNemar's mid-p (--midp), also where a verdict rests on it and in the sizes that are named"
        )
    return (Table("statistics", (), (), tuple(notes)),) if notes else ()


def closing(document: Mapping[str, Json]) -> tuple[Table, ...]:
    """Return what stands below the cells: the baseline where there is one, then the gate."""
    held = document.get("baseline")
    return (*((_baseline(held, Shown.of(document)),) if held else ()), _gate(document))


def pair_title(pair: Mapping[str, Json]) -> str:
    """Return `niah@8k naive`."""
    return f"{_columns.place(pair)} {pair['candidate']}"


def _banner(document: Mapping[str, Json]) -> tuple[Table, ...]:
    """Say above everything that runs of different contracts are compared."""
    held = (document.get("baseline") or {}).get("pairs", ())
    lifted = [pair_title(p) for p in (*document["pairs"], *held) if p.get("lifted")]
    if not lifted:
        return ()
    title = "DIFFERENT CONTRACTS (--allow-mismatch): the differences below can fail, nothing can pass"
    return (Table(title, (), (), (f"in {', '.join(dict.fromkeys(lifted))}",)),)


def _at(record: Mapping[str, Json], place: tuple[str, int | None, str | None]) -> bool:
    """Say whether a cell or a pair is of a task, a context and a model, if that matters."""
    return (record["task"], record.get("ctx")) == place[:2] and place[2] in (None, record.get("model"))


def _block(cells: Sequence[Mapping[str, Json]], pairs: Sequence[Mapping[str, Json]], shown: Shown) -> Table:
    by_mode = {pair["candidate"]: pair for pair in pairs}
    reference = next((pair["reference"] for pair in pairs), cells[0]["mode"])
    columns = (
        *(Column("mode"), Column("score [95%]"), *shown.differences(), Column("verdict")),
        *(Column("McNemar mid-p" if shown.mid_p else "McNemar p", right=True), *_COLUMNS),
    )
    rows = tuple(_row(cell, by_mode.get(cell["mode"]), cell["mode"] == reference, shown) for cell in cells)
    notes = [f"{pair['candidate']}: {'; '.join(told)}" for pair in pairs if (told := reasons(pair))]
    notes += [f"{pair['candidate']}: {APART}" for pair in pairs if _timed_apart(pair)]
    notes += [f"{cell['mode']}: {text}" for cell in cells if (text := _distance(cell))]
    notes += [f"{cell['mode']}: {text}" for cell in cells if (text := _columns.engaged(cell))]
    notes += [f"{cell['mode']}: run is {cell['status']}" for cell in cells if cell["status"] != "complete"]
    return without_empty_columns(
        Table(_title(cells, pairs), columns, rows, tuple(notes)), "nothing was measured there"
    )


def _distance(cell: Mapping[str, Json]) -> str:
    """Return how far the predictions are from those of the dense model, where that was measured."""
    metrics: Mapping[str, float] = cell.get("metrics") or {}
    if "kl_mean" not in metrics:
        return ""
    mean, high, flips = (metrics[name] for name in ("kl_mean", "kl_p99", "top1_flip"))
    divergence = f"KL {significant(mean)} nats per token (p99 {significant(high)})"
    return f"against the dense predictions: {divergence}, likeliest token changed at {100 * flips:.1f} %"


def _title(cells: Sequence[Mapping[str, Json]], pairs: Sequence[Mapping[str, Json]]) -> str:
    first = cells[0]
    parts = [
        _columns.place(first),
        _columns.model_name(first),
        f"{first.get('metric') or 'score'} of n={first['n']}",
    ]
    margins = dict.fromkeys(pair["margin"] for pair in pairs if pair.get("margin") is not None)
    parts += [f"margin {significant(margin)}" for margin in margins]
    return ", ".join(parts)


def _row(
    cell: Mapping[str, Json], pair: Mapping[str, Json] | None, is_reference: bool, shown: Shown
) -> tuple[Cell, ...]:
    alone = (Cell("reference" if is_reference else "-", "faint"), *[MISSING] * (3 + shown.newcombe))
    return (
        Cell(cell["mode"], "strong" if is_reference else ""),
        _columns.score(cell),
        *(_compared(pair, shown) if pair else alone),
        _columns.device(cell),
        _columns.host(cell),
        _ratio(pair) if pair else Cell("1.00x") if is_reference and cell.get("step_ms_p50") else MISSING,
        _columns.bound(cell),
        _columns.rungs(cell),
        _columns.violations(cell),
    )


def _compared(pair: Mapping[str, Json], shown: Shown) -> tuple[Cell, ...]:
    p = pair.get("mcnemar_mid_p" if shown.mid_p else "mcnemar_p")
    return (difference(pair), *shown.beside(pair), _verdict(pair), entry(p, p_value(p)), _flips(pair))


def difference(pair: Mapping[str, Json]) -> Cell:
    """Return the difference of a pair with the interval that its verdict rests on."""
    value, ends = pair.get("difference"), interval(pair.get("difference_ci"), sign=True)
    return entry(value, " ".join(filter(None, (decimal(value, sign=True), ends))))


def _verdict(pair: Mapping[str, Json]) -> Cell:
    verdict = pair.get("verdict") or "-"
    words = [verdict.upper() if verdict == "fail" else verdict]
    words += ["(expected)"] if pair.get("expected") and verdict == "fail" else []
    return Cell(" ".join(words), _STYLE.get(verdict, "faint"))


def _flips(pair: Mapping[str, Json]) -> Cell:
    lost, won, rate = pair.get("reference_only"), pair.get("candidate_only"), pair.get("flip_rate")
    if rate is None:
        return MISSING
    counts = "" if lost is None or won is None else f" ({lost} lost, {won} won)"
    return Cell(decimal(rate) + counts)


def _timed_apart(pair: Mapping[str, Json]) -> bool:
    """Say whether a ratio of step times is shown although no answers were given side by side."""
    return pair.get("latency_ratio") is not None and pair.get("latency_blocks") == 0


def _ratio(pair: Mapping[str, Json]) -> Cell:
    ratio = pair.get("latency_ratio")
    return entry(ratio, "" if ratio is None else f"{ratio:.2f}x")


def reasons(pair: Mapping[str, Json]) -> list[str]:
    """Return what stands behind the verdict of a pair, a sentence each."""
    told = [str(reason) for reason in pair.get("reasons", ())]
    # a label that a reason spells out needs no line of its own
    labels = [label for label in pair.get("labels", ()) if not any(label in r for r in told)]
    if pair.get("verdict") == "pass":
        # few flips are what a pass is made of; only an undecided test is short of them
        labels = [label for label in labels if not label.startswith("underpowered")]
    told = labels + told
    planned, n = pair.get("n_planned"), pair.get("n")
    if planned is not None and n is not None and n < planned:
        told.append(f"{n} of {planned} planned samples are paired")
    return told + _noise(pair.get("noise_floor"))


def _noise(floor: Mapping[str, Json] | None) -> list[str]:
    """Say how the candidate's flips compare with those of a second run of the reference."""
    if not floor:
        return []
    if not floor["n"]:
        return [f"noise floor: {floor['reason']}"]
    ends = interval(floor["excess_ci"], sign=True)
    text = (
        f"noise floor: the reference flips {decimal(floor['reference_flip_rate'])} against itself, this mode "
        f"{decimal(floor['candidate_flip_rate'])}; excess {decimal(floor['excess'], sign=True)} {ends}"
    )
    return [text + "".join(f", {label}" for label in floor["labels"])]


def _baseline(held: Mapping[str, Json], shown: Shown) -> Table:
    columns = (
        *(Column("against the baseline"), Column("was", right=True), Column("is", right=True)),
        *(*shown.differences(), Column("flips"), Column("verdict")),
    )
    rows = tuple(_baseline_row(pair, shown) for pair in held["pairs"])
    notes = [f"{pair_title(pair)}: {'; '.join(told)}" for pair in held["pairs"] if (told := reasons(pair))]
    title = f"baseline {held['file']}, contract {held['contract'][:12]}"
    return Table(title, columns if rows else (), rows, tuple(notes))


def _baseline_row(pair: Mapping[str, Json], shown: Shown) -> tuple[Cell, ...]:
    scores = (Cell(decimal(pair[f"{side}_score"])) for side in ("reference", "candidate"))
    return (
        Cell(pair_title(pair)),
        *scores,
        difference(pair),
        *shown.beside(pair),
        _flips(pair),
        _verdict(pair),
    )


def _gate(document: Mapping[str, Json]) -> Table:
    gate = document["gate"]
    title = f"gate {'passed' if gate['passed'] else 'FAILED'}, exit code {document['exit_code']}"
    columns = (Column("where"), Column("fails if"), Column("observed"), Column("result"))
    rows = tuple(_gate_row(g) for g in gate.get("gates", ()) if g.get("status") != "pass")
    notes = tuple(str(failure) for failure in gate["failures"])
    return Table(title, columns if rows else (), rows, notes)


def _gate_row(gate: Mapping[str, Json]) -> tuple[Cell, Cell, Cell, Cell]:
    status, value = str(gate.get("status")), gate.get("value")
    shown = significant(value) if isinstance(value, int | float) else str("-" if value is None else value)
    style = "bad" if status == "fail" else "doubt" if status in ("inconclusive", "warn") else "faint"
    return Cell(str(gate.get("matched") or "-")), Cell(str(gate["expr"])), Cell(shown), Cell(status, style)


REPORT = Paired()
