"""The baseline file: what a comparison measured when it was last accepted (statistics.md section 12)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rcq_cli.contract import LEVELS, Level
from rcq_cli.errors import SpecError
from rcq_cli.registry import did_you_mean
from rcq_cli.stats import SMALLEST_MARGIN

Json = Any
Record = Mapping[str, Json]
Key = tuple[str, str, int | None, str]
"""Task, part, context and mode."""

SCHEMA = "rcq-baseline/1"
KINDS = {"abs": "value", "rel": "value", "stat": "margin"}
"""Kinds of tolerance and the key that holds their number."""
BYTES_TOLERANCE = 0.01
"""Bytes come from a ledger: more than this share is a change of the cache, not of the machine."""
LATENCY = "latency_ratio"
OUTCOME_FIELDS = ("sample_id", "cluster", "status", "prompt_ids_sha256", "max_new_tokens", "stop_ids", "seed")
"""Fields of a row that pairing needs; its scores come on top."""

_KEYS = ("schema", "contract_hash", "created", "contracts", "outcomes", "outcomes_sha256", "rows")
_ROW_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("task", "sub", "mode", "metric", "dir"), (str,)),
    "ctx": (int, type(None)),
    "n": (int,),
    "value": (int, float),
    "tol": (dict,),
    "timing_hash": (str, type(None)),
}
_OPTIONAL = {"sub": "", "timing_hash": None}


@dataclass(frozen=True, slots=True)
class Entry:
    """One accepted number and how far it may move."""

    task: str
    sub: str
    """Part of the task, empty where it has none."""
    ctx: int | None
    mode: str
    metric: str
    value: float
    n: int
    dir: str
    """`up`: more is better; `down`: less is."""
    tol: Mapping[str, Json]
    timing_hash: str | None = None

    @property
    def key(self) -> Key:
        """Where the number stands."""
        return self.task, self.sub, self.ctx, self.mode

    @property
    def cell_task(self) -> str:
        """The task as cells call it: `ruler/vt`."""
        return f"{self.task}/{self.sub}" if self.sub else self.task

    @property
    def tolerance(self) -> float:
        """How far it may move: on its own scale, as a share, or the margin of a verdict."""
        return float(self.tol[KINDS[self.tol["kind"]]])

    def to_json(self) -> dict[str, Json]:
        """Return the record of the file."""
        names = [name for name in _ROW_TYPES if name != "timing_hash" or self.timing_hash is not None]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Baseline:
    """A baseline file as it was read, or as it will be written."""

    name: str
    """As the user calls it."""
    contract_hash: str
    entries: tuple[Entry, ...]
    contracts: tuple[Record, ...] = ()
    """`{task, ctx, fields}`: the MUST fields of each measured place, so that a mismatch can be named."""
    outcomes: Mapping[Key, Sequence[Record]] = field(default_factory=dict)
    """The accepted answers, sample by sample; empty where the file names none."""

    def fields_at(self, task: str, ctx: int | None) -> Record | None:
        """Return the contract of one place, None where the file holds none."""
        return next((c["fields"] for c in self.contracts if (c["task"], c["ctx"]) == (task, ctx)), None)


# -- reading ------------------------------------------------------------------------------------------------


def read_baseline(path: Path) -> Baseline:
    """Return the baseline of a YAML file, or of a document that `rcq compare --json` wrote.

    Raises `SpecError` for a file that does not exist or is neither.
    """
    record = _loaded(path)
    if record.get("command") == "compare":
        return _of_document(path, record)
    if record.get("schema") != SCHEMA:
        why = f"its schema is {record.get('schema')!r}, this rcq reads {SCHEMA!r}"
        raise _refused(path, why, "rcq compare ... --baseline FILE --update-baseline writes one")
    for key in record:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS)
            raise _refused(path, f"unknown key {key!r}", f"{hint}known: {', '.join(_KEYS)}")
    rows = record.get("rows")
    if not isinstance(rows, list) or not rows:
        raise _refused(path, "it has no rows", "write it again with --update-baseline")
    entries = tuple(_entry(path, number, row) for number, row in enumerate(rows, start=1))
    places = [(entry.key, entry.metric) for entry in entries]
    twice = next((place for i, place in enumerate(places) if place in places[:i]), None)
    if twice:
        raise _refused(path, f"two rows are about {twice[0][3]} {twice[0][0]} {twice[1]}", "keep one of them")
    return Baseline(
        str(path),
        _hash(path, record.get("contract_hash")),
        entries,
        _contracts(path, record.get("contracts", [])),
        _outcomes(path, record, entries),
    )


def _loaded(path: Path) -> dict[str, Json]:
    import yaml

    try:
        # JSON is YAML, but the parser of its own is a hundred times faster
        text = path.read_text("utf-8")
        value = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        why = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        fix = "name a file that --update-baseline wrote"
        raise _refused(path, why, fix, "cannot be read") from error
    if not isinstance(value, dict):
        raise _refused(path, "it holds no mapping", "name a file that --update-baseline wrote")
    return value


def _entry(path: Path, number: int, row: Json) -> Entry:
    where = f"row {number}"
    if not isinstance(row, dict):
        raise _refused(path, f"{where} is no mapping", "write it again with --update-baseline")
    row = _OPTIONAL | row
    for name in row:
        if name not in _ROW_TYPES:
            known = f"known: {', '.join(_ROW_TYPES)}"
            raise _refused(
                path,
                f"{where} has the unknown key {name!r}",
                did_you_mean(str(name), tuple(_ROW_TYPES)) + known,
            )
    for name, types in _ROW_TYPES.items():
        if name not in row or not isinstance(row[name], types) or isinstance(row[name], bool):
            raise _refused(path, f"{where}: {name} {row.get(name)!r} is not allowed", "see docs/ci.md")
    if row["dir"] not in ("up", "down") or not math.isfinite(row["value"]) or row["n"] < 1:
        raise _refused(path, f"{where}: dir is up or down, value finite, n at least 1", "see docs/ci.md")
    _check_tolerance(path, where, row["tol"])
    return Entry(**row)


def _check_tolerance(path: Path, where: str, tol: Record) -> None:
    kind = tol.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise _refused(path, f"{where}: tol.kind {kind!r} is not allowed", f"allowed: {', '.join(KINDS)}")
    value = tol.get(KINDS[kind])
    number = isinstance(value, int | float) and not isinstance(value, bool)
    low, high = (SMALLEST_MARGIN, 1.0) if kind == "stat" else (0.0, math.inf)
    if set(tol) != {"kind", KINDS[kind]} or not number or not low <= float(value or 0) < high:
        allowed = f"allowed: {{kind: {kind}, {KINDS[kind]}: NUMBER}}"
        raise _refused(path, f"{where}: tol {dict(tol)!r} is not allowed", allowed)


def _contracts(path: Path, found: Json) -> tuple[Record, ...]:
    sound = isinstance(found, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("task"), str)
        and isinstance(entry.get("ctx"), int | None)
        and isinstance(entry.get("fields"), dict)
        and all(LEVELS.get(name) is Level.MUST for name in entry["fields"])
        for entry in found
    )
    if not sound:
        raise _refused(
            path, "contracts is no list of {task, ctx, fields}", "write it again with --update-baseline"
        )
    return tuple(found)


def _hash(path: Path, value: Json) -> str:
    if isinstance(value, str) and len(value) == 64 and all(c in "0123456789abcdef" for c in value):
        return value
    raise _refused(path, f"contract_hash {value!r} is no sha256", "write it again with --update-baseline")


def _outcomes(path: Path, record: Record, entries: Sequence[Entry]) -> dict[Key, list[Record]]:
    """Return the stored answers of the file that `outcomes` names, which lies beside the baseline."""
    name = record.get("outcomes")
    if name is None:
        return {}
    plain = isinstance(name, str) and name != "" and Path(name).name == name
    beside = path.with_name(str(name)) if plain else None
    if beside is None or not beside.is_file():
        raise _refused(path, f"its outcomes {name!r} do not lie beside it", "commit both files together")
    data = beside.read_bytes()
    if record.get("outcomes_sha256") not in (None, hashlib.sha256(data).hexdigest()):
        raise _refused(path, f"{name} is not the file it was written with", "commit both files together")
    found: dict[Key, list[Record]] = {}
    metrics = {entry.key: entry.metric for entry in entries if entry.tol["kind"] == "stat"}
    try:
        for line in data.decode("utf-8").splitlines():
            row = json.loads(line)
            key = (str(row["task"]), str(row["sub"]), row["ctx"], str(row["mode"]))
            found.setdefault(key, []).append(_outcome(row, metrics.get(key)))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refused(
            path, f"{name} is broken: {error!r}", "write it again with --update-baseline"
        ) from error
    return found


def _outcome(row: Record, metric: str | None) -> dict[str, Json]:
    """Return a stored answer as pairing reads it; raise `ValueError` when it is none."""
    found = {name: row[name] for name in OUTCOME_FIELDS} | {"scores": dict(row["scores"])}
    scores = found["scores"]
    known = all(isinstance(v, int | float) and math.isfinite(v) for v in scores.values())
    scored = found["status"] != "ok" or metric is None or metric in scores
    if not (isinstance(found["sample_id"], str) and known and scored):
        raise ValueError(f"no answer: {dict(row)!r}"[:120])
    return found


def _refused(path: Path, why: str, fix: str, what: str = "is no baseline") -> SpecError:
    return SpecError(f"--baseline {str(path)!r} {what}", why, fix, "RCQ-USE-27")


# -- making -------------------------------------------------------------------------------------------------


def _of_document(path: Path, document: Record) -> Baseline:
    try:
        contract = _hash(path, document["contract"])
        contracts = _contracts(path, [_place(entry) for entry in document.get("contracts", [])])
        # a document of others may hold anything where a number belongs
        rows = [entry.to_json() for entry in entries_of(document)]
        entries = tuple(_entry(path, number, row) for number, row in enumerate(rows, 1))
        return Baseline(str(path), contract, entries, contracts)
    except (KeyError, TypeError, AttributeError) as error:
        why = f"it is no finished document of rcq compare ({error!r})"
        raise _refused(path, why, "rcq compare ... --json FILE writes one") from error


def _place(entry: Record) -> dict[str, Json]:
    return {"task": entry["task"], "ctx": entry["ctx"], "fields": dict(entry["fields"])}


def entries_of(document: Record, latency_margin: float | None = None) -> tuple[Entry, ...]:
    """Return what a finished comparison says of every mode that is not expected to fail."""
    pairs = {(p["task"], p["ctx"], p["candidate"]): p for p in document["pairs"]}
    margins = {(p["task"], p["ctx"]): p["margin"] for p in document["pairs"]}
    timing = {(c["task"], c["ctx"]): c["timing_hash"] for c in document.get("contracts", [])}
    found: list[Entry] = []
    for cell in document["cells"]:
        place = (cell["task"], cell["ctx"])
        pair = pairs.get((*place, cell["mode"]), {})
        if pair.get("expected") or place not in margins:
            continue
        hashed = timing.get((cell["task"].partition("/")[0], cell["ctx"])) or timing.get(place)
        found += _entries(cell, pair, margins[place], latency_margin, hashed)
    return tuple(found)


def _entries(
    cell: Record, pair: Record, margin: float, latency_margin: float | None, timing_hash: str | None
) -> Iterable[Entry]:
    task, _, sub = cell["task"].partition("/")
    place = (task, sub, cell["ctx"], cell["mode"])
    if cell.get("score") is not None:
        direction = "up" if cell["higher_is_better"] else "down"
        tolerance = {"kind": "stat", "margin": margin}
        yield Entry(*place, cell["metric"], cell["score"], cell["n"], direction, tolerance)
    device = (cell.get("bytes") or {}).get("device")
    if device is not None:
        tolerance = {"kind": "rel", "value": BYTES_TOLERANCE}
        yield Entry(*place, "device_bytes", device, cell["n"], "down", tolerance)
    if latency_margin is not None and pair.get("latency_paired"):
        tolerance = {"kind": "rel", "value": latency_margin}
        yield Entry(*place, LATENCY, pair[LATENCY], cell["n"], "down", tolerance, timing_hash)


def write_baseline(
    path: Path, document: Record, outcomes: Mapping[Key, Sequence[Record]], latency_margin: float | None
) -> None:
    """Write the baseline of a finished comparison and its answers beside it, the answers first.

    `outcomes` are the rows of each cell. The same measurements give the same bytes: no date stands in either.
    """
    from rcq_cli.shell import write_file

    entries = entries_of(document, latency_margin)
    lines = [
        json.dumps(_stored(entry, row), sort_keys=True, separators=(",", ":"))
        for entry in entries
        if entry.tol["kind"] == "stat"
        for row in outcomes.get(entry.key, ())
    ]
    text = "".join(line + "\n" for line in lines)
    beside = path.with_name(f"{path.stem}.outcomes.jsonl")
    write_file(beside, text)
    head = {
        "schema": SCHEMA,
        "contract_hash": document["contract"],
        "contracts": [_place(entry) for entry in document["contracts"]],
        "outcomes": beside.name,
        "outcomes_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    write_file(path, _yaml(head, entries))


def _stored(entry: Entry, row: Record) -> dict[str, Json]:
    wanted = (entry.metric, "nll_suffix", "n_targets")
    scores = {n: value for n, value in (row["scores"] or {}).items() if n in wanted and value is not None}
    place = {name: getattr(entry, name) for name in ("task", "sub", "ctx", "mode")}
    return place | {name: row.get(name) for name in OUTCOME_FIELDS} | {"scores": scores}


def _yaml(head: Record, entries: Sequence[Entry]) -> str:
    import yaml

    # one number a line, so that a diff shows what moved
    rows = [
        yaml.safe_dump(entry.to_json(), sort_keys=True, default_flow_style=True, width=10**6).strip()
        for entry in entries
    ]
    comment = "# Written by rcq compare --update-baseline; commit it with the outcomes beside it.\n"
    return (
        comment
        + yaml.safe_dump(dict(head), sort_keys=True)
        + "rows:\n"
        + "".join(f"- {row}\n" for row in rows)
    )
