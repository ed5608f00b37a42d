"""Findings of a comparison in the Code Quality format of GitLab: one issue per gate that is not clean."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rcq_cli.reports.junit import UNDECIDED

Json = Any
Record = Mapping[str, Json]

PLACE = ".gitlab-ci.yml"
"""File that a finding is shown at when the comparison has no baseline file."""
_SEVERITY = {4: "blocker", 3: "critical"}


@dataclass(frozen=True, slots=True)
class CodeQuality:
    """The report behind the Code Quality widget of a merge request."""

    name: str = "code-quality"
    summary: str = "failed and undecided gates as findings of a merge request, for GitLab"

    def text(self, document: Record) -> str:
        """Return the JSON list; empty where everything is clean."""
        place = (document.get("baseline") or {}).get("file") or PLACE
        issues = [
            {
                "description": text,
                "check_name": check,
                # the same finding has the same fingerprint in every pipeline, whatever numbers it quotes
                "fingerprint": hashlib.sha256(key.encode()).hexdigest(),
                "severity": severity,
                "location": {"path": place, "lines": {"begin": 1}},
            }
            for check, key, severity, text in _findings(document)
        ]
        return json.dumps(issues, indent=2, allow_nan=False) + "\n"


def _findings(document: Record) -> Iterator[tuple[str, str, str, str]]:
    if "error" in document:
        error = document["error"]
        text = "; ".join(filter(None, (error["what"], error["why"], error["fix"])))
        yield "rcq", error["id"], _SEVERITY.get(document["exit_code"], "major"), text
        return
    seen: set[str] = set()
    for gate in document["gate"]["gates"]:
        key = f"{gate['matched']}|{gate['expr']}"
        text = f"{gate['matched']}: {gate['reason'] or gate['status']}"
        if gate["code"]:
            severity = _SEVERITY.get(gate["code"], "major")
        elif gate["status"] in UNDECIDED:
            severity = "minor"
        else:
            continue
        if key not in seen:
            seen.add(key)
            yield "rcq." + ("certificate" if gate["code"] == 4 else "gate"), key, severity, text


REPORT = CodeQuality()
