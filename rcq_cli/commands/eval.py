"""Run tasks with one mode and write a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcq_cli.commands import _options as o
from rcq_cli.errors import SpecError

if TYPE_CHECKING:
    from rcq_cli.commands._run import Limits
    from rcq_cli.shell import Shell
    from rcq_cli.store import RunReader
    from rcq_cli.table import Table

Json = Any

Shard = Annotated[
    str | None, typer.Option("--shard", metavar="I/N", help="Only the I-th of N equal parts of the samples.")
]
Runs = Annotated[
    list[str] | None, typer.Argument(metavar="[RUN...]", help="With --merge: the runs of all shards.")
]
Merge = Annotated[bool, typer.Option("--merge", help="Put the shards RUN... together as one run.")]
Rescore = Annotated[
    str | None, typer.Option("--rescore", metavar="RUN", help="Score the stored answers of a run again.")
]


def command(
    context: typer.Context,
    runs: Runs = None,
    task: o.Task = None,
    ctx: o.Ctx = None,
    mode: o.ModeName = None,
    model: o.Model = None,
    samples: o.Samples = None,
    seed: o.Seed = None,
    preset: o.Preset = None,
    mode_option: o.ModeOption = None,
    task_option: o.TaskOption = None,
    backend: o.Backend = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    audit: o.Audit = None,
    max_errors: o.MaxErrors = "0",
    allow_inactive: o.AllowInactive = False,
    keep_prompts: o.KeepPrompts = False,
    shard: Shard = None,
    merge: Merge = False,
    rescore: Rescore = None,
    executor: o.Executor = None,
    workers: o.Workers = None,
    address: o.Address = None,
    out: o.Out = None,
    resume: o.Resume = False,
    dry_run: o.DryRun = False,
    format: o.Format = "table",
    json: o.JsonTarget = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> int:
    """Run tasks with one mode and write a run.

    Example: rcq eval --task niah --ctx 64k --mode certified
    """
    given = locals()
    asked = {name: given[name] for name in o.FLAG_NAMES if given.get(name)}
    from rcq_cli.commands import _run
    from rcq_cli.presets import resolve

    shell = o.shell_of(context)
    shell.parsed("eval", format=format, json_target=json, quiet=quiet, verbose=verbose)
    limits = _run.Limits(o.whole(max_errors, "--max-errors", 0) or 0, allow_inactive)
    if merge or rescore or runs:
        folder = _from_runs(tuple(runs or ()), merge, rescore, o.work_of(given))
        return _finish(shell, _run.read_runs([folder]), limits)
    plan = resolve("eval", o.flags_of((mode,) if mode else (), **asked))
    if dry_run:
        from rcq_cli.commands._dry_run import answer_dry_run

        return answer_dry_run(shell, plan)
    return _finish(shell, _run.read_runs(_run.carry_out(shell, plan, resume=resume)), limits)


def _from_runs(runs: tuple[str, ...], merge: bool, rescore: str | None, asked: dict[str, Json]) -> Path:
    """Make one run of stored ones and return its folder; nothing is answered again."""
    from rcq_cli import finish
    from rcq_cli.presets import resolve

    if not merge and runs:
        raise SpecError(f"unexpected argument {runs[0]!r}", fix="see rcq eval --help", id="RCQ-USE-02")
    if merge and rescore:
        raise SpecError("--merge and --rescore are two things", fix="merge first", id="RCQ-USE-02")
    out = asked.pop("out", None)
    named = o.words(asked.pop("task", None), "--task") if rescore else ()
    o.refuse_work(asked, "with --merge and --rescore")
    place = resolve("eval", o.flags_of(out=out)).out
    if merge:
        return finish.merge([Path(run) for run in runs], place)
    return finish.rescore(Path(str(rescore)), place, named)


def _finish(shell: Shell, readers: Sequence[RunReader], limits: Limits) -> int:
    from rcq_cli.commands import _run

    return _run.finish(shell, "eval", readers, limits, lambda document: _tables(document, readers))


def _tables(document: dict[str, Json], readers: Sequence[RunReader]) -> tuple[Table, ...]:
    from rcq_cli.reports._header import header
    from rcq_cli.reports.heatmap import REPORT as heatmap
    from rcq_cli.reports.heatmap import Rows
    from rcq_cli.reports.summary import REPORT as summary

    runs = [
        Rows(reader.spec.ctx, reader.spec.mode, cells[0]["metric"], reader.examples())
        for reader in readers
        if reader.spec.task_name == "niah" and reader.spec.ctx is not None and (cells := reader.cells())
    ]
    top = header(readers[0].contract, document["contract"])
    return (top, *summary.tables(document), *heatmap.tables(runs))
