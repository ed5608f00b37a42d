"""Executor ray: the folders of the local one, whoever dies on the way."""

import json
import os
import signal
import socket
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from rcq_cli.desk import status_of
from rcq_cli.errors import BrokenRun, RcqError, SpecError, UnsupportedHere
from rcq_cli.executors import _worker, local
from rcq_cli.executors import ray as executor
from rcq_cli.executors.ray import AHEAD, RayExecutor, RemoteDesk, RemoteEngine, _units, threads_each
from rcq_cli.main import run as rcq
from rcq_cli.progress import Silent
from rcq_cli.run import Turn
from rcq_cli.spec import RunSpec
from tests.unit.stub_bench import sample

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="the package ray is not installed")
SPEC = RunSpec(
    model="needle",
    task="niah",
    mode="dense",
    ctx=512,
    samples=4,
    task_options={},
    dtype="float32",
    controls=False,
)


class Later:
    """Stands for a reference to an outcome that a worker owes."""


class FakeRay:
    """Workers that answer at once, or die where `fatal` says so: the library's side of the pool."""

    class exceptions:
        RayError = type("RayError", (Exception,), {})
        RayTaskError = type("RayTaskError", (RayError,), {})
        ActorDiedError = type("ActorDiedError", (RayError,), {})

    def __init__(self, fatal=()):
        self.fatal, self.started, self.answered, self.most = list(fatal), 0, [], 0
        self.owed = {}

    def remote(self, _worker):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def _start(self, _settings):
        self.started += 1
        about = _worker.About(b"", {}, "cpu", (), {})
        return SimpleNamespace(
            ready=SimpleNamespace(remote=lambda: None),
            about=SimpleNamespace(remote=lambda: self._owe(about)),
            answer=SimpleNamespace(remote=lambda _specs, work: self._owe(work)),
        )

    def _owe(self, value):
        later = Later()
        self.owed[later] = value
        self.most = max(self.most, len(self.owed))
        return later

    def wait(self, references, num_returns=1, timeout=None):  # noqa: ARG002
        return references[-1:], references[:-1]  # the last one first: out of order

    def get(self, reference):
        value = self.owed.pop(reference)
        if isinstance(value, _worker.About):
            return value
        name = value[0][0].sample_id
        if name in self.fatal:
            self.fatal.remove(name)
            raise self.exceptions.ActorDiedError("gone")
        self.answered.append(name)
        return {
            (number, each.sample_id): _worker.Outcome(f"{each.sample_id}#{number}", None, "", "cpu")
            for each, numbers in value
            for number in numbers
        }

    def kill(self, _worker):
        pass


def turn(index, wanted=(0, 1), context=None):
    made = sample("", index if context is None else context, 32, 0)
    arms = tuple((SimpleNamespace(number=n), {"fill_ratio": 1.0}, n in wanted) for n in (0, 1))
    from dataclasses import replace

    return Turn("", replace(made, sample_id=f"s{index}", context_len=28), arms)


def desk(fatal=(), count=2):
    fake = FakeRay(fatal)
    settings = _worker.Settings(SPEC.to_json(), 1)
    pool = executor.Pool(fake, settings, count, {})
    return fake, RemoteDesk(pool, (SPEC, SPEC.but(mode="certified")), RemoteEngine(pool, {}, "auto", ()))


def answers(made, turns):
    return [[made.answer(n, each.sample) for n in each.wanted] for each in made.ahead(iter(turns))]


# -- the pool, without the library ---------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_samples_whoever_is_done_first():
    _, made = desk()
    got = answers(made, [turn(i) for i in range(9)])
    assert got == [[f"s{i}#0", f"s{i}#1"] for i in range(9)]


def test_samples_of_one_context_are_one_unit_and_what_is_answered_is_not_sent():
    units = list(_units(iter([turn(0, context=5), turn(1, context=5), turn(2, ()), turn(3, (1,))])))
    assert [len(unit.turns) for unit in units] == [2, 1, 1]
    assert [[(s.sample_id, n) for s, n in unit.work] for unit in units] == [
        [("s0", (0, 1)), ("s1", (0, 1))],
        [],
        [("s3", (1,))],
    ]
    fake, made = desk()
    assert answers(made, [turn(2, ()), turn(3, (1,))]) == [[], ["s3#1"]]
    assert fake.answered == ["s3"]


def test_a_worker_that_dies_is_replaced_and_its_unit_answered_again():
    fake, made = desk(["s3", "s3", "s5"])
    assert answers(made, [turn(i) for i in range(8)]) == [[f"s{i}#0", f"s{i}#1"] for i in range(8)]
    assert fake.started == 2 + 3


def test_a_sample_that_kills_every_worker_is_given_up_and_the_others_are_answered():
    _, made = desk(["s1"] * executor.ATTEMPTS)
    got = {}
    for each in made.ahead(iter([turn(i) for i in range(4)])):
        try:
            got[each.sample.sample_id] = made.answer(0, each.sample)
        except BrokenRun as error:
            got[each.sample.sample_id] = error.id
    assert got == {"s0": "s0#0", "s1": "RCQ-RUN-30", "s2": "s2#0", "s3": "s3#0"}


