"""Record certificates step by step, show, export or compare them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rcq_cli.commands import _options as o
from rcq_cli.errors import SpecError

if TYPE_CHECKING:
    from rcq_cli.presets import Plan
    from rcq_cli.shell import Shell
    from rcq_cli.store import RunReader
    from rcq_cli.table import Table
    from rcq_cli.traces import Filter

Json = Any

ACTIONS = ("show", "export", "diff")
FORMATS = ("perfetto", "jsonl", "csv", "parquet")
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[show RUN | export RUN | diff A B]", help="What to do with stored runs; nothing: record."
    ),
]
Sample = Annotated[str | None, typer.Option("--sample", metavar="ID", help="Only this sample: id or number.")]
Step = Annotated[str | None, typer.Option("--step", metavar="N", help="Only this decode step.")]
Layer = Annotated[str | None, typer.Option("--layer", metavar="L", help="Only this layer.")]
Head = Annotated[
    str | None,
    typer.Option("--head", metavar="H", help="Only this query head; with step and layer: in full."),
]
Rung = Annotated[
    str | None, typer.Option("--rung", metavar="R", help="Only head-steps that went to this rung or higher.")
]
As = Annotated[
    str | None, typer.Option("--format", metavar="FORMAT", help=f"Of export: {', '.join(FORMATS)}.")
]
To = Annotated[
    str | None, typer.Option("--to", metavar="PATH", help="Where export writes; - is stdout. [default: -]")
]
MaxMib = Annotated[
    str, typer.Option("--trace-max-mib", metavar="N", help="Largest Perfetto trace, before packing.")
]

EveryNth = Annotated[
    str | None,
    typer.Option("--trace-every", metavar="N", help="Each Nth step of a Perfetto trace. [default: 1]"),
]


def command(
    context: typer.Context,
    words: Words = None,
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
    sample: Sample = None,
    step: Step = None,
    layer: Layer = None,
    head: Head = None,
    rung: Rung = None,
    as_: As = None,
    to: To = None,
    trace_max_mib: MaxMib = "64",
    trace_every: EveryNth = None,
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
    """Record certificates step by step (audited by default), show, export or compare them.

    Example: rcq trace --task niah --ctx 4k --samples 2, then rcq trace show runs/RUN
    """
    given = locals()
    shell = o.shell_of(context)
    shell.parsed("trace", format=format, json_target=json, quiet=quiet, verbose=verbose)
    asked = {name: given[name] for name in o.FLAG_NAMES if given.get(name)}
    wanted = _filter(given)
    if not words:
        _refuse(given, ("as_", "to", "trace_every", *_FILTERS), "while recording; name an action first")
        return _record(shell, asked, given)
    action, *runs = words
    o.choose(action, ACTIONS, "trace")
    o.refuse_work(o.work_of(given), "for stored runs")
    readers = _readers(action, runs)
    if action == "export":
        _refuse(given, ("json",), "with export; --format and --to say what is written")
        return _export(shell, readers[0], wanted, as_ or "perfetto", to, _limits(given))
    _refuse(given, ("as_", "to", "trace_every"), f"with {action}; it belongs to export")
    return _show(shell, readers[0], wanted) if action == "show" else _diff(shell, readers, wanted)


_FILTERS = ("sample", "step", "layer", "head", "rung")


def _filter(given: dict[str, Json]) -> Filter:
    from rcq_cli.traces import Filter

    numbers = {name: o.whole(given[name], f"--{name}", 0) for name in _FILTERS[1:]}
    return Filter(sample=given["sample"], **numbers)


class _Limits(NamedTuple):
    """What keeps a Perfetto trace small enough to open."""

    max_mib: int
    every: int


def _limits(given: dict[str, Json]) -> _Limits:
    largest = o.whole(given["trace_max_mib"], "--trace-max-mib", 1) or 1
    return _Limits(largest, o.whole(given["trace_every"], "--trace-every", 1) or 1)


def _refuse(given: dict[str, Json], names: Sequence[str], where: str) -> None:
    for name in names:
        if given.get(name) is not None:
            flag = "--format" if name == "as_" else "--" + name.replace("_", "-")
            raise SpecError(f"{flag} has no meaning {where}", fix=f"leave {flag} out", id="RCQ-USE-02")


def _readers(action: str, runs: Sequence[str]) -> list[RunReader]:
    from rcq_cli.store import RunReader

    needed = 2 if action == "diff" else 1
    if len(runs) != needed:
        what = f"trace {action} needs {needed} run folder{'s' if needed > 1 else ''}, {len(runs)} came"
        raise SpecError(what, fix=f"rcq trace {action} {'A B' if needed > 1 else 'RUN'}", id="RCQ-USE-02")
    missing = next((run for run in runs if not Path(run).is_dir()), None)
    if missing is not None:
        raise SpecError(
            f"run folder {missing!r} does not exist", fix="name a folder below --out", id="RCQ-USE-11"
        )
    return [RunReader(Path(run)) for run in runs]


# -- recording ----------------------------------------------------------------------------------------------


def _record(shell: Shell, asked: dict[str, Json], given: dict[str, Json]) -> int:
    from rcq_cli.commands import _run
    from rcq_cli.presets import resolve

    limits = _run.Limits(o.whole(given["max_errors"], "--max-errors", 0) or 0, given["allow_inactive"])
    modes = (given["mode"],) if given["mode"] else ()
    plan = audited(resolve("trace", o.flags_of(modes, **asked)))
    if given["dry_run"]:
        from rcq_cli.commands._dry_run import answer_dry_run

        return answer_dry_run(shell, plan)
    readers = _run.read_runs(_run.carry_out(shell, plan, resume=given["resume"]))
    notes = [f"recorded in {reader.folder}; rcq trace show {reader.folder}" for reader in readers]
    return _run.finish(shell, "trace", readers, limits, lambda document: _tables(document, readers), notes)


def audited(plan: Plan) -> Plan:
    """Return the plan with every step audited, unless somebody said how many: a trace shows true errors."""
    batches = tuple(
        tuple(spec if spec.origins.get("audit") != "default" else spec.but(audit=1.0) for spec in batch)
        for batch in plan.batches
    )
    return plan._replace(batches=batches)


def _tables(document: dict[str, Json], readers: Sequence[RunReader]) -> tuple[Table, ...]:
    from rcq_cli.reports.summary import REPORT as summary
    from rcq_cli.reports.timeline import REPORT as timeline
    from rcq_cli.traces import Filter, show

    shown = [show(reader, Filter()) for reader in readers if reader.steps() is not None]
    return (*summary.tables(document), *(table for one in shown for table in timeline.tables(one)))


# -- reading ------------------------------------------------------------------------------------------------


def _show(shell: Shell, reader: RunReader, wanted: Filter) -> int:
    from rcq_cli.reports.timeline import REPORT
    from rcq_cli.shell import SCHEMA, Result
    from rcq_cli.traces import show

    shown = show(reader, wanted)
    document = {"schema": SCHEMA, "command": "trace", "action": "show", **shown}
    shell.answer(Result(document, lambda: REPORT.tables(shown), shown["worst"]))
    return 4 if shown["violations"] else 0


def _diff(shell: Shell, readers: Sequence[RunReader], wanted: Filter) -> int:
    from rcq_cli.reports.difference import REPORT
    from rcq_cli.shell import SCHEMA, Result
    from rcq_cli.traces import difference

    found = difference(readers[0], readers[1], wanted)
    document = {"schema": SCHEMA, "command": "trace", "action": "diff", **found}
    shell.answer(Result(document, lambda: REPORT.tables(found), found["heads"]))
    return 0


def _export(
    shell: Shell, reader: RunReader, wanted: Filter, kind: str, to: str | None, limits: _Limits
) -> int:
    from rcq_cli.shell import check_target
    from rcq_cli.traces import flat, recorded

    o.choose(kind, FORMATS, "--format")
    check_target(to, "--to")
    samples = recorded(reader, wanted.sample)
    if kind == "perfetto":
        return _export_perfetto(shell, reader, samples, wanted, to, limits)
    if limits.every > 1:
        raise SpecError(f"--trace-every has no meaning with --format {kind}", fix="--step N", id="RCQ-USE-02")
    found = flat(samples, wanted)
    if kind == "parquet":
        return _export_parquet(shell, found, to)
    from rcq_cli.render import to_csv, to_json_lines

    rows = list(found.records())
    _put(shell, to, to_csv(rows) if kind == "csv" else to_json_lines(rows))
    return 0


def _export_perfetto(
    shell: Shell, reader: RunReader, samples: Json, wanted: Filter, to: str | None, limits: _Limits
) -> int:
    from rcq_cli import perfetto

    spec = reader.spec
    title = " ".join(filter(None, (spec.task, str(spec.ctx or ""), spec.mode, spec.model)))
    document, truncated = perfetto.export(samples, title, wanted, limits.max_mib, limits.every)
    if truncated:
        shell.warn(
            f"{truncated['reason']} at step {truncated['at_step']}: no slices after it, counters go on"
        )
    if to is not None and to.endswith(".gz"):
        perfetto.write(Path(to), document)
        return 0
    _put(shell, to, perfetto.text(document))
    return 0


def _export_parquet(shell: Shell, found: Any, to: str | None) -> int:
    if to in (None, "-"):
        raise SpecError(
            "--format parquet needs a file", why="it is no text", fix="--to PATH", id="RCQ-USE-02"
        )
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = dict(found.columns)
    names = pa.DictionaryArray.from_arrays(columns.pop("sample"), list(found.samples)).cast(pa.string())
    table = pa.table({"sample_id": names, **columns})
    pq.write_table(table, to)
    shell.say(f"{table.num_rows} head-steps written to {to}")
    return 0


def _put(shell: Shell, to: str | None, text: str) -> None:
    from rcq_cli.shell import write_file

    if to in (None, "-"):
        shell.write(text)
    else:
        write_file(Path(str(to)), text)
