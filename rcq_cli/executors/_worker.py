"""One worker: a process with the model loaded once, which answers what it is given."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from rcq_cli import environment, identity
from rcq_cli.desk import Desk, status_of
from rcq_cli.executors.local import Benches
from rcq_cli.presets import MODES
from rcq_cli.protocols import Decoded, Sample
from rcq_cli.run import Bench, modes_of
from rcq_cli.spec import RunSpec

if TYPE_CHECKING:
    from rcq_cli.protocols import Json


class Settings(NamedTuple):
    """What a worker is started with."""

    spec: dict[str, Json]
    """A run spec: its model, device, dtype and backend are those of the worker."""
    threads: int


class About(NamedTuple):
    """What the process that writes the run has to know of a model it does not hold."""

    loaded: bytes
    """The pickled `Loaded`; in the place of the model its config and its device."""
    described: dict[str, Json]
    backend: str
    notes: tuple[str, ...]
    environment: dict[str, Json]


class Outcome(NamedTuple):
    """The answer to one sample under one mode, or what was raised in its place."""

    decoded: Decoded | None
    error: Exception | None
    trace: str
    backend: str


class Worker:
    """Holds one model. Its process is told its number of threads before torch starts any."""

    def __init__(self, settings: Settings) -> None:
        os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = str(settings.threads)
        self.settings = settings
        self.benches = Benches()

    @property
    def bench(self) -> Bench:
        """Return model and engine, loaded on first use: an error in `__init__` would lose its class."""
        import torch

        torch.set_num_threads(self.settings.threads)
        spec = RunSpec.from_json(self.settings.spec)
        modes_of((spec,))  # what a mode imports belongs to the record of the environment
        return self.benches(spec)

    def ready(self) -> None:
        """Load the model."""
        _ = self.bench

    def about(self) -> About:
        """Return what there is to know of the model."""
        loaded, engine, _ = self.bench
        device = identity.device_of(loaded)
        stand_in = SimpleNamespace(config=getattr(loaded.model, "config", None), device=device)
        light = pickle.dumps(replace(loaded, model=stand_in))
        told = engine.describe(), engine.backend_name, engine.notes
        return About(light, *told, environment.collect(device))

    def check_modes(self, modes: Sequence[tuple[str, Any]]) -> None:
        """Open modes, given by name with their options, on a layer of the model."""
        self.bench.engine.check_modes([(MODES.load(name), options) for name, options in modes])

    def answer(
        self, specs: Sequence[dict[str, Json]], work: Sequence[tuple[Sample, Sequence[int]]]
    ) -> dict[tuple[int, str], Outcome]:
        """Return the outcome of every sample under every spec that wants it, by number and sample id."""
        batch = tuple(RunSpec.from_json(spec) for spec in specs)
        desk = Desk(self.bench.engine, batch, modes_of(batch))
        return {
            (number, sample.sample_id): self._outcome(desk, number, sample)
            for sample, numbers in work
            for number in numbers
        }

    def _outcome(self, desk: Desk, number: int, sample: Sample) -> Outcome:
        try:
            decoded = desk.answer(number, sample)
        except Exception as error:  # noqa: BLE001  the outermost frame of a worker: it becomes a record
            trace = "".join(traceback.format_exception(error))
            if status_of(error) == "oom":
                error.__traceback__ = None
                desk.release()
            return Outcome(None, portable(error), trace, self.bench.engine.backend_name)
        return Outcome(decoded, None, "", self.bench.engine.backend_name)


def portable(error: Exception) -> Exception:
    """Return the error itself where it survives the way to another process, else one of its name and text."""
    try:
        twin: Any = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  whatever an error of another library does when it is pickled
        twin = None
    if type(twin) is type(error) and str(twin) == str(error):
        return error.with_traceback(None)
    named: type[Exception] = type(type(error).__name__, (Named,), {})
    return named(str(error))


class Named(Exception):
    """Stands for an error that cannot leave its process."""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        """Make the class anew where it arrives."""
        return _named, (type(self).__name__, str(self))


def _named(name: str, text: str) -> Exception:
    made: Exception = type(name, (Named,), {})(text)
    return made
