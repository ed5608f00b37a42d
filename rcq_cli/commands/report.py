"""Put stored runs into one HTML file that opens offline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

from rcq_cli.commands import _options as o
from rcq_cli.errors import NotComparable, RcqError, SpecError

if TYPE_CHECKING:
    from rcq_cli.contract import Mismatch
    from rcq_cli.store import RunReader

Json = Any
T = TypeVar("T")

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
    """Return pairs, gate and problems; runs that must not be compared get no verdict.

    Runs that one `compare` could have made are judged together and apart from all others: verdicts do not
    depend on what else stands in the report.
    """
    from rcq_cli.commands import _run
    from rcq_cli.commands._compare import Rules, judge_runs, labelled
    from rcq_cli.gates import GateReport

    models = _apart(readers, lambda reader: reader.spec.model)
    found = _groups([r for r in readers if r.facts is not None and r.spec.shard is None])
    refusals, gate = found.refusals, GateReport(())
    notes = _run.shortages(readers)
    pairs: list[dict[str, Json]] = []
    for comparison in found.comparisons:
        kept = []
        for group in comparison:
            try:
                judge_runs([group], Rules(partial=any(r.status != "complete" for r in group)))
                kept.append(group)
            except (NotComparable, SpecError) as error:  # SpecError: the margin stands in a Python task
                refusals.append(_refused(error))
        if not kept:
            continue
        partial = any(reader.status != "complete" for group in kept for reader in group)
        model = kept[0][0].spec.model
        judged = judge_runs(kept, Rules(partial=partial), models[model])
        pairs += [pair | {"model": model} for pair in judged.pairs]
        gate = GateReport((*gate.gates, *judged.gate.gates), (*gate.notices, *judged.gate.notices))
        notes += judged.warnings
    problems = _run.run_problems(readers, _run.Limits())
    return {
        "pairs": pairs,
        "gate": gate.to_json(),
        "exit_code": gate.exit_code(),
        "problems": [{**problem, "what": _named(problem["what"], readers)} for problem in problems],
        "refusals": refusals,
        "labels": {arm.reader.folder.name: arm.label for alike in models.values() for arm in labelled(alike)},
        "notes": list(dict.fromkeys(notes)),
    }


def _named(text: str, readers: Sequence[RunReader]) -> str:
    """Return the text with folders by name: where they lie is no part of a report."""
    for reader in readers:
        text = text.replace(str(reader.folder), reader.folder.name)
    return text


class Groups(NamedTuple):
    """What of the runs is compared with what."""

    comparisons: list[list[list[RunReader]]]
    """By comparison, the runs of each task and context, the reference first."""
    refusals: list[str]
    """Why a run stands without a verdict although there is a dense one of its task and context."""


def _groups(readers: Sequence[RunReader]) -> Groups:
    """Put each run to the first dense one it may be compared with."""
    found: list[list[RunReader]] = []
    refusals = []
    for place in _apart(readers, lambda reader: (reader.spec.task, reader.spec.ctx)).values():
        groups: list[list[RunReader]] = []
        for reader in place:
            own = next((group for group in groups if not _mismatch(group[0], reader).must), None)
            if own is not None:
                own.append(reader)
            elif reader.spec.mode_name == "dense":
                groups.append([reader])
            elif groups:
                nearest = min((group[0] for group in groups), key=lambda r: len(_mismatch(r, reader).must))
                refusals.append(
                    _refused(_mismatch(nearest, reader).refusal(nearest.spec.mode, reader.spec.mode))
                )
        found += [group for group in groups if len(group) > 1]
    comparisons = _apart(found, lambda group: _kind(group[0]))
    return Groups(list(comparisons.values()), refusals)


def _mismatch(reference: RunReader, candidate: RunReader) -> Mismatch:
    from rcq_cli.contract import compare_contracts

    return compare_contracts(reference.contract, candidate.contract)


def _refused(error: RcqError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what


def _kind(reader: RunReader) -> str:
    """Return what all runs of one `compare` share, whatever their task and context."""
    from rcq_cli.contract import is_must

    spec, fields = reader.spec, reader.contract
    shared = {
        name: value
        for name, value in sorted(fields.items())
        if name.partition(".")[0] in ("model", "tokenizer", "pipeline", "software") and is_must(name)
    }
    return repr((shared, spec.seed, spec.preset))


def _apart(entries: Iterable[T], key: Callable[[T], Hashable]) -> dict[Hashable, list[T]]:
    """Return the entries by key, in the order in which keys and entries come."""
    found: dict[Hashable, list[T]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


def _header(readers: Sequence[RunReader]) -> str:
    from rcq_cli import __version__
    from rcq_cli.commands._run import contract_of
    from rcq_cli.reports._header import header

    if not readers:
        return f"rcq {__version__}"
    return header(readers[0].contract, contract_of(readers)).title
