"""Judge a candidate against a reference, cell by cell: the objects under `pairs` of `rcq compare --json`.

A difference is candidate minus reference. A verdict is PASS when the whole interval lies above minus the
margin, FAIL when it lies below it, or when the loss is at least the margin and its sign is not in doubt, else
INCONCLUSIVE. Losses of perplexity are logarithms of ratios with the sign turned.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rcq_cli import stats
from rcq_cli.pairing import Pairing, PairSpec, Row, pair_rows
from rcq_cli.power import POWER, minimum_detectable_loss
from rcq_cli.stats import Interval, MeanEstimate
from rcq_cli.verdict import MID_P, Pair, close_pair, finish_pairs

FEWEST_DISCORDANT = {False: 6, True: 5}
"""With fewer discordant pairs McNemar's p (its mid-p: True) cannot be below 0.05."""
CRITICAL = 0.999
"""A fractional score from here on counts as a full answer."""

_EMPTY = dict.fromkeys(
    (
        *("both", "reference_only", "candidate_only", "neither", "reference_score", "candidate_score"),
        *("difference", "difference_ci", "ratio", "ratio_ci", "ci_method", "newcombe_ci", "bootstrap_ci"),
        *(
            "cluster",
            "mcnemar_p",
            "mcnemar_p_holm",
            "mcnemar_mid_p",
            "mcnemar_mid_p_holm",
            "p_value",
            "p_method",
            "p_holm",
            "noninferiority_p",
        ),
        *("flip_rate", "text_identical", "critical", "truncated", "mde"),
    )
)


@dataclass(frozen=True, slots=True)
class Measured:
    """The paired differences of one cell."""

    sums: tuple[float, ...]
    """Difference times weight, one per pair."""
    weights: tuple[float, ...]
    clusters: tuple[str, ...]
    binary: bool

    def grouped(self) -> tuple[list[float], list[float]]:
        """Return the sums and sizes of the clusters, in order of their names."""
        names = sorted(set(self.clusters))
        members = {name: [i for i, own in enumerate(self.clusters) if own == name] for name in names}
        sums = [math.fsum(self.sums[i] for i in members[name]) for name in names]
        return sums, [math.fsum(self.weights[i] for i in members[name]) for name in names]

    @property
    def clustered(self) -> bool:
        """Whether some samples share a cluster."""
        return len(set(self.clusters)) < len(self.clusters)


# -- public -------------------------------------------------------------------------------------------------


def judge(cells: Sequence[tuple[PairSpec, Sequence[Row], Sequence[Row]]]) -> list[Pair]:
    """Judge every cell of one `compare`, add macro means of tasks of several parts, correct for their number.

    Each entry is a spec with the rows of the reference and of the candidate. Headline pairs (`headline` true)
    are the macro means and the cells of tasks of one part.
    """
    pairs = [judge_cell(*cell) for cell in cells]
    groups: dict[tuple[str, int | None, str], list[int]] = {}
    for i, (spec, _, _) in enumerate(cells):
        if "/" in spec.task:
            groups.setdefault((spec.task.split("/")[0], spec.ctx, spec.candidate), []).append(i)
    for members in groups.values():
        if len(members) > 1:
            for i in members:
                pairs[i]["headline"] = False
            pairs.append(judge_macro([cells[i] for i in members]))
    return finish_pairs(pairs)


def judge_cell(spec: PairSpec, reference: Sequence[Row], candidate: Sequence[Row]) -> Pair:
    """Compare the rows of one cell; the verdict is that of a family of one until `finish_pairs`."""
    pairing = pair_rows(spec, reference, candidate)
    pair = _header(spec, pairing)
    if pairing.comparable and pairing.paired:
        _fill_paired(pair, spec, pairing)
    elif pairing.comparable:
        _fill_independent(pair, spec, pairing)
    close_pair(pair, pairing)
    return finish_pairs([pair])[0]


