"""What GitHub Actions shows of a comparison: annotations, outputs of the step, its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Any
Record = Mapping[str, Json]

PER_LEVEL = 10
"""GitHub shows no more annotations of one level per step."""
SUMMARY_BYTES = 900_000
"""GitHub refuses a step summary of a mebibyte."""
PRECEDENCE = (130, 1, 2, 7, 5, 4, 6, 3)
_OUTPUTS = ("verdict", "exit_code", "worst_cell", "contract")


@dataclass(frozen=True, slots=True)
class GitHub:
    """The report of `--github`."""

    name: str = "github"
    summary: str = "annotations, step outputs and step summary for GitHub Actions"

    def text(self, document: Record) -> str:
        """Return the workflow commands, one a line, the worst first and at most ten of each level."""
        lines = []
        for level, texts in _messages(document).items():
            shown = list(dict.fromkeys(texts))
            if len(shown) > PER_LEVEL:
                rest = len(shown) - PER_LEVEL + 1
                shown = [*shown[: PER_LEVEL - 1], f"and {rest} more: see the summary of the job"]
            lines += [f"::{level} title=rcq::{_escaped(text)}" for text in shown]
        return "".join(line + "\n" for line in lines)

    def outputs(self, document: Record) -> str:
        """Return the lines for `$GITHUB_OUTPUT`: verdict, exit_code, worst_cell, contract."""
        values = _verdict(document)
        return "".join(f"{name}={' '.join(str(values[name]).split())}\n" for name in _OUTPUTS)

    def step_summary(self, markdown: str, document_path: str | None) -> str:
        """Return the Markdown cut to what GitHub takes, with a pointer to the whole."""
        data = markdown.encode()
        if len(data) <= SUMMARY_BYTES:
            return markdown
        where = f"the JSON document {document_path}" if document_path else "the JSON document of --json PATH"
        kept = data[:SUMMARY_BYTES].decode("utf-8", "ignore").rpartition("\n")[0]
        return f"{kept}\n\nCut here at {SUMMARY_BYTES} bytes; the rest stands in {where}.\n"


def _messages(document: Record) -> dict[str, list[str]]:
    if "error" in document:
        error = document["error"]
        return {"error": ["; ".join(filter(None, (error["what"], error["why"], error["fix"])))]}
    gate = document["gate"]
    return {
        "error": list(gate["failures"]),
        "warning": [*gate["warnings"], *document.get("warnings", ())],
        "notice": list(gate["notices"]),
    }


def _verdict(document: Record) -> dict[str, Json]:
    code = document["exit_code"]
    if "error" in document:
        return {"verdict": "error", "exit_code": code, "worst_cell": "", "contract": ""}
    gates: Sequence[Record] = document["gate"]["gates"]
    bad = sorted((g for g in gates if g["code"]), key=lambda g: PRECEDENCE.index(g["code"]))
    open_ = [gate for gate in gates if gate["status"] == "inconclusive"]
    worst = next((gate["matched"] for gate in (*bad, *open_)), "")
    verdict = "fail" if bad else "inconclusive" if open_ else "pass"
    return {"verdict": verdict, "exit_code": code, "worst_cell": worst, "contract": document["contract"]}


def _escaped(text: str) -> str:
    """Return `text` as the data of a workflow command: it is one line, and `%` opens an escape."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


REPORT = GitHub()
