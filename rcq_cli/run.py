"""Run specs to records: where task, engine and store meet; modes of a batch share prompts and prefills."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rcq_cli import contract, environment, identity, records
from rcq_cli.desk import Desk, status_of
from rcq_cli.errors import BrokenRun, NotComparable, RcqError, SpecError, UnsupportedHere
from rcq_cli.files import read_json, write_json
from rcq_cli.finish import finish_run, write_contract
from rcq_cli.options import parse_options
from rcq_cli.presets import MODES, TASKS, Batch
from rcq_cli.progress import Progress
from rcq_cli.protocols import Decoded, Loaded, Mode, Sample, Task, TaskRequest
from rcq_cli.records import OK, Row, TaskFacts
from rcq_cli.spec import RunSpec
from rcq_cli.store import ERROR, INTERRUPTED, STARTED, RunWriter, last_by_key
from rcq_cli.stored import check_scored
from rcq_cli.telemetry import host


class Bench(NamedTuple):
    """A model and the engine that runs it."""

    loaded: Loaded
    engine: Any
    """`rcq_cli.engine.decoder.Engine`, or `rcq_cli.engine.model_free.TaskEngine`."""
    remote: Any = None
    """Where the model is in other processes: `desk(batch)` answers as `Desk`, `environment` is theirs."""


EngineFor = Callable[[RunSpec], Bench]


def planned(batch: Batch) -> int:
    """Return the samples to be answered over all modes of a batch, controls left out."""
    first = batch[0]
    return first.taken * len(identity.task_parts(TASKS.load(first.task_name), first)) * len(batch)


def check(batch: Batch, loaded: Loaded) -> None:
    """Raise `SpecError` for a context above the model's, `UnsupportedHere` for one memory cannot hold."""
    ctx = batch[0].ctx
    if ctx is None:
        return
    if ctx > loaded.max_positions and batch[0].task_options.get("overlength") != "allow":
        what = f"--ctx {ctx} is above what {loaded.name} can take"
        raise SpecError(what, fix=f"allowed: up to {loaded.max_positions}", id="RCQ-USE-10")
    config = getattr(loaded.model, "config", None)
    if config is None:
        return
    from rcq_cli.models._loading import kv_bytes

    # every mode begins with a dense prefill
    element_bytes = 4 if loaded.fingerprint.get("model.dtype") == "float32" else 2
    needed, free = kv_bytes(config, ctx, element_bytes), host.free_bytes(identity.device_of(loaded))
    if free.value is not None and needed > free.value:
        raise UnsupportedHere(
            f"a dense cache of {ctx} tokens of {loaded.name} does not fit",
            why=f"it takes {needed} bytes, {free.value} are free ({free.source})",
            fix="use a smaller --ctx or a machine with more memory",
            id="RCQ-ENV-05",
        )


def check_prompts(batches: Sequence[Batch], loaded: Loaded) -> None:
    """Raise what would end a later batch at its first prompt, before an earlier one has worked for hours.

    Asking for samples tells of data and packages that are missing. Drawing one tells of a context too small
    for this tokenizer, so it is drawn at the smallest context of a task alone, where it costs least.
    """
    smallest: dict[str, int] = {}
    for spec in (batch[0] for batch in batches):
        ctx = spec.ctx or 0
        smallest[spec.task] = min(ctx, smallest.get(spec.task, ctx))
    for spec in (batch[0] for batch in batches):
        task = TASKS.load(spec.task_name)
        options = identity.task_options(task, spec, loaded)
        for part in identity.task_parts(task, spec):
            request = TaskRequest(part, spec.ctx or 0, spec.samples, spec.seed, options)
            samples = task.samples(request, loaded.tokenizer)
            if request.ctx == smallest[spec.task]:
                next(iter(samples), None)  # a task of the user may give a list


