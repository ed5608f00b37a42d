"""The end of a run, and runs made of other runs: merged shards and answers scored again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rcq_cli import contract, identity, records, steps
from rcq_cli.errors import BrokenRun, NotComparable, SpecError
from rcq_cli.files import SCHEMA, read_json, write_json
from rcq_cli.presets import TASKS
from rcq_cli.protocols import Completion, Sample
from rcq_cli.records import OK, Row, TaskFacts
from rcq_cli.spec import RunSpec
from rcq_cli.store import (
    COMPLETE,
    ERROR,
    RunReader,
    RunWriter,
    build_cells,
    last_by_key,
    new_folder,
    timed_metrics,
)
from rcq_cli.task_files import name_on_command_line


def write_contract(folder: Path, fields: Mapping[str, Any], facts: TaskFacts, begun_hash: str) -> None:
    """Write `contract.json`; `begun_hash` is that of the contract before the first prompt."""
    record = {
        "schema": SCHEMA,
        "contract_hash": contract.contract_hash(fields),
        "timing_hash": contract.timing_hash(fields),
        "mode_hash": contract.mode_hash(fields),
        "begun_hash": begun_hash,
        "fields": dict(fields),
        "facts": facts._asdict(),
    }
    write_json(folder / "contract.json", record)


def finish_run(
    writer: RunWriter,
    spec: RunSpec,
    facts: TaskFacts,
    fields: Mapping[str, Any],
    begun_hash: str,
    rows: Sequence[Row],
    controls: Sequence[Row],
) -> None:
    """Write the final contract and the summary, both rebuilt from rows alone; `rows` in any order."""
    rows, controls = (records.ordered(found, facts.parts) for found in (rows, controls))
    write_contract(writer.folder, fields, facts, begun_hash)
    failed = any(row["status"] != OK for row in (*rows, *controls)) or not rows
    status = ERROR if failed else COMPLETE
    timings = {entry["key"]: entry for entry in writer.telemetry if entry.get("kind") == "timing"}
    timed = timed_metrics(writer.telemetry)
    built = build_cells(spec, facts, rows, timings, writer.log, status, timed)
    summary = {
        "status": status,
        "contract": contract.contract_hash(fields),
        "mode_hash": contract.mode_hash(fields),
        "model_name": facts.model_name,
        "cells": [done.cell for done in built],
        "controls": records.controls_summary(controls, facts.score_key),
        "problems": records.problems(facts, rows, controls, [done.certificates for done in built]),
    }
    writer.finish(summary, [row["key"] for row in rows])


def merge(folders: Sequence[Path], out: Path) -> Path:
    """Return the folder of a new run that holds the samples of all shards.

    Raises `SpecError` for fewer than two runs and for a shard given twice, `NotComparable` when they are not
    shards of one run, and `BrokenRun` when one of them is missing or did not come to its end.
    """
    readers = [RunReader(folder) for folder in folders]
    if len(readers) < 2:
        raise SpecError("--merge needs at least two runs", fix="--merge RUN RUN", id="RCQ-USE-12")
    for reader in readers:
        _check_ended(reader)
    first = readers[0]
    hashes = [_hashes(reader) for reader in readers]
    wholes = [reader.spec.but(shard=None) for reader in readers]
    if any(whole != wholes[0] for whole in wholes) or any(pair != hashes[0] for pair in hashes):
        what = f"{len(readers)} runs are not shards of one run"
        why = "their specs, contracts or modes differ"
        raise NotComparable(what, why, "name all shards of one run", "RCQ-CMP-04")
    _check_shards([reader.spec for reader in readers])
    rows = last_by_key([row for reader in readers for row in reader.examples()])
    controls = last_by_key([row for reader in readers for row in reader.controls()])
    facts = _facts(first)
    late = identity.late(records.ordered(rows.values(), facts.parts), None)
    late["tokenizer.bos_count"] = first.contract["tokenizer.bos_count"]
    return _write(wholes[0], out, readers, facts, first.contract | late, hashes[0][0], rows, controls)


def rescore(folder: Path, out: Path, named: Sequence[str] = ()) -> Path:
    """Return the folder of a new run in which the stored answers of `folder` are scored by today's task.

    A Python task is run only when `named` says its file, the one the run was made with; raises `SpecError`
    otherwise, and `BrokenRun` for a run that did not come to its end.
    """
    reader = RunReader(folder)
    for name in named:
        if TASKS.resolve(name) != reader.spec.task_name:
            what = f"--task {name!r} is not the task of {folder}"
            raise SpecError(what, fix=f"that run has task {reader.spec.task_name}", id="RCQ-USE-12")
        name_on_command_line(name)
    _check_ended(reader)
    spec, task = reader.spec, TASKS.load(reader.spec.task_name)
    fields = reader.contract | {"task.metric": task.metric}
    facts = _facts(reader)._replace(metric=task.metric, score_key=task.score_key)
    begun_hash = contract.contract_hash(fields | dict.fromkeys(identity.LATE))
    mode_hash = contract.mode_hash(fields)

    def again(row: Row) -> Row:
        key = records.row_key(begun_hash, mode_hash, row["sample_id"])
        if row["status"] != OK:
            return row | {"key": key}
        series = {name: tuple(values) for name, values in row.get("series", {}).items()}
        answer = Completion(tuple(row["output_ids"]), row["text"], row["finish_reason"], series)
        return row | {"key": key, "scores": records.finite(dict(task.score(_sample(row), answer)))}

    rows, controls = (
        {row["key"]: again(row) for row in found} for found in (reader.examples(), reader.controls())
    )
    return _write(spec, out, [reader], facts, fields, begun_hash, rows, controls)


def _write(
    spec: RunSpec,
    out: Path,
    readers: Sequence[RunReader],
    facts: TaskFacts,
    fields: Mapping[str, Any],
    begun_hash: str,
    rows: Mapping[str, Row],
    controls: Mapping[str, Row],
) -> Path:
    """Write a run from rows of others, given by the keys they had there."""
    environment = readers[0].environment  # refuses a changed one, before anything is made
    folder = new_folder(out, spec)
    write_json(folder / "environment.json", environment)
    with RunWriter(folder) as writer:
        for reader in readers:
            _copy_steps(reader, rows, writer)
            for entry in reader.timings().values():
                if entry["key"] in rows:
                    writer.append_telemetry(entry | {"key": rows[entry["key"]]["key"]})
        for row in records.ordered([*rows.values(), *controls.values()], facts.parts):
            writer.append_row(row)
        finish_run(writer, spec, facts, fields, begun_hash, list(rows.values()), list(controls.values()))
    return folder


def _copy_steps(reader: RunReader, rows: Mapping[str, Row], writer: RunWriter) -> None:
    held = reader.steps()
    if held is None:
        return
    keys = {row["sample_id"]: row["key"] for row in rows.values() if row["steps"]}
    for sample_id, arrays in steps.arrays_of(held):
        if sample_id in keys and keys[sample_id] not in writer.log.members:
            writer.append_steps(sample_id, keys[sample_id], arrays)


def _check_ended(reader: RunReader) -> None:
    """Refuse a run that was stopped: what is made of it would look as if every sample and control were there.

    Rows cannot tell, since a task may have fewer samples than were asked for.
    """
    if reader.summary is None:
        raise BrokenRun(
            f"{reader.folder} did not come to its end",
            why=f"it is {reader.status}: samples or controls are missing",
            fix="finish it: the command that began it with --resume",
            id="RCQ-RUN-08",
        )


def _check_shards(specs: Sequence[RunSpec]) -> None:
    """Refuse anything but the shards 1/N to N/N of one run, each once."""
    places = [spec.shard_place for spec in specs]
    count = places[0][1]
    names = [spec.shard or "the whole run" for spec in specs]
    if any(place[1] != count for place in places):
        what = f"{len(specs)} runs are not shards of one run"
        raise NotComparable(what, why=f"they are {', '.join(names)}", id="RCQ-CMP-04")
    twice = next((name for i, name in enumerate(names) if places[i] in places[:i]), None)
    if twice is not None:
        raise SpecError(f"--merge got {twice} twice", fix="name each shard once", id="RCQ-USE-12")
    missing = [f"{number}/{count}" for number in range(1, count + 1) if (number, count) not in places]
    if missing:
        raise BrokenRun(
            f"{len(missing)} of {count} shards are missing",
            why=f"no run of {', '.join(missing)} was given",
            fix="name the run of every shard",
            id="RCQ-RUN-05",
        )


def _hashes(reader: RunReader) -> tuple[str, str]:
    path = reader.folder / "contract.json"
    stored = read_json(path)
    begun, mode = stored.get("begun_hash"), stored.get("mode_hash")
    if not (isinstance(begun, str) and isinstance(mode, str)):
        what, why = f"{path} cannot be read", "it holds no begun_hash or no mode_hash"
        raise BrokenRun(what, why=why, fix="run it again", id="RCQ-RUN-03")
    return begun, mode


def _facts(reader: RunReader) -> TaskFacts:
    if reader.facts is None:
        raise BrokenRun(f"{reader.folder} holds no sample", why="it never began", id="RCQ-RUN-04")
    return reader.facts


def _sample(row: Row) -> Sample:
    """Return the sample of a row; its prompt is not stored, and no score needs it."""
    return Sample(
        sample_id=row["sample_id"],
        index=row["index"],
        cluster=row["cluster"],
        prompt_ids=(),
        context_len=row["context_len"],
        references=tuple(row["references"]),
        max_new_tokens=row["max_new_tokens"],
        stop_ids=tuple(row["stop_ids"]),
        seed=row["seed"],
        meta=row["meta"],
        control=row["control"],
    )
