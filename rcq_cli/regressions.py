"""A comparison held against a baseline: what got worse fails, what got better is a notice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rcq_cli import stats
from rcq_cli.baseline import LATENCY, Baseline, Entry
from rcq_cli.contract import Level, compare_contracts, difference_text, level_of, short
from rcq_cli.expressions import GateResult
from rcq_cli.judge import judge
from rcq_cli.latency import why_not_gated
from rcq_cli.pairing import PairSpec, Row, cell_name
from rcq_cli.verdict import Pair

Json = Any
Record = Mapping[str, Json]
At = tuple[str, int | None]
BASELINE = "baseline"
"""How results call the accepted side."""


@dataclass(frozen=True, slots=True)
class Current:
    """One cell as it was measured now: its record, its answers and how they are to be judged."""

    at: At
    """Task and context of its run, parts not told apart."""
    cell: Record
    rows: Sequence[Row]
    spec: PairSpec
    pair: Record
    """The pair in which it is the candidate; empty for the reference."""

    @property
    def key(self) -> tuple[str, int | None, str]:
        """Task with its part, context and mode."""
        return self.cell["task"], self.cell["ctx"], self.cell["mode"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A comparison as a baseline sees it."""

    contract: str
    """Hash over the contracts of all its runs."""
    contracts: Mapping[At, Record]
    """Contract fields of each task and context."""
    timing: Mapping[At, str]
    """Timing hash of each task and context."""
    cells: Sequence[Current]


@dataclass(slots=True)
class Regressions:
    """What a baseline has to say of a comparison."""

    gates: list[GateResult] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    """Today's answers against the accepted ones; the reference is `baseline`."""


def check_baseline(
    baseline: Baseline, measured: Measured, *, allow_mismatch: bool = False, strict: bool = False
) -> Regressions:
    """Judge every row of `baseline`; a contract that differs is gate 5 and names each field with both."""
    found = Regressions()
    lifted = _check_contracts(baseline, measured, found, allow_mismatch)
    cells = {one.key: one for one in measured.cells}
    judged = []
    for entry in baseline.entries:
        one = cells.get((entry.cell_task, entry.ctx, entry.mode))
        if one is None:
            reason = f"{baseline.name} has {entry.metric} of this cell, the comparison did not measure it"
            found.gates.append(_gate(entry, f"{entry.metric} is missing", None, "fail", 6, reason))
        elif lifted.get(one.at) and not allow_mismatch:
            continue  # told once for the whole place
        elif entry.tol["kind"] != "stat":
            _check_shift(entry, one, measured, found)
        elif baseline.outcomes.get(entry.key):
            judged.append(_paired(baseline, entry, one, lifted.get(one.at, ())))
        else:
            found.gates.append(_unpaired(entry, one, strict))
    found.pairs = judge(judged)
    for pair in found.pairs:
        if pair["headline"]:
            _settle(pair, found, strict)
    known = {(entry.cell_task, entry.ctx, entry.mode) for entry in baseline.entries}
    fresh = [one for one in measured.cells if one.key not in known and not one.pair.get("expected")]
    found.notices += [f"{_name(one)} is not in {baseline.name} yet" for one in fresh]
    return found


# -- the contract -------------------------------------------------------------------------------------------


def _check_contracts(
    baseline: Baseline, measured: Measured, found: Regressions, allow_mismatch: bool
) -> dict[At, tuple[str, ...]]:
    """Return the differing MUST fields of each place, told as gates or, where allowed, as warnings."""
    lifted: dict[At, tuple[str, ...]] = {}
    for at, fields in measured.contracts.items():
        differences = _differences(baseline, at, fields, measured.contract)
        if not differences:
            continue
        lifted[at] = tuple(name for name, _ in differences)
        told = f"{baseline.name} has another contract: " + "; ".join(text for _, text in differences)
        if allow_mismatch:
            found.warnings.append(f"{cell_name(*at)}: {told}")
        else:
            expr, where = "contract differs", f"{cell_name(*at)} {BASELINE}"
            found.gates.append(GateResult(expr, where, len(differences), "fail", 5, told, *at, BASELINE))
    return lifted


def _differences(baseline: Baseline, at: At, fields: Record, contract: str) -> list[tuple[str, str]]:
    """Return name and text of every MUST field in which a place differs from the baseline."""
    stored = baseline.fields_at(*at)
    if stored is not None:
        # a field that came with a later rcq stands in one of the two only, and null is what it was
        must = {name: value for name, value in fields.items() if level_of(name) is Level.MUST}
        return [(entry[0], difference_text(entry)) for entry in compare_contracts(stored, must).must]
    if baseline.contracts or baseline.contract_hash == contract:
        return []
    text = (
        f"contract ({short(baseline.contract_hash)} and {short(contract)}; the file holds no fields to name)"
    )
    return [("contract", text)]


# -- scores -------------------------------------------------------------------------------------------------


def _paired(
    baseline: Baseline, entry: Entry, one: Current, lifted: tuple[str, ...]
) -> tuple[PairSpec, Sequence[Row], Sequence[Row]]:
    spec = one.spec
    own = PairSpec(
        task=entry.cell_task,
        ctx=entry.ctx,
        reference=BASELINE,
        candidate=entry.mode,
        margin=entry.tolerance,
        metric=entry.metric,
        higher_is_better=entry.dir == "up",
        alpha=spec.alpha,
        mid_p=spec.mid_p,
        cluster=spec.cluster,
        exact_candidate=True,  # whether it acted is told by the comparison itself
        partial=spec.partial,
        allow_mismatch=spec.allow_mismatch,
        lifted=lifted,
        max_errors=spec.max_errors,
        max_missing=spec.max_missing,
    )
    return own, list(baseline.outcomes[entry.key]), one.rows


