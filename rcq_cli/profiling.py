"""Time and memory of decode steps: warm up, time the phases, then let two modes take turns.

Time and attribution are two passes; the ratio to dense comes from a third one without any clock inside a
step. Nothing here is torch: an arm is a `Stepper`, a phase a name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from rcq_cli import timings
from rcq_cli.phases import PHASES, UNATTRIBUTED
from rcq_cli.readings import Reading

if TYPE_CHECKING:
    from rcq_cli.engine.clock import StepClock, StepTimes
    from rcq_cli.engine.stepper import Stepper

Json = Any
INSIDE_ATTENTION = ("score", "select", "rank_check", "page_in", "bound")
"""Phases that a mode either marks or computes inside `attend`."""


class Effort(NamedTuple):
    """How long to measure; seconds are limits, a slow machine measures fewer steps and says so."""

    steps: int = 64
    pairs: int = 12
    block: int = 25
    warm_s: float = 5.0
    steps_s: float = 10.0
    pairs_s: float = 16.0


LEAST_STEPS, LEAST_BLOCK, LEAST_PAIRS = 5, 5, 4


@dataclass(slots=True)
class Warmth:
    """What the steps before the measurement showed."""

    cold_first_ns: int = 0
    steps_ns: list[int] = field(default_factory=list)
    settled: bool = False

    def to_json(self) -> dict[str, Json]:
        """Return the record; these steps are in no percentile."""
        return {
            "cold_first_ms": self.cold_first_ns / 1e6,
            "warmup_steps": len(self.steps_ns),
            "settled": self.settled,
        }


def warm_up(step: Callable[[], int], seconds: float, now: Callable[[], float] = time.monotonic) -> Warmth:
    """Take steps until they have settled, at most 200 and about `seconds`; the first one is kept apart."""
    warmth, began = Warmth(), now()
    while len(warmth.steps_ns) < timings.WARM_MAX:
        warmth.steps_ns.append(step())
        warmth.settled = timings.settled(warmth.steps_ns)
        if warmth.settled or (now() - began > seconds and len(warmth.steps_ns) >= LEAST_STEPS):
            break
    warmth.cold_first_ns = warmth.steps_ns[0]
    return warmth


class Timed(NamedTuple):
    """Steps under a clock, and what they read."""

    steps: Sequence[StepTimes]
    reads: Sequence[Mapping[str, int]]
    """By phase, one entry per step; empty for a mode whose reads nobody counts."""


def nothing() -> None:
    """Do nothing between two steps: the processor's caches hold what the step before left."""


def time_phases(
    arm: Stepper, clock: StepClock, effort: Effort, between: Callable[[], None] = nothing
) -> Timed:
    """Take steps under the clock, at most `effort.steps`; `between` runs before each, outside its time."""
    reads = []
    until = time.monotonic() + effort.steps_s
    for count in range(effort.steps):
        between()
        arm.step(clock)
        found = arm.reads()
        if found is not None:
            reads.append(found)
        if time.monotonic() > until and count + 1 >= LEAST_STEPS:
            break
    return Timed(clock.steps(), reads)


