"""From run folders to pairs and gates: what stands between the runs and the document of `rcq compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rcq_cli import gates
from rcq_cli.commands import _run
from rcq_cli.contract import (
    Level,
    Mismatch,
    compare_contracts,
    contract_hash,
    level_of,
    mode_hash,
    timing_hash,
)
from rcq_cli.errors import BrokenRun, NotComparable, RcqError
from rcq_cli.judge import add_costs, judge
from rcq_cli.latency import FEWEST_BLOCKS, latency_gate, paired_times
from rcq_cli.noise import FLIP_MARGIN
from rcq_cli.pairing import PairSpec
from rcq_cli.presets import TASKS
from rcq_cli.verdict import MID_P

if TYPE_CHECKING:
    from rcq_cli.baseline import Baseline
    from rcq_cli.spec import RunSpec
    from rcq_cli.store import RunReader

Json = Any
Rows = list[dict[str, Json]]
Clocks = dict[tuple[str, int | None, str], dict[str, Mapping[str, Any]]]
"""Timing records by sample, of each cell of each arm."""

VERDICT_INTERVAL = "tango"
INTERVALS = (VERDICT_INTERVAL, "newcombe")
"""Intervals of binary cells that `--interval` knows."""


class Rules(NamedTuple):
    """How runs are judged: the flags of compare that change no run."""

    limits: _run.Limits = _run.Limits()
    margin: float | None = None
    alpha: float = 0.025
    interval: str = VERDICT_INTERVAL
    """Interval of binary cells that is shown; verdicts use Tango's, whatever is shown beside it."""
    mid_p: bool = False
    cluster: str = "cluster"
    max_missing: int = 0
    allow_mismatch: bool = False
    partial: bool = False
    strict: bool = False
    exit_zero: bool = False
    expected: Mapping[str, str] = gates.EXPECTED
    fail_on: tuple[gates.GateExpression, ...] = ()
    latency_margin: float | None = None
    flip_margin: float = FLIP_MARGIN
    noise: tuple[RunReader, ...] = ()
    """Second runs of the reference."""
    baseline: Baseline | None = None

    def to_json(self) -> dict[str, Json]:
        """Return which statistics the verdicts rest on, as the document of a comparison records it."""
        beside = None if self.interval == VERDICT_INTERVAL else self.interval
        return {
            "alpha": self.alpha,
            "cluster": self.cluster,
            "verdict_interval": VERDICT_INTERVAL,
            "interval_beside": beside,
            "mcnemar": MID_P if self.mid_p else "exact",
        }


class Arm(NamedTuple):
    """One run under the name it has in this comparison."""

    label: str
    reader: RunReader


class Judged(NamedTuple):
    """Everything the document of a comparison holds."""

    cells: Rows
    pairs: Rows
    gate: gates.GateReport
    warnings: tuple[str, ...]
    contracts: Sequence[Mapping[str, Json]] = ()
    """Hashes and MUST fields of each task and context."""
    baseline: Json = None
    """What the baseline says, for the document; None without one."""


class Compared(NamedTuple):
    """One cell of one candidate on its way to a pair."""

    spec: PairSpec
    reference: Rows
    candidate: Rows


def labelled(readers: Sequence[RunReader], among: Sequence[RunReader] = ()) -> list[Arm]:
    """Name each run by its mode; runs of one mode and place `among` all are told apart by their folders."""
    seen = Counter(_place_of(reader) for reader in among or readers)
    return [
        Arm(
            f"{reader.spec.mode} ({reader.folder.name})" if seen[_place_of(reader)] > 1 else reader.spec.mode,
            reader,
        )
        for reader in readers
    ]


def _place_of(reader: RunReader) -> tuple[str, str, int | None]:
    return reader.spec.mode, reader.spec.task, reader.spec.ctx


