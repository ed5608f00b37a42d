"""List the tasks, or the options of one."""

import typer

from rcq_cli.commands._options import Format, JsonTarget, shell_of

NAME = typer.Argument(None, metavar="NAME", help="Show the parts and the options of this task.")


def command(
    ctx: typer.Context, name: str | None = NAME, format: Format = "table", json: JsonTarget = None
) -> int:
    """List the tasks, or the parts and options of one (what -T takes)."""
    from rcq_cli.commands._listing import Entry, answer_entries, answer_options
    from rcq_cli.presets import TASKS
    from rcq_cli.task_files import name_on_command_line

    shell = shell_of(ctx)
    shell.parsed("tasks", format=format, json_target=json)
    if name is not None:
        name_on_command_line(name)
        entry = TASKS.load(name)
        parts = [part for part in entry.parts if part]
        summary = entry.summary + (f"; parts: {', '.join(parts)}" if parts else "")
        answer_options(shell, "task", entry.name, summary, entry.Options)
        return 0
    entries = [TASKS.load(known) for known in TASKS.names()]
    rows = [
        Entry(
            e.name,
            {"metric": e.score_key, "min ctx": e.minimum_ctx or None, "samples": e.default_samples[""]},
            e.summary,
        )
        for e in entries
    ]
    answer_entries(shell, "tasks", rows)
    return 0
