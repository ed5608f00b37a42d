"""Run several modes, or take finished runs, and judge them in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcq_cli.commands import _options as o
from rcq_cli.errors import SpecError

if TYPE_CHECKING:
    from rcq_cli.commands._compare import Judged, Rules
    from rcq_cli.presets import Plan
    from rcq_cli.shell import Shell
    from rcq_cli.store import RunReader

Json = Any

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODE|RUN...", help="Two or more modes or run folders; the first is the reference."
    ),
]
FailOn = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-on",
        metavar="GATE",
        help="Condition that fails, repeatable: 'niah@64k.accuracy.upper < -0.02'.",
    ),
]
Expect = Annotated[
    list[str] | None,
    typer.Option("--expect", metavar="MODE=fail", help="A mode that is there to fail. [default: naive=fail]"),
]
Strict = Annotated[bool, typer.Option("--strict", help="An undecided cell fails too.")]
ExitZero = Annotated[bool, typer.Option("--exit-zero", help="Report a failed gate, but leave with 0.")]
AllowMismatch = Annotated[
    bool, typer.Option("--allow-mismatch", help="Compare runs of different contracts; nothing can pass then.")
]
Partial = Annotated[bool, typer.Option("--partial", help="Compare unfinished runs; nothing can pass then.")]
Margin = Annotated[
    str | None,
    typer.Option("--margin", metavar="X", help="Largest loss that passes. [default: the task's]"),
]
Alpha = Annotated[str, typer.Option("--alpha", metavar="X", help="One-sided level of the verdict.")]
Cluster = Annotated[
    str, typer.Option("--cluster", metavar="auto|none", help="none: treat all samples as independent.")
]
Match = Annotated[
    str | None,
    typer.Option(
        "--match",
        metavar="bytes=SHARE",
        help="Give every mode with a budget the one that holds this share of a dense 16-bit cache.",
    ),
]
MaxMissing = Annotated[
    str, typer.Option("--max-missing", metavar="N", help="Samples that only one run may hold.")
]


def command(
    context: typer.Context,
    names: Names = None,
    task: o.Task = None,
    ctx: o.Ctx = None,
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
    fail_on: FailOn = None,
    strict: Strict = False,
    exit_zero: ExitZero = False,
    expect: Expect = None,
    allow_mismatch: AllowMismatch = False,
    partial: Partial = False,
    margin: Margin = None,
    alpha: Alpha = "0.025",
    cluster: Cluster = "auto",
    max_missing: MaxMissing = "0",
    match: Match = None,
    executor: o.Executor = None,
    out: o.Out = None,
    resume: o.Resume = False,
    dry_run: o.DryRun = False,
    format: o.Format = "table",
    json: o.JsonTarget = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> int:
    """Run several modes, or take finished runs, and judge them in pairs.

    Example: rcq compare dense naive certified
    """
    given = locals()
    shell = o.shell_of(context)
    shell.parsed("compare", format=format, json_target=json, quiet=quiet, verbose=verbose)
    rules = _rules(given)
    words = tuple(names or ())
    folders = run_folders(words)
    share = _share(match)
    asked = {name: given[name] for name in o.FLAG_NAMES if given.get(name)}
    if folders:
        given_work = {"match": match, "dry_run": dry_run}
        asked |= {name: value for name, value in given_work.items() if value}
        o.refuse_work(asked, "for finished runs")
        return _judge(shell, [_stored(folders)], rules)
    return _measure(shell, words, asked, rules, share, resume=resume, dry_run=dry_run)


def _share(match: str | None) -> float | None:
    from rcq_cli.commands._match import parse_match

    return parse_match(match)


def _measure(
    shell: Shell,
    words: tuple[str, ...],
    asked: dict[str, Json],
    rules: Rules,
    share: float | None,
    *,
    resume: bool,
    dry_run: bool,
) -> int:
    from rcq_cli.commands import _run
    from rcq_cli.presets import resolve

    plan = resolve("compare", o.flags_of(words, **asked))
    if any(len(batch) < 2 for batch in plan.batches):
        raise SpecError(
            f"compare needs at least two modes, {len(plan.batches[0])} came",
            fix="rcq compare dense certified; rcq modes lists them",
            id="RCQ-USE-02",
        )
    _check_gates(plan, rules)
    if share is not None:
        from rcq_cli.commands._match import matched

        plan = matched(plan, share)
    if dry_run:
        from rcq_cli.commands._dry_run import answer_dry_run

        return answer_dry_run(shell, plan)
    readers = iter(_run.read_runs(_run.carry_out(shell, plan, resume=resume)))
    return _judge(shell, [[next(readers) for _ in batch] for batch in plan.batches], rules)


def run_folders(words: Sequence[str]) -> list[Path]:
    """Return the positionals as run folders, nothing when they are modes; raise `SpecError` for a mixture."""
    folders = [Path(word) for word in words if _means_folder(word)]
    if folders and len(folders) < len(words):
        raise SpecError(
            "modes and run folders do not mix in one comparison",
            fix="run the mode first (rcq eval), then compare the folders",
            id="RCQ-USE-02",
        )
    missing = next((folder for folder in folders if not folder.is_dir()), None)
    if missing is not None:
        raise SpecError(
            f"run folder {str(missing)!r} does not exist", fix="name a folder below --out", id="RCQ-USE-11"
        )
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise SpecError("a run is compared with itself", fix="name each folder once", id="RCQ-USE-09")
    if len(folders) == 1:
        raise SpecError(
            "compare needs at least two runs, 1 came", fix="name the reference first", id="RCQ-USE-02"
        )
    return folders


def _means_folder(word: str) -> bool:
    return (Path(word) / "spec.json").is_file() or "/" in word.partition(":")[0]


def _stored(folders: Sequence[Path]) -> list[RunReader]:
    from rcq_cli.commands._run import read_runs

    return read_runs(folders)


def _rules(given: dict[str, Json]) -> Rules:
    from rcq_cli import gates
    from rcq_cli.commands._compare import Rules
    from rcq_cli.commands._run import Limits

    o.choose(given["cluster"], ("auto", "none"), "--cluster")
    return Rules(
        limits=Limits(o.whole(given["max_errors"], "--max-errors", 0) or 0, given["allow_inactive"]),
        margin=o.between(given["margin"], "--margin", 1.0),
        alpha=o.between(given["alpha"], "--alpha", 0.5) or 0.025,
        cluster="none" if given["cluster"] == "none" else "cluster",
        max_missing=o.whole(given["max_missing"], "--max-missing", 0) or 0,
        allow_mismatch=given["allow_mismatch"],
        partial=given["partial"],
        strict=given["strict"],
        exit_zero=given["exit_zero"],
        expected=gates.parse_expectations(given["expect"] or ()),
        fail_on=tuple(gates.parse_gate(text) for text in given["fail_on"] or ()),
    )


def _check_gates(plan: Plan, rules: Rules) -> None:
    """Refuse a gate that no cell of the plan can meet, before anything runs."""
    from rcq_cli import gates
    from rcq_cli.presets import TASKS

    cells = []
    for batch in plan.batches:
        spec = batch[0]
        parts = (spec.part,) if spec.part else TASKS.load(spec.task_name).parts
        cells += [(spec.cell_task(part), spec.ctx) for part in parts]
    # further metrics of a task are known only from its scores: here each gate's own metric counts as known
    gates.check_gates(rules.fail_on, cells, [gate.metric for gate in rules.fail_on])


def _judge(shell: Shell, groups: Sequence[Sequence[RunReader]], rules: Rules) -> int:
    from rcq_cli.commands import _compare

    judged = _compare.judge_runs(groups, rules)
    for warning in judged.warnings:
        shell.warn(warning)
    code = judged.gate.exit_code(exit_zero=rules.exit_zero)
    _answer(shell, [reader for group in groups for reader in group], judged, code)
    _warn_undecided(shell, judged)
    if code:
        shell.report(_compare.as_error(judged.gate, code))
    return code


def _warn_undecided(shell: Shell, judged: Judged) -> None:
    """Say in one line each what the exit code does not: what is undecided, and what got better."""
    loose = [
        g for g in judged.gate.gates if g.status in ("inconclusive", "warn", "not evaluated") and not g.code
    ]
    if loose:
        places = ", ".join(dict.fromkeys(f"{gate.matched} ({gate.status})" for gate in loose))
        shell.warn(f"no failure, but no clean pass either: {places}")
    for notice in judged.gate.notices:
        shell.warn(notice)


def _answer(shell: Shell, readers: Sequence[RunReader], judged: Judged, code: int) -> None:
    from rcq_cli.commands._run import contract_of, one_of
    from rcq_cli.reports._header import header
    from rcq_cli.reports.paired import REPORT
    from rcq_cli.shell import SCHEMA, Result

    contract = contract_of(readers)
    document = {
        "schema": SCHEMA,
        "command": "compare",
        "contract": contract,
        "run": one_of(str(reader.folder) for reader in readers),
        "cells": judged.cells,
        "pairs": judged.pairs,
        "gate": judged.gate.to_json(),
        "exit_code": code,
    }
    records = [_with_pair(cell, judged.pairs) for cell in judged.cells]
    shell.answer(
        Result(
            document,
            lambda: (header(readers[0].contract, contract), *REPORT.tables(document)),
            records,
        )
    )


def _with_pair(cell: dict[str, Json], pairs: Sequence[dict[str, Json]]) -> dict[str, Json]:
    """Return the cell with the pair in which it is the candidate, for flat output."""
    at = (cell["task"], cell["ctx"], cell["mode"])
    found = next((p for p in pairs if (p["task"], p["ctx"], p["candidate"]) == at), None)
    return {**cell, "pair": found}
