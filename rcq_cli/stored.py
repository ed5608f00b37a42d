"""What records of a run must look like: a folder may be damaged, and it may come from anybody."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from types import NoneType
from typing import Any

from rcq_cli.errors import BrokenRun

Record = Mapping[str, Any]
Check = Callable[[Any], bool]

STATUSES = ("ok", "nan", "oom", "error")
CODES = (4, 5, 6)
"""Exit codes that a stored problem may carry."""


def _is(*types: type) -> Check:
    return lambda value: isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _many(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _table_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _number(value: Any) -> bool:
    """Say whether a value is a finite number: rcq writes no other, JSON of Python reads some."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < inf


_TEXT, _WHOLE, _NUMBER, _FLAG, _TABLE = _is(str), _is(int), _number, _is(bool), _is(dict)
_NUMBERS = _table_of(_or_none(_NUMBER))
_INTERVAL = _or_none(lambda value: isinstance(value, list) and len(value) == 2 and all(map(_NUMBER, value)))

ROW: Mapping[str, Check] = {
    **dict.fromkeys(("key", "sample_id", "part", "cluster", "prompt_ids_sha256", "finish_reason"), _TEXT),
    **dict.fromkeys(("index", "prompt_tokens", "context_len", "max_new_tokens", "seed"), _WHOLE),
    **dict.fromkeys(("control", "error", "text", "first_logits_sha256"), _or_none(_TEXT)),
    **dict.fromkeys(("first_ids", "stop_ids"), _many(_WHOLE)),
    "output_ids": _or_none(_many(_WHOLE)),
    "prompt": _TEXT,
    "prompt_ids": _many(_WHOLE),
    "references": _many(_TEXT),
    "fill_ratio": _or_none(_NUMBER),
    "meta": _TABLE,
    "status": lambda value: value in STATUSES,
    "scores": _or_none(_NUMBERS),
    "engaged": _or_none(_TABLE),
    "bytes": _or_none(_table_of(_WHOLE)),
    "steps": _FLAG,
    "series": _table_of(_many(_or_none(_NUMBER))),
}
NEEDED_OF_ROW = (
    "key",
    "sample_id",
    "part",
    "index",
    "status",
    "control",
    "prompt_ids_sha256",
    "meta",
    "steps",
)
SCORES: Mapping[str, Check] = {
    **dict.fromkeys(("accuracy", "critical_recall"), _or_none(lambda value: 0 <= value <= 1)),
    "perplexity": _or_none(lambda value: value > 0),
}
"""What scores of these names can be, whichever task gives them; one of another name may be any number."""
ANSWERED = ("scores", "engaged", "output_ids", "text")
"""What a row of status ok must hold."""

CELL: Mapping[str, Check] = {
    **dict.fromkeys(("task", "mode", "model", "metric", "metric_version", "dtype", "status"), _TEXT),
    **dict.fromkeys(("n", "errors", "engaged"), _WHOLE),
    **dict.fromkeys(("constructed", "higher_is_better"), _FLAG),
    **dict.fromkeys(("score", "fill_ratio_min", "tokens_per_s", "step_ms_p50"), _or_none(_NUMBER)),
    **dict.fromkeys(("ctx", "prompt_tokens_median"), _or_none(_WHOLE)),
    "score_ci": _INTERVAL,
    "metrics": _NUMBERS,
    "bytes": _or_none(_NUMBERS),
    "certificates": _or_none(_TABLE),
    "estimates": _TABLE,
}
NEEDED_OF_CELL = ("task", "ctx", "mode", "n", "score", "status", "metric", "metrics", "bytes", "certificates")
CERTIFICATES: Mapping[str, Check] = {
    **dict.fromkeys(("head_steps", "certified", "exact", "violations", "audited"), _WHOLE),
    **dict.fromkeys(("rel_bound_p50", "rel_bound_p95", "rel_error_max"), _or_none(_NUMBER)),
    **dict.fromkeys(("promoted_key_share", "promoted_value_share", "host_to_device_bytes_per_step"), _NUMBER),
    "rungs": lambda value: _table_of(_WHOLE)(value) and set(value) == {"0", "1", "2", "3", "4"},
}
PROBLEM: Mapping[str, Check] = {
    "code": lambda value: value in CODES,
    "kind": _TEXT,
    "what": _TEXT,
    "count": _WHOLE,
}
FACTS: Mapping[str, Check] = {
    **dict.fromkeys(("metric", "score_key", "dtype", "model_name", "label"), _TEXT),
    **dict.fromkeys(("higher_is_better", "constructed"), _FLAG),
    "parts": lambda value: _many(_TEXT)(value) and bool(value),
}
CONTRACT: Mapping[str, Check] = {
    **dict.fromkeys(("contract_hash", "begun_hash", "mode_hash"), _TEXT),
    "fields": _TABLE,
    "facts": _TABLE,
}
TELEMETRY: Mapping[str, Mapping[str, Check]] = {
    "timing": {"key": _TEXT, "step_ns": _many(_WHOLE), "prefill_ns": _WHOLE, "selection_ns": _WHOLE},
    "status": {"status": _TEXT},
    "timed": {"metrics": _NUMBERS},
    "sealed": {"files": _table_of(_TEXT)},
}


