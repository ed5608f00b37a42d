"""List the models rcq can provide, or fetch one."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from rcq_cli.commands import _options as o
from rcq_cli.errors import SpecError
from rcq_cli.protocols import Availability
from rcq_cli.sources import SOURCES, built_in, resolve

ACTION = typer.Argument("list", metavar="[list|pull]", help="list what there is, or pull one model.")
NAME = typer.Argument(None, metavar="NAME", help="The model to pull.")


def command(
    context: typer.Context,
    action: str = ACTION,
    name: str | None = NAME,
    format: o.Format = "table",
    json: o.JsonTarget = None,
    quiet: o.Quiet = False,
) -> int:
    """List the models with licence and availability, without network; or pull one."""
    from rcq_cli.commands._listing import Entry, answer_entries, answer_records

    shell = o.shell_of(context)
    shell.parsed("models", format=format, json_target=json, quiet=quiet)
    o.choose(action, ("list", "pull"), "models")
    if action == "pull":
        if name is None:
            raise SpecError(
                "models pull needs a NAME", fix=f"known: {', '.join(built_in())}", id="RCQ-USE-02"
            )
        said = pull(name)
        answer_records(shell, "pulled", [{"name": name, "result": said}])
        return 0
    if name is not None:
        raise SpecError(
            f"models list takes no name, {name!r} came", fix=f"rcq models pull {name}", id="RCQ-USE-02"
        )
    entries = []
    for known in SOURCES.names():
        source, found = SOURCES.load(known), availability_of(known) if known in built_in() else None
        facts = {"here": None if found is None else found.available, "licence": source.licence}
        why = "" if found is None or found.available else "; ".join(filter(None, (found.reason, found.fix)))
        entries.append(Entry(known, facts, source.summary + (f" ({why})" if why else "")))
    answer_entries(shell, "models", entries)
    return 0


def availability_of(name: str) -> Availability:
    """Say whether the source `name` can provide its model here."""
    found: Availability = SOURCES.load(name).availability(name)
    return found


def pull(reference: str) -> str:
    """Fetch what `reference` names into rcq's cache and say what was done."""
    source, reference = resolve(reference)
    said: str = source.pull(reference)
    return said


def cache_folder() -> Path:
    """Return rcq's own folder: `$RCQ_HOME`, else `~/.cache/rcq`."""
    return Path(os.environ.get("RCQ_HOME") or Path.home() / ".cache" / "rcq")
