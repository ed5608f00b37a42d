"""From run folders and profile documents to the one document a report is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rcq_cli.stats import wilson
from rcq_cli.traces import Filter, show

if TYPE_CHECKING:
    from rcq_cli.store import RunReader

Json = Any
Record = Mapping[str, Json]


def document(
    readers: Sequence[RunReader], profiles: Sequence[Record], judged: Record, header: str
) -> dict[str, Json]:
    """Return the document of a report; `judged` is what `rcq report` makes of the runs.

    It holds pairs, gate, problems, refusals, notes, exit_code and labels: the name of a run's mode where
    several runs of one place share it.

    Folders are named, not located, so that the same runs give the same report wherever they lie.
    """
    names = judged["labels"]
    cells = [
        cell | {"run": reader.folder.name, "mode": names.get(reader.folder.name, cell["mode"])}
        for reader in readers
        for cell in reader.cells()
    ]
    return {
        "schema": 1,
        "command": "report",
        "title": "rcq report" + (f": {', '.join(_modes(readers))}" if readers else ""),
        "header": header,
        "runs": [_run(reader) for reader in readers],
        "contract": _contract(readers),
        "cells": cells,
        "profiles": list(profiles),
        "traces": [_trace(reader) for reader in readers if reader.steps() is not None],
        "heatmaps": heatmaps(readers, names),
        "environment": _environment(readers),
        **judged,
    }


def _modes(readers: Sequence[RunReader]) -> list[str]:
    return list(dict.fromkeys(reader.spec.mode for reader in readers))


def _run(reader: RunReader) -> dict[str, Json]:
    spec = reader.spec
    return {
        "name": reader.folder.name,
        "task": spec.task,
        "ctx": spec.ctx,
        "mode": spec.mode,
        "model": spec.model,
        "status": reader.status,
        "digest": spec.digest(),
    }


def _trace(reader: RunReader) -> dict[str, Json]:
    return show(reader, Filter()) | {"run": reader.folder.name}


def _contract(readers: Sequence[RunReader]) -> dict[str, Json]:
    """Return the fields all runs share and those they do not; the machine has a table of its own."""
    all_fields = [reader.contract for reader in readers]
    names = sorted({n for fields in all_fields for n in fields if n.partition(".")[0] not in _MACHINE})
    values = {name: [fields.get(name) for fields in all_fields] for name in names}
    same = {name: found[0] for name, found in values.items() if all(v == found[0] for v in found)}
    return {
        "runs": [reader.folder.name for reader in readers],
        "common": same,
        "differing": {name: found for name, found in values.items() if name not in same},
    }


_MACHINE = ("software", "hardware", "determinism")


def _environment(readers: Sequence[RunReader]) -> dict[str, list[Json]]:
    records = [reader.environment for reader in readers]
    names = [
        (group, name)
        for group in _MACHINE
        for name in dict.fromkeys(n for record in records for n in record.get(group, {}))
    ]
    return {f"{g}.{n}": [record.get(g, {}).get(n) for record in records] for g, n in names}


def heatmaps(readers: Sequence[RunReader], names: Mapping[str, str]) -> list[dict[str, Json]]:
    """Return score by depth and context of each model's and mode's niah runs.

    Every field has n and a Wilson interval. `names` are those of modes, by run folder.
    """
    by_mode: dict[tuple[str, str], dict[tuple[float, int], list[float]]] = {}
    for reader in readers:
        spec, facts = reader.spec, reader.facts
        if spec.task_name != "niah" or spec.ctx is None or facts is None:
            continue
        mode = names.get(reader.folder.name, spec.mode)
        scores = by_mode.setdefault((spec.model, mode), {})
        for depth, score in _depths(reader.examples(), facts.score_key):
            scores.setdefault((depth, spec.ctx), []).append(score)
    return [{"model": model} | _heatmap(mode, scores) for (model, mode), scores in by_mode.items() if scores]


def _depths(rows: Iterable[Record], key: str) -> Iterable[tuple[float, float]]:
    for row in rows:
        depth, score = (row.get("meta") or {}).get("depth"), (row.get("scores") or {}).get(key)
        if depth is not None and score is not None:
            yield depth, score


def _heatmap(mode: str, scores: Mapping[tuple[float, int], Sequence[float]]) -> dict[str, Json]:
    contexts = sorted({ctx for _, ctx in scores})

    def cell(found: Sequence[float] | None) -> dict[str, Json] | None:
        if not found:
            return None
        return {"score": sum(found) / len(found), "n": len(found), "ci": list(wilson(sum(found), len(found)))}

    rows = [
        {"depth": depth, "cells": [cell(scores.get((depth, ctx))) for ctx in contexts]}
        for depth in sorted({depth for depth, _ in scores})
    ]
    return {"mode": mode, "contexts": contexts, "rows": rows}
