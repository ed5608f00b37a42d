"""The Typer application, put together from the files of `commands/`; only the chosen one is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from rcq_cli.errors import SpecError
from rcq_cli.main import COMMANDS, EPILOG, SUMMARY, command_names, summary_of, unknown_command


class Command(TyperCommand):
    """A command that refuses what an unset variable leaves behind before it runs: a value that is none."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command unless a value is blank, which must not mean the default, or the next option."""
        flags = {name for param in self.params if param.param_type_name == "option" for name in param.opts}
        for param in self.params:
            value = ctx.params.get(param.name)
            if any(isinstance(text, str) and not text.strip() for text in _texts(value)):
                _take_output_flags(ctx)
                raise _blank(param, value)
            if param.param_type_name == "option":
                _check_own(param, value, flags)
        return super().invoke(ctx)


def _texts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _take_output_flags(ctx: Any) -> None:
    """Let the shell know `--json`, so that the refusal is a document where one was asked for."""
    given = ctx.params
    ctx.obj.parsed(ctx.info_name, format=given.get("format", "table"), json_target=given.get("json"))


def _blank(param: Any, value: Any) -> SpecError:
    """Return the error for a parameter that is blank, or has a blank entry."""
    name = param.opts[-1] if param.param_type_name == "option" else "argument"
    shown = next(text for text in _texts(value) if not text.strip())
    return SpecError(f"{name} {shown!r} is empty", fix="give a value, or leave it out", id="RCQ-USE-02")


def _check_own(param: Any, value: Any, flags: set[str]) -> None:
    """Raise `SpecError` when an option took the one after it for its value."""
    for text in _texts(value):
        name = text.partition("=")[0] if isinstance(text, str) else ""
        if name in flags:
            what = f"{param.opts[-1]} has no value: {name} follows it"
            raise SpecError(what, fix="give it one, or leave it out", id="RCQ-USE-02")


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
        single.command(cmd_name, cls=Command, epilog=EPILOG)(COMMANDS.load(cmd_name))
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
