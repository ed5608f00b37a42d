"""Put stored runs into one HTML file that opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcq_cli.commands import _options as o
from rcq_cli.errors import NotComparable, SpecError

if TYPE_CHECKING:
    from rcq_cli.store import RunReader

Json = Any

Sources = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN...", help="Run folders, and files that rcq profile --json PATH wrote."),
]
Output = Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The file to write.")]


def command(
    context: typer.Context,
    sources: Sources = None,
    output: Output = "report.html",
    json: o.JsonTarget = None,
    quiet: o.Quiet = False,
) -> int:
    """Put stored runs into one HTML file that opens offline: verdicts, memory, time, certificates, accuracy.

    Example: rcq report runs/* -o report.html. Of the runs of one task and context, the dense one is the
    reference.
    """
    shell = o.shell_of(context)
    shell.parsed("report", json_target=json, quiet=quiet)
    from rcq_cli.shell import check_target, write_file

    check_target(output, "-o")
    target = Path(output)
    folders, files = _sorted(tuple(sources or ()))
    from rcq_cli.commands._run import read_runs
    from rcq_cli.page.content import document
    from rcq_cli.page.page import render

    readers = sorted(read_runs(folders), key=_order)
    profiles = [cell for file in files for cell in _profiles(file)]
    content = document(readers, profiles, _judged(readers), _header(readers))
    text = render(content)
    write_file(target, text)
    if json is not None:
        from rcq_cli.shell import Result

        shell.answer(Result(content, lambda: (), ()))
    if json != "-":
        shell.write(f"{target}\n")
    violated = any((cell.get("certificates") or {}).get("violations") for cell in content["cells"])
    if violated:
        shell.warn("a certificate is violated; the report shows it at the top")
    return 4 if violated else 0


def _sorted(sources: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """Return run folders and JSON files; raise `SpecError` for anything else and for nothing at all."""
    if not sources:
        raise SpecError("report needs at least one run folder", fix="rcq report runs/*", id="RCQ-USE-02")
    paths = [Path(source) for source in dict.fromkeys(sources)]
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise SpecError(
            f"run folder {str(missing)!r} does not exist", fix="name a folder below --out", id="RCQ-USE-11"
        )
    return [path for path in paths if path.is_dir()], [path for path in paths if not path.is_dir()]


def _profiles(path: Path) -> Sequence[dict[str, Json]]:
    import json

    from rcq_cli.reports.breakdown import cells_of

    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{str(path)!r} cannot be read", str(error), id="RCQ-USE-11") from error
    if not isinstance(found, dict) or found.get("command") != "profile" or "error" in found:
        raise SpecError(
            f"{str(path)!r} is no document of rcq profile", fix="rcq profile --json PATH", id="RCQ-USE-11"
        )
    left_out = ("schema", "command", "growth")
    return [{name: v for name, v in cell.items() if name not in left_out} for cell in cells_of(found)]


def _order(reader: RunReader) -> tuple[str, int, bool, str, str]:
    """Order runs by task and context, the dense one first, then by mode: not by how they were named."""
    spec = reader.spec
    return spec.task, spec.ctx or 0, spec.mode_name != "dense", spec.mode, reader.folder.name


def _judged(readers: Sequence[RunReader]) -> dict[str, Json]:
    """Return pairs, gate and problems; runs that must not be compared get no verdict."""
    from rcq_cli.commands import _run
    from rcq_cli.commands._compare import Rules, judge_runs, labelled

    problems = _run.run_problems(readers, _run.Limits())
    record: dict[str, Json] = {
        "pairs": [],
        "gate": {"passed": True, "failures": [], "gates": []},
        "exit_code": 0,
        "problems": [{**problem, "what": _named(problem["what"], readers)} for problem in problems],
        "refusals": [],
        "labels": {arm.reader.folder.name: arm.label for arm in labelled(readers)},
        "notes": [],
    }
    groups = _groups(readers)
    kept = []
    for group in groups:
        try:
            judge_runs([group], Rules(partial=any(r.status != "complete" for r in group)))
            kept.append(group)
        except (NotComparable, SpecError) as error:  # SpecError: the margin stands in a Python task
            record["refusals"].append(f"{error.what}: {error.why}" if error.why else error.what)
    if kept:
        partial = any(reader.status != "complete" for group in kept for reader in group)
        judged = judge_runs(kept, Rules(partial=partial))
        gate = judged.gate.to_json()
        record |= {"pairs": judged.pairs, "gate": gate, "exit_code": judged.gate.exit_code()}
        record["notes"] = list(judged.warnings)
    return record


def _named(text: str, readers: Sequence[RunReader]) -> str:
    """Return the text with folders by name: where they lie is no part of a report."""
    for reader in readers:
        text = text.replace(str(reader.folder), reader.folder.name)
    return text


def _groups(readers: Sequence[RunReader]) -> list[list[RunReader]]:
    """Return the runs of each task and context that has a dense run and others."""
    groups: dict[tuple[str, int | None], list[RunReader]] = {}
    for reader in readers:
        if reader.facts is not None and reader.spec.shard is None:
            groups.setdefault((reader.spec.task, reader.spec.ctx), []).append(reader)
    return [g for g in groups.values() if len(g) > 1 and g[0].spec.mode_name == "dense"]


def _header(readers: Sequence[RunReader]) -> str:
    from rcq_cli import __version__
    from rcq_cli.commands._run import contract_of
    from rcq_cli.reports._header import header

    if not readers:
        return f"rcq {__version__}"
    return header(readers[0].contract, contract_of(readers)).title