def take_turns(
    reference: Stepper,
    candidate: Stepper,
    effort: Effort,
    step_ns: tuple[int, int],
    between: Callable[[], None] = nothing,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return blocks of step times of both arms, ordered A B B A; `step_ns` is what a step of each takes.

    `between` runs before each step, outside its time.
    """

    def step(arm: Stepper) -> int:
        between()
        return arm.step()

    pairs, block = plan_pairs(effort, sum(step_ns))
    taken: dict[str, list[list[int]]] = {"reference": [], "candidate": []}
    arms = {"reference": reference, "candidate": candidate}
    for pair in timings.abba(pairs):
        for name in pair:
            taken[name].append([step(arms[name]) for _ in range(block)])
    return taken["reference"], taken["candidate"]


def plan_pairs(effort: Effort, pair_ns: int) -> tuple[int, int]:
    """Return pairs and steps per block that fit the time: first the blocks get shorter, then fewer."""
    room = effort.pairs_s * 1e9 / max(pair_ns, 1)
    block = min(effort.block, max(LEAST_BLOCK, int(room / effort.pairs)))
    pairs = min(effort.pairs, max(LEAST_PAIRS, int(room / block)))
    return pairs, block


def phase_rows(timed: Timed, ceiling: Reading | None, *, reference: bool) -> list[dict[str, Json]]:
    """Return one row per phase and the rest; shares are of the summed step and sum to 1.

    `reference`: a dense arm, which has no certificate phases at all.
    """
    entered = {name for step in timed.steps for name in step.entries}
    covered = {part: whole for step in timed.steps for part, whole in step.covered.items()}
    if not reference and not entered & set(INSIDE_ATTENTION):
        covered = dict.fromkeys(INSIDE_ATTENTION, "attend")
    rows = []
    for name in (*PHASES, UNATTRIBUTED):
        if name == "model" and name not in entered:
            rows.append(_absent(name, "not_applicable", "no model runs here"))
        elif reference and name not in (*entered, UNATTRIBUTED):
            rows.append(_absent(name, "not_applicable", "dense attention has no such phase"))
        elif name in covered and name not in entered:
            rows.append(_absent(name, "merged", f"not told apart: the time is in {covered[name]}"))
        else:  # the mode marks its phases, so one that was never entered took no time
            parts = [part for part, whole in covered.items() if whole == name and part not in entered]
            rows.append(_measured(name, timed, parts, ceiling))
    return rows


_EMPTY = ("p50_ms", "p90_ms", "share", "bytes", "gb_per_s", "ceiling_share")


def _absent(name: str, status: str, detail: str) -> dict[str, Json]:
    return {"name": name, **dict.fromkeys(_EMPTY), "calls": 0, "status": status, "detail": detail}


def _measured(name: str, timed: Timed, parts: Sequence[str], ceiling: Reading | None) -> dict[str, Json]:
    """Return the row of a phase that has marks; `parts` are the phases without, whose bytes it moves."""
    times = [step.of(name) or 0 for step in timed.steps]
    row: dict[str, Json] = {"name": name}
    row |= timings.quantile_ms(times, 50, "p50_ms") | timings.quantile_ms(times, 90, "p90_ms")
    row["share"] = sum(times) / sum(step.step_ns for step in timed.steps)
    row["calls"] = fmean(step.entries.get(name, 0) for step in timed.steps)
    count = _bytes((name, *parts), timed)
    row["bytes"] = count
    if count is None:
        row["bytes_status"] = "not_counted"
    rate = count / fmean(times) if count and any(times) else None
    row["gb_per_s"] = rate
    row["ceiling_share"] = rate / ceiling.value if rate and ceiling and ceiling.value else None
    row["status"] = "ok"
    return row


def _bytes(names: Sequence[str], timed: Timed) -> int | None:
    """Return the mean bytes a step moves in these phases, None where nobody counts any of them."""
    if not timed.reads or not any(name in timed.reads[0] for name in names):
        return None
    return round(fmean(sum(reads.get(name, 0) for name in names) for reads in timed.reads))


def layer_rows(timed: Timed, layers: Sequence[int]) -> list[dict[str, Json]]:
    """Return the phases of each layer's attention from the steps that tell layers apart; `layers` names them.

    Empty where no step does.
    """
    steps = [step.layers for step in timed.steps if step.layers]
    rows = []
    for place, layer in enumerate(layers if steps else ()):
        mine = [step[place] for step in steps]
        names = [name for name in PHASES if any(name in spent for spent in mine)]
        mean_ms = {name: fmean(spent.get(name, 0) for spent in mine) / 1e6 for name in names}
        whole = timings.quantile_ms([sum(spent.values()) for spent in mine], 50, "p50_ms")
        rows.append({"layer": layer, "steps": len(steps), **whole, "phases_mean_ms": mean_ms})
    return rows


def step_record(timed: Timed) -> dict[str, Json]:
    """Return percentiles of the steps under the clock."""
    return timings.summary([step.step_ns for step in timed.steps])


def ratio_record(
    reference: Sequence[Sequence[int]], candidate: Sequence[Sequence[int]], noisy: str
) -> dict[str, Json]:
    """Return dense steps, ratio with its interval and the verdict, which a noisy machine does not get."""
    # neighbouring blocks of one arm show what this machine calls equal
    alike = timings.paired_ratio(reference[0::2], reference[1::2]) if len(reference) > 3 else None
    floor = (alike.ci.upper - alike.ci.lower) / 2 if alike and alike.ci else 0.0
    found = timings.paired_ratio(reference, candidate, floor)
    kept = [ns for block in reference for ns in block[timings.DISCARDED :]]
    return {
        "dense_step_ms": timings.summary(kept),
        "ratio_to_dense": found.value,
        "ratio_ci": None if found.ci is None else list(found.ci),
        "ratio": {
            "pairs": found.pairs,
            "steps_per_block": len(reference[0]),
            "discarded_per_block": timings.DISCARDED,
            "candidate_p50_ms": median(ns for block in candidate for ns in block[timings.DISCARDED :]) / 1e6,
            "noise_floor": found.floor,
            "verdict": "inconclusive" if noisy else found.verdict,
            "reason": noisy,
        },
    }


def totals(entries: Sequence[Mapping[str, Json]], dense_equivalent: int) -> dict[str, Json]:
    """Return tier 1, device and system bytes beside what a dense 16-bit cache holds: all three, always.

    The weights are the same in every mode and stand in none of them.
    """

    def of(*tiers: str) -> int:
        return sum(entry["bytes"] for entry in entries if entry["tier"] in tiers)

    return {
        "tier1_bytes": of("device"),
        "device_total_bytes": of("device", "scratch"),
        "system_total_bytes": of("device", "scratch", "host"),
        "dense_equivalent_bytes": dense_equivalent,
    }


def growth(cells: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """Return, per mode measured at several contexts, the exponent e of step ~ ctx^e."""
    found = []
    for mode in dict.fromkeys(cell["mode"] for cell in cells):
        mine = [c for c in cells if c["mode"] == mode and c["step_ms"]["p50"] is not None]
        attention = [(c["ctx"], _attention_ms(c)) for c in mine]
        whole = timings.growth_exponent([c["ctx"] for c in mine], [c["step_ms"]["p50"] for c in mine])
        known = [(ctx, ms) for ctx, ms in attention if ms]
        part = timings.growth_exponent([ctx for ctx, _ in known], [ms for _, ms in known])
        if whole is not None:
            found.append({"mode": mode, "step_exponent": whole, "attention_exponent": part})
    return found


def _attention_ms(cell: Mapping[str, Json]) -> float:
    """Return the mean time of a step outside the model, in milliseconds."""
    share = sum(row["share"] or 0 for row in cell["phases"] if row["name"] not in ("model", UNATTRIBUTED))
    return float(share * cell["step_ms"]["mean"])
