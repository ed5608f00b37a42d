"""Which samples of two runs form pairs, and what stands in the way (statistics.md section 3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rcq_cli.errors import SpecError
from rcq_cli.records import WAIVED
from rcq_cli.stats import SMALLEST_MARGIN

SMALLEST_ALPHA = 1e-9
"""Quantiles further out are beyond what float64 resolves next to 1."""

Row = Mapping[str, Any]

RATIO_METRICS = ("perplexity",)
"""Metrics judged as the logarithm of candidate / reference; their margin is relative (0.02 = 2 %)."""

_SETTINGS = ("max_new_tokens", "stop_ids", "seed")
_LISTED = 5


def check_margin(margin: float, task: str, metric: str) -> None:
    """Raise `SpecError` for a margin that no verdict can be given at."""
    if not SMALLEST_MARGIN <= margin < 1:
        relative = metric in RATIO_METRICS
        raise SpecError(
            f"margin {margin} of {task} is not allowed",
            why="the margin of perplexity is relative: 0.02 for a ratio of 1.02" if relative else "",
            fix=f"allowed: a number from {SMALLEST_MARGIN:g} to below 1",
            id="RCQ-USE-20",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpec:
    """What is asked of one cell of one candidate."""

    task: str
    """With its part: `ruler/vt`."""
    ctx: int | None
    reference: str
    candidate: str
    margin: float
    """Largest loss that still passes, on the score scale; relative for perplexity."""
    metric: str = "accuracy"
    """Key of `scores` in a row, and the name of the metric in results."""
    higher_is_better: bool = True
    alpha: float = 0.025
    """One-sided level."""
    mid_p: bool = False
    """Test by McNemar's mid-p instead of the exact p."""
    n_planned: int | None = None
    """Samples asked for; None: as many as either run holds."""
    cluster: str = "cluster"
    """How results call what samples share (`form`, `book`); `none` treats samples as independent."""
    nll_key: str = "nll_suffix"
    """Key of the mean NLL of a chunk, for perplexity."""
    weight_key: str = "n_targets"
    """Key of the number of tokens behind that mean, for perplexity."""
    exact_candidate: bool = False
    """The candidate declares itself exact, so it need not have acted."""
    same_mode: bool = False
    """Both arms are one mode with the same options: equal outputs are what they should give."""
    controls: bool = True
    """False when the task's controls were switched off."""
    partial: bool = False
    """Compare what is there of an unfinished run."""
    allow_inactive: bool = False
    allow_mismatch: bool = False
    lifted: tuple[str, ...] = ()
    """Contract fields that differ and were allowed to; nothing passes then."""
    max_errors: int = 0
    max_missing: int = 0

    def __post_init__(self) -> None:
        check_margin(self.margin, self.task, self.metric)
        if not SMALLEST_ALPHA <= self.alpha < 0.5:
            what = f"alpha {self.alpha} is not between {SMALLEST_ALPHA:g} and 0.5"
            raise SpecError(what, id="RCQ-USE-21")

    @property
    def log_ratio(self) -> bool:
        """Whether the cell is judged on the log of a ratio."""
        return self.metric in RATIO_METRICS

    @property
    def key(self) -> str:
        """Name of the cell, which fixes its random draws."""
        return f"{cell_name(self.task, self.ctx)}|{self.reference}|{self.candidate}"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a comparison is incomplete (6) or not one (5); the fields of a run's problems."""

    code: int
    kind: str
    what: str
    count: int


@dataclass(slots=True)
class Pairing:
    """The rows of both arms that belong together, in order of sample id."""

    reference: list[Row]
    candidate: list[Row]
    planned: int
    problems: list[Problem] = field(default_factory=list)
    cannot_pass: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    paired: bool = True
    """False: the prompts differ, the two lists are independent samples."""

    @property
    def comparable(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self.reference and self.candidate) and all(p.code != 5 for p in self.problems)


def cell_name(task: str, ctx: int | None) -> str:
    """Return `task@ctx`, or the task alone where there is no context."""
    return task if ctx is None else f"{task}@{ctx}"


def pair_rows(spec: PairSpec, reference: Sequence[Row], candidate: Sequence[Row]) -> Pairing:
    """Match the rows of two runs by sample id; whatever is wrong is recorded, nothing is dropped silently."""
    arms = [{row["sample_id"]: row for row in rows} for rows in (reference, candidate)]
    shared = sorted(arms[0].keys() & arms[1].keys())
    union = arms[0].keys() | arms[1].keys()
    good = [i for i in shared if all(arm[i]["status"] == "ok" for arm in arms)]
    rows = [[arm[i] for i in good] for arm in arms]
    pairing = Pairing(rows[0], rows[1], spec.n_planned if spec.n_planned is not None else len(union))
    _check_same_question(spec, pairing, arms, shared)
    _check_complete(spec, pairing, arms, shared)
    if pairing.comparable:
        _check_engaged(spec, pairing)
    if not spec.controls:
        pairing.cannot_pass.append("the controls were switched off")
    if spec.lifted:
        pairing.cannot_pass.append(f"the contracts differ ({_listed(spec.lifted)}): nothing passes so")
    return pairing


