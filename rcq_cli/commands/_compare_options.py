"""The flags of `rcq compare` alone; only Typer is imported here."""

from __future__ import annotations

from typing import Annotated

import typer

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODE|RUN...", help="Two or more modes or run folders; the first is the reference."
    ),
]
FailOn = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-on",
        metavar="GATE",
        help="Condition that fails, repeatable: 'niah@64k.accuracy.upper < -0.02'.",
    ),
]
Expect = Annotated[
    list[str] | None,
    typer.Option("--expect", metavar="MODE=fail", help="A mode that is there to fail. [default: naive=fail]"),
]
Strict = Annotated[bool, typer.Option("--strict", help="An undecided cell fails too.")]
ExitZero = Annotated[bool, typer.Option("--exit-zero", help="Report a failed gate, but leave with 0.")]
AllowMismatch = Annotated[
    bool, typer.Option("--allow-mismatch", help="Compare runs of different contracts; nothing can pass then.")
]
Partial = Annotated[bool, typer.Option("--partial", help="Compare unfinished runs; nothing can pass then.")]
Margin = Annotated[
    str | None,
    typer.Option("--margin", metavar="X", help="Largest loss that passes. [default: the task's]"),
]
Alpha = Annotated[str, typer.Option("--alpha", metavar="X", help="One-sided level of the verdict.")]
Interval = Annotated[
    str,
    typer.Option(
        "--interval",
        metavar="tango|newcombe",
        help="newcombe: show Newcombe's interval too, as a cross-check; verdicts always use Tango's.",
    ),
]
MidP = Annotated[
    bool,
    typer.Option("--midp", help="Test by McNemar's mid-p instead of the exact p, which is conservative."),
]
Cluster = Annotated[
    str, typer.Option("--cluster", metavar="auto|none", help="none: treat all samples as independent.")
]
Match = Annotated[
    str | None,
    typer.Option(
        "--match",
        metavar="bytes=SHARE",
        help="Give every mode with a budget the one that holds this share of a dense 16-bit cache.",
    ),
]
MaxMissing = Annotated[
    str, typer.Option("--max-missing", metavar="N", help="Samples that only one run may hold.")
]
BaselineFile = Annotated[
    str | None,
    typer.Option("--baseline", metavar="FILE", help="Fail what is worse than this file says it was."),
]
UpdateBaseline = Annotated[
    bool, typer.Option("--update-baseline", help="Write what was measured to the file of --baseline.")
]
NoiseFloor = Annotated[
    list[str] | None,
    typer.Option(
        "--noise-floor", metavar="RUN", help="A second run of the reference, whose own flips are told apart."
    ),
]
FlipMargin = Annotated[
    str, typer.Option("--flip-margin", metavar="X", help="Excess of flips that still counts as noise.")
]
LatencyMargin = Annotated[
    str | None,
    typer.Option(
        "--latency-margin",
        metavar="X",
        help="Fail a step time above 1+X of the reference's, where both took turns in one process.",
    ),
]
JUnitFile = Annotated[
    str | None, typer.Option("--junit", metavar="PATH", help="JUnit XML: every gate as a test case.")
]
CodeQualityFile = Annotated[
    str | None, typer.Option("--code-quality", metavar="PATH", help="Findings for GitLab's merge requests.")
]
GitHub = Annotated[
    bool, typer.Option("--github", help="Annotations, outputs and summary, where GitHub Actions runs this.")
]
