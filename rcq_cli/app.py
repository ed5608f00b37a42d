"""The Typer application, put together from the files of `commands/`; only the chosen one is built."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from rcq_cli.main import COMMANDS, EPILOG, SUMMARY, command_names, summary_of, unknown_command


class Commands(TyperGroup):
    """A group whose commands are files, imported when they are called or listed."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  the signature is Typer's
        """Return all names, verbs first."""
        return list(command_names())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Import and build the command `cmd_name`, None when there is none."""
        if cmd_name not in COMMANDS.names():
            return None
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name, epilog=EPILOG)(COMMANDS.load(cmd_name))
        return typer.main.get_command(single)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Refuse an unknown command in one line."""
        if args[0] not in command_names() and not args[0].startswith("-"):
            raise unknown_command(args[0])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with the first line of their files, without building their options."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary_of(name)) for name in self.list_commands(ctx)])


def build() -> Any:
    """Return the command tree."""
    app = typer.Typer(
        cls=Commands, rich_markup_mode=None, pretty_exceptions_enable=False, help=SUMMARY, epilog=EPILOG
    )

    @app.callback()
    def program(
        version: bool = typer.Option(
            False, "--version", help="Show the version.", is_eager=True, callback=_version
        ),
    ) -> None:
        pass

    return typer.main.get_command(app)


def _version(asked: bool) -> None:
    if asked:
        from rcq_cli import __version__

        typer.echo(f"rcq {__version__}")
        raise typer.Exit