def check_rows(rows: Sequence[Record], where: object) -> None:
    """Raise `BrokenRun` unless every record is the row of a sample."""
    for row in rows:
        _check(row, ROW, NEEDED_OF_ROW, where)
        _check(row.get("scores") or {}, SCORES, (), where, "scores.")
        if row["status"] == "ok":
            _check(row, dict.fromkeys(ANSWERED, lambda value: value is not None), ANSWERED, where)


def check_scored(rows: Sequence[Record], score_key: str, where: object) -> None:
    """Raise `BrokenRun` unless every answered row, checked before, has a score of the main metric."""
    for row in rows:
        if row["status"] == "ok":
            _check(row["scores"], {score_key: _NUMBER}, (score_key,), where, "scores.")


def check_telemetry(found: Sequence[Record], where: object) -> None:
    """Raise `BrokenRun` unless records of times and of status have what readers take from them."""
    for record in found:
        kind = record.get("kind")
        table = TELEMETRY.get(kind, {}) if isinstance(kind, str) else {}
        _check(
            record,
            table,
            [name for name in ("key", "step_ns", "status", "metrics", "files") if name in table],
            where,
        )


def check_contract(record: Record, where: object) -> None:
    """Raise `BrokenRun` unless this is the record of `contract.json`."""
    _check(record, CONTRACT, ("begun_hash", "mode_hash", "fields", "facts"), where)
    _check(record["facts"], FACTS, tuple(FACTS), where)
    extra = next((name for name in record["facts"] if name not in FACTS), None)
    if extra is not None:
        raise _broken(where, extra, "is not known")


def check_summary(record: Record, where: object) -> None:
    """Raise `BrokenRun` unless this is the record of `summary.json`."""
    tables = {"status": _TEXT, "cells": _many(_TABLE), "problems": _many(_TABLE)}
    _check(record, tables, ("status", "cells"), where)
    for cell in record["cells"]:
        _check(cell, CELL, NEEDED_OF_CELL, where)
        if cell["certificates"] is not None:
            _check(cell["certificates"], CERTIFICATES, tuple(CERTIFICATES), where)
    for problem in record.get("problems", ()):
        _check(problem, PROBLEM, tuple(PROBLEM), where)


def changed(path: Path) -> BrokenRun:
    """Return the error of a file that is not what it was when its run was finished, or is there no longer."""
    return BrokenRun(
        f"{path.name} of {path.parent} changed after the run was finished",
        why="its digest is not the one that the run recorded" if path.exists() else "it is gone",
        fix="restore the file, or run it again with --fresh",
        id="RCQ-RUN-23",
    )


def _check(
    record: Record, table: Mapping[str, Check], needed: Sequence[str], where: object, inside: str = ""
) -> None:
    for name in needed:
        if name not in record:
            raise _broken(where, inside + name, "is missing")
    for name, check in table.items():
        if name in record and not check(record[name]):
            raise _broken(where, inside + name, f"cannot be {_shown(record[name])}")


def _shown(value: Any) -> str:
    return (
        f"{value!r:.40}" if isinstance(value, str | int | float | NoneType) else f"a {type(value).__name__}"
    )


def _broken(where: object, name: str, what: str) -> BrokenRun:
    return BrokenRun(
        f"{where} cannot be read",
        why=f"field {name!r} {what}",
        fix="the folder is damaged or of another program: run it again with --fresh",
        id="RCQ-RUN-03",
    )