def _check_same_question(
    spec: PairSpec, pairing: Pairing, arms: list[dict[str, Row]], shared: list[str]
) -> None:
    empty = [name for name, arm in zip(("reference", "candidate"), arms, strict=True) if not arm]
    if empty:  # a run that was stopped before its first sample: it has to be finished, not set up differently
        what = (
            f"{' and '.join(empty)} hold no sample" if len(empty) > 1 else f"the {empty[0]} holds no sample"
        )
        pairing.problems.append(Problem(6, "no_samples", what, 0))
        return
    if not shared:
        pairing.problems.append(Problem(5, "no_common_samples", "the two runs share no sample", 0))
        return
    reference, candidate = arms
    prompts = [i for i in shared if reference[i]["prompt_ids_sha256"] != candidate[i]["prompt_ids_sha256"]]
    settings = [
        (i, name) for i in shared for name in _SETTINGS if reference[i].get(name) != candidate[i].get(name)
    ]
    if prompts and spec.allow_mismatch:
        pairing.reference, pairing.candidate = (
            [r for r in arm.values() if r["status"] == "ok"] for arm in arms
        )
        pairing.paired = False
        pairing.labels.append("prompts differ")
        pairing.cannot_pass.append("the prompts differ: two independent samples, not pairs")
    elif prompts:
        what = f"{len(prompts)} of {len(shared)} samples have another prompt: {_listed(prompts)}"
        pairing.problems.append(Problem(5, "prompts_differ", what, len(prompts)))
    if settings and not spec.allow_mismatch:
        sample, name = settings[0]
        what = (
            f"{name} differs in {sample}: {reference[sample].get(name)!r} and {candidate[sample].get(name)!r}"
        )
        pairing.problems.append(Problem(5, "settings_differ", what, len(settings)))


def _check_complete(spec: PairSpec, pairing: Pairing, arms: list[dict[str, Row]], shared: list[str]) -> None:
    single = sorted(arms[0].keys() ^ arms[1].keys())
    missing = max(pairing.planned - len(shared), len(single))
    if missing > spec.max_missing and shared:
        listed = f": only one run holds {_listed(single)}" if single else ""
        what = f"{len(shared)} of {pairing.planned} planned samples are in both runs{listed}"
        if spec.partial:
            pairing.cannot_pass.append(f"partial: {what}")
        else:
            pairing.problems.append(Problem(6, "missing_samples", what, missing))
    failed = [row for arm in arms for row in arm.values() if row["status"] != "ok"]
    if len(failed) > spec.max_errors:
        first = f"{failed[0]['sample_id']}: {failed[0]['status']}"
        what = f"{len(failed)} samples failed ({first}), more than {spec.max_errors} allowed"
        pairing.problems.append(Problem(6, "sample_errors", what, len(failed)))


def _check_engaged(spec: PairSpec, pairing: Pairing) -> None:
    if spec.exact_candidate:
        return
    records = [(row["sample_id"], row.get("engaged") or {}) for row in pairing.candidate]
    idle = [
        (i, str(record.get("reason") or "inactive")) for i, record in records if not record.get("engaged")
    ]
    faulty = [i for i, reason in idle if reason not in WAIVED]
    if idle:
        reasons = ", ".join(sorted({reason for _, reason in idle}))
        pairing.labels.append("not engaged")
        acted = len(records) - len(idle)
        pairing.cannot_pass.append(
            f"not engaged: the mode acted on {acted} of {len(records)} samples ({reasons})"
        )
    if faulty and not spec.allow_inactive:
        what = f"{spec.candidate} did nothing in {len(faulty)} of {len(records)} samples: {_listed(faulty)}"
        pairing.problems.append(Problem(6, "inactive", what, len(faulty)))
    # certificates of its steps are proof that a mode ran, and equal outputs its best result
    proven = all(row.get("steps") for row in pairing.candidate)
    doubted = len(idle) < len(records) and not (proven or spec.same_mode)
    if doubted and pairing.paired and _same_outputs(pairing):
        what = f"mode not applied: every text and every first logit of {spec.candidate} equals the reference"
        pairing.labels.append("mode not applied")
        pairing.problems.append(Problem(6, "not_applied", what, len(records)))


def _same_outputs(pairing: Pairing) -> bool:
    pairs = list(zip(pairing.reference, pairing.candidate, strict=True))
    return all(
        r.get("text") == c.get("text")
        and r.get("first_logits_sha256")
        and r["first_logits_sha256"] == c.get("first_logits_sha256")
        for r, c in pairs
    )


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else ""
    return ", ".join(ids[:_LISTED]) + more
