"""What a run writes: one row per sample, cells and the summary; all rebuilt from rows, none holds a clock."""

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rcq_cli.files import SCHEMA
from rcq_cli.protocols import Decoded, LayerBytes, Sample
from rcq_cli.readings import known
from rcq_cli.spec import RunSpec

Row = dict[str, Any]

BYTES = ("device", "host", "metadata", "scratch", "dense_equivalent")
OK = "ok"
WAIVED = ("short_context", "budget_ge_context", "no_decode_steps")
"""Reasons for which a mode may leave a sample alone; the cell is then not engaged, the run complete."""


VIOLATIONS = "bound_violations"
"""Metric of a task that checks bounds itself: how often one did not hold."""


class TaskFacts(NamedTuple):
    """What of a task and a model a cell repeats; stored with the contract so that cells need no task file."""

    parts: tuple[str, ...]
    metric: str
    score_key: str
    higher_is_better: bool
    dtype: str
    """Of the originals."""
    model_name: str
    constructed: bool
    label: str
    """Strongest claim of the mode: `reference`, `none`, `reported`, `calibrated`, `certified`."""


class CellParts(NamedTuple):
    """A cell and the certificate figures behind it, among them some that the cell does not show."""

    cell: dict[str, Any]
    certificates: dict[str, Any] | None


def row_key(contract_hash: str, mode_hash: str, sample_id: str) -> str:
    """Return the identity of a row: what was asked, of whom, in which mode."""
    return hashlib.sha256(f"{contract_hash}|{mode_hash}|{sample_id}".encode()).hexdigest()


def prompt_sha256(ids: Sequence[int]) -> str:
    """Return the sha256 over the ids as little-endian uint32."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


def sample_row(key: str, part: str, sample: Sample, ctx: int | None) -> Row:
    """Return what is known of a sample before it is answered."""
    # a task whose questions share a context leaves room for earlier answers
    budget = None if ctx is None else sample.meta.get("budget", ctx - sample.max_new_tokens)
    return {
        "schema": SCHEMA,
        "key": key,
        "sample_id": sample.sample_id,
        "part": part,
        "index": sample.index,
        "cluster": sample.cluster,
        "control": sample.control,
        "prompt_ids_sha256": prompt_sha256(sample.prompt_ids),
        "prompt_tokens": len(sample.prompt_ids),
        "first_ids": list(sample.prompt_ids[:8]),
        "context_len": sample.context_len,
        "fill_ratio": len(sample.prompt_ids) / budget if budget else None,
        "references": list(sample.references),
        "max_new_tokens": sample.max_new_tokens,
        "stop_ids": list(sample.stop_ids),
        "seed": sample.seed,
        "meta": finite(dict(sample.meta)),
        "status": OK,
        "error": None,
        "text": None,
        "output_ids": None,
        "finish_reason": "error",
        "scores": None,
        "engaged": None,
        "first_logits_sha256": None,
        "bytes": None,
        "steps": False,
    }


def answered(row: Row, decoded: Decoded, scores: Mapping[str, float]) -> Row:
    """Return the row of an answered sample; a score that is not finite makes it an error."""
    row = row | {
        "text": decoded.completion.text,
        "output_ids": list(decoded.completion.output_ids),
        "finish_reason": decoded.completion.finish_reason,
        "scores": finite(dict(scores)),
        "engaged": finite(dict(decoded.engagement)),
        "first_logits_sha256": decoded.first_logits_sha256,
        "bytes": None if decoded.bytes is None else _bytes(decoded.bytes),
        "steps": decoded.steps is not None,
    }
    if decoded.completion.series:
        row["series"] = finite(dict(decoded.completion.series))
    bad = [name for name, value in scores.items() if not math.isfinite(value)]
    return failed(row, "nan", f"score {bad[0]} is not finite") if bad else row


def failed(row: Row, status: str, what: str) -> Row:
    """Return the row of a sample that could not be answered: `nan`, `oom` or `error`, and why."""
    return row | {"status": status, "error": what, "finish_reason": "error"}


def finite(value: Any) -> Any:
    """Return `value` as JSON: tuples as lists, NaN and infinity as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


def _bytes(held: LayerBytes) -> dict[str, int]:
    return {name: int(getattr(held, name)) for name in BYTES}


def timing_record(row: Row, decoded: Decoded) -> dict[str, Any]:
    """Return the clock's record of a sample, which stands in telemetry and never in a row."""
    return {
        "schema": SCHEMA,
        "kind": "timing",
        "key": row["key"],
        "sample_id": row["sample_id"],
        "prefill_ns": decoded.prefill_ns,
        "selection_ns": decoded.selection_ns,
        "step_ns": list(decoded.step_ns),
    }


def ordered(rows: Iterable[Row], parts: Sequence[str]) -> list[Row]:
    """Return rows in the one order that does not depend on how the run went: part, index, id."""
    place = {part: i for i, part in enumerate(parts)}
    return sorted(rows, key=lambda r: (place.get(r["part"], len(place)), r["index"], r["sample_id"]))


