"""The files and annotations that `rcq compare` leaves for a CI server, whatever way it ends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rcq_cli.errors import RcqError, SpecError
from rcq_cli.shell import SCHEMA, check_target, write_file

if TYPE_CHECKING:
    from rcq_cli.shell import Shell

Json = Any
Record = Mapping[str, Json]


class Outputs(NamedTuple):
    """Where the reports go; nothing where none was asked for."""

    junit: str | None = None
    code_quality: str | None = None
    github: bool = False

    def check(self) -> None:
        """Raise `SpecError` for a file that cannot be written, before any work is done."""
        for flag, path in (("--junit", self.junit), ("--code-quality", self.code_quality)):
            if path == "-":
                raise SpecError(f"{flag} needs a file, '-' came", fix=f"{flag} PATH", id="RCQ-USE-02")
            check_target(path, flag)

    def write(self, shell: Shell, document: Record) -> None:
        """Write every report of a finished comparison, or of one that ended with an error."""
        from rcq_cli.reports.code_quality import REPORT as code_quality
        from rcq_cli.reports.junit import REPORT as junit

        for path, report in ((self.junit, junit), (self.code_quality, code_quality)):
            if path is not None:
                write_file(Path(path), report.text(document))
        if self.github and os.environ.get("GITHUB_ACTIONS") == "true":
            _to_github(shell, document)

    def write_error(self, shell: Shell, error: RcqError) -> None:
        """Write the reports of a comparison that came to no judgement; the error itself is told elsewhere."""
        details = {"id": error.id, "what": error.what, "why": error.why, "fix": error.fix}
        self.write(
            shell,
            {"schema": SCHEMA, "command": "compare", "exit_code": error.exit_code, "error": details},
        )


def _to_github(shell: Shell, document: Record) -> None:
    from rcq_cli.render import to_markdown
    from rcq_cli.reports.github import REPORT as github
    from rcq_cli.reports.markdown import REPORT as markdown

    shell.annotate(github.text(document))
    target = None if shell.json_target in (None, "-") else shell.json_target
    summary = github.step_summary(to_markdown(markdown.tables(document)), target)
    for path, text in (
        (os.environ.get("GITHUB_STEP_SUMMARY"), summary),
        (os.environ.get("GITHUB_OUTPUT"), github.outputs(document)),
    ):
        if path:
            _append(Path(path), text)


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        why = error.strerror or str(error)
        raise SpecError(f"cannot write {str(path)!r}", why, "leave out --github", "RCQ-USE-02") from error
