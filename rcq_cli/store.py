"""Run folders: an append-only writer that survives a kill, and a reader that needs no torch."""

import errno
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rcq_cli import records, steps, stored
from rcq_cli.errors import SpecError
from rcq_cli.files import (
    SCHEMA,
    Appender,
    disk,
    file_sha256,
    json_bytes,
    read_json,
    read_lines,
    replace_with,
    unwritable,
    write_json,
)
from rcq_cli.protocols import StepArrays
from rcq_cli.records import Row, TaskFacts
from rcq_cli.spec import RunSpec, canonical

if TYPE_CHECKING:
    import pyarrow as pa

SEALED = (
    "spec.json",
    "contract.json",
    "environment.json",
    "examples.jsonl",
    "controls.jsonl",
    "steps.parquet",
)
"""Files whose digests the last line of telemetry holds, beside its own and that of the summary."""
COMPLETE, STARTED, ERROR, INTERRUPTED = "complete", "started", "error", "interrupted"


def check_out(out: Path) -> None:
    """Raise `SpecError` when no run folder can be made in `out`, before any work is done; nothing is left.

    A full disk is no fault of the name: it is a `BrokenRun`.
    """
    with disk(out):
        if out.exists() and not out.is_dir():
            raise SpecError(f"--out {str(out)!r} is a file", fix="name a folder", id="RCQ-USE-11")
        if out.is_symlink() and not out.exists():
            raise SpecError(f"--out {str(out)!r} is a link to nothing", fix="name a folder", id="RCQ-USE-11")
        error = unwritable(next(folder for folder in (out, *out.parents) if folder.exists()))
        if error is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise error
    if error is not None:
        what = f"--out {str(out)!r} cannot be written"
        why = error.strerror or str(error)
        raise SpecError(what, why, "name a folder that can be made and written", "RCQ-USE-11") from error


