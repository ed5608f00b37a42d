"""What a comparison is held against beside its reference: a second run of it, and the baseline file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rcq_cli.commands import _compare, _run
from rcq_cli.contract import compare_contracts, mode_hash
from rcq_cli.errors import NotComparable, SpecError
from rcq_cli.gates import GateReport, expectation
from rcq_cli.noise import noise_floor
from rcq_cli.pairing import cell_name

if TYPE_CHECKING:
    from pathlib import Path

    from rcq_cli.baseline import Key
    from rcq_cli.store import RunReader

Json = Any
Rows = list[dict[str, Json]]

# -- noise floor --------------------------------------------------------------------------------------------


def check_noise(groups: Sequence[Sequence[RunReader]], rules: _compare.Rules) -> None:
    """Refuse a `--noise-floor` run that repeats no reference: raise `SpecError` or `NotComparable`."""
    references = {(g[0].spec.task, g[0].spec.ctx): g[0] for g in groups}
    for again in rules.noise:
        first = references.get((again.spec.task, again.spec.ctx))
        if first is None:
            places = ", ".join(cell_name(*place) for place in references)
            what = f"--noise-floor {again.folder} is a run of {cell_name(again.spec.task, again.spec.ctx)}"
            raise SpecError(what, fix=f"name a second run of the reference at {places}", id="RCQ-USE-11")
        if again.folder.resolve() == first.folder.resolve():
            what = f"--noise-floor {again.folder} is the reference itself"
            raise SpecError(what, fix="run it once more: rcq eval --fresh", id="RCQ-USE-09")
        _same_contract(first, again, rules)


def _same_contract(first: RunReader, again: RunReader, rules: _compare.Rules) -> None:
    if mode_hash(first.contract) != mode_hash(again.contract):
        raise NotComparable(
            f"--noise-floor {again.folder} is no second run of {first.folder}",
            f"its mode differs: {first.spec.mode} and {again.spec.mode}, or their options",
            "run the reference once more with the same settings",
            "RCQ-CMP-05",
        )
    mismatch = compare_contracts(first.contract, again.contract)
    if not mismatch.comparable and not rules.allow_mismatch:
        raise mismatch.refusal(str(first.folder), f"--noise-floor {again.folder}")


def add_noise(pairs: Rows, specs: Sequence[_compare.Compared], rules: _compare.Rules) -> None:
    """Add `noise_floor` to every pair whose place has a second run of the reference."""
    if not rules.noise:
        return
    again: dict[tuple[str, int | None], Rows] = {}
    for reader in rules.noise:
        facts = reader.facts
        for part in facts.parts if facts else ():
            place = (reader.spec.cell_task(part), reader.spec.ctx)
            again[place] = [row for row in reader.examples() if row["part"] == part]
    compared = {(one.spec.task, one.spec.ctx, one.spec.candidate): one for one in specs}
    for pair in pairs:
        one = compared.get((pair["task"], pair["ctx"], pair["candidate"]))
        rows = again.get((pair["task"], pair["ctx"]))
        if one is not None and rows is not None and not pair["macro"]:
            pair["noise_floor"] = noise_floor(
                one.reference,
                rows,
                one.candidate,
                metric=one.spec.metric,
                flip_margin=rules.flip_margin,
                alpha=rules.alpha,
            )


# -- baseline -----------------------------------------------------------------------------------------------


def held_against(
    judged: _compare.Judged, groups: Sequence[Sequence[RunReader]], rules: _compare.Rules
) -> _compare.Judged:
    """Return the comparison with the gates, notices and warnings of its baseline."""
    from rcq_cli import regressions

    baseline = rules.baseline
    assert baseline is not None
    entries = {(entry["task"], entry["ctx"]): entry for entry in judged.contracts}
    measured = regressions.Measured(
        _run.contract_of([reader for group in groups for reader in group]),
        {at: entry["fields"] for at, entry in entries.items()},
        {at: entry["timing_hash"] for at, entry in entries.items()},
        [one for group in groups for one in _current(group, judged, rules)],
    )
    found = regressions.check_baseline(
        baseline, measured, allow_mismatch=rules.allow_mismatch, strict=rules.strict
    )
    gate = GateReport((*judged.gate.gates, *found.gates), (*judged.gate.notices, *found.notices))
    record = {"file": baseline.name, "contract": baseline.contract_hash, "pairs": found.pairs}
    return judged._replace(gate=gate, warnings=(*judged.warnings, *found.warnings), baseline=record)


def _current(group: Sequence[RunReader], judged: _compare.Judged, rules: _compare.Rules) -> list[Any]:
    from rcq_cli.regressions import Current

    arms = _compare.labelled(group)
    at = (group[0].spec.task_title, group[0].spec.ctx)
    pairs = {(p["task"], p["ctx"], p["candidate"]): p for p in judged.pairs}
    cells = {(c["task"], c["ctx"], c["mode"]): c for c in judged.cells}
    found = []
    for arm in arms:
        rows = {each.label: each.reader.examples() for each in (arms[0], arm)}
        for one in _compare.parts_of(arms[0], arm, rows, rules):
            key = (one.spec.task, one.spec.ctx, arm.label)
            expected = {"expected": expectation(arm.label, rules.expected) == "fail"}
            if key in cells:
                found.append(Current(at, cells[key], one.candidate, one.spec, pairs.get(key, expected)))
    return found


def outcomes_of(
    groups: Sequence[Sequence[RunReader]], judged: _compare.Judged, rules: _compare.Rules
) -> Mapping[Key, Rows]:
    """Return the rows of every measured cell by task, part, context and mode."""
    found: dict[Key, Rows] = {}
    for group in groups:
        for one in _current(group, judged, rules):
            task, _, sub = one.cell["task"].partition("/")
            found[task, sub, one.cell["ctx"], one.cell["mode"]] = list(one.rows)
    return found


def keep_baseline(
    path: Path,
    document: Mapping[str, Json],
    groups: Sequence[Sequence[RunReader]],
    judged: _compare.Judged,
    rules: _compare.Rules,
) -> str:
    """Write the baseline of a finished comparison, unless its exit code says it proves nothing; say which."""
    from rcq_cli.baseline import write_baseline

    code = judged.gate.exit_code()
    if code not in (0, 3):
        return f"{path} is left as it was: a comparison that ends with {code} is no baseline"
    write_baseline(path, document, outcomes_of(groups, judged, rules), rules.latency_margin)
    return f"{path} written" + (", although the gate failed" if code else "")