def run_batch(batch: Batch, folders: Sequence[Path], engine_for: EngineFor, progress: Progress) -> None:
    """Answer every sample of `batch` under every mode that lacks it, then the controls, then write summaries.

    The first mode is the reference. A sample that cannot be answered becomes a row (nan, oom or error).
    Raises `BrokenRun` when a folder cannot be written or is in use, `NotComparable` when it was begun under
    another contract, and what makes all samples impossible (`SpecError`, `UnsupportedHere`, ...).
    """
    with ExitStack() as stack:
        writers = [stack.enter_context(RunWriter(folder)) for folder in folders]
        for note in (note for writer in writers for note in writer.notes):
            progress.note(note)
        if all(writer.complete for writer in writers):
            return
        bench = engine_for(batch[0])
        host.reset_peak()
        check(batch, bench.loaded)
        far = bench.remote
        found = far.environment if far else environment.collect(identity.device_of(bench.loaded))
        arms = [_Arm.open(i, *pair, bench, found) for i, pair in enumerate(zip(batch, writers, strict=True))]
        work = _Work(
            batch[0],
            bench,
            arms,
            progress,
            far.desk(batch) if far else Desk(bench.engine, batch, modes_of(batch)),
        )
        progress.doing("answering the first sample; kernels are compiled once, at their first use")
        try:
            work.samples()
            work.controls()
        except BaseException as error:
            mark = INTERRUPTED if isinstance(error, KeyboardInterrupt | SystemExit) else ERROR
            with suppress(BrokenRun):  # a full disk is told by the first error
                for arm in arms:
                    arm.mark(mark)
            raise
        for arm in arms:
            arm.finish(bench)


class Turn(NamedTuple):
    """A sample and the arms it concerns."""

    part: str
    sample: Sample
    rows: tuple[tuple["_Arm", Row, bool], ...]
    """Each arm with the unanswered row, and whether it has to be answered."""

    @property
    def wanted(self) -> tuple[int, ...]:
        """Return the numbers of the specs that a model has to answer."""
        return tuple(
            arm.number for arm, row, missing in self.rows if missing and not _unfit(self.sample, row)
        )


_IDENTITY = ("sample_id", "part", "index", "prompt_ids_sha256")
"""Fields of a row that say which sample it answers."""