def new_folder(out: Path, spec: RunSpec, now: datetime | None = None) -> Path:
    """Make `<UTC time>-<task>-<mode>-<digest8>` in `out`, write `spec.json` there and return its path.

    Raises what `check_out` raises, and `BrokenRun` when writing fails in spite of it.
    """
    check_out(out)
    now = now or datetime.now(UTC)
    with disk(out):
        out.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".new-", dir=out))
    try:
        write_json(draft / "spec.json", {"schema": SCHEMA, **spec.to_json(), "digest": spec.digest()})
        with disk(out):
            draft.chmod(0o755)
            return _named(draft, out, spec, now)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _named(draft: Path, out: Path, spec: RunSpec, now: datetime) -> Path:
    """Give a draft the name of a run: a kill leaves a hidden draft, never a folder without its spec."""
    while True:
        folder = out / "-".join(
            (now.strftime("%Y%m%dT%H%M%SZ"), _safe(spec.task_title), _safe(spec.mode), spec.digest()[:8])
        )
        try:
            return draft.rename(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            now += timedelta(seconds=1)


def find_unfinished(out: Path, spec: RunSpec) -> Path | None:
    """Return the newest run of exactly this spec in `out` that is not complete."""
    return next((f for f in _runs_of(out, spec) if RunReader(f).status != COMPLETE), None)


def find_complete(out: Path, spec: RunSpec) -> Path | None:
    """Return the newest complete run of exactly this spec in `out`."""
    return next((f for f in _runs_of(out, spec) if RunReader(f).status == COMPLETE), None)


def _runs_of(out: Path, spec: RunSpec) -> Iterator[Path]:
    """Yield the folders of this spec, newest first."""
    digest = spec.digest()
    found = out.glob(f"*-{digest[:8]}") if out.is_dir() else ()
    for folder in sorted(found, reverse=True):
        if (folder / "spec.json").is_file() and RunReader(folder).spec.digest() == digest:
            yield folder


def discard_empty(folder: Path) -> None:
    """Remove a run folder in which no sample was answered; leave any other."""
    rows = folder / "examples.jsonl"
    if rows.exists() and rows.stat().st_size:
        return
    with suppress(OSError):
        for entry in folder.iterdir():
            entry.unlink()
        folder.rmdir()


def _safe(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=,+]+", "-", label).strip("-")[:80]


class RunWriter:
    """One run being written; a context manager that holds the folder's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self._examples = Appender(folder / "examples.jsonl", 0)
        try:
            if not self._examples.lock():
                self.notes.append(f"{folder}: this file system has no locks; run one process at a time")
            self._open()
        except BaseException:
            self._examples.close()
            raise

    def _open(self) -> None:
        """Read what is there, cut off torn ends, open the other files."""
        self.rows = self._trimmed(self._examples)
        stored.check_rows(self.rows, self._examples.path)
        self._controls = Appender(self.folder / "controls.jsonl", 0)
        self.control_rows = self._trimmed(self._controls)
        stored.check_rows(self.control_rows, self._controls.path)
        self._telemetry = Appender(self.folder / "telemetry.jsonl", 0)
        self.telemetry = self._trimmed(self._telemetry)
        stored.check_telemetry(self.telemetry, self._telemetry.path)
        self.log = steps.StepLog(self.folder / "steps.jsonl.gz")
        self._steps: Appender | None = None
        summary = self.folder / "summary.json"
        self.complete = summary.exists() and read_json(summary)["status"] == COMPLETE
        if not self.complete:  # whatever it said is true no longer once rows are added
            with disk(summary):
                summary.unlink(missing_ok=True)

    def _trimmed(self, appender: Appender) -> list[dict[str, Any]]:
        found, good, torn = read_lines(appender.path)
        if torn:
            self.notes.append(f"{appender.path.name}: a torn last line was dropped")
        appender.trim(good)
        return found

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        for appender in (self._steps, self._telemetry, self._controls, self._examples):
            if appender is not None:
                appender.close()

    def append_steps(self, sample_id: str, key: str, arrays: StepArrays) -> None:
        """Append the certificates of one sample."""
        if self._steps is None:
            self._steps = Appender(self.log.path, self.log.good_bytes)
            self._steps.trim(self.log.good_bytes)
        member = steps.encode(sample_id, key, arrays, SCHEMA)
        self._steps.append(member)
        self.log.add(key, len(member))

    def append_row(self, row: Row) -> None:
        """Append a row; last, so that a row on disk means its certificates and timing are there too."""
        appender, rows = (
            (self._examples, self.rows) if row["control"] is None else (self._controls, self.control_rows)
        )
        appender.append(_line(row))
        rows.append(row)

    def append_telemetry(self, record: Mapping[str, Any]) -> None:
        """Append a clock's or a sensor's record, or a change of status."""
        self._telemetry.append(_line({"schema": SCHEMA, **record}))
        self.telemetry.append(dict(record))

    def finish(self, summary: Mapping[str, Any], keys: Sequence[str]) -> None:
        """Write `summary.json`; before it, a complete run's certificates (`keys`, in order) as Parquet."""
        complete = summary["status"] == COMPLETE
        if complete and self.log.members:
            target = self.folder / "steps.parquet"
            replace_with(target, lambda temp: steps.write_parquet(temp, self.log.read(keys)))
        record = {"schema": SCHEMA, **summary}
        self._seal(sha256(json_bytes(record)).hexdigest())
        write_json(self.folder / "summary.json", record)
        if complete:
            with disk(self.log.path):
                self.log.path.unlink(missing_ok=True)

    def _seal(self, summary: str) -> None:
        """Record what every file holds; a clock's figures make the digests, so they stand in telemetry."""
        files = {name: file_sha256(path) for name in SEALED if (path := self.folder / name).exists()}
        telemetry = file_sha256(self._telemetry.path, self._telemetry.size)
        files |= {"telemetry.jsonl": telemetry, "summary.json": summary}
        self.append_telemetry({"kind": "sealed", "files": files})


def _line(record: Mapping[str, Any]) -> bytes:
    return (canonical(record) + "\n").encode()


def last_by_key(rows: Sequence[Row]) -> dict[str, Row]:
    """Return rows by key; of duplicates the last one wins."""
    return {row["key"]: row for row in rows}


class RunReader:
    """One stored run, finished or not. Raises `SpecError` for a folder that is no run."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "spec.json").is_file():
            what = f"{str(folder)!r} is no run folder"
            raise SpecError(what, why="it has no spec.json", fix="name a folder below --out", id="RCQ-USE-11")
        self.notes: list[str] = []
        self._sealed: dict[str, str] | None = None

    @property
    def spec(self) -> RunSpec:
        """What was asked."""
        record = self._stored("spec.json")
        return RunSpec.from_json({k: v for k, v in record.items() if k not in ("schema", "digest")})

    @property
    def contract(self) -> dict[str, Any]:
        """The flat contract fields, empty before the model was loaded."""
        fields: dict[str, Any] = self._contract().get("fields", {})
        return fields

    @property
    def environment(self) -> dict[str, Any]:
        """The machine and its software."""
        return self._stored("environment.json")

    @property
    def facts(self) -> TaskFacts | None:
        """What of the task its cells repeat; None before the model was loaded."""
        found = self._contract().get("facts")
        return TaskFacts(**found | {"parts": tuple(found["parts"])}) if found else None

    @property
    def summary(self) -> dict[str, Any] | None:
        """The record of `summary.json`; None for a run that did not come to its end."""
        found = self._stored("summary.json") or None
        if found is not None:
            stored.check_summary(found, self.folder / "summary.json")
        return found

    @property
    def status(self) -> str:
        """`complete`, `error` (samples failed), `interrupted` or `started`."""
        summary = self.summary
        if summary:
            return str(summary["status"])
        marks = [record["status"] for record in self._telemetry() if record.get("kind") == "status"]
        return str(marks[-1]) if marks else STARTED

    def _stored(self, name: str) -> dict[str, Any]:
        self._verify(name)
        path = self.folder / name
        return read_json(path) if path.exists() else {}

    def _verify(self, name: str) -> None:
        """Raise `BrokenRun` when a file of a finished run is not the one that was sealed."""
        if not (self.folder / "summary.json").exists():
            return
        if self._sealed is None:
            self._sealed = self._read_seal()
        known, path = self._sealed.get(name), self.folder / name
        if known is not None and (not path.exists() or file_sha256(path) != known):
            raise stored.changed(path)

    def _read_seal(self) -> dict[str, str]:
        """Return the digests of the last seal; what stands before it is checked here.

        Whoever can take the seal away can change the rest: a summary without one is refused.
        """
        path = self.folder / "telemetry.jsonl"
        found = read_lines(path)[0]
        stored.check_telemetry(found, path)
        last = next((i for i in reversed(range(len(found))) if found[i].get("kind") == "sealed"), None)
        if last is None:
            raise stored.changed(path)
        files: dict[str, str] = dict(found[last]["files"])
        before = sum(map(len, path.read_bytes().splitlines(keepends=True)[:last]))
        if file_sha256(path, before) != files.pop("telemetry.jsonl", ""):
            raise stored.changed(path)
        return files

    def _contract(self) -> dict[str, Any]:
        found = self._stored("contract.json")
        if found:
            stored.check_contract(found, self.folder / "contract.json")
        return found

    def _telemetry(self) -> list[dict[str, Any]]:
        path = self.folder / "telemetry.jsonl"
        found = read_lines(path)[0]
        stored.check_telemetry(found, path)
        return found

    def examples(self) -> list[Row]:
        """Return the rows of scored samples in canonical order, one per sample."""
        return self._rows("examples.jsonl")

    def controls(self) -> list[Row]:
        """Return the rows of control samples in canonical order."""
        return self._rows("controls.jsonl")

    def _rows(self, name: str) -> list[Row]:
        self._verify(name)
        rows, _, torn = read_lines(self.folder / name)
        if torn:
            self.notes.append(f"{name}: a torn last line was left out")
        stored.check_rows(rows, self.folder / name)
        facts = self.facts
        if facts is not None:
            stored.check_scored(rows, facts.score_key, self.folder / name)
        return records.ordered(last_by_key(rows).values(), facts.parts if facts else ())

    def timings(self) -> dict[str, dict[str, Any]]:
        """Return the clock's record of each row, by row key."""
        return {record["key"]: record for record in self._telemetry() if record.get("kind") == "timing"}

    def timed(self) -> dict[str, float]:
        """Return the metrics that were timed once for the run."""
        return timed_metrics(self._telemetry())

    def cells(self) -> list[dict[str, Any]]:
        """Return the cells; those of an unfinished run are computed from the rows so far."""
        summary = self.summary
        found = summary["cells"] if summary else self._cells_so_far()
        return [cell | {"run": str(self.folder)} for cell in found]

    def _cells_so_far(self) -> list[dict[str, Any]]:
        facts = self.facts
        if facts is None:
            return []
        log = steps.StepLog(self.folder / "steps.jsonl.gz")
        return [
            done.cell
            for done in build_cells(
                self.spec, facts, self.examples(), self.timings(), log, self.status, self.timed()
            )
        ]

    def steps(self) -> "pa.Table | None":
        """Return the table of certificates, whichever form it is stored in; None where none were kept."""
        path = self.folder / "steps.parquet"
        self._verify(path.name)
        if path.exists():
            return steps.read_parquet(path)
        log = steps.StepLog(self.folder / "steps.jsonl.gz")
        return steps.table(log.read(row["key"] for row in self.examples()))


def timed_metrics(telemetry: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of the last record of kind `timed`, nothing without one."""
    found = [record["metrics"] for record in telemetry if record.get("kind") == "timed"]
    return dict(found[-1]) if found else {}


def build_cells(
    spec: RunSpec,
    facts: TaskFacts,
    rows: Sequence[Row],
    timings: Mapping[str, Mapping[str, Any]],
    log: steps.StepLog,
    status: str,
    timed: Mapping[str, float] | None = None,
) -> list[records.CellParts]:
    """Return the cell of every part, in the task's order, with the certificates it was made from."""
    cells = []
    for part in facts.parts:
        mine = [row for row in rows if row["part"] == part]
        kept = log.read(row["key"] for row in mine if row["status"] == records.OK and row["steps"])
        certificates = steps.certificate_summary(kept) if any(row["steps"] for row in mine) else None
        cell = records.cell(spec, facts, part, mine, timings, certificates, status, timed)
        cells.append(records.CellParts(cell, certificates))
    return cells
