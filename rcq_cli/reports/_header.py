"""The line above every report: what was measured, by which program, on which machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rcq_cli.table import Table, binary_bytes

Json = Any


def header(fields: Mapping[str, Json], contract: str | None) -> Table:
    """Return contract hash, program and machine; a dirty source tree is said, not hidden."""
    dirty = " (dirty source tree)" if fields.get("software.rcq_dirty") else ""
    parts = [f"rcq {fields.get('software.rcq') or '?'}{dirty}"]
    parts += [f"contract {contract[:12]}"] if contract else []
    parts += [f"torch {fields['software.torch']}"] if fields.get("software.torch") else []
    machine = fields.get("hardware.gpu") or fields.get("hardware.cpu")
    parts += [str(machine)] if machine else []
    if fields.get("hardware.cpu_count"):
        parts.append(f"{fields['hardware.cpu_count']} cores")
    if fields.get("hardware.memory_bytes"):
        parts.append(f"{binary_bytes(fields['hardware.memory_bytes'])} memory")
    return Table(", ".join(parts), (), ())