def judge_runs(
    groups: Sequence[Sequence[RunReader]], rules: Rules, among: Sequence[RunReader] = ()
) -> Judged:
    """Judge each group of runs against its first one; `among` whose names a run's has to be told apart.

    Raises `NotComparable` when no pair of runs may be compared, `BrokenRun` for a run that never began and
    `SpecError` for an expectation of what is no candidate.
    """
    from rcq_cli.commands import _against

    specs: list[Compared] = []
    cells: Rows = []
    problems: Rows = []
    refusals: list[NotComparable] = []
    timing: dict[tuple[str, str], bool] = {}
    clocks: Clocks = {}
    warnings: list[str] = []
    _against.check_noise(groups, rules)
    candidates = [arm.label for group in groups for arm in labelled(group, among)[1:]]
    gates.check_expectations(rules.expected, candidates)
    for group in groups:
        warnings += _run.shortages(group)
        arms = labelled(group, among)
        rows = {arm.label: _rows(arm) for arm in arms}
        cells += [cell | {"mode": arm.label} for arm in arms for cell in _run.cells_of([arm.reader])]
        for arm in arms:
            problems += [_located(problem, arm) for problem in (arm.reader.summary or {}).get("problems", ())]
            clocks |= _clocks(arm, rows[arm.label])
        for arm in arms[1:]:
            mismatch = compare_contracts(arms[0].reader.contract, arm.reader.contract)
            if not mismatch.comparable and not rules.allow_mismatch:
                refusals.append(mismatch.refusal(arms[0].label, arm.label))
                problems.append(_refused(refusals[-1], arm))
                continue
            warnings += _warnings(mismatch, arm.label)
            timing[arms[0].label, arm.label] = mismatch.timing_comparable
            lifted = tuple(name for name, _, _ in mismatch.must)
            specs += parts_of(arms[0], arm, rows, rules, lifted)
    if not specs:
        raise refusals[0]
    pairs = [_finished(pair, cells, timing, clocks, rules) for pair in judge(specs)]
    _against.add_noise(pairs, specs, rules)
    report = gates.evaluate_gates(
        pairs,
        cells,
        fail_on=rules.fail_on,
        expected=rules.expected,
        strict=rules.strict,
        preset=groups[0][0].spec.preset or "",
        partial=rules.partial,
        max_errors=rules.limits.max_errors,
        allow_inactive=rules.limits.allow_inactive,
        problems=problems,
    )
    timed = _timed(pairs, rules)
    report = gates.GateReport((*report.gates, *timed), report.notices)
    judged = Judged(cells, pairs, report, tuple(dict.fromkeys(warnings)), [contract_entry(g) for g in groups])
    return _against.held_against(judged, groups, rules) if rules.baseline else judged


def _timed(pairs: Rows, rules: Rules) -> list[gates.GateResult]:
    if rules.latency_margin is None:
        return []
    judged = [pair for pair in pairs if pair["headline"] and not pair["expected"]]
    return [latency_gate(pair, rules.latency_margin, strict=rules.strict) for pair in judged]


def contract_entry(group: Sequence[RunReader]) -> dict[str, Json]:
    """Return hashes, seed and MUST fields of one task and context, as the document holds them."""
    reference = group[0]
    fields = reference.contract
    return {
        "task": reference.spec.task_title,
        "ctx": reference.spec.ctx,
        "contract": contract_hash(fields),
        "timing_hash": timing_hash(fields),
        "mode_hashes": {arm.label: mode_hash(arm.reader.contract) for arm in labelled(group)},
        "seed": reference.spec.seed,
        "fields": {name: value for name, value in sorted(fields.items()) if level_of(name) is Level.MUST},
    }


def _clocks(arm: Arm, rows: Rows) -> Clocks:
    """Return the clock's record of every answer, by the cell it belongs to and for the task as a whole."""
    facts, spec, timings = arm.reader.facts, arm.reader.spec, arm.reader.timings()
    found: Clocks = {}
    for part in facts.parts if facts else ():
        mine = {
            row["sample_id"]: timings[row["key"]]
            for row in rows
            if row["part"] == part and row["status"] == "ok" and row["key"] in timings
        }
        cell = spec.cell_task(part)
        for task in dict.fromkeys((cell, cell.partition("/")[0])):
            found.setdefault((task, spec.ctx, arm.label), {}).update(mine)
    return found


def _rows(arm: Arm) -> Rows:
    if arm.reader.facts is None:
        raise BrokenRun(
            f"run {arm.reader.folder} has no results",
            f"it is {arm.reader.status}: no model was loaded yet",
            "finish it with rcq eval ... --resume",
            "RCQ-RUN-08",
        )
    return arm.reader.examples()


def _located(problem: Mapping[str, Json], arm: Arm) -> dict[str, Json]:
    spec = arm.reader.spec
    return {**problem, "task": spec.task_title, "ctx": spec.ctx, "mode": arm.label}


def _refused(refusal: NotComparable, arm: Arm) -> dict[str, Json]:
    what = f"{refusal.what}: {refusal.why}"
    return _located({"code": 5, "kind": "contract_differs", "what": what, "count": 1}, arm)


