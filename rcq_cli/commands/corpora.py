"""List the texts rcq can build prompts from, or fetch one."""

from __future__ import annotations

from typing import Any

import typer

from rcq_cli.commands import _options as o
from rcq_cli.errors import SpecError

ACTION = typer.Argument("list", metavar="[list|pull]", help="list what there is, or pull one corpus.")
NAME = typer.Argument(None, metavar="NAME", help="The corpus to pull.")


def command(
    context: typer.Context,
    action: str = ACTION,
    name: str | None = NAME,
    format: o.Format = "table",
    json: o.JsonTarget = None,
    quiet: o.Quiet = False,
) -> int:
    """List the texts that -T corpus=NAME takes, without network; or pull one."""
    from rcq_cli.commands._listing import answer_entries, answer_records
    from rcq_cli.corpora import pull

    shell = o.shell_of(context)
    shell.parsed("corpora", format=format, json_target=json, quiet=quiet)
    o.choose(action, ("list", "pull"), "corpora")
    if action == "list" and name is not None:
        raise SpecError(
            f"corpora list takes no name, {name!r} came", fix=f"rcq corpora pull {name}", id="RCQ-USE-02"
        )
    if action == "list":
        answer_entries(shell, "corpora", _entries())
        return 0
    if name is None:
        raise SpecError("corpora pull needs a NAME", fix="see rcq corpora list", id="RCQ-USE-02")
    answer_records(shell, "pulled", [{"name": name, "result": pull(name)}])
    return 0


def _entries() -> list[Any]:
    from rcq_cli.commands._listing import Entry
    from rcq_cli.tasks._packaged import found_at, names
    from rcq_cli.tasks._words import data

    built_in = {"here": True, "licence": "Apache-2.0"}
    entries = [Entry("builtin", built_in, "procedural prose, 64 books of 160,000 words; the default")]
    for name in names():
        source = data("sources")[name]
        entries.append(
            Entry(name, {"here": found_at(name) is not None, "licence": source["licence"]}, source["summary"])
        )
    return entries
