"""Answers samples in several processes, each with the model loaded once; the run folders are written here.

A unit of work is what shares a prefill: the samples of one context, under every mode that lacks them. Workers
answer units and return what `Desk` returns; this process draws the prompts, and takes the answers in the
order of the samples, so that a run folder is the one the local executor writes. A worker that dies costs the
unit it was at, which another one answers again.
"""

from __future__ import annotations

import logging
import pickle
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rcq_cli.environment import usable_cpus
from rcq_cli.errors import BrokenRun, RcqError, SpecError, UnsupportedHere
from rcq_cli.executors._worker import About, Outcome, Settings, Worker
from rcq_cli.executors.local import Benches, LocalExecutor
from rcq_cli.presets import Batch
from rcq_cli.progress import Progress
from rcq_cli.protocols import Decoded, Loaded, Mode, Sample
from rcq_cli.run import Bench, Turn
from rcq_cli.spec import RunSpec

if TYPE_CHECKING:
    from rcq_cli.protocols import Json

ON_A_CPU = 2
"""Workers where `--workers` is not given and the model runs on the CPU."""
AHEAD = 2
"""Units per worker that are drawn and handed out before their answers are taken."""
ATTEMPTS = 3
"""Workers that may die at one unit before it is given up."""
STARTS = 2
"""Attempts to start Ray here: on a busy machine the first may take longer than Ray waits."""
POLL_SECONDS = 0.5
REACH_SECONDS = 10
"""Time that a machine of a cluster has to take a connection."""
STORE_BYTES = 128 * 2**20
"""Shared memory for prompts and certificates on their way; more of them go to disk."""


class Placeholder(NamedTuple):
    """What a run asks of a model that is elsewhere."""

    config: Any
    device: str


@dataclass(slots=True)
class RemoteEngine:
    """What a run asks of an engine that is elsewhere."""

    pool: Pool
    fields: dict[str, Json]
    backend_name: str
    notes: tuple[str, ...]

    def describe(self) -> dict[str, Json]:
        """Return the contract fields that the engine decides."""
        return self.fields

    def check_modes(self, modes: Sequence[tuple[Mode, Any]]) -> None:
        """Raise what a mode raises when it opens on a layer of the model."""
        self.pool.check_modes(modes)


@dataclass(slots=True)
class Unit:
    """Samples of one context on their way through a worker."""

    turns: tuple[Turn, ...]
    work: list[tuple[Sample, tuple[int, ...]]]
    """Each sample with the numbers of the specs that want it."""
    outcomes: dict[tuple[int, str], Outcome] | None = None
    attempts: int = 0