def _settle(pair: Pair, found: Regressions, strict: bool) -> None:
    """Turn a finished pair into gates, and an improvement into a notice."""
    where, candidate = cell_name(pair["task"], pair["ctx"]), pair["candidate"]
    named = f"{where} {candidate}"
    place = (pair["task"], pair["ctx"], candidate)
    for problem in pair["problems"]:
        found.gates.append(
            GateResult(f"{BASELINE}: {problem['kind']}", named, problem["count"], "fail", problem["code"],
                       f"against {BASELINE}: {problem['what']}", *place)
        )  # fmt: skip
    verdict, reason = pair["verdict"], "; ".join(pair["reasons"])
    failed = verdict == "fail" or (strict and verdict == "inconclusive")
    expr = f"{pair['metric']} is worse than {BASELINE} by {pair['margin']:g}"
    told = f"against {BASELINE}: {reason}" if reason else ""
    found.gates.append(GateResult(expr, named, verdict, verdict, 3 if failed else 0, told, *place))
    if "better" in pair["labels"]:
        found.notices.append(_better(named, pair["metric"], pair["reference_score"], pair["candidate_score"]))


def _unpaired(entry: Entry, one: Current, strict: bool) -> GateResult:
    """Compare shares of right answers as independent samples, which can fail and never pass."""
    score, n, limit = one.cell.get("score"), int(one.cell["n"]), entry.tolerance
    expr = f"{entry.metric} is worse than {BASELINE} by {limit:g}"
    shares = [share for share in (entry.value, score) if share is not None and 0 <= share <= 1]
    right = [share * size for share, size in zip(shares, (entry.n, n), strict=False)]
    if len(right) < 2 or not n or entry.dir != "up" or any(abs(r - round(r)) > 1e-6 for r in right):
        reason = (
            f"against {BASELINE}: it names no answers to pair with; write it again with --update-baseline"
        )
        return _gate(entry, expr, score, "inconclusive", 3 if strict else 0, reason)
    counts = (round(right[0]), entry.n, round(right[1]), n)
    low, high = stats.newcombe_independent(*counts, one.spec.alpha)
    told = f"against {BASELINE}: it was {entry.value:.4g} and is {score:.4g}, "
    told += f"difference in [{low:+.3f}, {high:+.3f}]"
    if high < -limit:
        return _gate(entry, expr, score, "fail", 3, told)
    told += "; without stored answers to pair with nothing passes"
    return _gate(entry, expr, score, "inconclusive", 3 if strict else 0, told)


# -- costs --------------------------------------------------------------------------------------------------


def _check_shift(entry: Entry, one: Current, measured: Measured, found: Regressions) -> None:
    """Judge a number that may move by an amount or a share in the bad direction."""
    if entry.metric == LATENCY and (why := _not_timed(entry, one, measured)):
        found.notices.append(f"{_name(one)}: {LATENCY} is not held against {BASELINE}: {why}")
        return
    value = _value(one, entry.metric)
    room = entry.tolerance * (abs(entry.value) if entry.tol["kind"] == "rel" else 1.0)
    expr = f"{entry.metric} is worse than {BASELINE} by {entry.tolerance:g}"
    expr += " of it" if entry.tol["kind"] == "rel" else ""
    if value is None:
        reason = f"against {BASELINE}: {entry.metric} was not measured"
        found.gates.append(_gate(entry, expr, None, "not evaluated", 6, reason))
        return
    loss = (value - entry.value) * (1 if entry.dir == "down" else -1)
    # noise of the clock alone must not fail: the whole interval lies above what was accepted
    sure = entry.metric != LATENCY or one.pair["latency_ci"][0] > entry.value
    told = f"against {BASELINE}: {entry.metric} was {entry.value:.6g} and is {value:.6g}"
    failed = loss > room and sure
    found.gates.append(
        _gate(entry, expr, value, "fail" if failed else "pass", 3 if failed else 0, told if failed else "")
    )
    if -loss > room:
        found.notices.append(_better(_name(one), entry.metric, entry.value, value))


def _not_timed(entry: Entry, one: Current, measured: Measured) -> str:
    """Return why a time cannot be held against the baseline, nothing when it can."""
    if entry.timing_hash != measured.timing.get(one.at):
        return "its machine or settings were others (timing_hash differs)"
    return "" if one.pair.get("latency_paired") else why_not_gated(one.pair)


def _value(one: Current, metric: str) -> float | None:
    if metric == one.cell.get("metric"):
        return one.cell.get("score")
    if metric == "device_bytes":
        return (one.cell.get("bytes") or {}).get("device")
    if metric == LATENCY:
        return one.pair.get(LATENCY)
    return (one.cell.get("metrics") or {}).get(metric)


# -- words --------------------------------------------------------------------------------------------------


def _gate(entry: Entry, expr: str, value: Json, status: str, code: int, reason: str = "") -> GateResult:
    where = f"{cell_name(entry.cell_task, entry.ctx)} {entry.mode}"
    place = (entry.cell_task, entry.ctx, entry.mode)
    return GateResult(expr, where, value, status, code, reason, *place)


def _name(one: Current) -> str:
    return f"{cell_name(one.cell['task'], one.cell['ctx'])} {one.cell['mode']}"


def _better(where: str, metric: str, before: float, now: float) -> str:
    told = f"{where}: {metric} is better than {BASELINE} ({before:.6g}, now {now:.6g})"
    return f"{told}; --update-baseline keeps it"
