"""Cells that several reports show, made from the cell objects of the JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rcq_cli.table import MISSING, Cell, binary_bytes, decimal, interval, share, significant, tokens

Json = Any
CellRecord = Mapping[str, Json]


def place(cell: CellRecord) -> str:
    """Return `niah@64k`, or the task alone where there is no context."""
    return cell["task"] if cell.get("ctx") is None else f"{cell['task']}@{tokens(cell['ctx'])}"


def score(cell: CellRecord) -> Cell:
    """Show the primary metric with its interval."""
    if cell.get("score") is None:
        return MISSING
    return Cell(" ".join(filter(None, (decimal(cell["score"]), interval(cell.get("score_ci"))))), "strong")


def device(cell: CellRecord) -> Cell:
    """Tier 1 as allocated, and its share of a dense 16-bit cache."""
    sizes = cell.get("bytes") or {}
    if sizes.get("device") is None:
        return MISSING
    ratio = sizes.get("device_ratio")
    return Cell(binary_bytes(sizes["device"]) + ("" if ratio is None else f" ({share(ratio)})"))


def host(cell: CellRecord) -> Cell:
    """Tier 2 and bookkeeping in host memory."""
    size = (cell.get("bytes") or {}).get("host")
    return MISSING if size is None else Cell(binary_bytes(size))


def bound(cell: CellRecord) -> Cell:
    """Relative bound of the certified head-steps: median and 95th percentile."""
    certificates = cell.get("certificates") or {}
    median, high = certificates.get("rel_bound_p50"), certificates.get("rel_bound_p95")
    return MISSING if median is None else Cell(f"{significant(median, 2)}, {significant(high, 2)}")


def rungs(cell: CellRecord) -> Cell:
    """Share of the head-steps that ended on each rung, rungs nobody used left out."""
    counts: Mapping[str, int] = (cell.get("certificates") or {}).get("rungs") or {}
    total = sum(counts.values())
    if not total:
        return MISSING
    return Cell("  ".join(f"{rung}: {share(n / total)}" for rung, n in sorted(counts.items()) if n))


def violations(cell: CellRecord) -> Cell:
    """Violated bounds among the audited head-steps; what was not audited is not called 0."""
    certificates = cell.get("certificates")
    if not certificates:
        return MISSING
    found, audited = certificates["violations"], certificates["audited"]
    if not audited:
        return Cell("not audited", "faint") if not found else Cell(str(found), "bad")
    return Cell(f"{found} of {audited}", "bad" if found else "good")


def model_name(cell: CellRecord) -> str:
    """Return the model as tables show it: an instrument says that it is constructed."""
    return f"{cell['model']} (constructed)" if cell.get("constructed") else str(cell["model"])


def step_ms(cell: CellRecord) -> Cell:
    """Median time of a decode step."""
    return MISSING if cell.get("step_ms_p50") is None else Cell(f"{significant(cell['step_ms_p50'])} ms")


def engaged(cell: CellRecord) -> str:
    """Return `k/n engaged` where the mode did not act on every sample, else nothing."""
    acted, n = cell.get("engaged"), cell.get("n")
    if acted is None or n is None or acted == n:
        return ""
    return f"{acted}/{n} engaged"
