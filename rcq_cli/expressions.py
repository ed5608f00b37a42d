"""Expressions of `--fail-on`: `TASK[/SUB][@CTX].METRIC.STAT OP VALUE` names the condition that fails."""

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rcq_cli.errors import SpecError
from rcq_cli.options import parse_tokens
from rcq_cli.pairing import cell_name
from rcq_cli.registry import did_you_mean

Record = Mapping[str, Any]

STATS = ("reference", "candidate", "difference", "ratio", "lower", "upper", "verdict", "n")
SHARE = "share"
"""Statistic of `device_bytes` alone: the candidate's over a dense 16-bit cache, as tables show them.

`ratio` is over the reference's, which a float32 model makes twice as large."""
OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
VERDICTS = ("pass", "fail", "inconclusive")
COST_METRICS = {"decode_ms": "latency_ratio", "device_bytes": "device_bytes_ratio"}
"""Metrics of cost and the field of a pair that holds their ratio."""
COUNT_METRICS = ("critical", "flip_rate", "text_identical", "truncated")
"""Metrics that a pair has of the candidate alone."""
TIMINGS = "profile"
"""Stands for every task in a gate on cost, which does not depend on answers."""

_FORM = re.compile(
    r"\s*(?P<task>[\w*-]+(?:/[\w*-]+)?)(?:@(?P<ctx>[\w.*]+))?\.(?P<metric>\w+)\.(?P<stat>\w+)"
    r"\s*(?P<op><=|>=|==|!=|<|>)\s*(?P<value>\S+)\s*"
)
_SHAPE = "TASK[/SUB][@CTX].METRIC.STAT OP VALUE, for example 'niah@64k.accuracy.upper < -0.02'"


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate on one cell of one candidate, or on one run."""

    expr: str
    matched: str
    """The cell, as `niah@8192 naive`."""
    value: Any
    status: str
    """`pass`, `fail`, `inconclusive`, `warn`, `expected` (an announced failure) or `not evaluated`."""
    code: int
    """Exit code this gate asks for."""
    reason: str = ""
    task: str = ""
    ctx: int | None = None
    candidate: str = ""


@dataclass(frozen=True, slots=True)
class GateExpression:
    """One `--fail-on`, parsed."""

    text: str
    task: str
    ctx: int | None
    """None for any."""
    metric: str
    stat: str
    op: str
    value: float | str

    def matches(self, task: str, ctx: int | None) -> bool:
        """Whether a cell is meant; a task without its part means every part."""
        anywhere = self.task == "*" or (self.task == TIMINGS and self.metric in COST_METRICS)
        named = anywhere or self.task == task or task.startswith(f"{self.task}/")
        return named and self.ctx in (None, ctx)

    def holds(self, value: Any) -> bool:
        """Whether the condition that fails is met."""
        return OPERATORS[self.op](value, self.value)


def parse_gate(text: str) -> GateExpression:
    """Return the parsed expression; raise `SpecError` for a wrong form, statistic, operator or value."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise SpecError(f"gate {text!r} has not the form {_SHAPE}", id="RCQ-USE-22")
    stat, op = match["stat"], match["op"]
    if stat not in (*STATS, SHARE):
        raise _unknown(text, "statistic", stat, (*STATS, SHARE))
    allowed = _stats_of(match["metric"])
    if stat not in allowed:
        raise SpecError(
            f"gate {text!r}: {match['metric']} has no {stat}",
            fix=f"it has {', '.join(allowed)}",
            id="RCQ-USE-22",
        )
    ctx = None if match["ctx"] in (None, "*") else parse_tokens(match["ctx"])
    value = _verdict(text, match) if stat == "verdict" else _number(text, match["value"])
    return GateExpression(text.strip(), match["task"], ctx, match["metric"], stat, op, value)


def check_gates(
    gates: Sequence[GateExpression], cells: Collection[tuple[str, int | None]], metrics: Collection[str]
) -> None:
    """Raise `SpecError` for a gate that names an unknown task or metric, or matches no cell.

    `cells` are the (task, ctx) to be compared, `metrics` the score metrics of their tasks.
    """
    tasks = tuple(dict.fromkeys(name for task, _ in cells for name in (task, task.split("/")[0])))
    known = (*dict.fromkeys(metrics), *COUNT_METRICS, *COST_METRICS, "macro")
    for gate in gates:
        if gate.task not in ("*", TIMINGS, *tasks):
            raise _unknown(gate.text, "task", gate.task, tasks)
        if gate.metric not in known:
            raise _unknown(gate.text, "metric", gate.metric, known)
        if not any(gate.matches(task, ctx) for task, ctx in cells):
            raise _never(gate, [cell_name(*cell) for cell in cells])


def _stats_of(metric: str) -> tuple[str, ...]:
    if metric in COUNT_METRICS:
        return ("candidate", "verdict", "n")
    if metric == "device_bytes":
        return (SHARE, "ratio", "verdict", "n")
    return ("ratio", "lower", "upper", "verdict", "n") if metric in COST_METRICS else STATS


def _verdict(text: str, match: re.Match[str]) -> str:
    value = match["value"].lower()
    if value not in VERDICTS:
        raise _unknown(text, "verdict", match["value"], tuple(v.upper() for v in VERDICTS))
    if match["op"] not in ("==", "!="):
        raise SpecError(f"gate {text!r}: a verdict is compared with == or !=", id="RCQ-USE-22")
    return value


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(f"gate {text!r}: {value!r} is not a finite number", id="RCQ-USE-22")
    return number