@dataclass(slots=True)
class _Arm:
    """One mode of a batch: its spec, its folder, what it has answered."""

    number: int
    """Place of the spec in its batch."""
    spec: RunSpec
    writer: RunWriter
    facts: TaskFacts
    fields: dict[str, Any]
    """Contract fields known before the first sample."""
    mode_hash: str
    begun_hash: str
    """Hash of the contract before the first sample; with the mode's hash it makes the keys of rows."""
    done: dict[str, Row]
    keys: list[str] = field(default_factory=list)
    """Keys of the samples of this run, in the order they came."""
    control_keys: list[str] = field(default_factory=list)
    errors: int = 0
    scores: list[float] = field(default_factory=list)

    @classmethod
    def open(
        cls, number: int, spec: RunSpec, writer: RunWriter, bench: Bench, found: Mapping[str, Any]
    ) -> "_Arm":
        """Write contract and environment (`found`), or check the contract that is there."""
        task, mode = TASKS.load(spec.task_name), MODES.load(spec.mode_name)
        task_options = identity.task_options(task, spec, bench.loaded)
        known = identity.begun(spec, task, task_options, bench.loaded, bench.engine)
        known |= environment.contract_fields(found)
        arm = cls(
            number=number,
            spec=spec,
            writer=writer,
            facts=identity.facts(spec, task, mode, bench.loaded),
            fields=known,
            mode_hash=contract.mode_hash(known),
            begun_hash=contract.contract_hash(known),
            done=last_by_key([*writer.rows, *writer.control_rows]),
        )
        if not writer.complete:
            arm._agree()
            check_scored(writer.rows, arm.facts.score_key, writer.folder / "examples.jsonl")
            check_scored(writer.control_rows, arm.facts.score_key, writer.folder / "controls.jsonl")
            write_contract(writer.folder, known, arm.facts, arm.begun_hash)
            write_json(writer.folder / "environment.json", found)
            arm.mark(STARTED)
        return arm

    def _agree(self) -> None:
        """Refuse a folder that was begun with another model, task or mode."""
        path = self.writer.folder / "contract.json"
        if not path.exists():
            return
        stored = read_json(path)
        if (stored["begun_hash"], stored["mode_hash"]) == (self.begun_hash, self.mode_hash):
            return
        names = sorted(
            name
            for name, value in self.fields.items()
            if stored["fields"].get(name) != value and contract.is_must(name) and name not in identity.LATE
        )
        raise NotComparable(
            f"{path.parent} was begun under another contract",
            why=f"these fields differ: {', '.join(names) or 'those of the mode'}",
            fix="use --fresh",
            id="RCQ-CMP-02",
        )

    def mark(self, status: str) -> None:
        """Record a change of status."""
        if not self.writer.complete:
            self.writer.append_telemetry({"kind": "status", "status": status})

    def lacks(self, row: Row) -> bool:
        """Say whether the sample of `row` has to be answered.

        One that failed is tried again, and so is one whose row is not of this sample any more.
        """
        if self.writer.complete:
            return False
        stored = self.done.get(row["key"])
        if (
            stored is None
            or stored["status"] != OK
            or any(stored.get(name) != row[name] for name in _IDENTITY)
        ):
            return True
        return bool(stored["steps"]) and stored["key"] not in self.writer.log.members

    def keep(self, row: Row, decoded: Decoded | None) -> None:
        """Store one row; what it refers to goes first."""
        if decoded is not None:
            if row["steps"] and decoded.steps is not None:
                self.writer.append_steps(row["sample_id"], row["key"], decoded.steps)
            self.writer.append_telemetry(records.timing_record(row, decoded))
        self.writer.append_row(row)
        self.done[row["key"]] = row

    def count(self, key: str) -> None:
        """Take a sample of this run into the running score."""
        self.keys.append(key)
        row = self.done[key]
        if row["status"] == OK:
            self.scores.append(row["scores"][self.facts.score_key])
        else:
            self.errors += 1

    def finish(self, bench: Bench) -> None:
        """Write the final contract and the summary, both rebuilt from rows alone."""
        if self.writer.complete:
            return
        for name, reading in host.memory().items():
            self.writer.append_telemetry({"kind": "host", "name": name, **reading.to_json()})
        rows, controls = ([self.done[key] for key in keys] for keys in (self.keys, self.control_keys))
        if self.spec.ctx is None:
            scores = [row["scores"] for row in rows if row["status"] == OK]
            self.writer.append_telemetry({"kind": "timed", "metrics": bench.engine.timed(scores)})
        late = identity.late(records.ordered(rows, self.facts.parts), bench.loaded.tokenizer.bos_id)
        final = self.fields | late | {"pipeline.backend": bench.engine.backend_name}
        finish_run(self.writer, self.spec, self.facts, final, self.begun_hash, rows, controls)


