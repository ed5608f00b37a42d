"""Certificates and step times as a trace that Perfetto and Chrome open: slices and counters on one time axis.

Times are what was measured, one step after the other from 0; there is no clock of the day in the file.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rcq_cli.traces import Filter, Recorded, flat, series

Json = Any
PROCESS, SAMPLES, STEPS = 1, 2, 3
"""The one process and its two lanes; slices on a lane never overlap. A lane of the process's own number would
be shown as its main thread."""
RATIO, COUNT = "(ratio)", "(head-steps)"
"""Perfetto names a counter's track by its name and the key of its value: the key is the unit."""


class Exported(NamedTuple):
    """A trace and what the cap left out."""

    document: dict[str, Json]
    truncated: dict[str, Json] | None


def export(
    samples: Sequence[Recorded], title: str, wanted: Filter, max_mib: float = 64.0, every: int = 1
) -> Exported:
    """Return the trace of `samples`, each `every`th step of it.

    Beyond `max_mib` (uncompressed) slices stop and counters go on.
    """
    limit, used = int(max_mib * (1 << 20)), 0
    events: list[dict[str, Json]] = list(_names(title))
    truncated = None
    for event, at_step in _events(samples, wanted, every):
        size = len(json.dumps(event)) + 1
        if event["ph"] == "X" and used + size > limit:
            truncated = truncated or {"at_step": at_step, "reason": f"slices reached {max_mib:g} MiB"}
            continue
        used += size
        events.append(event)
    other = {"title": title} | ({"truncated": truncated} if truncated else {})
    return Exported({"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}, truncated)


def _names(title: str) -> Iterator[dict[str, Json]]:
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "ts": 0, "args": {"name": title}}
    for lane, name in ((SAMPLES, "samples"), (STEPS, "decode steps")):
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": lane, "ts": 0, "args": {"name": name}}


def _events(samples: Sequence[Recorded], wanted: Filter, every: int) -> Iterator[tuple[dict[str, Json], int]]:
    """Yield events in time order, each with its step."""
    at_ns = 0
    for entry in samples:
        rows = {row["step"]: row for row in series(flat([entry], wanted))}
        count = entry.arrays.rung.shape[0]
        untimed = count - len(entry.step_ns)
        yield _slice(SAMPLES, entry.sample_id, at_ns, sum(entry.step_ns), {"steps": count}), 0
        for step in range(count):
            spent = entry.step_ns[step - untimed] if step >= untimed else 0
            row = None if step % every else rows.get(step)
            if row is not None:
                args = {name: row[name] for name in ("violations", "exact", "audited", "rungs")}
                if spent:
                    yield _slice(STEPS, f"step {step}", at_ns, spent, args), step
                for event in _counters(at_ns, row):
                    yield event, step
            at_ns += spent


def _slice(lane: int, name: str, at_ns: int, spent_ns: int, args: dict[str, Json]) -> dict[str, Json]:
    return {
        "ph": "X",
        "name": name,
        "pid": PROCESS,
        "tid": lane,
        "ts": at_ns / 1e3,
        "dur": spent_ns / 1e3,
        "args": args,
    }


def _counters(at_ns: int, row: dict[str, Json]) -> Iterator[dict[str, Json]]:
    values = (
        ("relative bound, max", RATIO, row["bound_max"]),
        ("relative bound, p50", RATIO, row["bound_p50"]),
        ("relative true error, max", RATIO, row["error_max"]),
        ("above rung 0", COUNT, sum(row["rungs"][1:])),
        ("violations", COUNT, row["violations"]),
    )
    for name, unit, value in values:
        if value is not None:
            yield {
                "ph": "C",
                "name": name,
                "pid": PROCESS,
                "tid": 0,
                "ts": at_ns / 1e3,
                "args": {unit: value},
            }


def text(document: dict[str, Json]) -> str:
    """Return the document as one compact line of JSON."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")) + "\n"


def write(path: Path, document: dict[str, Json]) -> None:
    """Write the document to `path`, packed when its name ends in .gz; the same input gives the same bytes."""
    data = text(document).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