def _warnings(mismatch: Mismatch, label: str) -> list[str]:
    lifted = [f"{label}: {name} differs ({ours!r} and {theirs!r})" for name, ours, theirs in mismatch.must]
    return lifted + [f"{label}: {text}" for text in mismatch.warnings()]


def parts_of(
    reference: Arm, candidate: Arm, rows: Mapping[str, Rows], rules: Rules, lifted: tuple[str, ...] = ()
) -> list[Compared]:
    """Return a spec with both arms' rows for every part of the task; `lifted` fields differ and may."""
    facts, spec = reference.reader.facts, reference.reader.spec
    if facts is None:
        return []
    margin = margin_of(spec, rules)
    found = []
    for part in facts.parts:
        pair = PairSpec(
            task=spec.cell_task(part),
            ctx=spec.ctx,
            reference=reference.label,
            candidate=candidate.label,
            margin=margin,
            metric=facts.score_key,
            higher_is_better=facts.higher_is_better,
            alpha=rules.alpha,
            mid_p=rules.mid_p,
            cluster=rules.cluster,
            exact_candidate=candidate.reader.spec.mode_name == "dense",
            same_mode=mode_hash(reference.reader.contract) == mode_hash(candidate.reader.contract),
            controls=spec.controls and candidate.reader.spec.controls,
            partial=rules.partial,
            allow_inactive=rules.limits.allow_inactive,
            allow_mismatch=rules.allow_mismatch,
            lifted=lifted,
            max_errors=rules.limits.max_errors,
            max_missing=rules.max_missing,
        )
        mine = [[row for row in rows[arm.label] if row["part"] == part] for arm in (reference, candidate)]
        found.append(Compared(pair, mine[0], mine[1]))
    return found


def margin_of(spec: RunSpec, rules: Rules) -> float:
    """Return the margin that was asked for, else that of the task for the preset."""
    if rules.margin is not None:
        return rules.margin
    margins = TASKS.load(spec.task_name).margins
    return margins.get(spec.preset or "", margins[""])


def _finished(
    pair: Mapping[str, Json],
    cells: Rows,
    timing: Mapping[tuple[str, str], bool],
    clocks: Clocks,
    rules: Rules,
) -> dict[str, Json]:
    """Return the pair with its costs and whether its failure was announced."""
    arms = [_cell_at(cells, pair, pair[side]) for side in ("reference", "candidate")]
    comparable = timing[pair["reference"], pair["candidate"]]
    expected = gates.expectation(pair["candidate"], rules.expected) == "fail"
    whole = {**add_costs(dict(pair), *arms, timing_comparable=comparable), "expected": expected}
    times = [clocks.get((pair["task"], pair["ctx"], pair[side]), {}) for side in ("reference", "candidate")]
    return whole | (
        paired_times(times[0], times[1], rules.alpha)
        if comparable
        else {"latency_paired": False, "latency_blocks": 0}
    )


def _cell_at(cells: Rows, pair: Mapping[str, Json], label: str) -> dict[str, Json]:
    found = (c for c in cells if (c["task"], c["ctx"], c["mode"]) == (pair["task"], pair["ctx"], label))
    return next(found, {})


def as_error(report: gates.GateReport, code: int) -> RcqError:
    """Return what the exit code of a comparison says, as an error of three lines."""
    worst = next(gate for gate in report.gates if gate.code == code)
    more = len(report.failures) - 1
    error = RcqError(
        f"{_CAUSES[code]}: {worst.matched}" + (f" and {more} more" if more else ""),
        worst.reason,
        # nothing else that is 5 stays unevaluated: the runs match, their times cannot be held against a limit
        _FIX_OF_TIMES if (code, worst.status) == (5, "not evaluated") else _FIXES[code],
        IDS[code],
    )
    error.exit_code = code
    return error


IDS = {3: "RCQ-CMP-13", 4: "RCQ-CERT-14", 5: "RCQ-CMP-15", 6: "RCQ-CMP-16"}
"""Id of a comparison that ended with each exit code."""
_CAUSES = {
    3: "gate failed",
    4: "certificate violated",
    5: "runs not comparable",
    6: "incomplete or unfit run",
}
_FIX_OF_TIMES = f"run the modes in one rcq compare with --samples {FEWEST_BLOCKS} or more, or gate no times"
_FIXES = {
    3: "use a safer mode, or decide on another margin before the next run; --exit-zero only reports",
    4: "report this with the run folder; do not use the mode on this model",
    5: "run both with the same settings, or pass --allow-mismatch",
    6: "see the notes below the table and `error` in examples.jsonl of the run, then run it again",
}
