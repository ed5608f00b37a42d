"""What eval and compare share: carrying out a plan, reading the runs, and the document's common part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rcq_cli.errors import BrokenRun, CertificateViolated, RcqError, SpecError, UnsupportedHere
from rcq_cli.progress import Progress, progress_for
from rcq_cli.registry import Registry
from rcq_cli.shell import Interrupted, Shell

if TYPE_CHECKING:
    from rcq_cli.presets import Plan
    from rcq_cli.store import RunReader
    from rcq_cli.table import Table

Json = Any

EXECUTORS: Registry[Any] = Registry("rcq_cli.executors", "EXECUTOR", "executor")


class Limits(NamedTuple):
    """What of a run's problems is accepted."""

    max_errors: int = 0
    allow_inactive: bool = False


def carry_out(shell: Shell, plan: Plan, *, resume: bool) -> tuple[Path, ...]:
    """Run every batch and return the run folders in batch and mode order; a stop names the way to go on."""
    executor = executor_of(plan)
    for note in plan.notes:
        shell.say(note)
    if shell.verbose:
        for line in origin_lines(plan):
            shell.say(line)
    # the executor starts the work; the bar must be visible while models load, hence the title at once
    with told(shell, sum(spec.samples for batch in plan.batches for spec in batch)) as progress:
        try:
            folders: tuple[Path, ...] = executor.run(
                plan.batches, out=plan.out, resume=resume, progress=progress
            )
        except KeyboardInterrupt:
            raise Interrupted(
                "interrupted",
                f"stopped by a signal; what was finished is stored in {plan.out}",
                shell.resume_command(),
                "RCQ-RUN-09",
            ) from None
    return folders


@contextmanager
def told(shell: Shell, samples: int) -> Iterator[Progress]:
    """Show how the work inside the block, of that many samples, gets on."""
    progress = progress_for(shell.stderr, shell.view(shell.stderr), quiet=shell.quiet)
    progress.start(samples, shell.command)
    try:
        yield progress
    finally:
        progress.close()


def executor_of(plan: Plan) -> Any:
    """Return the executor of a plan, ready to run; raise `UnsupportedHere` where it cannot."""
    executor = EXECUTORS.load(plan.executor)
    wanted = {name: value for name in ("workers", "address") if (value := getattr(plan, name)) is not None}
    if wanted and executor.name == "local":
        raise SpecError(
            f"--{next(iter(wanted))} has no meaning with executor local",
            fix="add --executor ray, or leave it out",
            id="RCQ-USE-02",
        )
    reason = executor.unsupported()
    if reason:
        raise UnsupportedHere(
            f"executor {executor.name} cannot run here", reason, "--executor local", "RCQ-ENV-01"
        )
    return replace(executor, **wanted) if wanted else executor


def origin_lines(plan: Plan) -> Iterable[str]:
    """Say of each run where its values came from."""
    for batch in plan.batches:
        for spec in batch:
            origins = ", ".join(f"{name} {origin}" for name, origin in sorted(spec.origins.items()))
            yield f"{spec.task} {spec.mode} ctx={spec.ctx}: {origins}"


def read_runs(folders: Iterable[Path]) -> list[RunReader]:
    """Open run folders; raise `BrokenRun` for one that cannot be read."""
    from rcq_cli.store import RunReader

    return [RunReader(folder) for folder in folders]


def cells_of(readers: Iterable[RunReader]) -> list[dict[str, Json]]:
    """Return the cells of all runs, each with the folder of its run."""
    return [{**cell, "run": str(reader.folder)} for reader in readers for cell in reader.cells()]


def one_of(values: Iterable[str | None]) -> str | None:
    """Return the value all share, None when there are several."""
    known = dict.fromkeys(values)
    return next(iter(known)) if len(known) == 1 else None


def contract_of(readers: Sequence[RunReader]) -> str:
    """Return the contract hash of the runs; of several contracts the hash of their sorted list."""
    from rcq_cli.contract import contract_hash
    from rcq_cli.spec import sha256_json

    hashes = sorted({contract_hash(reader.contract) for reader in readers})
    return hashes[0] if len(hashes) == 1 else sha256_json(hashes)


