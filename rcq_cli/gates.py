"""Gates of a comparison: what fails it, and with which exit code."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rcq_cli.errors import SpecError
from rcq_cli.expressions import (
    GateExpression,
    GateResult,
    Record,
    cell_value,
    check_gates,
    expression_gates,
    gate_result,
    pair_name,
    parse_gate,
)
from rcq_cli.pairing import cell_name
from rcq_cli.registry import did_you_mean

__all__ = [
    "GateExpression",
    "GateReport",
    "GateResult",
    "check_expectations",
    "check_gates",
    "evaluate_gates",
    "exit_code",
    "expectation",
    "parse_expectations",
    "parse_gate",
]

PRECEDENCE = (130, 1, 2, 7, 5, 4, 6, 3, 0)
"""Exit codes, the one that wins first: a violated certificate is never hidden by an incomplete run."""
EXPECTED = {"naive": "fail"}
"""Modes that are in a comparison to show that it can find damage."""
TRUNCATED_SHARE = 0.10
KL_MARGINS = {"ci": 0.02, "release": 0.01}
"""Nats per token above which a warning is printed, by preset."""


def exit_code(causes: Iterable[int], *, exit_zero: bool = False) -> int:
    """Return the exit code for everything that happened; `exit_zero` turns a failed gate alone into 0."""
    found = set(causes)
    code = next((c for c in PRECEDENCE if c in found), 1 if found else 0)
    return 0 if exit_zero and code == 3 else code


def parse_expectations(texts: Sequence[str]) -> dict[str, str]:
    """Return mode -> expected outcome from `MODE=fail`, or `MODE=pass` to lift the default of naive."""
    expected = dict(EXPECTED)
    for text in texts:
        mode, _, outcome = text.rpartition("=")
        if not mode or outcome not in ("fail", "pass"):
            raise SpecError(f"--expect {text!r} is not MODE=fail or MODE=pass", id="RCQ-USE-24")
        expected[mode] = outcome
    return expected


def check_expectations(expected: Mapping[str, str], candidates: Iterable[str]) -> None:
    """Refuse an expectation of what is no candidate; those rcq has by itself may find none.

    Raises `SpecError` with the nearest name, as for a gate that is never evaluated.
    """
    labels = tuple(dict.fromkeys(candidates))
    names = tuple(dict.fromkeys((*labels, *map(_mode_name, labels))))
    for mode, outcome in expected.items():
        if mode not in names and mode not in EXPECTED:
            hint = did_you_mean(mode, (*names, *EXPECTED))
            what = f"--expect {mode}={outcome}: no mode {mode!r} is compared with the reference"
            raise SpecError(what, fix=f"{hint}allowed: {', '.join(names)}", id="RCQ-USE-24")


# -- evaluation ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GateReport:
    """Every gate of a comparison."""

    gates: tuple[GateResult, ...]
    notices: tuple[str, ...] = ()

    @property
    def failures(self) -> list[str]:
        """One line per gate that asks for an exit code, worst first."""
        bad = sorted((g for g in self.gates if g.code), key=lambda g: PRECEDENCE.index(g.code))
        return [f"{gate.matched}: {gate.reason}" for gate in bad]

    @property
    def warnings(self) -> list[str]:
        """One line per gate that neither passed nor failed."""
        told = ("inconclusive", "warn", "not evaluated")
        return [f"{g.matched}: {g.reason}" for g in self.gates if g.status in told and not g.code]

    def exit_code(self, *, exit_zero: bool = False) -> int:
        """Return the exit code of all gates together."""
        return exit_code((gate.code for gate in self.gates), exit_zero=exit_zero)

    def to_json(self) -> dict[str, Any]:
        """Return the object under `gate`."""
        return {
            "passed": not self.failures,
            "failures": self.failures,
            "warnings": self.warnings,
            "notices": list(self.notices),
            "gates": [asdict(gate) for gate in self.gates],
        }


def evaluate_gates(
    pairs: Sequence[Record],
    cells: Sequence[Record],
    *,
    fail_on: Sequence[GateExpression] = (),
    expected: Mapping[str, str] = EXPECTED,
    strict: bool = False,
    preset: str = "",
    partial: bool = False,
    max_errors: int = 0,
    allow_inactive: bool = False,
    problems: Iterable[Record] = (),
) -> GateReport:
    """Evaluate the default gates and those of `--fail-on` on finished pairs.

    `cells` are the entries of `cells`, each with its `mode`; `problems` those of the runs (`code`, `kind`,
    `what`, `count`), each with `task`, `ctx` and `mode` of its run. Raises `SpecError` for a gate of
    `fail_on` that matches nothing.
    """
    results: list[GateResult] = []
    for pair in pairs:
        results += [_problem_gate(pair, problem) for problem in pair["problems"]]
        if pair["headline"]:
            results.append(_quality_gate(pair, expected, strict))
        results += _answer_gates(pair, cells, preset, expected)
    results += [gate for cell in cells for gate in _cell_gates(cell, partial)]
    waived = {"sample_errors": float(max_errors)} | ({"inactive": math.inf} if allow_inactive else {})
    results += _run_gates(problems, results, waived)
    results += _sensitivity_gates(pairs, expected, strict)
    for gate in fail_on:
        results += expression_gates(gate, pairs, cells)
    better = [f"{pair_name(pair)}: better than the reference; refresh the baseline" for pair in pairs
              if "better" in pair["labels"]]  # fmt: skip
    return GateReport(tuple(results), tuple(better))


def expectation(mode: str, expected: Mapping[str, str]) -> str | None:
    """Return what is expected of a mode; `naive:group=32` inherits it from `naive`."""
    return expected.get(mode, expected.get(_mode_name(mode)))


def _mode_name(label: str) -> str:
    return label.partition(":")[0]


def _quality_gate(pair: Record, expected: Mapping[str, str], strict: bool) -> GateResult:
    expr = f"{cell_name(pair['task'], pair['ctx'])}.{pair['metric']}.verdict == FAIL"
    verdict, reason = pair["verdict"], "; ".join(pair["reasons"])
    if expectation(pair["candidate"], expected) == "fail":
        return gate_result(pair, expr, verdict, "expected" if verdict == "fail" else verdict, 0, reason)
    failed = verdict == "fail" or (strict and verdict == "inconclusive")
    return gate_result(pair, expr, verdict, verdict, 3 if failed else 0, reason)


def _sensitivity_gates(
    pairs: Sequence[Record], expected: Mapping[str, str], strict: bool
) -> list[GateResult]:
    """Say of each arm that passed everywhere against expectation that this comparison finds no damage."""
    found = []
    for candidate in dict.fromkeys(pair["candidate"] for pair in pairs):
        own = [pair for pair in pairs if pair["candidate"] == candidate and pair["headline"]]
        passed = own and all(pair["verdict"] == "pass" for pair in own)
        if expectation(candidate, expected) == "fail" and passed:
            reason = f"harness not sensitive: {candidate} was expected to fail and passes every cell"
            code, status = (3, "fail") if strict else (0, "warn")
            expr = f"{candidate} is expected to fail"
            found.append(GateResult(expr, candidate, "pass", status, code, reason, candidate=candidate))
    return found


def _problem_gate(pair: Record, problem: Record) -> GateResult:
    return gate_result(pair, problem["kind"], problem["count"], "fail", problem["code"], problem["what"])


def _answer_gates(
    pair: Record, cells: Sequence[Record], preset: str, expected: Mapping[str, str]
) -> list[GateResult]:
    found = []
    # an arm that is expected to fail may fail in this way as well
    may_fail = expectation(pair["candidate"], expected) == "fail"
    if not may_fail and pair["truncated"] and pair["truncated"] > TRUNCATED_SHARE * pair["n"]:
        reason = f"{pair['truncated']} of {pair['n']} answers were cut off before the value was found"
        code, status = (3, "fail") if preset == "release" else (0, "warn")
        found.append(gate_result(pair, "truncated > 10 %", pair["truncated"], status, code, reason))
    kl = cell_value(pair, cells, "candidate", "kl_mean")
    if preset in KL_MARGINS and kl is not None and kl > KL_MARGINS[preset]:
        reason = f"mean KL {kl:.4g} nats per token is above {KL_MARGINS[preset]:g}"
        found.append(gate_result(pair, f"kl_mean > {KL_MARGINS[preset]:g}", kl, "warn", 0, reason))
    return found


def _cell_gates(cell: Record, partial: bool) -> list[GateResult]:
    """Check what holds for every cell, the reference included: its certificates, and that its run ended."""
    pair = {"task": cell["task"], "ctx": cell["ctx"], "candidate": cell["mode"]}
    certificates = cell.get("certificates")
    found = []
    if certificates is not None:
        count = certificates["violations"]
        reason = f"{count} certificate violations in {certificates.get('audited')} audited head-steps"
        status, code = ("fail", 4) if count else ("pass", 0)
        found.append(
            gate_result(pair, "certificates.violations > 0", count, status, code, reason if count else "")
        )
    # a run that ended with failed samples tells so in its problems, where --max-errors counts
    if cell.get("status") in ("started", "interrupted"):
        reason = f"the run is not complete (status {cell['status']})"
        status, code = ("warn", 0) if partial else ("fail", 6)
        found.append(gate_result(pair, "status != complete", cell["status"], status, code, reason))
    return found


def _run_gates(
    problems: Iterable[Record], known: Sequence[GateResult], waived: Mapping[str, float]
) -> list[GateResult]:
    """Add the problems of runs that no pair or cell has told yet; `waived` counts of a kind are allowed."""
    told = {(gate.expr, gate.task.split("/")[0], gate.ctx, gate.candidate) for gate in known if gate.code}
    found = []
    for problem in problems:
        kind = "certificates.violations > 0" if problem["kind"] == "violation" else problem["kind"]
        place = (kind, problem["task"].split("/")[0], problem["ctx"], problem["mode"])
        if place not in told and problem["count"] > waived.get(kind, 0):
            run = {"task": problem["task"], "ctx": problem["ctx"], "candidate": problem["mode"]}
            found.append(_problem_gate(run, {**problem, "kind": kind}))
    return found
