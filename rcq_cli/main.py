"""The command line: finds the command, runs it, and is the only place that turns errors into exit codes."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from rcq_cli.errors import BrokenRun, RcqError, SpecError, UnknownEntry
from rcq_cli.registry import Registry, did_you_mean
from rcq_cli.shell import Interrupted, Shell
from rcq_cli.streams import tolerant

COMMANDS: Registry[Any] = Registry("rcq_cli.commands", "command", "command")
FIRST = ("eval", "compare", "profile", "trace")
"""The verbs stand before the helpers in the help."""
EVERYWHERE = ("--color", "--ascii", "--debug")
PATIENCE_S = 3.0
"""What a command that was told to stop may take to store what it has."""
BARE = {"--json": "--json=-", "--audit": "--audit=1.0"}
"""Options whose value may be left out, and what they then mean."""

SUMMARY = "Is this KV-cache compression safe, what does it cost, and can CI prove it?"
EPILOG = "Everywhere: --color auto|always|never, --ascii (no other characters), --debug (tracebacks)."
SHORT_HELP = """\
rcq: is this KV-cache compression safe, what does it cost, and can CI prove it?
  rcq compare dense naive certified      judge modes in pairs, on a built-in model
  rcq eval --task niah --mode certified  measure one mode
  rcq doctor                             what this machine can do
  rcq --help                             all commands
"""


def run(argv: Sequence[str]) -> int:
    """Run `rcq` with `argv` and return the exit code; nothing escapes."""
    shell, rest = Shell.from_argv(argv)
    for stream in (sys.stdout, sys.stderr):
        tolerant(stream)
    try:
        return _run(shell, rest)
    finally:
        shell.finish()


def _run(shell: Shell, rest: list[str]) -> int:
    argv = with_bare_values(rest)
    shell.foretold(command_of(argv), json_target_of(argv))
    try:
        shell.check_presentation()
        check_words(shell.argv)
        if not rest and "_RCQ_COMPLETE" not in os.environ:
            shell.stderr.write(SHORT_HELP)
            return 2
        with _terminable():
            return _call(shell, argv)
    except RcqError as error:
        return shell.fail(error)
    except KeyboardInterrupt:
        return shell.fail(interrupted())
    except OSError as error:
        refused = refused_name(error) or no_room(error)
        return shell.internal_error(error) if refused is None else shell.fail(refused)
    except Exception as error:  # noqa: BLE001  the outermost frame: a defect becomes a record, not a traceback
        return shell.internal_error(error)


def _call(shell: Shell, argv: list[str]) -> int:
    # Typer colours and reflows help by its own rules; plain text is what rcq promises, and is faster
    os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"
    from typer.exceptions import TyperException

    from rcq_cli.app import build

    try:
        code = build().main(args=argv, prog_name="rcq", standalone_mode=False, obj=shell)
    except TyperException as error:
        raise usage_error(error, shell.command) from error
    except SystemExit as stop:
        # Typer leaves so after completion, and when the reader of a help text has gone away
        return stop.code if isinstance(stop.code, int) and not _reader_gone() else 0
    if code == Interrupted.exit_code:
        raise interrupted()
    return code if isinstance(code, int) else 0


def check_words(argv: Sequence[str]) -> None:
    """Raise `SpecError` for an argument that is no text: no record could name it."""
    for word in argv:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            shown = word.encode(errors="backslashreplace").decode()
            what = f"argument {shown!r} is not text in {sys.getfilesystemencoding()}"
            fix = "name files in UTF-8, and set a UTF-8 locale or PYTHONUTF8=1"
            raise SpecError(what, fix=fix, id="RCQ-USE-11") from error


def refused_name(error: OSError) -> SpecError | None:
    """Return the usage error for a name that no file system takes or this user may not use; else None.

    Any argument that names a file may be such a one.
    """
    name = str(error.filename)
    if error.errno == errno.ENAMETOOLONG:
        shown = name if len(name) <= 40 else f"{name[:40]}..."
        what = f"{shown!r} ({len(name)} characters) is longer than a file name can be"
        return SpecError(what, fix="name a shorter path", id="RCQ-USE-11")
    if isinstance(error, PermissionError) and error.filename is not None:
        return SpecError(f"no permission for {name!r}", fix="allow it, or name another", id="RCQ-USE-11")
    return None


def no_room(error: OSError) -> BrokenRun | None:
    """Return the error of a full disk that no one could put a name to; else None.

    It may be behind stdout, whose help texts rcq does not write itself, or hold temporary files.
    """
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    what = f"cannot write {error.filename or 'to standard output or a temporary file'}"
    fix = "free space where output, RCQ_HOME and temporary files go; finished runs are stored"
    return BrokenRun(what, error.strerror or str(error), fix, "RCQ-RUN-01")


def _reader_gone() -> bool:
    return type(sys.stdout).__name__ == "PacifyFlushWrapper"


def command_names() -> tuple[str, ...]:
    """Return the names of all commands, verbs first."""
    names = COMMANDS.names()
    return (*(name for name in FIRST if name in names), *(name for name in names if name not in FIRST))


def unknown_command(name: str) -> UnknownEntry:
    """Return the error for a command that is not there."""
    known = command_names()
    return UnknownEntry(
        f"unknown command {name!r}",
        fix=did_you_mean(name, known) + f"known: {', '.join(known)}",
        id="RCQ-USE-01",
    )


def summary_of(name: str) -> str:
    """Return the first line of the docstring of a command's file, without importing it."""
    spec = find_spec(f"rcq_cli.commands.{name.replace('-', '_')}")
    if spec is None or spec.origin is None:
        return ""
    with Path(spec.origin).open(encoding="utf-8") as file:
        return file.readline().strip().strip('"').rstrip(".")


