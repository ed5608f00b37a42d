"""The streams of a command: the result on stdout, all else on stderr; and what a failure looks like."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from rcq_cli.errors import BrokenRun, RcqError, SpecError
from rcq_cli.registry import did_you_mean
from rcq_cli.streams import to_devnull

if TYPE_CHECKING:
    from rcq_cli.glyphs import View
    from rcq_cli.table import Table

SCHEMA = 1
COLORS = ("auto", "always", "never")
FORMATS = ("table", "json", "jsonl", "md", "csv")


class Interrupted(RcqError):
    """The user or the system asked to stop; what was finished is stored."""

    exit_code = 130


class Result(NamedTuple):
    """What a command answers, in every form it can be asked for."""

    document: Mapping[str, Any]
    """The one JSON document."""
    tables: Callable[[], Sequence[Table]]
    """What people look at; made only when shown."""
    records: Sequence[Mapping[str, Any]]
    """Flat view for `-o jsonl` and `-o csv`, one object a line."""
    markdown: Callable[[], Sequence[Table]] | None = None
    """What `-o md` shows, where that is not the same as the tables."""


class Shell:
    """Streams, presentation and the state of the answer of one call of `rcq`.

    `argv` is kept as typed, for the command that goes on with an interrupted run.
    """

    def __init__(
        self, argv: Sequence[str] = (), stdout: TextIO | None = None, stderr: TextIO | None = None
    ) -> None:
        self.argv = tuple(argv)
        self.stdout, self.stderr = stdout or sys.stdout, stderr or sys.stderr
        self.color, self.ascii_only, self.debug = "auto", False, False
        self.quiet, self.verbose = False, False
        self.command, self.format = "", "table"
        self.json_target: str | None = None
        """`-` for stdout, a path, or None; foretold from the words until they are parsed."""
        self.answered = False
        """The JSON document was written: a later failure must not write a second one."""

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> tuple[Shell, list[str]]:
        """Take `--color`, `--ascii` and `--debug` out of `argv`, wherever they stand before `--`."""
        shell = cls(argv)
        rest: list[str] = []
        words = iter(argv)
        for word in words:
            if word == "--":
                rest += [word, *words]
            elif word == "--ascii":
                shell.ascii_only = True
            elif word == "--debug":
                shell.debug = True
            elif word == "--color" or word.startswith("--color="):
                shell.color = word[8:] if "=" in word else next(words, "")
            else:
                rest.append(word)
        return shell, rest

    def check_presentation(self) -> None:
        """Raise `SpecError` when `--color` or RCQ_COLOR is none of the three choices."""
        for name, value in (("--color", self.color), ("RCQ_COLOR", os.environ.get("RCQ_COLOR") or "auto")):
            if value not in COLORS:
                hint = did_you_mean(value, COLORS)
                raise SpecError(
                    f"{name} {value!r} is not allowed",
                    fix=f"{hint}allowed: {', '.join(COLORS)}",
                    id="RCQ-USE-02",
                )

    def view(self, stream: TextIO) -> View:
        """Return what `stream` can show under this call's flags."""
        from rcq_cli.glyphs import view_of

        return view_of(stream, color=self.color, ascii_only=self.ascii_only)

    def foretold(self, command: str, json_target: str | None) -> None:
        """Take over what the words of the call say before they are parsed, for an error that comes first."""
        self.command, self.json_target = command, json_target

    def parsed(
        self,
        command: str,
        *,
        format: str = "table",
        json_target: str | None = None,
        quiet: bool = False,
        verbose: bool = False,
    ) -> None:
        """Take over the output flags of a command; raise `SpecError` for a bad or a contradictory one."""
        self.command, self.quiet, self.verbose, self.json_target = command, quiet, verbose, None
        check_target(json_target)  # first of all: where it cannot be written no error can be, either
        self.json_target = "-" if format == "json" and json_target is None else json_target
        if format not in FORMATS:
            hint = did_you_mean(format, FORMATS)
            raise SpecError(
                f"-o {format!r} is not allowed", fix=f"{hint}allowed: {', '.join(FORMATS)}", id="RCQ-USE-02"
            )
        if json_target == "-" and format not in ("table", "json"):
            raise SpecError(
                f"--json and -o {format} both want stdout",
                fix="give --json a PATH, or one of the two",
                id="RCQ-USE-02",
            )
        self.format = "json" if self.json_target == "-" else format
        if self.format == "json" and self.json_target not in (None, "-"):
            raise SpecError(
                f"-o json and --json {json_target} both ask for the document",
                fix="give one of them",
                id="RCQ-USE-02",
            )

    def say(self, text: str) -> None:
        """Write a line to stderr, unless `-q` asked for the result only."""
        if not self.quiet:
            self._write_stderr(text)

    def warn(self, text: str) -> None:
        """Write a warning to stderr, `-q` or not."""
        self._write_stderr(self._paint("warning:", "doubt") + " " + text)

    def annotate(self, lines: str) -> None:
        """Write the commands a CI server reads from stderr, without colour, `-q` or not."""
        if lines:
            self._write_stderr(lines.removesuffix("\n"))

    def answer(self, result: Result) -> None:
        """Write the result in the form that was asked for, and the document to the path of `--json PATH`."""
        from rcq_cli import render

        if self.json_target == "-":
            self._write_document(result.document)
        elif self.format == "table":
            self.write(render.to_text(result.tables(), self.view(self.stdout)))
        elif self.format == "md":
            self.write(render.to_markdown((result.markdown or result.tables)()))
        elif self.format == "csv":
            self.write(render.to_csv(result.records))
        elif self.format == "jsonl":
            self.write(render.to_json_lines(result.records))
        if self.json_target not in (None, "-"):  # last: where it cannot be written, the rest has been shown
            self._write_document(result.document)

    def _write_document(self, document: Mapping[str, Any]) -> None:
        from rcq_cli.render import to_json

        text = to_json(document)
        self.answered = True
        if self.json_target == "-":
            self.write(text)
        elif self.json_target is not None:
            write_file(Path(self.json_target), text)

    def write(self, text: str) -> None:
        """Write to stdout; a reader that has gone away is no error, a full disk is a `BrokenRun`."""
        try:
            self.stdout.write(text)
            self.stdout.flush()
        except BrokenPipeError:
            to_devnull(self.stdout)
        except OSError as error:
            raise self.lost(error) from error

    def lost(self, error: OSError) -> BrokenRun:
        """Return the error of a stdout that takes no more, and write nothing further to it."""
        to_devnull(self.stdout)
        self.answered = True  # nothing can be
        return BrokenRun(
            "cannot write to standard output",
            why=error.strerror or str(error),
            fix="free space where it goes, or send it elsewhere; finished runs are stored",
            id="RCQ-RUN-01",
        )

    def finish(self) -> None:
        """Flush both streams without complaint: what had to be said was flushed before."""
        for stream in (self.stdout, self.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                to_devnull(stream)

    def fail(self, error: RcqError) -> int:
        """Report `error`, also as the document under `--json`, and return its exit code."""
        self.report(error)
        self._fail_document(error)
        return error.exit_code

    def report(self, error: RcqError) -> None:
        """Write `error` to stderr: one line for usage, else three."""
        if error.exit_code == 2:
            parts = [part for part in (error.what, error.why, error.fix) if part]
            self._write_stderr(f"{self._paint('error:', 'bad')} {_one_line('; '.join(parts))} [{error.id}]")
        else:
            self._write_stderr(f"{self._paint('error:', 'bad')} {_one_line(error.what)} [{error.id}]")
            self._write_stderr(f"  why: {_one_line(error.why or 'nothing more is known')}")
            self._write_stderr(
                f"  fix: {_one_line(error.fix or 'run again with --debug and report what it prints')}"
            )
        if self.debug:
            import traceback

            self._write_stderr("".join(traceback.format_exception(error)).rstrip())

    def _fail_document(self, error: RcqError) -> None:
        if self.json_target is None or self.answered:
            return
        details = {"id": error.id, "what": error.what, "why": error.why, "fix": error.fix}
        document = {
            "schema": SCHEMA,
            "command": self.command,
            "status": "interrupted" if error.exit_code == 130 else "error",
            "exit_code": error.exit_code,
            "error": details,
        }
        # a second failure while reporting the first must not hide it
        with suppress(OSError, RcqError):
            check_target(self.json_target)
            self._write_document(document)

    def internal_error(self, error: Exception) -> int:
        """Save the traceback of a defect in rcq to a file, say where, return 1."""
        import shlex
        import tempfile
        import traceback

        text = "".join(traceback.format_exception(error))
        with tempfile.NamedTemporaryFile(
            "w",
            prefix="rcq-error-",
            suffix=".txt",
            delete=False,
            encoding="utf-8",
            errors="backslashreplace",
        ) as file:
            file.write(f"rcq {shlex.join(self.argv)}\n\n{text}")
        known = RcqError(
            f"internal error: {type(error).__name__}: {error}",
            f"this is a defect of rcq; the traceback is in {file.name}",
            "report it with that file, or run again with --debug",
            "RCQ-RUN-00",
        )
        known.__cause__ = error
        return self.fail(known)

    def resume_command(self) -> str:
        """Return the command line that goes on where this one stopped."""
        import shlex

        words = [word for word in self.argv if word not in ("--fresh", "--resume")]
        return shlex.join(["rcq", *words, "--resume"])

    def _paint(self, text: str, style: str) -> str:
        from rcq_cli.render import paint

        return paint(text, style, self.view(self.stderr))

    def _write_stderr(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self.stderr.write(text + "\n")
            self.stderr.flush()


def write_file(path: Path, text: str) -> None:
    """Write `text` as UTF-8 by temp and rename.

    Raises `SpecError` when the place is not writable, `BrokenRun` when it has no room. A device or a pipe is
    written to: a rename would put a file in its place.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if _is_special(path):
            path.write_text(text, encoding="utf-8", newline="\n")
            return
        draft.write_text(text, encoding="utf-8", newline="\n")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        what, why = f"cannot write {str(path)!r}", error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            fix = "free space or name a file elsewhere; finished runs are stored"
            raise BrokenRun(what, why, fix, "RCQ-RUN-01") from error
        raise SpecError(what, why, "give a file in a folder that exists", "RCQ-USE-02") from error


def check_target(path: str | None, flag: str = "--json") -> None:
    """Raise `SpecError` when the file `flag` names cannot be written, before any work is done."""
    if path is None or path == "-":
        return
    what = _refusal(path)
    if what:
        raise SpecError(f"{flag} {path!r} {what}", fix="give a file in a folder that exists", id="RCQ-USE-02")


def _refusal(name: str) -> str:
    """Return why the file `name` cannot be written, nothing when it can."""
    path = Path(name)
    if not name.strip():
        return "names no file"
    if path.is_dir():
        return "is a folder"
    if not path.parent.is_dir():
        return f"lies in {str(path.parent)!r}, which is no folder"
    if _is_special(path):
        return ""
    from rcq_cli.files import unwritable

    error = unwritable(path.parent)
    return f"cannot be written: {error.strerror}" if error else ""


def _is_special(path: Path) -> bool:
    """Say whether something is there that is neither a file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()


def version() -> int:
    """Write the version; return the exit code."""
    from rcq_cli import __version__

    shell = Shell()
    try:
        shell.write(f"rcq {__version__}\n")
    except RcqError as error:
        return shell.fail(error)
    return 0


def _one_line(text: str) -> str:
    return " ".join(text.split())
