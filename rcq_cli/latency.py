"""Step times of two modes that answered side by side in one process, and the gate on their ratio.

Modes of one comparison take turns sample by sample, from one prefill each, so a sample is a paired block:
what a machine does meanwhile meets both. Times of runs that did not take turns are shown and never gated.
"""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from rcq_cli import stats
from rcq_cli.expressions import GateResult, gate_result, pair_name

Timing = Mapping[str, Any]

DISCARDED = 2
"""First steps after each switch of the mode, which pay for cold caches."""
FEWEST_BLOCKS = 5
"""Fewer paired blocks give no interval that a gate may rest on."""


def paired_times(
    reference: Mapping[str, Timing], candidate: Mapping[str, Timing], alpha: float = stats.ALPHA
) -> dict[str, Any]:
    """Return the `latency_*` fields of a pair from the clock's records, by sample id.

    Two answers were side by side when they share one prefill: its time, in ns, is then the same number. The
    ratio is exp of the mean over blocks of log(median step of the candidate / median step of the reference),
    its interval Student's. Without enough such samples `latency_paired` is false and there is neither.
    """
    ratios = []
    for sample in sorted(reference.keys() & candidate.keys()):
        one, two = reference[sample], candidate[sample]
        steps = [record["step_ns"][DISCARDED:] for record in (one, two)]
        shared = one.get("prefill_ns") and one.get("prefill_ns") == two.get("prefill_ns")
        if shared and all(steps) and all(min(times) > 0 for times in steps):
            ratios.append(math.log(median(steps[1]) / median(steps[0])))
    if len(ratios) < max(FEWEST_BLOCKS, len(reference.keys() & candidate.keys())):
        return {"latency_paired": False, "latency_blocks": len(ratios)}
    estimate = stats.t_interval(ratios, alpha)
    assert estimate is not None  # there are at least five blocks
    return {
        "latency_paired": True,
        "latency_blocks": len(ratios),
        "latency_ratio": math.exp(estimate.mean),
        "latency_ci": [math.exp(end) for end in estimate.ci],
    }


def latency_gate(pair: Mapping[str, Any], margin: float, *, strict: bool) -> GateResult:
    """Judge a pair's step time by the rules of every verdict, on the logarithm of the ratio."""
    limit = 1 + margin
    expr = f"profile.decode_ms.ratio > {limit:g}"
    if not pair.get("latency_paired"):
        reason = f"step times of {pair_name(pair)} cannot be gated: {why_not_gated(pair)}"
        return gate_result(pair, expr, None, "not evaluated", 5, reason)
    ratio, (low, high) = pair["latency_ratio"], pair["latency_ci"]
    told = f"step time {ratio:.3g}x the reference's [{low:.3g}, {high:.3g}]"
    if low > limit or (ratio >= limit and low > 1):
        return gate_result(pair, expr, ratio, "fail", 3, f"{told} is above {limit:g}x")
    if high < limit:
        return gate_result(pair, expr, ratio, "pass", 0)
    reason = f"{told} does not exclude {limit:g}x; more samples would decide"
    return gate_result(pair, expr, ratio, "inconclusive", 3 if strict else 0, reason)


def why_not_gated(pair: Mapping[str, Any]) -> str:
    """Return why the times of a pair are only shown."""
    if pair.get("latency_status") == "timing_contract_differs":
        return "the machines or settings of the two runs differ"
    if pair.get("latency_status") == "not_measured":
        return "no decode step was timed"
    return f"only runs that took turns in one process are, on {FEWEST_BLOCKS} samples or more"