def with_bare_values(argv: Sequence[str]) -> list[str]:
    """Write out the value of an option of `BARE` when nothing or another option follows it."""
    out = list(argv)
    for i, word in enumerate(argv):
        if word == "--":
            break
        after = argv[i + 1] if i + 1 < len(argv) else "--"
        if word in BARE and after.startswith("-") and after != "-":
            out[i] = BARE[word]
    return out


def command_of(argv: Sequence[str]) -> str:
    """Return the command that `argv` names, nothing when it names none."""
    name = next((word for word in argv if not word.startswith("-")), "")
    return name if name in COMMANDS.names() else ""


def json_target_of(argv: Sequence[str]) -> str | None:
    """Return where `argv` asks for the document: `-` is stdout, None nowhere.

    Read from the words alone, for an error that comes before they are parsed.
    """
    target = None
    short = () if command_of(argv) == "report" else ("-o",)  # there it names the page
    words = [*argv[: argv.index("--") if "--" in argv else None], ""]
    for word, after in pairwise(words):
        if word in short and after == "json":
            target = target or "-"
        elif word == "--json" or word.startswith("--json="):
            target = word.partition("=")[2] or after
    return target


def usage_error(error: Any, command: str) -> SpecError:
    """Return Typer's complaint about the arguments as one of ours, with the near match."""
    where = f"rcq {command} --help" if command else "rcq --help"
    if hasattr(error, "possibilities"):
        near = nearest_option(error.option_name, [*(error.possibilities or ()), *EVERYWHERE])
        hint = f"did you mean {near!r}? " if near else ""
        return SpecError(
            f"unknown option {error.option_name}",
            fix=f"{hint}{where} lists what is allowed",
            id="RCQ-USE-02",
        )
    message = " ".join(error.format_message().split()).rstrip(".")
    return SpecError(message[:1].lower() + message[1:], fix=f"see {where}", id="RCQ-USE-02")


def nearest_option(name: str, known: Sequence[str]) -> str:
    """Return the option of `known` that `name` is near to, nothing when none is.

    Without their dashes: the two that all have in common would make short names look alike.
    """
    bare = {option.lstrip("-"): option for option in known}
    near = get_close_matches(name.lstrip("-"), bare, n=1)
    return bare[near[0]] if near else ""


def interrupted() -> Interrupted:
    """Return the error of a command that was stopped before or after its runs."""
    return Interrupted("interrupted", "stopped by a signal", "start the command again", "RCQ-RUN-09")


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM stop a command as Ctrl-C does: what is finished is stored and the way to go on is said.

    Signals that follow at once, as from a wrapper that forwards what its group gets, change nothing; one that
    comes after PATIENCE_S ends a process that hangs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stopped: list[float] = []

    def stop(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001  the signature is the signal module's
        if not stopped:
            stopped.append(time.monotonic())
            raise KeyboardInterrupt
        if time.monotonic() - stopped[0] > PATIENCE_S:
            os._exit(Interrupted.exit_code)

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        if not stopped:  # else the process is on its way out, and one more signal must not cut that short
            for number, handler in before:
                signal.signal(number, handler)