def _unknown(text: str, noun: str, name: str, known: Sequence[str]) -> SpecError:
    fix = did_you_mean(name, tuple(known)) + f"known: {', '.join(known)}"
    return SpecError(f"gate {text!r}: unknown {noun} {name!r}", fix=fix, id="RCQ-USE-23")


def _never(gate: GateExpression, cells: Sequence[str]) -> SpecError:
    why = f"it matches no cell of this comparison ({', '.join(dict.fromkeys(cells))})"
    return SpecError(f"gate {gate.text!r} is never evaluated", why, id="RCQ-USE-25")


def pair_name(pair: Record) -> str:
    """Return how messages call a pair: `niah@8192 naive`."""
    return f"{cell_name(pair['task'], pair['ctx'])} {pair['candidate']}"


def gate_result(pair: Record, expr: str, value: Any, status: str, code: int, reason: str = "") -> GateResult:
    """Return the result of a gate on one pair."""
    place = (pair["task"], pair["ctx"], pair["candidate"])
    return GateResult(expr, pair_name(pair), value, status, code, reason, *place)


# -- values of expressions ----------------------------------------------------------------------------------


def expression_gates(
    gate: GateExpression, pairs: Sequence[Record], cells: Sequence[Record]
) -> list[GateResult]:
    """Evaluate one expression on every pair it speaks of; raise `SpecError` when there is none."""
    meant = [pair for pair in pairs if gate.matches(pair["task"], pair["ctx"])]
    spoken = [pair for pair in meant if _speaks_of(gate, pair, cells)]
    if not spoken:
        names = {pair["metric"] for pair in pairs} | {m for cell in cells for m in cell.get("metrics") or {}}
        check_gates([gate], [(pair["task"], pair["ctx"]) for pair in pairs], sorted(names))
        raise _never(gate, [f"{pair_name(pair)} {pair['metric']}" for pair in meant])
    return [_expression_gate(gate, pair, cells) for pair in spoken]


def _speaks_of(gate: GateExpression, pair: Record, cells: Sequence[Record]) -> bool:
    if pair["macro"] or gate.metric == "macro":
        return bool(pair["metric"] == gate.metric)
    if gate.metric in COUNT_METRICS or gate.metric in COST_METRICS or gate.metric == pair["metric"]:
        return True
    return cell_value(pair, cells, "candidate", gate.metric) is not None


def _expression_gate(gate: GateExpression, pair: Record, cells: Sequence[Record]) -> GateResult:
    value = _value(gate, pair, cells)
    if value is None:
        timing = gate.metric == "decode_ms" and (
            pair.get("latency_paired") is False or pair.get("latency_status") == "timing_contract_differs"
        )
        why = (
            "times are gated only where both modes took turns in one process, on one kind of machine"
            if timing
            else f"{gate.metric}.{gate.stat} was not measured"
        )
        reason = f"gate {gate.text!r} could not be evaluated: {why}"
        return gate_result(pair, gate.text, None, "not evaluated", 5 if timing else 6, reason)
    failed = gate.holds(value)
    shown = f"{value:.6g}" if isinstance(value, int | float) else str(value)
    reason = f"{gate.metric}.{gate.stat} = {shown} meets {gate.text!r}" if failed else ""
    return gate_result(pair, gate.text, value, "fail" if failed else "pass", 3 if failed else 0, reason)


def _value(gate: GateExpression, pair: Record, cells: Sequence[Record]) -> Any:
    """Return the number or verdict a gate speaks of, None where there is none."""
    metric, stat = gate.metric, gate.stat
    if stat in ("n", "verdict"):
        return pair[stat]
    if metric == "decode_ms" and pair.get("latency_paired") is False:
        return None
    if stat == SHARE:
        held = _cell_of(pair, cells, "candidate").get("bytes") or {}
        return held.get("device_ratio")
    if metric in COST_METRICS:
        ends = pair.get("latency_ci") if metric == "decode_ms" else None
        if stat in ("lower", "upper"):
            return ends[stat == "upper"] if ends else None
        return pair.get(COST_METRICS[metric])
    if metric in COUNT_METRICS:
        return pair[metric]
    if metric != pair["metric"]:
        return _of_cells(pair, cells, metric, stat)
    if stat in ("lower", "upper"):
        # a ratio is what users set limits on, its logarithm is only judged
        ends = pair["ratio_ci"] if pair["scale"] == "log_ratio" else pair["difference_ci"]
        return ends[stat == "upper"] if ends else None
    return pair[f"{stat}_score" if stat in ("reference", "candidate") else stat]


def _of_cells(pair: Record, cells: Sequence[Record], metric: str, stat: str) -> float | None:
    values = [cell_value(pair, cells, arm, metric) for arm in ("reference", "candidate")]
    reference, candidate = values
    if stat in ("reference", "candidate"):
        return values[stat == "candidate"]
    if reference is None or candidate is None or stat not in ("difference", "ratio"):
        return None
    if stat == "difference":
        return candidate - reference
    return candidate / reference if reference else None


def cell_value(pair: Record, cells: Sequence[Record], arm: str, metric: str) -> float | None:
    """Return a further metric of the cell of one arm (`reference` or `candidate`) of a pair."""
    value: float | None = (_cell_of(pair, cells, arm).get("metrics") or {}).get(metric)
    return value


def _cell_of(pair: Record, cells: Sequence[Record], arm: str) -> Record:
    """Return the cell of one arm of a pair, an empty one where there is none."""
    place = pair["task"], pair["ctx"], pair[arm]
    return next((cell for cell in cells if (cell["task"], cell["ctx"], cell["mode"]) == place), {})