def judge_macro(cells: Sequence[tuple[PairSpec, Sequence[Row], Sequence[Row]]]) -> Pair:
    """Compare the unweighted mean over the parts of a task, each part a stratum."""
    specs = [spec for spec, _, _ in cells]
    pairings = [pair_rows(*cell) for cell in cells]
    head = specs[0]
    merged = Pairing([], [], sum(p.planned for p in pairings))
    for spec, pairing in zip(specs, pairings, strict=True):
        # the problems stand with the parts; here they only forbid a PASS
        merged.cannot_pass += [f"{spec.task}: {problem.what}" for problem in pairing.problems]
        merged.cannot_pass += [f"{spec.task}: {reason}" for reason in pairing.cannot_pass]
        merged.reference += pairing.reference
        merged.candidate += pairing.candidate
        merged.labels += [label for label in pairing.labels if label not in merged.labels]
    pair = _header(head, merged) | {"task": head.task.split("/")[0], "metric": "macro", "macro": True}
    if all(pairing.comparable and pairing.paired for pairing in pairings):
        _fill_macro(pair, specs, pairings)
    close_pair(pair, merged)
    return finish_pairs([pair])[0]


# -- measuring ----------------------------------------------------------------------------------------------


def _header(spec: PairSpec, pairing: Pairing) -> Pair:
    return {
        "task": spec.task,
        "ctx": spec.ctx,
        "reference": spec.reference,
        "candidate": spec.candidate,
        "metric": spec.metric,
        "higher_is_better": spec.higher_is_better and not spec.log_ratio,
        "scale": "log_ratio" if spec.log_ratio else "score",
        "headline": True,
        "macro": False,
        "n": min(len(pairing.reference), len(pairing.candidate)) if pairing.comparable else 0,
        "n_planned": pairing.planned,
        **_EMPTY,
        "holm_family": 1,
        "margin": spec.margin,
        "lifted": list(spec.lifted),
        "alpha": spec.alpha,
        "verdict": "inconclusive",
        "labels": list(pairing.labels),
        "reasons": [],
        "cannot_pass": [],
        "problems": [asdict(problem) for problem in pairing.problems],
    }


def measure(spec: PairSpec, pairing: Pairing) -> Measured:
    """Return the difference, weight and cluster of every pair."""
    reference, candidate = _values(spec, pairing.reference), _values(spec, pairing.candidate)
    weights = [1.0] * len(reference)
    if spec.log_ratio:
        weights = [float(row["scores"].get(spec.weight_key) or 1) for row in pairing.reference]
    single = spec.cluster == "none"
    return Measured(
        tuple(w * (c - r) for r, c, w in zip(reference, candidate, weights, strict=True)),
        tuple(weights),
        tuple(row["sample_id"] if single else str(row["cluster"]) for row in pairing.reference),
        not spec.log_ratio and all(value in (0, 1) for value in reference + candidate),
    )


def _values(spec: PairSpec, rows: Sequence[Row]) -> list[float]:
    if not spec.log_ratio:
        return [float(row["scores"][spec.metric]) for row in rows]
    scores = [row["scores"] for row in rows]
    return [float(s[spec.nll_key]) if spec.nll_key in s else math.log(s[spec.metric]) for s in scores]


def _fill_paired(pair: Pair, spec: PairSpec, pairing: Pairing) -> None:
    measured = measure(spec, pairing)
    reference, candidate = _values(spec, pairing.reference), _values(spec, pairing.candidate)
    total = math.fsum(measured.weights)
    means = [
        math.fsum(w * v for w, v in zip(measured.weights, values, strict=True)) / total
        for values in (reference, candidate)
    ]
    if spec.log_ratio:
        means = [math.exp(mean) for mean in means]
    pair |= {
        "reference_score": means[0],
        "candidate_score": means[1],
        "difference": math.fsum(measured.sums) / total,
        "text_identical": sum(
            r.get("text") == c.get("text") for r, c in zip(pairing.reference, pairing.candidate, strict=True)
        ),
    }
    if not spec.log_ratio:
        _count_outcomes(pair, measured.binary, reference, candidate)
        pair["truncated"] = sum(
            row.get("finish_reason") == "length" and value < CRITICAL
            for row, value in zip(pairing.candidate, candidate, strict=True)
        )
    _fill_intervals(pair, spec, measured)
    _fill_tests(pair, spec, measured)


def _count_outcomes(pair: Pair, binary: bool, reference: Sequence[float], candidate: Sequence[float]) -> None:
    outcomes = list(zip(reference, candidate, strict=True))
    pair["flip_rate"] = sum(r != c for r, c in outcomes) / len(outcomes)
    pair["critical"] = sum(r >= CRITICAL > c for r, c in outcomes)
    if binary:
        names = {(1, 1): "both", (1, 0): "reference_only", (0, 1): "candidate_only", (0, 0): "neither"}
        pair |= {name: outcomes.count(outcome) for outcome, name in names.items()}