def run_problems(readers: Iterable[RunReader], limits: Limits) -> list[Mapping[str, Json]]:
    """Return what makes the runs fail beyond `limits`, `{code, kind, what, count}`; `what` names the run."""
    found: list[Mapping[str, Json]] = []
    for reader in readers:
        if reader.summary is None:
            found.append(
                {"code": 6, "kind": "status", "what": f"{reader.folder}: run is {reader.status}", "count": 1}
            )
            continue
        entries = [p for p in reader.summary.get("problems", ()) if not _accepted(p, limits)]
        found += [{**problem, "what": f"{reader.spec.mode}: {problem['what']}"} for problem in entries]
    return found


def _accepted(problem: Mapping[str, Json], limits: Limits) -> bool:
    if problem["kind"] == "sample_errors":
        return bool(problem["count"] <= limits.max_errors)
    return problem["kind"] == "inactive" and limits.allow_inactive


def shortages(readers: Iterable[RunReader]) -> list[str]:
    """Return a warning for each finished run whose task has fewer samples than somebody asked for.

    Read from the stored run, so that it is said again wherever the run is shown. Sizes of presets and tasks
    are upper limits that nobody asked for: all there is is what they mean.
    """
    found = [_shortage(reader) for reader in readers if reader.summary is not None]
    return list(dict.fromkeys(filter(None, found)))


def _shortage(reader: RunReader) -> str:
    spec = reader.spec
    came = {cell["task"]: cell["n"] + cell["errors"] for cell in reader.cells()}
    short = [f"{task} has {n}" for task, n in came.items() if n < spec.taken]
    if not short or spec.origins.get("samples") not in ("flag", "file"):
        return ""
    where = (f" at {spec.ctx} tokens" if spec.ctx else "") + (f" in shard {spec.shard}" if spec.shard else "")
    return (
        f"{spec.taken} samples{where} were asked for, but {', '.join(short)}: the score rests on those; "
        "give the task more, or ask for fewer with --samples"
    )


def finish(
    shell: Shell,
    command: str,
    readers: Sequence[RunReader],
    limits: Limits,
    tables: Callable[[dict[str, Json]], Sequence[Table]],
    notes: Sequence[str] = (),
) -> int:
    """Answer with the runs of a command, say `notes` and the problems, and return the exit code.

    `tables` draws the document.
    """
    from rcq_cli.gates import exit_code
    from rcq_cli.shell import SCHEMA, Result

    problems = run_problems(readers, limits)
    code = exit_code(problem["code"] for problem in problems)
    warnings = shortages(readers)
    for warning in warnings:
        shell.warn(warning)
    cells = cells_of(readers)
    document = {
        "schema": SCHEMA,
        "command": command,
        "contract": contract_of(readers),
        "run": one_of(str(reader.folder) for reader in readers),
        "cells": cells,
        "problems": problems,
        "warnings": warnings,
        "exit_code": code,
    }
    shell.answer(Result(document, lambda: tables(document), cells))
    for note in notes:
        shell.say(note)
    report_problems(shell, problems)
    return code


def report_problems(shell: Shell, problems: Sequence[Mapping[str, Json]]) -> None:
    """Write each problem to stderr as an error of three lines, the gravest first."""
    from rcq_cli.gates import PRECEDENCE

    for problem in sorted(problems, key=lambda p: PRECEDENCE.index(p["code"])):
        shell.report(_as_error(problem))


def _as_error(problem: Mapping[str, Json]) -> RcqError:
    if problem["code"] == 4:
        return CertificateViolated(
            problem["what"],
            "an audited error is above its proven bound: the certificate does not hold",
            "report this with the run folder; do not use the mode on this model",
            "RCQ-CERT-01",
        )
    fixes = {
        "sample_errors": "see `error` in examples.jsonl; --max-errors N accepts failed samples",
        "inactive": "choose a context beyond the mode's budget, or --allow-inactive",
        "status": "finish it: the same command with --resume",
    }
    return BrokenRun(
        problem["what"],
        "a run with failed samples, a mode that did nothing or a failed control proves nothing",
        fixes.get(problem["kind"], "see controls.jsonl in the run folder"),
        "RCQ-RUN-08",
    )
