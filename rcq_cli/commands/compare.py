"""Run several modes, or take finished runs, and judge them in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rcq_cli.commands import _compare_options as c
from rcq_cli.commands import _options as o
from rcq_cli.errors import RcqError, SpecError, UnknownEntry

if TYPE_CHECKING:
    from rcq_cli.baseline import Baseline
    from rcq_cli.commands._ci import Outputs
    from rcq_cli.commands._compare import Judged, Rules
    from rcq_cli.presets import Plan
    from rcq_cli.shell import Shell
    from rcq_cli.store import RunReader

Json = Any


def command(
    context: typer.Context,
    names: c.Names = None,
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
    fail_on: c.FailOn = None,
    strict: c.Strict = False,
    exit_zero: c.ExitZero = False,
    expect: c.Expect = None,
    allow_mismatch: c.AllowMismatch = False,
    partial: c.Partial = False,
    margin: c.Margin = None,
    alpha: c.Alpha = "0.025",
    interval: c.Interval = "tango",
    midp: c.MidP = False,
    cluster: c.Cluster = "auto",
    max_missing: c.MaxMissing = "0",
    match: c.Match = None,
    baseline: c.BaselineFile = None,
    update_baseline: c.UpdateBaseline = False,
    noise_floor: c.NoiseFloor = None,
    flip_margin: c.FlipMargin = "0.02",
    latency_margin: c.LatencyMargin = None,
    junit: c.JUnitFile = None,
    code_quality: c.CodeQualityFile = None,
    github: c.GitHub = False,
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
    """Run several modes, or take finished runs, and judge them in pairs.

    Example: rcq compare dense naive certified
    """
    given = locals()
    shell = o.shell_of(context)
    shell.parsed("compare", format=format, json_target=json, quiet=quiet, verbose=verbose)
    from rcq_cli.commands._ci import Outputs

    outputs = Outputs(junit, code_quality, github)
    outputs.check()
    try:
        return _compare(shell, given, outputs)
    except RcqError as error:
        # a server that waits for reports gets them from a comparison that broke off, too
        if not shell.answered and not dry_run:
            outputs.write_error(shell, error)
        raise


def _compare(shell: Shell, given: dict[str, Json], outputs: Outputs) -> int:
    rules = _rules(given)
    words = tuple(given["names"] or ())
    folders = run_folders(words)
    share = _share(given["match"])
    asked = {name: given[name] for name in o.FLAG_NAMES if given.get(name)}
    target = Path(given["baseline"]) if given["update_baseline"] else None
    if folders:
        o.refuse_work(o.work_of(given), "for finished runs")
        return _judge(shell, _stored(folders), rules, outputs, target)
    groups = _measure(shell, words, asked, rules, share, resume=given["resume"], dry_run=given["dry_run"])
    return 0 if groups is None else _judge(shell, groups, rules, outputs, target)


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
) -> list[list[RunReader]] | None:
    """Return the runs of each task and context, None when `--dry-run` asked for none."""
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

        with _run.told(shell, 0) as progress:
            plan = matched(plan, share, progress)
    if dry_run:
        from rcq_cli.commands._dry_run import answer_dry_run

        answer_dry_run(shell, plan)
        return None
    readers = iter(_run.read_runs(_run.carry_out(shell, plan, resume=resume)))
    return [[next(readers) for _ in batch] for batch in plan.batches]


def run_folders(words: Sequence[str]) -> list[Path]:
    """Return the positionals as run folders, nothing when they are modes; raise `SpecError` for a mixture."""
    folders = [Path(word) for word in words if _means_folder(word)]
    if folders and len(folders) < len(words):
        raise _mixed([word for word in words if not _means_folder(word)])
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


def _mixed(others: Sequence[str]) -> SpecError:
    """Return the error of words beside run folders that are none: modes, or folders that are no runs."""
    modes = [word for word in others if _means_mode(word)]
    if modes:
        return SpecError(
            "modes and run folders do not mix in one comparison",
            why=f"no run folder: {', '.join(modes)}",
            fix="run the mode first (rcq eval), then compare the folders",
            id="RCQ-USE-02",
        )
    word = others[0]
    why = "it has no spec.json" if Path(word).is_dir() else "there is no folder and no mode of that name"
    return SpecError(f"{word!r} is no run folder", why, "name a folder below --out", "RCQ-USE-11")


def _means_mode(word: str) -> bool:
    from rcq_cli.presets import MODES

    try:
        return bool(MODES.resolve(word.partition(":")[0]))
    except UnknownEntry:
        return False


def _means_folder(word: str) -> bool:
    return (Path(word) / "spec.json").is_file() or "/" in word.partition(":")[0]


def _stored(folders: Sequence[Path]) -> list[list[RunReader]]:
    """Return finished runs by task and context, each with the reference first: the mode of the first folder.

    Runs that do not fall into such groups stay together, and what differs between them is refused.
    """
    from rcq_cli.commands._run import read_runs

    readers = read_runs(folders)
    groups: dict[tuple[str, int | None], list[RunReader]] = {}
    for reader in readers:
        groups.setdefault((reader.spec.task, reader.spec.ctx), []).append(reader)
    reference = readers[0].spec.mode
    for group in groups.values():
        group.sort(key=lambda reader: reader.spec.mode != reference)
        if len(group) < 2 or group[0].spec.mode != reference:
            return [readers]
    return list(groups.values())


def _baseline(path: str | None, update: bool) -> Baseline | None:
    """Return the baseline to be held against; None without one, and when it is about to be written."""
    if path is None:
        if update:
            raise SpecError("--update-baseline needs --baseline FILE", fix="name the file", id="RCQ-USE-02")
        return None
    if not update:
        from rcq_cli.baseline import read_baseline

        return read_baseline(Path(path))
    from rcq_cli.shell import check_target

    check_target(path, "--baseline")
    if Path(path).suffix not in (".yaml", ".yml"):
        what = f"--update-baseline writes YAML, --baseline {path!r} came"
        raise SpecError(what, fix="name a file that ends with .yaml", id="RCQ-USE-02")
    return None


def _rules(given: dict[str, Json]) -> Rules:
    from rcq_cli import gates
    from rcq_cli.commands._compare import INTERVALS, Rules
    from rcq_cli.commands._run import Limits, read_runs
    from rcq_cli.pairing import SMALLEST_ALPHA
    from rcq_cli.stats import SMALLEST_MARGIN

    o.choose(given["cluster"], ("auto", "none"), "--cluster")
    o.choose(given["interval"], INTERVALS, "--interval")
    return Rules(
        limits=Limits(o.whole(given["max_errors"], "--max-errors", 0) or 0, given["allow_inactive"]),
        margin=o.between(given["margin"], "--margin", 1.0, SMALLEST_MARGIN),
        alpha=o.between(given["alpha"], "--alpha", 0.5, SMALLEST_ALPHA) or 0.025,
        interval=given["interval"],
        mid_p=given["midp"],
        cluster="none" if given["cluster"] == "none" else "cluster",
        max_missing=o.whole(given["max_missing"], "--max-missing", 0) or 0,
        allow_mismatch=given["allow_mismatch"],
        partial=given["partial"],
        strict=given["strict"],
        exit_zero=given["exit_zero"],
        expected=gates.parse_expectations(given["expect"] or ()),
        fail_on=tuple(gates.parse_gate(text) for text in given["fail_on"] or ()),
        latency_margin=o.between(given["latency_margin"], "--latency-margin", 100.0, SMALLEST_MARGIN),
        flip_margin=o.between(given["flip_margin"], "--flip-margin", 1.0, SMALLEST_MARGIN) or 0.02,
        noise=tuple(read_runs(Path(run) for run in given["noise_floor"] or ())),
        baseline=_baseline(given["baseline"], given["update_baseline"]),
    )


def _check_gates(plan: Plan, rules: Rules) -> None:
    """Refuse before anything runs what could not be judged after it.

    That is a margin out of range, a gate that no cell of the plan can meet, and an expectation of no arm.
    """
    from rcq_cli import gates
    from rcq_cli.commands._compare import margin_of
    from rcq_cli.pairing import check_margin
    from rcq_cli.presets import TASKS

    for spec, *_ in plan.batches:
        check_margin(margin_of(spec, rules), spec.task_title, TASKS.load(spec.task_name).score_key)
    cells = _cells_of(plan)
    for gate in rules.fail_on:
        meant = [metrics for cell, metrics in cells.items() if gate.matches(*cell)]
        # a task that does not tell its metrics shows them in its scores: the gate is checked after them
        told = meant and None not in meant
        known = [name for metrics in meant for name in metrics or ()] if told else [gate.metric]
        gates.check_gates([gate], tuple(cells), known)
    gates.check_expectations(rules.expected, [spec.mode for batch in plan.batches for spec in batch[1:]])


def _cells_of(plan: Plan) -> dict[tuple[str, int | None], tuple[str, ...] | None]:
    """Return each (task, ctx) of a plan with all metrics its task can score, None where it does not say."""
    from rcq_cli.presets import TASKS

    cells: dict[tuple[str, int | None], tuple[str, ...] | None] = {}
    for batch in plan.batches:
        spec = batch[0]
        task = TASKS.load(spec.task_name)
        metrics = None if task.further_metrics is None else (task.score_key, *task.further_metrics)
        parts = (spec.part,) if spec.part else task.parts
        cells |= {(spec.cell_task(part), spec.ctx): metrics for part in parts}
    return cells


def _judge(
    shell: Shell,
    groups: Sequence[Sequence[RunReader]],
    rules: Rules,
    outputs: Outputs,
    target: Path | None,
) -> int:
    """Judge, answer, write every report, and only then say how it ended."""
    from rcq_cli.commands import _against, _compare

    judged = _compare.judge_runs(groups, rules)
    for warning in judged.warnings:
        shell.warn(warning)
    code = judged.gate.exit_code(exit_zero=rules.exit_zero)
    readers = [reader for group in groups for reader in group]
    document = _document(readers, judged, rules, code)
    _answer(shell, readers, document)
    outputs.write(shell, document)
    if target is not None:
        shell.say("baseline " + _against.keep_baseline(target, document, groups, judged, rules))
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


def _document(readers: Sequence[RunReader], judged: Judged, rules: Rules, code: int) -> dict[str, Json]:
    from rcq_cli.commands._run import contract_of, one_of
    from rcq_cli.shell import SCHEMA

    return {
        "schema": SCHEMA,
        "command": "compare",
        "contract": contract_of(readers),
        "contracts": judged.contracts,
        "run": one_of(str(reader.folder) for reader in readers),
        "judgement": rules.to_json(),
        "cells": judged.cells,
        "pairs": judged.pairs,
        "baseline": judged.baseline,
        "gate": judged.gate.to_json(),
        "warnings": list(judged.warnings),
        "exit_code": code,
    }


def _answer(shell: Shell, readers: Sequence[RunReader], document: dict[str, Json]) -> None:
    from rcq_cli.reports._header import header
    from rcq_cli.reports.markdown import REPORT as markdown
    from rcq_cli.reports.paired import REPORT as paired
    from rcq_cli.shell import Result

    top = header(readers[0].contract, document["contract"])
    shell.answer(
        Result(
            document,
            lambda: (top, *paired.tables(document)),
            [_with_pair(cell, document["pairs"]) for cell in document["cells"]],
            lambda: (top, *markdown.tables(document)),
        )
    )


def _with_pair(cell: dict[str, Json], pairs: Sequence[dict[str, Json]]) -> dict[str, Json]:
    """Return the cell with the pair in which it is the candidate, for flat output."""
    at = (cell["task"], cell["ctx"], cell["mode"])
    found = next((p for p in pairs if (p["task"], p["ctx"], p["candidate"]) == at), None)
    return {**cell, "pair": found}