def _fill_intervals(pair: Pair, spec: PairSpec, measured: Measured) -> None:
    """Set the verdict interval: by sample and by cluster, the wider end each side."""
    n, alpha = len(measured.sums), spec.alpha
    by_sample = stats.cluster_t(measured.sums, measured.weights, alpha)
    sums, sizes = measured.grouped()
    by_cluster = stats.cluster_t(sums, sizes, alpha) if measured.clustered else None
    method, ci = "t", by_sample.ci if by_sample else None
    if measured.binary:
        method, ci = "tango", stats.tango_interval(pair["reference_only"], pair["candidate_only"], n, alpha)
    elif ci and not spec.log_ratio:
        ci = stats.guard(ci, pair["difference"], n, alpha)
    if ci and by_cluster:
        method, ci = f"{method}+cluster-t", _widest(ci, by_cluster.ci)
    if ci and not spec.log_ratio:
        ci = _possible(ci)
    pair["ci_method"], pair["difference_ci"] = method, list(ci) if ci else None
    pair["cluster"] = {
        "key": spec.cluster,
        "k": len(sums),
        "ci": list(by_cluster.ci) if by_cluster else None,
        "sign_flip_p": stats.sign_flip(sums, key=spec.key) if measured.clustered else None,
    }
    if n > 1:
        pair["bootstrap_ci"] = list(stats.bootstrap((sums, sizes), key=spec.key, alpha=alpha))
    if not measured.binary and by_sample and by_sample.se > 0 and not spec.log_ratio:
        power_z = stats.normal_quantile(alpha) + stats.normal_quantile(1 - POWER)
        pair["mde"] = power_z * max(part.se for part in (by_sample, by_cluster) if part)


def _fill_tests(pair: Pair, spec: PairSpec, measured: Measured) -> None:
    if measured.binary:
        b, c, n = pair["reference_only"], pair["candidate_only"], pair["n"]
        table = (pair["both"], b, c, pair["neither"])
        _set_mcnemar(pair, b, c, "mcnemar", spec.mid_p)
        pair["newcombe_ci"] = list(stats.newcombe_paired(*table, spec.alpha))
        pair["noninferiority_p"] = stats.noninferiority_p(b, c, n, spec.margin)
        pair["mde"] = minimum_detectable_loss(n, c / n, mid_p=spec.mid_p)
        if b + c < (fewest := FEWEST_DISCORDANT[spec.mid_p]):
            pair["labels"].append(f"underpowered (m<{fewest})")
    elif pair["n"] > 1:
        units = measured.grouped()[0] if measured.clustered else measured.sums
        pair["p_value"], pair["p_method"] = stats.sign_flip(units, key=spec.key), "sign-flip"
    if spec.log_ratio:
        pair["ratio"] = math.exp(pair["difference"])
        ci = pair["difference_ci"]
        pair["ratio_ci"] = [math.exp(end) for end in ci] if ci else None
    elif pair["reference_score"]:
        pair["ratio"] = pair["candidate_score"] / pair["reference_score"]


def _set_mcnemar(pair: Pair, b: int, c: int, method: str, mid_p: bool) -> None:
    """Keep both p under names of their own; the one asked for is what Holm adjusts and a verdict reads."""
    pair["mcnemar_p"], pair["mcnemar_mid_p"] = stats.mcnemar_exact(b, c), stats.mcnemar_mid_p(b, c)
    pair["p_value"] = pair["mcnemar_mid_p" if mid_p else "mcnemar_p"]
    pair["p_method"] = f"{method} {MID_P}" if mid_p else method


