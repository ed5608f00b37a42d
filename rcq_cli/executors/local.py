"""Runs cells one after the other in this process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rcq_cli.errors import RcqError
from rcq_cli.identity import task_options
from rcq_cli.presets import TASKS, Batch
from rcq_cli.progress import Progress
from rcq_cli.run import Bench, EngineFor, check, check_prompts, modes_of, run_batch
from rcq_cli.spec import RunSpec
from rcq_cli.store import check_out, discard_empty, find_complete, find_unfinished, new_folder


@dataclass(slots=True)
class Benches:
    """Loads a model once and keeps it for as long as the next spec asks for the same one."""

    key: tuple[str, ...] = ()
    bench: Bench | None = None

    def __call__(self, spec: RunSpec) -> Bench:
        """Return the bench of `spec`; raise `UnsupportedHere` or `UnsupportedModel` if there is none."""
        if spec.ctx is None:
            return _model_free(spec)
        key = (spec.model, spec.device, spec.dtype, spec.backend)
        if self.bench is None or key != self.key:
            from rcq_cli.engine.decoder import Engine
            from rcq_cli.sources import resolve

            self.bench = None  # two large models may not fit side by side
            source, reference = resolve(spec.model)
            loaded = source.load(reference, device=spec.device, dtype=spec.dtype)
            self.bench, self.key = Bench(loaded, Engine(loaded, backend=spec.backend)), key
        return self.bench


def _model_free(spec: RunSpec) -> Bench:
    from rcq_cli.engine.model_free import NO_MODEL, TaskEngine

    task: Any = TASKS.load(spec.task_name)
    return Bench(NO_MODEL, TaskEngine(task, task_options(task, spec, NO_MODEL)))


@dataclass(frozen=True, slots=True)
class LocalExecutor:
    """The executor that is always there."""

    name: str = "local"
    summary: str = "one cell after the other in this process"
    engine_for: EngineFor = field(default_factory=Benches)

    def unsupported(self) -> str | None:
        """Return None: it runs everywhere."""
        return None

    def run(
        self, batches: Sequence[Batch], *, out: Path, resume: bool, progress: Progress
    ) -> tuple[Path, ...]:
        """Run every batch below `out` and return the run folders in batch and mode order.

        With `resume` a finished run of a spec is taken as it is and an unfinished one goes on in its folder.
        Nothing is written before every batch fits its model and has prompts, and its modes open. Raises what
        `run_batch` raises.
        """
        notes: dict[str, None] = {}
        stored = [[find_complete(out, spec) if resume else None for spec in batch] for batch in batches]
        wanted = [batch for batch, folders in zip(batches, stored, strict=True) if not all(folders)]
        if wanted:
            check_out(out)
        for batch in wanted:
            progress.doing(f"loading {batch[0].model}" if batch[0].model else "preparing")
            bench = self.engine_for(batch[0])
            check(batch, bench.loaded)
            bench.engine.check_modes(modes_of(batch))
            notes |= dict.fromkeys(bench.engine.notes)
        prompted = [batch for batch in wanted if batch[0].ctx is not None]
        if prompted:
            check_prompts(prompted, self.engine_for(prompted[0][0]).loaded)
        for note in notes:
            progress.note(note)
        done: list[Path] = []
        for batch, folders in zip(batches, stored, strict=True):
            done += self._batch(batch, folders, out, resume, progress)
        return tuple(done)

    def _batch(
        self, batch: Batch, stored: Sequence[Path | None], out: Path, resume: bool, progress: Progress
    ) -> list[Path]:
        if all(stored):
            return [folder for folder in stored if folder]
        fresh: list[Path] = []
        folders = []
        for spec, finished in zip(batch, stored, strict=True):
            folder = finished or (find_unfinished(out, spec) if resume else None)
            if folder is None:
                folder = new_folder(out, spec)
                fresh.append(folder)
            folders.append(folder)
        try:
            run_batch(batch, folders, self.engine_for, progress)
        except RcqError:
            for folder in fresh:  # a run that never began leaves nothing behind
                discard_empty(folder)
            raise
        return folders


EXECUTOR = LocalExecutor()