def cell(
    spec: RunSpec,
    facts: TaskFacts,
    part: str,
    rows: Sequence[Row],
    timings: Mapping[str, Mapping[str, Any]],
    certificates: Mapping[str, Any] | None,
    status: str,
    timed: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return one entry of `cells` (product.md section 6) from the rows of one part, in canonical order.

    `timings` are the clock's records by row key, `timed` metrics it measured once for the run. Only rows of
    status ok are scored; others count as errors.
    """
    good = [row for row in rows if row["status"] == OK]
    scores = [row["scores"][facts.score_key] for row in good]
    fills = [row["fill_ratio"] for row in rows if row["fill_ratio"] is not None]
    prompts = [row["prompt_tokens"] for row in rows if row["prompt_tokens"]]
    return {
        "task": spec.cell_task(part),
        "ctx": spec.ctx,
        "mode": spec.mode,
        "model": spec.model,
        "constructed": facts.constructed,
        "n": len(good),
        "errors": len(rows) - len(good),
        "engaged": sum(bool(row["engaged"].get("engaged")) for row in good),
        "metric": facts.score_key,
        "metric_version": facts.metric,
        "higher_is_better": facts.higher_is_better,
        **_score(scores, facts),
        # a task without a model names all its metrics, the primary one too
        "metrics": {**_metrics(good, facts.score_key if spec.ctx else ""), **(timed or {})},
        "dtype": facts.dtype,
        **known("fill_ratio_min", min(fills, default=None), "not_applicable"),
        **known("prompt_tokens_median", _median(prompts), "not_applicable" if rows else "no_samples"),
        **_speed([timings[row["key"]] for row in good if row["key"] in timings]),
        **known("bytes", _largest_bytes(good), _absent(spec, good, "not_measured")),
        **known("certificates", _shown(certificates), _absent(spec, good, _uncertified(facts))),
        **_estimates(good),
        "status": status,
    }


def _estimates(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how often a calibrated estimate covered what a probe measured; nothing where none was made.

    `tested` counts the probes that met an estimate below 1, since only those could be missed.
    """
    from rcq_cli.stats import clopper_pearson

    names = ("estimate_probes", "estimate_misses", "estimate_tested")
    probes, misses, tested = (sum(row["engaged"].get(name, 0) for row in rows) for name in names)
    if not any(names[0] in row["engaged"] for row in rows):
        return {}
    found: dict[str, Any] = {"label": "calibrated" if tested else "none", "probes": probes, "tested": tested}
    if not probes:
        return {"estimates": found | {"coverage": None, "coverage_status": "no_probes"}}
    covered = probes - misses
    interval = list(clopper_pearson(covered, probes))
    return {"estimates": found | {"coverage": covered / probes, "coverage_ci": interval}}


def _absent(spec: RunSpec, good: Sequence[Row], otherwise: str) -> str:
    """Return why a cell lacks what only the cache of an answered sample has."""
    if not good:
        return "no_samples"
    return "not_applicable" if spec.ctx is None else otherwise


def _uncertified(facts: TaskFacts) -> str:
    return "no_decode_steps" if facts.label in ("reported", "certified") else "not_applicable"


def _shown(certificates: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the figures a cell shows; `unbounded` only decides whether the run is sound."""
    if certificates is None:
        return None
    return {name: value for name, value in certificates.items() if name != "unbounded"}


def _score(scores: Sequence[float], facts: TaskFacts) -> dict[str, Any]:
    """Return the mean score and its interval: Wilson for shares of right answers, t otherwise.

    The t interval of scores in [0, 1] stays inside and has width even where all scores agree.
    Perplexities are averaged as logarithms, which is the perplexity of all targets where samples have equally
    many.
    """
    from rcq_cli.stats import score_interval, t_interval, wilson

    if not scores:
        return {**known("score", None, "no_samples"), **known("score_ci", None, "no_samples")}
    if facts.higher_is_better and all(score in (0.0, 1.0) for score in scores):
        return {"score": math.fsum(scores) / len(scores), "score_ci": list(wilson(sum(scores), len(scores)))}
    into, back = (math.log, math.exp) if facts.score_key == "perplexity" else (float, float)
    values = [into(score) for score in scores]
    score = back(math.fsum(values) / len(values))
    bounded = facts.higher_is_better and all(0 <= value <= 1 for value in values)
    estimate = (score_interval if bounded else t_interval)(values)
    if estimate is None:
        return {"score": score, "score_ci": None, "score_ci_status": "too_few_samples"}
    return {"score": score, "score_ci": [back(limit) for limit in estimate.ci]}


def _metrics(rows: Sequence[Row], primary: str) -> dict[str, float]:
    """Return the mean of every further metric over the rows that have it; violations are added up."""
    names = dict.fromkeys(name for row in rows for name in row["scores"] if name != primary)
    means = {}
    for name in names:
        values = [row["scores"][name] for row in rows if row["scores"].get(name) is not None]
        means[name] = math.fsum(values) / (1 if name == VIOLATIONS else len(values))
    return means


def _speed(timings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return decode tokens per second over all steps, the median step, and the median cost of selection.

    Selection is what a mode does once with the prompt: statistics, choice, encoding.
    """
    steps = [ns for timing in timings for ns in timing["step_ns"]]
    # without a step there was no prompt to choose from, and a time of 0 was not measured
    chosen = _median([timing["selection_ns"] for timing in timings if "selection_ns" in timing and steps])
    return step_speed(steps) | known(
        "selection_ms_p50", None if chosen is None else chosen / 1e6, "not_measured"
    )


def step_speed(steps_ns: Sequence[int]) -> dict[str, Any]:
    """Return tokens per second over all decode steps and the median step, null where there was none."""
    total = sum(steps_ns)
    rate, middle = (len(steps_ns) * 1e9 / total, _median(steps_ns) / 1e6) if total else (None, None)
    return {
        **known("tokens_per_s", rate, "no_decode_steps"),
        **known("step_ms_p50", middle, "no_decode_steps"),
    }


def _median(values: Sequence[float]) -> Any:
    """Return the lower middle value: one that occurred, exact for integers."""
    return sorted(values)[(len(values) - 1) // 2] if values else None


def _largest_bytes(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the largest of each figure over the samples, and the ratio of the two largest."""
    held = [row["bytes"] for row in rows if row["bytes"]]
    if not held:
        return None
    largest: dict[str, Any] = {name: max(entry[name] for entry in held) for name in BYTES}
    dense = largest["dense_equivalent"]
    return largest | {"device_ratio": largest["device"] / dense if dense else None}


def controls_summary(rows: Iterable[Row], score_key: str) -> dict[str, Any]:
    """Return n and mean score of each control, by name."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["status"] == OK:
            found.setdefault(row["control"], []).append(row["scores"][score_key])
    return {
        name: {"n": len(scores), "score": math.fsum(scores) / len(scores), "hits": sum(s > 0 for s in scores)}
        for name, scores in sorted(found.items())
    }


NEEDLE_ONLY_FLOOR = 0.90
"""Share of needle-only prompts a reference must answer for the run to say anything."""


def problems(
    facts: TaskFacts,
    rows: Sequence[Row],
    controls: Sequence[Row],
    certificates: Sequence[Mapping[str, Any] | None],
) -> list[dict[str, Any]]:
    """Return what makes the run fail: `{code, kind, what, count}`; code 4 violated, 6 incomplete or unfit."""
    found = [] if rows else [_problem(6, "no_samples", 0, "the task gave no sample")]
    violations = sum(entry["violations"] for entry in certificates if entry)
    if violations:
        found.append(
            _problem(4, "violation", violations, f"{violations} audited head-steps above their bound")
        )
    broken = sum((row["scores"] or {}).get(VIOLATIONS) or 0 for row in rows)
    if broken:
        found.append(_problem(4, "violation", int(broken), f"{broken:.0f} errors above their bound"))
    unbounded = sum(entry["unbounded"] for entry in certificates if entry)
    if unbounded and facts.label == "certified":
        what = f"{unbounded} head-steps without a finite bound were not recomputed"
        found.append(_problem(4, "unbounded", unbounded, what))
    found += _sample_problems(rows, "samples", "sample_errors") + _sample_problems(
        controls, "control samples", "control_errors"
    )
    idle = [row for row in rows if row["status"] == OK and (row["engaged"] or {}).get("reason") == "inactive"]
    if idle:
        what = f"the mode did nothing in {len(idle)} of {len(rows)} samples (first: {idle[0]['sample_id']})"
        found.append(_problem(6, "inactive", len(idle), what))
    return found + _control_problems(controls_summary(controls, facts.score_key), facts)


def _sample_problems(rows: Sequence[Row], noun: str, kind: str) -> list[dict[str, Any]]:
    bad = [row for row in rows if row["status"] != OK]
    if not bad:
        return []
    counts: dict[str, int] = {}
    for row in bad:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    each = ", ".join(f"{status} {count}" for status, count in sorted(counts.items()))
    what = f"{len(bad)} of {len(rows)} {noun} failed ({each}); {bad[0]['sample_id']}: {bad[0]['error']}"
    return [_problem(6, kind, len(bad), what)]


def _control_problems(controls: Mapping[str, Any], facts: TaskFacts) -> list[dict[str, Any]]:
    found = []
    only = controls.get("needle-only")
    # the candidate's value is only reported: damage to a short prompt is a finding, not an unfit harness
    if only and facts.label == "reference" and only["score"] < NEEDLE_ONLY_FLOOR:
        what = (
            f"needle-only control {only['score']:.2f} is below {NEEDLE_ONLY_FLOOR:.2f}: prompt or model unfit"
        )
        found.append(_problem(6, "control_needle_only", only["n"], what))
    leak = controls.get("no-needle")
    if leak and leak["hits"]:
        what = f"no-needle control: {leak['hits']} of {leak['n']} answers hold a value that was never planted"
        found.append(_problem(6, "control_no_needle", leak["hits"], what))
    return found


def _problem(code: int, kind: str, count: int, what: str) -> dict[str, Any]:
    return {"code": code, "kind": kind, "what": what, "count": count}