def test_only_so_many_units_are_drawn_ahead():
    drawn = []

    def draw():
        for i in range(50):
            drawn.append(i)
            yield turn(i)

    _, made = desk(count=2)
    next(made.ahead(draw()))
    assert len(drawn) <= AHEAD * 2 + 2


# -- errors on their way -------------------------------------------------------------------------------------


class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        BrokenRun("NaN", "why", "fix", "RCQ-RUN-NAN"),
        Odd("cup", "saucer"),
        RuntimeError("can't allocate memory"),
        KeyError("x"),
    ],
)
def test_an_error_arrives_with_its_name_its_text_and_its_meaning(error):
    import pickle

    got = pickle.loads(pickle.dumps(_worker.portable(error)))
    assert (type(got).__name__, str(got), status_of(got)) == (
        type(error).__name__,
        str(error),
        status_of(error),
    )
    assert isinstance(got, RcqError) == isinstance(error, RcqError)


def test_an_address_where_nothing_listens_is_told_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UnsupportedHere, match="check --address"), executor._connected(f"127.0.0.1:{port}", 1):
        pass


def test_threads_are_those_that_are_asked_for_or_a_share(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_each(n) for n in (1, 2, 5, 100)] == [12, 6, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_each(2) == 3


# -- flags ---------------------------------------------------------------------------------------------------


def test_a_missing_package_is_exit_7_with_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(executor, "find_spec", lambda _: None)
    assert rcq(["eval", "--executor", "ray", "--out", str(tmp_path)]) == 7
    err = capsys.readouterr().err
    assert "pip install 'rcq[ray]'" in err
    assert "--executor local" in err


@pytest.mark.parametrize("flag", [["--workers", "2"], ["--address", "auto"]])
def test_flags_of_ray_mean_nothing_to_the_local_executor(flag, capsys, tmp_path):
    assert rcq(["eval", *flag, "--out", str(tmp_path)]) == 2
    assert "--executor ray" in capsys.readouterr().err


def test_workers_is_a_number_above_zero(capsys):
    assert rcq(["eval", "--executor", "ray", "--workers", "0"]) == 2
    assert "--workers" in capsys.readouterr().err


def test_one_gpu_cannot_be_named_for_all_workers():
    fake = SimpleNamespace(cluster_resources=lambda: {"GPU": 2})
    benches = executor.RemoteBenches(fake, None, spread=False)
    with pytest.raises(SpecError, match="--device cuda:1"):
        benches(SPEC.but(device="cuda:1"))
    with pytest.raises(UnsupportedHere, match="3 workers on GPUs"):
        executor.RemoteBenches(fake, 3, spread=False)(SPEC.but(device="cuda"))


# -- with the library ----------------------------------------------------------------------------------------


def folders(out):
    return sorted(Path(out).glob("[!.]*"))


def plan(out, *, samples=4):
    from rcq_cli.presets import Flags, resolve

    flags = Flags(
        modes=("dense", "certified"),
        tasks=("niah",),
        ctx=("512",),
        samples=samples,
        out=str(out),
        model="needle",
    )
    return resolve("compare", flags).batches


@NEEDS_RAY
def test_a_worker_killed_in_mid_run_costs_time_and_nothing_else(tmp_path, monkeypatch):
    """Two workers, one of them killed at its first answer; the folders are those of the local executor."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    killed = []

    class Watching(Silent):
        def update(self, *_args, **_more):
            if not killed:
                killed.extend(_kill_one())

    there = RayExecutor(workers=2).run(
        plan(tmp_path), out=tmp_path / "ray", resume=False, progress=Watching()
    )
    here = local.LocalExecutor().run(plan(tmp_path), out=tmp_path / "local", resume=False, progress=Silent())
    assert killed
    for ours, theirs in zip(here, there, strict=True):
        for name in ("spec.json", "examples.jsonl", "controls.jsonl"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()
        fields = [
            json.loads((place / "contract.json").read_text())["contract_hash"] for place in (ours, theirs)
        ]
        assert fields[0] == fields[1]


def _kill_one():
    """Send SIGKILL to one worker process of this session's Ray; return its id."""
    import psutil

    mine = psutil.Process().children(recursive=True)
    workers = [p for p in mine if "Worker.answer" in " ".join(p.cmdline()) or "ray::Worker" in p.name()]
    for process in workers[:1]:
        os.kill(process.pid, signal.SIGKILL)
    return [process.pid for process in workers[:1]]


@NEEDS_RAY
def test_a_model_that_cannot_be_had_is_the_same_error_as_locally(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    batch = (SPEC.but(model="no-one/nothing"),)
    with pytest.raises(UnsupportedHere, match="cannot be had"):
        RayExecutor(workers=1).run((batch,), out=tmp_path, resume=False, progress=Silent())
    assert not list(tmp_path.iterdir())


def test_a_mode_that_a_worker_cannot_open_is_refused_as_it_is_here():
    fake, remote = desk()
    error = fake.exceptions.RayTaskError("refused")
    error.cause = SpecError("group=7 does not divide head dim 128", id="RCQ-USE-11")
    remote.pool.idle[0].check_modes = SimpleNamespace(remote=lambda _modes: Later())

    def get(_reference):
        raise error

    fake.get = get
    with pytest.raises(SpecError, match="group=7"):
        remote.engine.check_modes([(SimpleNamespace(name="certified"), None)])
