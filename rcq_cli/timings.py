"""What times of decode steps say, pure: when they have settled, percentiles, ratio, growth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from rcq_cli.stats import Interval, percentile, t_interval

MINIMUM_N = {50: 5, 90: 29, 95: 59, 99: 299}
"""Steps from which on the largest one lies above the percentile in 95 % of all cases: 1 - p^n >= 0.95."""
SPAN = 8
"""Steps on either side that a settled series is judged by."""
WARM_MIN, WARM_MAX = 2 * SPAN, 200
OUTLIER = 14.8
"""Distance from the median in units of the median absolute deviation."""
DISCARDED = 2
"""Steps after each switch between two arms that are not compared."""
NOISE_RATIO, NOISE_NS = 0.01, 50_000
"""Least difference that counts, as a share and as a time."""


def settled(steps_ns: Sequence[int]) -> bool:
    """Say whether the last eight steps have the median of the eight before, within 2 %."""
    if len(steps_ns) < WARM_MIN:
        return False
    last, before = median(steps_ns[-SPAN:]), median(steps_ns[-2 * SPAN : -SPAN])
    return abs(last - before) < 0.02 * before


def summary(steps_ns: Sequence[int]) -> dict[str, Any]:
    """Return the record of a series of steps in milliseconds.

    A percentile that the number of steps does not support is null with the reason; outliers are counted and
    kept. Percentiles are nearest rank.
    """
    record: dict[str, Any] = {"n": len(steps_ns)}
    for percent in MINIMUM_N:
        record |= quantile_ms(steps_ns, percent, f"p{percent}")
    if not steps_ns:
        return record | dict.fromkeys(("max", "mean", "mad")) | {"status": "no_steps", "outliers": 0}
    middle = median(steps_ns)
    mad = median(abs(ns - middle) for ns in steps_ns)
    outliers = sum(abs(ns - middle) > OUTLIER * mad for ns in steps_ns) if mad else 0
    return record | {
        "max": max(steps_ns) / 1e6,
        "mean": fmean(steps_ns) / 1e6,
        "mad": mad / 1e6,
        "outliers": outliers,
    }


def quantile_ms(steps_ns: Sequence[int], percent: int, name: str) -> dict[str, Any]:
    """Return the percentile in milliseconds under `name`, or null and `<name>_status` when n is too small."""
    needed = MINIMUM_N[percent]
    if len(steps_ns) < needed:
        return {name: None, f"{name}_status": f"needs n >= {needed}, n is {len(steps_ns)}"}
    return {name: percentile(steps_ns, percent) / 1e6}


class Ratio(NamedTuple):
    """Candidate over reference, from pairs of interleaved blocks."""

    value: float
    ci: Interval | None
    """95 %, None for fewer than two pairs."""
    pairs: int
    floor: float
    """Largest deviation from 1 that counts as none."""
    verdict: str
    """`faster`, `slower`, `same` or `inconclusive`."""


def paired_ratio(
    reference: Sequence[Sequence[int]], candidate: Sequence[Sequence[int]], floor: float = 0.0
) -> Ratio:
    """Return exp of the mean over pairs of log(median candidate / median reference), with a t interval.

    Each block is the steps between two switches; its first two are left out. The noise floor is the largest
    of 1 %, 50 us and `floor`.
    """
    middles = [[median(block[DISCARDED:]) for block in arm] for arm in (reference, candidate)]
    logs = [math.log(b / a) for a, b in zip(*middles, strict=True)]
    least = max(NOISE_RATIO, NOISE_NS / median(middles[0]), floor)
    estimate = t_interval(logs) if len(logs) > 1 else None
    value = math.exp(fmean(logs))
    if estimate is None:
        return Ratio(value, None, len(logs), least, "inconclusive")
    ci = Interval(*(math.exp(end) for end in estimate.ci))
    return Ratio(value, ci, len(logs), least, _verdict(ci, least))


def _verdict(ci: Interval, floor: float) -> str:
    if ci.upper < 1 - floor:
        return "faster"
    if ci.lower > 1 + floor:
        return "slower"
    return "same" if ci.lower > 1 - floor and ci.upper < 1 + floor else "inconclusive"


def abba(pairs: int) -> list[tuple[str, str]]:
    """Return the order of `pairs` pairs of blocks: AB, BA, AB, BA, so that a drift hits both arms alike."""
    return [("reference", "candidate") if i % 2 == 0 else ("candidate", "reference") for i in range(pairs)]


def growth_exponent(sizes: Sequence[int], times: Sequence[float]) -> float | None:
    """Return e of time ~ size^e by least squares in logarithms; None for fewer than two sizes."""
    if len(set(sizes)) < 2:
        return None
    x, y = [math.log(size) for size in sizes], [math.log(time) for time in times]
    mx, my = fmean(x), fmean(y)
    return math.fsum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / math.fsum(
        (a - mx) ** 2 for a in x
    )
