"""Verdicts: what an interval, an adjusted p and the state of a comparison amount to."""

import math
from collections.abc import Sequence
from typing import Any

from rcq_cli import stats
from rcq_cli.pairing import Pairing
from rcq_cli.power import deciding_n

Pair = dict[str, Any]

FEWEST_CLUSTERS = 5
"""Below this many clusters an interval says too little about the next cluster to pass."""
MID_P = "mid-p"
"""How `p_method` ends where McNemar's p is the mid-p."""
FLOOR = 0.20
"""A reference score below this leaves nothing to lose: the cell is uninformative."""

_AFFORDABLE = 1100
"""Samples of a cell that anyone can be asked for: twice those of a release (550), the most that power is
tabulated for. A flip rate that still decides nothing there is a fault of the task."""
_DECIDED_LABELS = ("worse but within margin", "better")


def finish_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """Adjust p over all cells of each candidate (Holm) and settle every verdict.

    Macro means are a family of their own: they repeat the cells.
    """
    families: dict[tuple[str, str, bool], list[int]] = {}
    for i, pair in enumerate(pairs):
        if pair["p_value"] is not None:
            families.setdefault((pair["reference"], pair["candidate"], pair["macro"]), []).append(i)
    finished = [dict(pair) for pair in pairs]
    for members in families.values():
        adjusted = stats.holm([pairs[i]["p_value"] for i in members])
        for i, p in zip(members, adjusted, strict=True):
            finished[i]["p_holm"], finished[i]["holm_family"] = p, len(members)
            if finished[i]["mcnemar_p"] is not None:
                finished[i]["mcnemar_mid_p_holm" if _by_mid_p(finished[i]) else "mcnemar_p_holm"] = p
    for pair in finished:
        settle(pair)
    return finished


def _by_mid_p(pair: Pair) -> bool:
    return str(pair["p_method"]).endswith(MID_P)


def close_pair(pair: Pair, pairing: Pairing) -> None:
    """Collect whatever forbids a PASS."""
    reasons = [problem.what for problem in pairing.problems] + pairing.cannot_pass
    if pair["difference"] is not None:
        reasons += _uninformative(pair)
        cluster = pair["cluster"] or {"key": "none"}
        if cluster["key"] != "none" and cluster["k"] < FEWEST_CLUSTERS:
            pair["labels"].append("too few clusters")
            reasons.append(
                f"too few clusters: {cluster['k']} ({cluster['key']}), {FEWEST_CLUSTERS} are needed to pass"
            )
    pair["cannot_pass"] = reasons


def _uninformative(pair: Pair) -> list[str]:
    if pair["scale"] != "score" or not pair["higher_is_better"]:
        return []
    needed = stats.smallest_passing_n(pair["margin"], pair["alpha"])
    found = []
    if pair["reference_score"] < FLOOR:
        found.append(f"uninformative: the reference scores {pair['reference_score']:.3f}, below {FLOOR:.2f}")
    if pair["reference_score"] == pair["candidate_score"] == 1 and pair["n"] < needed:
        found.append(
            f"uninformative: both score 1 on {pair['n']} samples; {needed} are needed for a margin of "
            f"{pair['margin']:g}"
        )
    pair["labels"] += ["uninformative"] if found else []
    return found


def settle(pair: Pair) -> None:
    """Set verdict, labels and reasons from the interval, the adjusted p and what forbids a PASS."""
    labels = [label for label in pair["labels"] if label not in _DECIDED_LABELS]
    pair["verdict"], reasons = "inconclusive", list(pair["cannot_pass"])
    if pair["difference_ci"] is None:
        if pair["difference"] is not None:
            reasons.append(f"n = {pair['n']} gives no interval")
    else:
        gain, low, high = _gain(pair)
        limit = _limit(pair)
        sure = pair["p_holm"] is not None and pair["p_holm"] < stats.SIGNIFICANCE
        lost = high < -limit or (gain <= -limit + 1e-12 and high < 0 and sure)
        if lost and "uninformative" not in labels:
            pair["verdict"] = "fail"
            reasons.append(_loss_text(pair))
        elif low > -limit and not reasons:
            pair["verdict"] = "pass"
            labels += ["worse but within margin"] if high < 0 else []
        elif not low > -limit:
            reasons.append(_undecided_text(pair, gain, low, high))
            if gain <= -limit + 1e-12 and high < 0 and pair["p_holm"] is not None:
                reasons.append(
                    f"the loss is as large as the margin, but p = {pair['p_holm']:.3g}, adjusted for "
                    f"{pair['holm_family']} cells (Holm), is not below {stats.SIGNIFICANCE:g}"
                )
        labels += ["better"] if low > 0 else []
    pair["labels"], pair["reasons"] = labels, reasons


def _gain(pair: Pair) -> tuple[float, float, float]:
    """Return difference, lower and upper end, turned so that less is worse."""
    difference, (lower, upper) = pair["difference"], pair["difference_ci"]
    return (difference, lower, upper) if pair["higher_is_better"] else (-difference, -upper, -lower)


def _limit(pair: Pair) -> float:
    return math.log1p(pair["margin"]) if pair["scale"] == "log_ratio" else float(pair["margin"])


def _loss_text(pair: Pair) -> str:
    if pair["scale"] == "log_ratio":
        return f"ratio {pair['ratio'] or math.exp(pair['difference']):.4g} is above {1 + pair['margin']:g}"
    if pair["higher_is_better"]:
        return f"difference {pair['difference']:.4g} is below -{pair['margin']:g}"
    return f"difference {pair['difference']:.4g} is above {pair['margin']:g}"


def _undecided_text(pair: Pair, gain: float, low: float, high: float) -> str:
    lower, upper = pair["difference_ci"]
    level = 100 * (1 - 2 * pair["alpha"])
    what = (
        f"the {level:g} % interval [{lower:+.3f}, {upper:+.3f}] does not exclude a loss of {_limit(pair):.3g}"
    )
    needed = _needed_n(pair, gain, low, high)
    # a task that ran more than a release, such as a mean over many parts, can be doubled like any other
    if needed is None or needed > max(_AFFORDABLE, 2 * pair["n"]):
        rate = "" if pair["flip_rate"] is None else f" at a flip rate of {pair['flip_rate']:.2f}"
        return f"{what}; no affordable n decides{rate}: fix the task (controls, easier prompts) instead"
    if needed <= pair["n"]:
        return what
    return f"{what}; about {needed} samples like these would decide"


def _needed_n(pair: Pair, gain: float, low: float, high: float) -> int | None:
    """Return about how many samples would decide, None when no number does."""
    n: int = pair["n"]
    gap = gain + _limit(pair)
    family = pair["p_holm"] / pair["p_value"] if pair["p_value"] and pair["p_holm"] else 1.0
    if pair["both"] is not None and not pair["macro"]:
        b, c = pair["reference_only"], pair["candidate_only"]
        level = {"alpha": pair["alpha"], "family": family, "mid_p": _by_mid_p(pair)}
        alone = deciding_n(b, c, n, pair["margin"], **level)
        ends = pair["cluster"]["ci"]
        if alone is None or not ends:
            return alone
        # a loss beyond the margin has to be told from none, a smaller one from the margin
        half: float = (ends[1] - ends[0]) / 2
        return max(alone, math.ceil(n * (half / (gap if gap > 0 else gain)) ** 2))
    if abs(gap) < 1e-9:
        return None
    return math.ceil(n * ((gain - low) / gap) ** 2) if gap > 0 else math.ceil(n * ((high - gain) / gain) ** 2)
