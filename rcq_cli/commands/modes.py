"""List the cache modes, or the options of one."""

import typer

from rcq_cli.commands._options import Format, JsonTarget, shell_of

NAME = typer.Argument(None, metavar="NAME", help="Show the options of this mode.")


def command(
    ctx: typer.Context, name: str | None = NAME, format: Format = "table", json: JsonTarget = None
) -> int:
    """List the cache modes, or the options of one (what -O takes)."""
    from rcq_cli.commands._listing import Entry, answer_entries, answer_options
    from rcq_cli.presets import MODES

    shell = shell_of(ctx)
    shell.parsed("modes", format=format, json_target=json)
    if name is not None:
        entry = MODES.load(name)
        answer_options(shell, "mode", entry.name, entry.summary, entry.Options)
        return 0
    entries = [MODES.load(known) for known in MODES.names()]
    rows = [Entry(e.name, {"claim": e.label}, e.summary) for e in entries]
    answer_entries(shell, "modes", rows)
    return 0