@dataclass(slots=True)
class _Work:
    """One batch at work: one prompt at a time through every arm that lacks it."""

    spec: RunSpec
    """Of the reference; task, context, samples and seed are the same in all arms."""
    bench: Bench
    arms: list[_Arm]
    progress: Progress
    desk: Any
    """`Desk`, or what stands for it where the model is elsewhere."""
    task: Task = field(init=False)
    options: Any = field(init=False)

    def __post_init__(self) -> None:
        self.task = TASKS.load(self.spec.task_name)
        self.options = identity.task_options(self.task, self.spec, self.bench.loaded)

    def samples(self) -> None:
        """Answer the scored samples."""
        turns = (self._turn(*drawn) for drawn in self._drawn(self.task.samples))
        for part, sample, rows in self.desk.ahead(turns):
            for arm, row, missing in rows:
                if missing:
                    self._store(arm, sample, row)
                arm.count(row["key"])
                if missing:
                    self._tell(arm, part)

    def controls(self) -> None:
        """Answer the control samples: without a needle in the reference alone, the others in every mode."""
        if not self.spec.controls:
            return
        turns = (self._turn(*drawn) for drawn in self._drawn(self.task.controls))
        for part, sample, rows in self.desk.ahead(turns):
            for arm, row, missing in rows:
                if missing:
                    self._store(arm, sample, row)
                arm.control_keys.append(row["key"])
                if missing:
                    self._tell(arm, part, " controls")

    def _drawn(self, source: Callable[..., Iterator[Sample]]) -> Iterator[tuple[str, Sample]]:
        for part in identity.task_parts(self.task, self.spec):
            request = TaskRequest(part, self.spec.ctx or 0, self.spec.samples, self.spec.seed, self.options)
            for sample in source(request, self.bench.loaded.tokenizer):
                if sample.control is not None or self.spec.takes(sample.index):
                    yield part, sample

    def _turn(self, part: str, sample: Sample) -> Turn:
        """Return each arm with the unanswered row of this sample, and whether the arm lacks it."""
        arms = self.arms[:1] if sample.control == "no-needle" else self.arms
        row = records.sample_row("", part, sample, self.spec.ctx)
        if self.spec.keep_prompts:
            # the text is to be read; special tokens and merges make the ids alone exact
            row["prompt"] = self.bench.loaded.tokenizer.decode(sample.prompt_ids)
            row["prompt_ids"] = list(sample.prompt_ids)
        rows = []
        for arm in arms:
            if not arm.writer.complete:
                mine = row | {"key": records.row_key(arm.begun_hash, arm.mode_hash, sample.sample_id)}
                rows.append((arm, mine, arm.lacks(mine)))
        return Turn(part, sample, tuple(rows))

    def _store(self, arm: _Arm, sample: Sample, row: Row) -> None:
        if unfit := _unfit(sample, row):
            arm.keep(records.failed(row, "error", unfit), None)
            return
        decoded: Decoded | None = None
        try:
            decoded = self.desk.answer(arm.number, sample)
            assert decoded is not None
            row = records.answered(row, decoded, self.task.score(sample, decoded.completion))
        except Exception as error:
            if isinstance(error, RcqError) and not isinstance(error, BrokenRun):
                raise
            row, decoded = self._failed(arm, row, error), None
        if sample.control is not None:
            row = row | {"steps": False}
        arm.keep(row, decoded)

    def _failed(self, arm: _Arm, row: Row, error: Exception) -> Row:
        """Return the row of a sample that raised; where it raised goes to telemetry."""
        status = status_of(error)
        text = "".join(traceback.format_exception(error))
        arm.writer.append_telemetry({"kind": "traceback", "key": row["key"], "text": text})
        if status == "oom":
            error.__traceback__ = None
            self.desk.release()
        return records.failed(row, status, f"{type(error).__name__}: {error}")

    def _tell(self, arm: _Arm, part: str, what: str = "") -> None:
        name = self.spec.cell_task(part)
        done = len(arm.keys)
        timing = arm.writer.telemetry[-1]
        steps = timing.get("step_ns") or []
        self.progress.update(
            f"{name}{what} {arm.spec.mode}" + (f" T={self.spec.ctx}" if self.spec.ctx else ""),
            done,
            planned((self.spec,)),
            score=sum(arm.scores) / len(arm.scores) if arm.scores else None,
            tokens_per_s=len(steps) * 1e9 / sum(steps) if sum(steps) else None,
            errors=arm.errors,
        )


def modes_of(batch: Batch) -> list[tuple[Mode, Any]]:
    """Return mode and options of every spec."""
    modes = [MODES.load(spec.mode_name) for spec in batch]
    nouns = [f"option of mode {spec.mode_name}" for spec in batch]
    return [
        (mode, parse_options(mode.Options, spec.mode_options, noun))
        for mode, spec, noun in zip(modes, batch, nouns, strict=True)
    ]


def _unfit(sample: Sample, row: Row) -> str:
    """Return why a sample is not worth an answer, nothing for one that is."""
    floor = sample.meta.get("fill_floor")
    if sample.control is not None or floor is None or row["fill_ratio"] >= floor:
        return ""
    return f"the prompt fills {row['fill_ratio']:.3f} of its budget, below {floor:.3f}"
