"""Measure where the time and the bytes of a decode step go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcq_cli.commands import _options as o
from rcq_cli.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rcq_cli.commands._profile import Place
    from rcq_cli.presets import Plan
    from rcq_cli.profiling import Effort
    from rcq_cli.shell import Shell

Json = Any

READINGS = ("nvml", "allocator", "vm_hwm_bytes", "rss_anon_bytes", "rss_file_bytes", "rss_anon_delta_bytes")
"""What `--require` may name."""
GEOMETRIES = ("llama-3.1-8b", "qwen2.5-7b", "smollm2-135m")
Modes = Annotated[
    list[str] | None,
    typer.Option("--mode", metavar="NAME", help="How the cache is kept, repeatable. [default: certified]"),
]
Ctx = Annotated[
    list[str] | None,
    typer.Option("--ctx", metavar="TOKENS", help="Contexts, comma list: 8k,32k,128k. [default: 8k]"),
]
Breakdown = Annotated[
    bool, typer.Option("--breakdown", help="Show the phases of the step and the memory ledger too.")
]
Geometry = Annotated[
    str | None,
    typer.Option("--geometry", metavar="NAME", help=f"One layer without a model: {', '.join(GEOMETRIES)}."),
]
Attribution = Annotated[
    bool, typer.Option("--attribution", help="Name the operations of a step in a separate profiled pass.")
]
Steps = Annotated[str, typer.Option("--steps", metavar="N", help="Steps timed by phase, at most.")]
Pairs = Annotated[
    str, typer.Option("--pairs", metavar="N", help="Pairs of blocks for the ratio to dense, at most.")
]
Granularity = Annotated[
    str,
    typer.Option("--granularity", metavar="WHAT", help="step, or layer: the phases of every layer too."),
]
Every = Annotated[
    str | None,
    typer.Option("--every", metavar="N", help="With --granularity layer: in each Nth step. [default: 1]"),
]
Caches = Annotated[
    str,
    typer.Option("--cache", metavar="STATE", help="warm, or cold: the processor's caches are emptied first."),
]
Require = Annotated[
    list[str] | None,
    typer.Option("--require", metavar="READING", help="Fail (7) without it: nvml, allocator, vm_hwm_bytes."),
]


def command(
    context: typer.Context,
    breakdown: Breakdown = False,
    geometry: Geometry = None,
    task: o.Task = None,
    ctx: Ctx = None,
    mode: Modes = None,
    model: o.Model = None,
    seed: o.Seed = None,
    preset: o.Preset = None,
    mode_option: o.ModeOption = None,
    task_option: o.TaskOption = None,
    backend: o.Backend = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    steps: Steps = "64",
    pairs: Pairs = "12",
    granularity: Granularity = "step",
    every: Every = None,
    cache: Caches = "warm",
    attribution: Attribution = False,
    require: Require = None,
    dry_run: o.DryRun = False,
    format: o.Format = "table",
    json: o.JsonTarget = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> int:
    """Measure where the time and the bytes of a decode step go.

    Example: rcq profile --breakdown
    """
    given = locals()
    asked = {name: given[name] for name in o.FLAG_NAMES if given.get(name)}
    shell = o.shell_of(context)
    shell.parsed("profile", format=format, json_target=json, quiet=quiet, verbose=verbose)
    layers = _every(granularity, every)
    o.choose(cache, ("warm", "cold"), "--cache")
    counts = o.whole(steps, "--steps", 5) or 5, o.whole(pairs, "--pairs", 2) or 2
    for reading in require or ():
        o.choose(reading, READINGS, "--require")
    plan = _plan(tuple(mode or ()), asked, geometry)
    from rcq_cli.profiling import Effort

    effort = Effort(steps=counts[0], pairs=counts[1])
    from rcq_cli.commands._profile import Asked, require_known

    if require:
        require_known(require, plan.batches[0][0].device)
    if dry_run:
        return _answer_dry_run(shell, plan, effort, geometry)
    wanted = Asked(effort, attribution, tuple(require or ()), layers, cache == "cold")
    cells = _measure(shell, plan, geometry, dtype, wanted)
    _answer(shell, cells, breakdown)
    return 0


def _every(granularity: str, every: str | None) -> int:
    """Return in which steps layers are told apart: each Nth one, 0 for none."""
    if o.choose(granularity, ("step", "layer"), "--granularity") == "layer":
        return o.whole(every, "--every", 1) or 1
    if every is not None:
        raise SpecError("--every has no meaning without --granularity layer", fix="add it", id="RCQ-USE-02")
    return 0


def _plan(modes: tuple[str, ...], asked: dict[str, Json], geometry: str | None) -> Plan:
    """Return the plan with all modes of a context in one batch, so that they share a prefill."""
    from rcq_cli.presets import MODES, resolve

    if geometry is not None:
        o.choose(geometry, GEOMETRIES, "--geometry")
        for name in ("model", "task", "task_option"):
            if name in asked:
                flag = "-T" if name == "task_option" else f"--{name}"
                raise SpecError(
                    f"{flag} has no meaning with --geometry", fix=f"leave {flag} out", id="RCQ-USE-09"
                )
    plans = [resolve("profile", o.flags_of((label,), **asked)) for label in modes or ("certified",)]
    if not modes:
        plans = [resolve("profile", o.flags_of((), **asked))]
    batches = tuple(
        tuple(spec for batch in group for spec in batch)
        for group in zip(*(p.batches for p in plans), strict=True)
    )
    labels = [spec.mode for spec in batches[0]]
    twice = next((label for i, label in enumerate(labels) if label in labels[:i]), None)
    if twice:
        raise SpecError(f"mode {twice!r} is given twice", fix="name each mode once", id="RCQ-USE-09")
    for spec in batches[0]:
        MODES.load(spec.mode_name)
    if batches[0][0].ctx is None:
        what = f"task {batches[0][0].task} runs no model"
        raise SpecError(what, fix="profile a task with a context, such as niah", id="RCQ-USE-09")
    # every mode of a context is timed on one prompt, the first of the task, or on one layer
    changes: dict[str, Json] = {"samples": 1} | ({} if geometry is None else {"model": geometry})
    return plans[0]._replace(batches=tuple(tuple(spec.but(**changes) for spec in batch) for batch in batches))


def _answer_dry_run(shell: Shell, plan: Plan, effort: Effort, geometry: str | None) -> int:
    from rcq_cli.commands._dry_run import answer_dry_run

    seconds = effort.warm_s + effort.steps_s + effort.pairs_s
    note = (
        f"each row is one prompt, on which up to {effort.steps} steps by phase and {effort.pairs} pairs of "
        f"blocks are timed, for {seconds:g} s at most beside the time shown"
    )
    untried = "" if geometry is None else f"one layer of {geometry} has no model: nothing is estimated"
    return answer_dry_run(shell, plan._replace(notes=(*plan.notes, note)), stores=False, untried=untried)


def _measure(
    shell: Shell, plan: Plan, geometry: str | None, dtype: str | None, asked: Any
) -> list[dict[str, Json]]:
    from rcq_cli.commands import _profile
    from rcq_cli.progress import progress_for

    for note in plan.notes:
        shell.say(note)
    device = plan.batches[0][0].device
    progress = progress_for(shell.stderr, shell.view(shell.stderr), quiet=shell.quiet)
    total = sum(len(batch) for batch in plan.batches)
    progress.start(total, "profile")
    try:
        room = _profile.Room("cuda" if device.startswith("cuda") else "cpu")
        cells = []
        for place in _places(shell, plan, geometry, dtype):
            cells.append(_profile.cell(place, room, asked) | {"noise": room.to_json()})
            name = f"profile {place.facts['mode']} T={place.facts['ctx']}"
            progress.update(name, len(cells), total)
    finally:
        progress.close()
    _profile.require(cells, asked.required)
    return cells


def _places(shell: Shell, plan: Plan, geometry: str | None, dtype: str | None) -> Iterator[Place]:
    from rcq_cli.commands import _profile

    if geometry is None:
        return _profile.model_places(shell, plan)
    return _profile.layer_places(shell, geometry, plan, "bfloat16" if dtype in (None, "auto") else dtype)


def _answer(shell: Shell, cells: list[dict[str, Json]], breakdown: bool) -> None:
    from rcq_cli import profiling
    from rcq_cli.reports.breakdown import REPORT
    from rcq_cli.shell import SCHEMA, Result

    document: dict[str, Json] = {"schema": SCHEMA, "command": "profile"}
    if len(cells) == 1:
        document |= cells[0]
    else:
        document |= {"cells": cells, "growth": profiling.growth(cells)}
    rows = [{"ctx": cell["ctx"], "mode": cell["mode"], **row} for cell in cells for row in cell["phases"]]
    shell.answer(Result(document, lambda: REPORT.tables(document, breakdown=breakdown), rows))