@dataclass(slots=True)
class Pool:
    """Workers with one model, and the units they are at."""

    ray: Any
    settings: Settings
    count: int
    resources: dict[str, Any]
    about: About = field(init=False)
    idle: list[Any] = field(default_factory=list)
    running: dict[Any, tuple[Any, Unit, Batch]] = field(default_factory=dict)
    queue: deque[tuple[Unit, Batch]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.idle = [self._worker() for _ in range(self.count)]
        try:
            self.about = self._get(self.idle[0].about.remote())
        except self.ray.exceptions.RayError as error:
            raise _cause(error) from error

    def _worker(self) -> Any:
        worker = self.ray.remote(Worker).options(**self.resources).remote(self.settings)
        worker.ready.remote()  # all load at once; what goes wrong is raised by the first answer
        return worker

    def _get(self, reference: Any) -> Any:
        while not self.ray.wait([reference], timeout=POLL_SECONDS)[0]:
            pass  # short waits let a signal through
        return self.ray.get(reference)

    def check_modes(self, modes: Sequence[tuple[Mode, Any]]) -> None:
        """Let one worker open the modes; raise what it raises."""
        try:
            self._get(self.idle[0].check_modes.remote([(mode.name, options) for mode, options in modes]))
        except self.ray.exceptions.RayError as error:
            raise _cause(error) from error

    def submit(self, unit: Unit, batch: Batch) -> None:
        """Hand out a unit; it is worked on when a worker is free."""
        if unit.work:
            self.queue.append((unit, batch))
            self._hand_out()

    def wait(self, unit: Unit) -> dict[tuple[int, str], Outcome]:
        """Return the outcomes of a unit, by spec number and sample id."""
        while unit.outcomes is None:
            self._collect()
        return unit.outcomes

    def _hand_out(self) -> None:
        while self.queue and self.idle:
            (unit, batch), worker = self.queue.popleft(), self.idle.pop(0)
            specs = [spec.to_json() for spec in batch]
            self.running[worker.answer.remote(specs, unit.work)] = (worker, unit, batch)

    def _collect(self) -> None:
        """Take the outcomes of whatever is finished; replace a worker that is gone."""
        done, _ = self.ray.wait(list(self.running), num_returns=1, timeout=POLL_SECONDS)
        for reference in done:
            worker, unit, batch = self.running.pop(reference)
            try:
                unit.outcomes = self.ray.get(reference)
            except self.ray.exceptions.RayTaskError as error:
                raise _cause(error) from error
            except self.ray.exceptions.RayError as error:
                worker = self._worker()
                self._again(unit, batch, error)
            self.idle.append(worker)
        self._hand_out()

    def _again(self, unit: Unit, batch: Batch, error: Exception) -> None:
        """Put a unit whose worker died first in the queue, or give it up."""
        unit.attempts += 1
        if unit.attempts < ATTEMPTS:
            self.queue.appendleft((unit, batch))
            return
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        died = BrokenRun(f"{ATTEMPTS} workers died at this sample", why, "see the log of Ray", "RCQ-RUN-30")
        unit.outcomes = {
            (number, sample.sample_id): Outcome(None, died, "", "")
            for sample, numbers in unit.work
            for number in numbers
        }

    def close(self) -> None:
        """Let the workers go."""
        for worker in (*self.idle, *(entry[0] for entry in self.running.values())):
            self.ray.kill(worker)
        self.idle, self.running, self.queue = [], {}, deque()


@dataclass(slots=True)
class RemoteDesk:
    """Answers like `Desk`, from what the workers of a pool return."""

    pool: Pool
    batch: Batch
    engine: RemoteEngine
    outcomes: dict[tuple[int, str], Outcome] = field(default_factory=dict)

    def ahead(self, turns: Iterator[Turn]) -> Iterator[Turn]:
        """Yield the turns in their order while workers are at later ones."""
        window: deque[Unit] = deque()
        for unit in _units(turns):
            self.pool.submit(unit, self.batch)
            window.append(unit)
            if len(window) > AHEAD * self.pool.count:
                yield from self._taken(window.popleft())
        while window:
            yield from self._taken(window.popleft())

    def _taken(self, unit: Unit) -> Iterator[Turn]:
        self.outcomes = self.pool.wait(unit) if unit.work else {}
        yield from unit.turns

    def answer(self, number: int, sample: Sample) -> Decoded:
        """Return what a worker answered, or raise what it raised."""
        outcome = self.outcomes[number, sample.sample_id]
        self.engine.backend_name = outcome.backend or self.engine.backend_name
        if outcome.error is not None:
            if outcome.trace:
                outcome.error.add_note(outcome.trace)
            raise outcome.error
        assert outcome.decoded is not None
        return outcome.decoded

    def release(self) -> None:
        """Do nothing: the worker has given back what the sample held."""


def _units(turns: Iterator[Turn]) -> Iterator[Unit]:
    """Yield consecutive turns of one context together."""
    for _, group in groupby(turns, key=lambda turn: turn.sample.prompt_ids[: turn.sample.context_len]):
        held = tuple(group)
        work = [(turn.sample, turn.wanted) for turn in held if turn.wanted]
        yield Unit(held, work, None if work else {})


@dataclass(slots=True)
class Remote:
    """The part of a bench that says where its model is."""

    pool: Pool
    engine: RemoteEngine

    @property
    def environment(self) -> dict[str, Json]:
        """Return the record of the machine and the process that answer."""
        return self.pool.about.environment | {"argv": [Path(sys.argv[0]).name, *sys.argv[1:]]}

    def desk(self, batch: Batch) -> RemoteDesk:
        """Return where the samples of a batch are answered."""
        return RemoteDesk(self.pool, batch, self.engine)


@dataclass(slots=True)
class RemoteBenches:
    """Keeps one pool for as long as the next spec asks for the same model."""

    ray: Any
    workers: int | None
    spread: bool
    """Over the machines of a cluster; workers then wait for processors that are free."""
    key: tuple[str, ...] = ()
    bench: Bench | None = None
    local: Benches = field(default_factory=Benches)

    def __call__(self, spec: RunSpec) -> Bench:
        """Return the bench of `spec`; a task without a model runs in this process."""
        if spec.ctx is None:
            return self.local(spec)
        key = (spec.model, spec.device, spec.dtype, spec.backend)
        if self.bench is None or key != self.key:
            self.close()
            pool = self._pool(spec)
            about = pool.about
            engine = RemoteEngine(pool, about.described, about.backend, about.notes)
            loaded = _without_model(about)
            self.bench, self.key = Bench(loaded, engine, Remote(pool, engine)), key
        return self.bench

    def _pool(self, spec: RunSpec) -> Pool:
        gpus = int(self.ray.cluster_resources().get("GPU", 0))
        on_gpu = spec.device.startswith("cuda") or (spec.device == "auto" and gpus > 0)
        if ":" in spec.device:
            raise SpecError(
                f"--device {spec.device} with --executor ray",
                why="every worker gets a GPU of its own",
                fix="--device cuda",
                id="RCQ-USE-15",
            )
        count = self.workers or (gpus if on_gpu else ON_A_CPU)
        if on_gpu and count > gpus:
            raise UnsupportedHere(
                f"{count} workers on GPUs", f"Ray sees {gpus} GPUs", f"--workers {gpus}", "RCQ-ENV-01"
            )
        threads = threads_each(count)
        resources: dict[str, Any] = {
            "num_cpus": threads if self.spread else 0,
            "num_gpus": 1 if on_gpu else 0,
        }
        resources |= {"scheduling_strategy": "SPREAD"} if self.spread else {}
        return Pool(self.ray, Settings(spec.to_json(), threads), count, resources)

    def close(self) -> None:
        """Let the workers go."""
        if self.bench is not None:
            self.bench.remote.pool.close()
            self.bench = None


def threads_each(workers: int) -> int:
    """Return the threads of a worker: what OMP_NUM_THREADS says, else its share of the processors."""
    import os

    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdecimal() and int(said) > 0:
        return int(said)
    return max(1, (usable_cpus() or 1) // workers)


def _without_model(about: About) -> Loaded:
    held: Loaded = pickle.loads(about.loaded)
    return held


def _cause(error: Exception) -> Exception:
    """Return what a worker raised: an `RcqError` as it was, anything else as a defect."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, RcqError):
        return cause
    text = " ".join(str(error).split())
    return BrokenRun("a worker could not start or answer", text[-400:], "--executor local", "RCQ-RUN-30")


@dataclass(frozen=True, slots=True)
class RayExecutor:
    """The executor that spreads samples over processes, GPUs and machines."""

    name: str = "ray"
    summary: str = "samples in several processes through Ray (--workers N, --address HOST:PORT)"
    workers: int | None = None
    """None: one per GPU, two where the model runs on the CPU."""
    address: str | None = None
    """A Ray cluster that is running; None starts one here and ends it afterwards."""

    def unsupported(self) -> str | None:
        """Return why this executor cannot run here, or None."""
        return None if find_spec("ray") else "the package ray is not installed (pip install 'rcq[ray]')"

    def run(
        self, batches: Sequence[Batch], *, out: Path, resume: bool, progress: Progress
    ) -> tuple[Path, ...]:
        """Run every batch below `out`; the same folders, files and errors as with the local executor."""
        with _connected(self.address, self.workers or ON_A_CPU) as ray:
            benches = RemoteBenches(ray, self.workers, self.address is not None)
            try:
                local = LocalExecutor(engine_for=benches)
                return local.run(batches, out=out, resume=resume, progress=progress)
            finally:
                benches.close()


@contextmanager
def _connected(address: str | None, workers: int) -> Iterator[Any]:
    """Give the library, connected; the handler of SIGTERM stays ours, and nothing is written or reported."""
    import os

    if address:
        _reach(address)
    # set before the import, which reads them
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    here: dict[str, Any] = {
        "num_cpus": workers,
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
    }
    with _signals_kept():
        for left in reversed(range(1 if address else STARTS)):
            try:
                ray.init(
                    address=address or "local",
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                    **({} if address else here),
                )
                break
            except Exception as error:  # a start that takes too long is an Exception and nothing more
                ray.shutdown()
                if not left:
                    raise _not_started(error, address) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep our handler of SIGTERM, which Ray would replace."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, handler)


def _reach(address: str) -> None:
    """Raise `UnsupportedHere` where nothing listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "//" in host:
        return  # `auto` and addresses of other forms are Ray's to find
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _not_started(error, address) from error


def _not_started(error: Exception, address: str | None) -> UnsupportedHere:
    why = " ".join(str(error).split())[:300]
    fix = "check --address, or leave it out to start workers here" if address else "--executor local"
    return UnsupportedHere("Ray cannot be reached or started", why, fix, "RCQ-ENV-01")


EXECUTOR = RayExecutor()
