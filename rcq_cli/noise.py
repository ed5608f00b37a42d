"""How much of a candidate's change the reference shows against itself (statistics.md section 9)."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from rcq_cli import stats
from rcq_cli.pairing import Row

FLIP_MARGIN = 0.02
"""Largest excess of flips, upper end of its interval, that still counts as the noise of the reference."""
UNSTABLE = 0.05
"""Above this share of flips the reference does not agree with itself."""
INDISTINGUISHABLE = "indistinguishable from dense noise"
_ARMS = (("reference", "again"), ("candidate", "candidate"))


class Three(NamedTuple):
    """One sample in the reference, in its second run and in the candidate."""

    reference: Row
    again: Row
    candidate: Row


def noise_floor(
    reference: Sequence[Row],
    again: Sequence[Row],
    candidate: Sequence[Row],
    *,
    metric: str = "accuracy",
    flip_margin: float = FLIP_MARGIN,
    alpha: float = stats.ALPHA,
) -> dict[str, Any]:
    """Compare the candidate's flips with those of a second run of the reference itself.

    `excess` is the share of samples that flip in the candidate minus the share that flip in `again`, with
    Tango's interval; `text` says the same of the answers' texts. It never replaces a verdict.
    """
    samples = _shared(reference, again, candidate)
    if not samples:
        return {"n": 0, "excess": None, "labels": [], "reason": "the three runs share no sample"}
    found = _excess(samples, lambda row: row["scores"][metric], alpha)
    labels = [INDISTINGUISHABLE] if found["excess_ci"][1] <= flip_margin else []
    labels += ["dense arm unstable"] if found["reference_flip_rate"] > UNSTABLE else []
    return {
        "n": len(samples),
        **found,
        "text": _excess(samples, lambda row: row.get("text"), alpha),
        "first_divergence_p50": _divergence(samples),
        **_moved(samples),
        "flip_margin": flip_margin,
        "labels": labels,
    }


def _shared(*arms: Sequence[Row]) -> list[Three]:
    rows = [{row["sample_id"]: row for row in arm if row["status"] == "ok"} for arm in arms]
    shared = sorted(set.intersection(*(set(found) for found in rows)))
    return [Three(*(found[i] for found in rows)) for i in shared]


def _excess(samples: Sequence[Three], of: Callable[[Row], Any], alpha: float) -> dict[str, Any]:
    flips = [(of(s.again) != of(s.reference), of(s.candidate) != of(s.reference)) for s in samples]
    noise, own, n = flips.count((True, False)), flips.count((False, True)), len(flips)
    return {
        "reference_flip_rate": sum(first for first, _ in flips) / n,
        "candidate_flip_rate": sum(second for _, second in flips) / n,
        "excess": (own - noise) / n,
        "excess_ci": list(stats.tango_interval(noise, own, n, alpha)),
        "mcnemar_p": stats.mcnemar_exact(noise, own),
    }


def _divergence(samples: Sequence[Three]) -> dict[str, float | None]:
    """Return the median token at which answers leave the reference's, null where none does."""
    arms = {
        "reference": [_first_difference(s.reference, s.again) for s in samples],
        "candidate": [_first_difference(s.reference, s.candidate) for s in samples],
    }
    left = {name: [at for at in places if at is not None] for name, places in arms.items()}
    return {name: median(places) if places else None for name, places in left.items()}


def _first_difference(one: Row, two: Row) -> int | None:
    ours, theirs = one.get("output_ids") or [], two.get("output_ids") or []
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return i
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _moved(samples: Sequence[Three]) -> dict[str, Any]:
    """Return, for scored text, how far the mean loss moved (nats) and how often the likeliest token did."""
    found: dict[str, Any] = {}
    if all("nll_suffix" in row["scores"] for sample in samples for row in sample):
        found["abs_nll_difference"] = {
            name: sum(abs(_nll(getattr(s, arm)) - _nll(s.reference)) for s in samples) / len(samples)
            for name, arm in _ARMS
        }
    flips = {name: _mean_flip([getattr(s, arm) for s in samples]) for name, arm in _ARMS}
    if any(value is not None for value in flips.values()):
        found["top1_flip"] = flips
    return found


def _nll(row: Mapping[str, Any]) -> float:
    return float(row["scores"]["nll_suffix"])


def _mean_flip(rows: Sequence[Row]) -> float | None:
    known = [row["scores"]["top1_flip"] for row in rows if row["scores"].get("top1_flip") is not None]
    return sum(known) / len(known) if len(known) == len(rows) else None
