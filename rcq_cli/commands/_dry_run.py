"""What a plan would cost, extended from a short sample answered under each mode at two lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rcq_cli.errors import RcqError, SpecError
from rcq_cli.shell import SCHEMA, Result, Shell
from rcq_cli.table import MISSING, Cell, Column, Table, binary_bytes, duration, tokens

if TYPE_CHECKING:
    from rcq_cli.engine.decoder import Engine
    from rcq_cli.presets import Batch, Plan
    from rcq_cli.protocols import Decoded, Loaded, Mode, Sample
    from rcq_cli.spec import RunSpec

Json = Any
Loads = dict[tuple[str, str, str], "Loaded"]

PROBE_TOKENS = 1024
"""Context of the shorter trial; the longer one has twice as many."""
COLUMNS = (
    Column("cell"),
    Column("mode"),
    Column("model"),
    Column("samples", right=True),
    Column("device memory", right=True),
    Column("host memory", right=True),
    Column("time", right=True),
)


class Trial(NamedTuple):
    """One answered sample."""

    tokens: int
    device: int
    host: int
    dense: int
    seconds: float
    """Of prefill and decoding together."""


def answer_dry_run(shell: Shell, plan: Plan, *, stores: bool = True, untried: str = "") -> int:
    """Answer with the matrix, the origin of every value, bytes and time expected; nothing is written.

    For a command that `stores` runs, raises what it would raise before its work: for an `--out` or an
    executor that cannot be used. `untried` says why nothing can be tried and extended from.
    """
    from rcq_cli.commands._run import executor_of
    from rcq_cli.run import planned
    from rcq_cli.store import check_out

    if stores:
        check_out(plan.out)
        executor_of(plan)
    loads: Loads = {}
    runs = []
    for batch in plan.batches:
        trials, why = ({}, untried) if untried else _tried(batch, loads)
        runs += [
            _expected(spec, planned((spec,)), trials.get(spec.mode, ()), why, shared=i > 0)
            for i, spec in enumerate(batch)
        ]
    document = {
        "schema": SCHEMA,
        "command": shell.command,
        "dry_run": True,
        "runs": runs,
        "notes": list(plan.notes),
    }
    on_top = "controls, loading and compiling" if stores else "loading and compiling"
    shell.answer(Result(document, lambda: (_table(runs, plan, on_top),), runs))
    return 0


def _tried(batch: Batch, loads: Loads) -> tuple[dict[str, list[Trial]], str]:
    """Answer one sample at two lengths under every mode of a batch; on failure nothing but the reason.

    What the command would refuse as its user's mistake is refused here as well.
    """
    spec = batch[0]
    if spec.ctx is None:
        return {}, "this task runs no model"
    try:
        return _trials(batch, spec.ctx, loads), ""
    except RcqError as error:
        if error.exit_code == SpecError.exit_code:
            raise
        return {}, str(error)


def _trials(batch: Batch, ctx: int, loads: Loads) -> dict[str, list[Trial]]:
    from rcq_cli.engine.decoder import Engine
    from rcq_cli.run import check, modes_of

    spec = batch[0]
    loaded = _loaded(spec, loads)
    check(batch, loaded)
    engine = Engine(loaded, backend=spec.backend)
    sizes = tuple(dict.fromkeys(min(ctx, size) for size in (PROBE_TOKENS, 2 * PROBE_TOKENS)))
    samples = [_sample(spec, size, loaded) for size in sizes]
    modes = modes_of(batch)
    # kernels are compiled at their first use, in seconds that no later sample takes
    _answered(engine, samples[-1], batch, modes)
    answers = [_answered(engine, sample, batch, modes) for sample in samples]
    return {
        one.mode: [_trial(size, done[i], prefills=i == 0) for size, done in zip(sizes, answers, strict=True)]
        for i, one in enumerate(batch)
    }


def _answered(
    engine: Engine, sample: Sample, batch: Batch, modes: Sequence[tuple[Mode, Json]]
) -> list[Decoded]:
    """Answer a sample under every mode of a batch, on one prefill."""
    prefill = engine.prefill(sample.prompt_ids[: sample.context_len], modes)
    return [
        engine.decode(prefill, sample, mode, options, audit=spec.audit)
        for spec, (mode, options) in zip(batch, modes, strict=True)
    ]


def _trial(size: int, done: Decoded, *, prefills: bool) -> Trial:
    """Return what an answer took; the first mode of a batch pays for the prefill that all of them share."""
    spent = sum(done.step_ns) + done.selection_ns + (done.prefill_ns if prefills else 0)
    held = done.bytes
    assert held is not None  # every model holds a cache
    return Trial(size, held.device, held.host, held.dense_equivalent, spent / 1e9)


def _loaded(spec: RunSpec, loads: Loads) -> Loaded:
    from rcq_cli.sources import resolve

    key = (spec.model, spec.device, spec.dtype)
    if key not in loads:
        source, reference = resolve(spec.model)
        loads[key] = source.load(reference, device=spec.device, dtype=spec.dtype)
    return loads[key]


def _sample(spec: RunSpec, size: int, loaded: Loaded) -> Sample:
    from rcq_cli.identity import task_options, task_parts
    from rcq_cli.presets import TASKS
    from rcq_cli.protocols import TaskRequest

    task = TASKS.load(spec.task_name)
    options, part = task_options(task, spec, loaded), task_parts(task, spec)[0]
    request = TaskRequest(part, max(size, task.minimum_ctx), 1, spec.seed, options)
    return next(iter(task.samples(request, loaded.tokenizer)))


def extended(trials: Sequence[Trial], name: str, ctx: int) -> float:
    """Return a figure of the trials at `ctx` tokens, on the line through them.

    A line that falls is noise, since a longer context takes no less: the last trial's figure stands then.
    """
    last = trials[-1]
    value = float(getattr(last, name))
    if len(trials) < 2 or last.tokens == trials[0].tokens:
        return value
    slope = (value - getattr(trials[0], name)) / (last.tokens - trials[0].tokens)
    return value + max(slope, 0.0) * (ctx - last.tokens)


def _expected(
    spec: RunSpec, samples: int, trials: Sequence[Trial], why: str, *, shared: bool
) -> dict[str, Json]:
    figures: dict[str, Json] = dict.fromkeys(("device", "host", "dense_equivalent"))
    seconds = None
    if trials and spec.ctx is not None:
        device, host, dense = (
            round(extended(trials, name, spec.ctx)) for name in ("device", "host", "dense")
        )
        figures = {"device": device, "host": host, "dense_equivalent": dense}
        seconds = samples * extended(trials, "seconds", spec.ctx)
    return {
        "task": spec.task,
        "ctx": spec.ctx,
        "mode": spec.mode,
        "model": spec.model,
        "samples": samples,
        "bytes": figures,
        "seconds": seconds,
        "status": "estimated" if trials else why,
        "shares_prefill": shared,
        "spec": spec.to_json(),
        "digest": spec.digest(),
    }


def _table(runs: Sequence[Mapping[str, Json]], plan: Plan, on_top: str) -> Table:
    known = [run["seconds"] for run in runs if run["seconds"] is not None]
    notes = [*plan.notes, *dict.fromkeys(run["status"] for run in runs if run["status"] != "estimated")]
    if known:
        notes.append(f"about {duration(sum(known))} in all for the samples; {on_top} come on top")
        notes.append(
            f"extended from one sample of {PROBE_TOKENS} and one of {2 * PROBE_TOKENS} tokens per mode"
        )
    for origin in ("flag", "file", "preset"):
        names = dict.fromkeys(n for run in runs for n, o in run["spec"]["origins"].items() if o == origin)
        notes += [f"from {origin}: {', '.join(names)}"] if names else []
    return Table("would run", COLUMNS, tuple(_row(run) for run in runs), tuple(notes))


def _row(run: Mapping[str, Json]) -> tuple[Cell, ...]:
    sizes, seconds = run["bytes"], run["seconds"]
    place = run["task"] if run["ctx"] is None else f"{run['task']}@{tokens(run['ctx'])}"
    return (
        Cell(place),
        Cell(run["mode"]),
        Cell(run["model"]),
        Cell(str(run["samples"])),
        MISSING if sizes["device"] is None else Cell(binary_bytes(sizes["device"])),
        MISSING if sizes["host"] is None else Cell(binary_bytes(sizes["host"])),
        MISSING if seconds is None else Cell(duration(seconds)),
    )