def _fill_macro(pair: Pair, specs: Sequence[PairSpec], pairings: Sequence[Pairing]) -> None:
    alpha, parts = specs[0].alpha, [measure(s, p) for s, p in zip(specs, pairings, strict=True)]
    share = 1 / len(parts)
    means = [
        share * math.fsum(math.fsum(_values(s, rows)) / len(rows) for s, rows in zip(specs, arm, strict=True))
        for arm in ([p.reference for p in pairings], [p.candidate for p in pairings])
    ]
    strata = [part.grouped() for part in parts]
    pair |= {"reference_score": means[0], "candidate_score": means[1], "difference": means[1] - means[0]}
    pair["ratio"] = means[1] / means[0] if means[0] else None
    _count_outcomes(
        pair,
        all(part.binary for part in parts),
        [v for s, p in zip(specs, pairings, strict=True) for v in _values(s, p.reference)],
        [v for s, p in zip(specs, pairings, strict=True) for v in _values(s, p.candidate)],
    )
    # equal weights of unequal parts carry as much as this many samples
    effective = len(parts) ** 2 / math.fsum(1 / len(part.sums) for part in parts)
    levels = [
        [stats.cluster_t(part.sums, part.weights, alpha) for part in parts],
        [stats.cluster_t(*stratum, alpha) for stratum in strata],
    ]
    full = [[e for e in level if e is not None] for level in levels]
    intervals = [stats.combine([share] * len(parts), e, alpha).ci for e in full if len(e) == len(parts)]
    if intervals:
        ci = _possible(stats.guard(_widest(*intervals), pair["difference"], effective, alpha))
        pair["difference_ci"], pair["ci_method"] = list(ci), "stratified t"
    pair["bootstrap_ci"] = list(stats.bootstrap(*strata, key=f"{specs[0].key}|macro", alpha=alpha))
    pair["cluster"] = {"key": specs[0].cluster, "k": sum(len(s[0]) for s in strata), "ci": None}
    if pair["both"] is not None:
        counts = pair["reference_only"], pair["candidate_only"]
        _set_mcnemar(pair, *counts, "stratified mcnemar", specs[0].mid_p)
    else:
        units = [total / sum(sizes) for sums, sizes in strata for total in sums]
        pair["p_value"], pair["p_method"] = stats.sign_flip(units, key=specs[0].key), "sign-flip"


def _fill_independent(pair: Pair, spec: PairSpec, pairing: Pairing) -> None:
    """Compare two samples that do not pair; never enough for a PASS."""
    reference, candidate = _values(spec, pairing.reference), _values(spec, pairing.candidate)
    means = [math.fsum(values) / len(values) for values in (reference, candidate)]
    pair["difference"] = means[1] - means[0]
    if spec.log_ratio:
        means = [math.exp(mean) for mean in means]
    pair["reference_score"], pair["candidate_score"] = means
    if not spec.log_ratio and all(value in (0, 1) for value in reference + candidate):
        counts = (int(sum(reference)), len(reference), int(sum(candidate)), len(candidate))
        pair["ci_method"] = "newcombe-independent"
        pair["difference_ci"] = list(stats.newcombe_independent(*counts, spec.alpha))
    else:
        estimate: MeanEstimate | None = stats.welch(reference, candidate, spec.alpha)
        ci = estimate and (estimate.ci if spec.log_ratio else _possible(estimate.ci))
        pair["ci_method"], pair["difference_ci"] = "welch", list(ci) if ci else None


def _possible(ci: Interval) -> Interval:
    """Return the part of an interval that differences of scores in [0, 1] can lie in."""
    return Interval(max(-1.0, ci.lower), min(1.0, ci.upper))


def _widest(*intervals: Interval) -> Interval:
    return Interval(min(ci.lower for ci in intervals), max(ci.upper for ci in intervals))


# -- beside the verdict -------------------------------------------------------------------------------------


def add_costs(
    pair: Pair, reference: Mapping[str, Any], candidate: Mapping[str, Any], *, timing_comparable: bool
) -> Pair:
    """Return the pair with `latency_ratio` and `device_bytes_ratio` of two `cells`, null if unknown."""

    def ratio(over: float | None, under: float | None) -> float | None:
        return over / under if over is not None and under else None

    held = [(cell.get("bytes") or {}).get("device") for cell in (candidate, reference)]
    steps = [cell.get("step_ms_p50") for cell in (candidate, reference)]
    costs: Pair = {"latency_ratio": ratio(*steps) if timing_comparable else None}
    if costs["latency_ratio"] is None:
        costs["latency_status"] = "not_measured" if timing_comparable else "timing_contract_differs"
    return pair | costs | {"device_bytes_ratio": ratio(*held)}
