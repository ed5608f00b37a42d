"""`compare --match bytes=SHARE`: budgets with which modes hold equally many bytes, found on the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rcq_cli.errors import SpecError

if TYPE_CHECKING:
    from rcq_cli.presets import Batch, Plan
    from rcq_cli.progress import Progress
    from rcq_cli.protocols import Loaded, Sample
    from rcq_cli.spec import RunSpec

Json = Any

AIMED = 0.005
"""Relative deviation at which the search ends."""
ACCEPTED = 0.02
"""Relative deviation that still counts as matched."""
TRIES = 12
SMALLEST_SHARE, LARGEST_SHARE = 1e-4, 4.0
"""The search tells budgets apart that differ by as much; no mode holds more than float32 with copies."""
BUDGETS = ("keep_tokens", "keep_fraction", "budget_bytes")


class Found(NamedTuple):
    """A budget and what it led to."""

    fraction: float
    ratio: float
    """Device bytes over those of a dense 16-bit cache."""


def parse_match(text: str | None) -> float | None:
    """Return the share of `bytes=SHARE`; raise `SpecError` for anything else."""
    if text is None:
        return None
    name, equals, value = text.partition("=")
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if name.strip() != "bytes" or not equals or not SMALLEST_SHARE <= share <= LARGEST_SHARE:
        raise SpecError(
            f"--match {text!r} is not allowed",
            why=f"allowed: bytes=SHARE with a share from {SMALLEST_SHARE:g} to {LARGEST_SHARE:g}",
            fix="a dense 16-bit cache has share 1: --match bytes=0.44",
            id="RCQ-USE-07",
        )
    return share


def has_budget(options: Mapping[str, Json]) -> bool:
    """Say whether a mode with these options holds as many tokens as it is told to."""
    return all(name in options for name in BUDGETS)


def search(measure: Callable[[float], float], share: float) -> Found:
    """Return the budget, as a fraction of the prompt, whose measured ratio is nearest to `share`.

    Ratios grow with the fraction, nearly in proportion: the first guess is corrected by the secant through
    the two measurements around the target, and halved between them where that leaves the bracket.
    """
    low, high = Found(0.0, 0.0), Found(1.0, measure(1.0))
    best = high
    guess = min(1.0, share / high.ratio)
    for _ in range(TRIES):
        if abs(best.ratio / share - 1) <= AIMED or high.fraction - low.fraction < SMALLEST_SHARE:
            break
        here = Found(round(guess, 6), measure(round(guess, 6)))
        if abs(here.ratio - share) < abs(best.ratio - share):
            best = here
        low, high = (here, high) if here.ratio < share else (low, here)
        rise = high.ratio - low.ratio
        guess = low.fraction + (high.fraction - low.fraction) * (share - low.ratio) / rise if rise else 0.0
        if not low.fraction < guess < high.fraction:
            guess = (low.fraction + high.fraction) / 2
    return best


def matched(plan: Plan, share: float, progress: Progress) -> Plan:
    """Return the plan with a budget for every mode that has one, found on the first sample of each batch.

    Modes without a budget, and those that cannot come within 2 %, are named in the notes with what they hold.
    Raises `SpecError` for a budget that was given besides.
    """
    loads: dict[str, Loaded] = {}
    notes: list[str] = []
    batches = tuple(_batch(batch, share, loads, notes, progress) for batch in plan.batches)
    return plan._replace(batches=batches, notes=(*plan.notes, *notes))


def _batch(
    batch: Batch, share: float, loads: dict[str, Loaded], notes: list[str], progress: Progress
) -> Batch:
    reference = batch[0]
    if reference.ctx is None:
        raise SpecError("--match needs a task that runs a model", fix="leave --match out", id="RCQ-USE-02")
    for spec in batch[1:]:
        given = [name for name in BUDGETS if spec.mode_options.get(name) is not None]
        if given:
            what = f"mode {spec.mode_name} was given {given[0]} and --match"
            raise SpecError(what, fix="give one of them", id="RCQ-USE-02")
    progress.doing(f"loading {reference.model}")
    trial = _Trial(batch, loads)
    done = [reference]
    for spec in batch[1:]:
        where = f"{spec.mode} at {spec.ctx}"
        progress.doing(f"matching {where} to bytes={share:g} ({len(done)} of {len(batch) - 1})")
        if not has_budget(spec.mode_options):
            ratio = trial.ratio(spec, None)
            done.append(spec)
            notes.append(f"{where} has no budget to match: it holds {ratio:.3f} of a dense 16-bit cache")
            continue
        found = search(partial(trial.ratio, spec), share)
        done.append(_with_fraction(spec, found.fraction))
        near = abs(found.ratio / share - 1) <= ACCEPTED
        text = f"{where} keeps {found.fraction:g} of the prompt: {found.ratio:.3f} of a dense 16-bit cache"
        notes.append(text if near else f"{text}, the nearest to {share:g} it can come")
    return tuple(done)


def _with_fraction(spec: RunSpec, fraction: float) -> RunSpec:
    options = {**spec.mode_options, "keep_fraction": fraction}
    return spec.but(mode_options=options, origins={**spec.origins, "mode_options.keep_fraction": "flag"})


class _Trial:
    """The first sample of a batch, prefilled once for all its modes, answered under any of them and budget.

    The answer is generated as in the run: what is generated counts in the bytes.
    """

    def __init__(self, batch: Batch, loads: dict[str, Loaded]) -> None:
        from rcq_cli.engine.decoder import Engine

        loaded = _loaded(batch[0], loads)
        self.batch = batch
        self.engine = Engine(loaded, backend=batch[0].backend)
        self.sample = _first_sample(batch[0], loaded)
        self.prefill: Json = None

    def ratio(self, spec: RunSpec, fraction: float | None) -> float:
        """Return the device ratio of a mode that keeps `fraction` of the prompt."""
        if self.prefill is None:
            ids = self.sample.prompt_ids[: self.sample.context_len]
            self.prefill = self.engine.prefill(ids, [_mode(each, None) for each in self.batch[1:]])
        held = self.engine.decode(self.prefill, self.sample, *_mode(spec, fraction)).bytes
        self.prefill.opened.clear()
        assert held is not None  # every model holds a cache
        return float(held.device / held.dense_equivalent)


def _mode(spec: RunSpec, fraction: float | None) -> tuple[Json, Json]:
    """Return the mode of `spec` and its options, with a budget where a fraction is given."""
    from rcq_cli.options import parse_options
    from rcq_cli.presets import MODES

    mode = MODES.load(spec.mode_name)
    given = {**spec.mode_options} if fraction is None else {**spec.mode_options, "keep_fraction": fraction}
    return mode, parse_options(mode.Options, given, f"option of mode {spec.mode_name}")


def _loaded(spec: RunSpec, loads: dict[str, Loaded]) -> Loaded:
    from rcq_cli.sources import resolve

    if spec.model not in loads:
        source, reference = resolve(spec.model)
        loads[spec.model] = source.load(reference, device=spec.device, dtype=spec.dtype)
    return loads[spec.model]


def _first_sample(spec: RunSpec, loaded: Loaded) -> Sample:
    from rcq_cli.identity import task_options, task_parts
    from rcq_cli.presets import TASKS
    from rcq_cli.protocols import TaskRequest

    task = TASKS.load(spec.task_name)
    options, part = task_options(task, spec, loaded), task_parts(task, spec)[0]
    request = TaskRequest(part, spec.ctx or 0, 1, spec.seed, options)
    return next(iter(task.samples(request, loaded.tokenizer)))
