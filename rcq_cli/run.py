"""Run specs to records: where task, engine and store meet; modes of a batch share prompts and prefills."""

import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rcq_cli import contract, environment, identity, records
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
from rcq_cli.telemetry import host

NAN_ID = "RCQ-RUN-NAN"
"""Id of the `BrokenRun` an engine raises for logits that are not finite."""


class Bench(NamedTuple):
    """A model and the engine that runs it."""

    loaded: Loaded
    engine: Any
    """`rcq_cli.engine.decoder.Engine`, or `rcq_cli.engine.model_free.TaskEngine`."""


EngineFor = Callable[[RunSpec], Bench]


def planned(batch: Batch) -> int:
    """Return the samples to be answered over all modes of a batch, controls left out."""
    first = batch[0]
    shard = [index for index in range(first.samples) if first.takes(index)]
    return len(shard) * len(identity.task_parts(TASKS.load(first.task_name), first)) * len(batch)


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
        found = environment.collect(identity.device_of(bench.loaded))
        arms = [_Arm.open(*pair, bench, found) for pair in zip(batch, writers, strict=True)]
        work = _Work(batch[0], bench, arms, progress)
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


@dataclass(slots=True)
class _Arm:
    """One mode of a batch: its spec, its folder, what it has answered."""

    spec: RunSpec
    mode: Mode
    options: Any
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
    def open(cls, spec: RunSpec, writer: RunWriter, bench: Bench, found: Mapping[str, Any]) -> "_Arm":
        """Write contract and environment (`found`), or check the contract that is there."""
        task, mode = TASKS.load(spec.task_name), MODES.load(spec.mode_name)
        task_options = identity.task_options(task, spec, bench.loaded)
        known = identity.begun(spec, task, task_options, bench.loaded, bench.engine)
        known |= environment.contract_fields(found)
        arm = cls(
            spec=spec,
            mode=mode,
            options=parse_options(mode.Options, spec.mode_options, f"option of mode {spec.mode_name}"),
            writer=writer,
            facts=identity.facts(spec, task, mode, bench.loaded),
            fields=known,
            mode_hash=contract.mode_hash(known),
            begun_hash=contract.contract_hash(known),
            done=last_by_key([*writer.rows, *writer.control_rows]),
        )
        if not writer.complete:
            arm._agree()
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
        """Say whether the sample of `row` has to be answered; a failed one is tried again."""
        if self.writer.complete:
            return False
        stored = self.done.get(row["key"])
        if (
            stored is None
            or stored["status"] != OK
            or stored["prompt_ids_sha256"] != row["prompt_ids_sha256"]
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
    task: Task = field(init=False)
    options: Any = field(init=False)
    prefill_ids: tuple[int, ...] = ()
    prefill: Any = None

    def __post_init__(self) -> None:
        self.task = TASKS.load(self.spec.task_name)
        self.options = identity.task_options(self.task, self.spec, self.bench.loaded)

    def samples(self) -> None:
        """Answer the scored samples."""
        for part, sample in self._drawn(self.task.samples):
            if self.spec.takes(sample.index):
                for arm, row, missing in self._rows(part, sample, self.arms):
                    if missing:
                        self._store(arm, sample, row)
                    arm.count(row["key"])
                    if missing:
                        self._tell(arm, part)

    def controls(self) -> None:
        """Answer the control samples: without a needle in the reference alone, the others in every mode."""
        if not self.spec.controls:
            return
        for part, sample in self._drawn(self.task.controls):
            arms = self.arms[:1] if sample.control == "no-needle" else self.arms
            for arm, row, missing in self._rows(part, sample, arms):
                if missing:
                    self._store(arm, sample, row)
                arm.control_keys.append(row["key"])
                if missing:
                    self._tell(arm, part, " controls")

    def _drawn(self, source: Callable[..., Iterator[Sample]]) -> Iterator[tuple[str, Sample]]:
        for part in identity.task_parts(self.task, self.spec):
            request = TaskRequest(part, self.spec.ctx or 0, self.spec.samples, self.spec.seed, self.options)
            for sample in source(request, self.bench.loaded.tokenizer):
                yield part, sample

    def _rows(self, part: str, sample: Sample, arms: Sequence[_Arm]) -> Iterator[tuple[_Arm, Row, bool]]:
        """Yield each arm with the unanswered row of this sample, and whether the arm lacks it."""
        row = records.sample_row("", part, sample, self.spec.ctx)
        if self.spec.keep_prompts:
            row["prompt"] = self.bench.loaded.tokenizer.decode(sample.prompt_ids)
        for arm in arms:
            if not arm.writer.complete:
                mine = row | {"key": records.row_key(arm.begun_hash, arm.mode_hash, sample.sample_id)}
                yield arm, mine, arm.lacks(mine)

    def _store(self, arm: _Arm, sample: Sample, row: Row) -> None:
        floor = sample.meta.get("fill_floor")
        if sample.control is None and floor is not None and row["fill_ratio"] < floor:
            what = f"the prompt fills {row['fill_ratio']:.3f} of its budget, below {floor:.3f}"
            arm.keep(records.failed(row, "error", what), None)
            return
        decoded: Decoded | None = None
        try:
            decoded = self._decode(arm, sample)
            row = records.answered(row, decoded, self.task.score(sample, decoded.completion))
        except Exception as error:
            if isinstance(error, RcqError) and not isinstance(error, BrokenRun):
                raise
            row, decoded = self._failed(arm, row, error), None
        if sample.control is not None:
            row = row | {"steps": False}
        arm.keep(row, decoded)

    def _decode(self, arm: _Arm, sample: Sample) -> Decoded:
        """Return the answer; samples of one context, and the modes of a batch, share one prefill."""
        engine = self.bench.engine
        ids = tuple(sample.prompt_ids[: sample.context_len])
        if self.prefill is None or ids != self.prefill_ids:
            self.prefill = None  # let go of the old one before the new one is made
            self.prefill = self._prefilled(sample, ids)
            self.prefill_ids = ids
        if sample.targets and arm.spec.mode_name != "dense" and self._dense_beside(sample):
            engine.add_reference(self.prefill, sample)
        audit = arm.spec.audit if sample.control is None else 0.0
        decoded: Decoded = engine.decode(self.prefill, sample, arm.mode, arm.options, audit=audit)
        return decoded

    def _prefilled(self, sample: Sample, ids: tuple[int, ...]) -> Any:
        modes = [(each.mode, each.options) for each in self.arms]
        if sample.meta.get("pooled"):
            return self.bench.engine.prefill(ids, modes, score_prompt=True)
        return self.bench.engine.prefill(ids, modes)

    def _dense_beside(self, sample: Sample) -> bool:
        """Say whether predictions are compared with the dense model's: it is in the batch, or asked for.

        A batch is compared whatever was answered before, so that a resumed run has the same rows.
        """
        return sample.meta.get("shadow") == "dense" or any(arm.spec.mode_name == "dense" for arm in self.arms)

    def _failed(self, arm: _Arm, row: Row, error: Exception) -> Row:
        """Return the row of a sample that raised; where it raised goes to telemetry."""
        status = _status(error)
        text = "".join(traceback.format_exception(error))
        arm.writer.append_telemetry({"kind": "traceback", "key": row["key"], "text": text})
        if status == "oom":
            self.prefill, self.prefill_ids = None, ()
            error.__traceback__ = None
            _release()
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


def _status(error: Exception) -> str:
    """Return what a sample's exception means: `nan`, `oom` or `error`."""
    if isinstance(error, BrokenRun):
        return "nan" if error.id == NAN_ID else "error"
    # torch says so in the class on a GPU and in the text on a CPU
    text = f"{type(error).__name__} {error}".lower()
    short = isinstance(error, MemoryError) or "outofmemory" in text or "can't allocate memory" in text
    return "oom" if short else "error"


def _release() -> None:
    """Give back what a sample that ran out of memory held."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
