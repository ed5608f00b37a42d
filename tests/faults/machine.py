"""What a machine does to a run: kills, full and read-only disks, torn ends, a second process, clock jumps.

Each case breaks a run at a place that the seed chooses, goes on with `--resume` and compares with a run that
nothing happened to.
"""

import errno
import json
import os
import random
import resource
import signal
import time
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from unittest import mock

from rcq_cli import files, run, store
from rcq_cli.errors import BrokenRun
from rcq_cli.store import RunReader, RunWriter
from tests.unit import stub_bench
from tests.unit.stub_bench import Engine, Task, execute

CLOCKED = ("tokens_per_s", "step_ms_p50", "selection_ms_p50")
MOVING = ("hardware.threads", "software.rcq_commit", "software.rcq_dirty")
"""A library counts its threads from when it is loaded, maybe by an earlier run of the process; somebody may
commit while twenty injections of each fault go on."""
CALLS = 172
"""Writes, syncs, cuts and renames of one whole run; a test checks it."""


@contextmanager
def stubs():
    """Run without a model."""
    entries = stub_bench.Stubs("", "", "task", {"stub": Task(parts=("", "b"))})
    modes = stub_bench.Stubs("", "", "mode", stub_bench.MODES)
    with mock.patch.object(run, "TASKS", entries), mock.patch.object(run, "MODES", modes):
        yield


def result(out):
    """What of the runs below `out` must not depend on how they went."""
    found = {}
    for folder in sorted(out.glob("[!.]*")):
        reader = RunReader(folder)
        summary = json.loads(json.dumps(reader.summary))
        for cell in summary["cells"]:
            for name in CLOCKED:
                cell.pop(name, None)
        table = reader.steps()
        steps = None if table is None else table.to_pylist()
        contract = {name: value for name, value in reader.contract.items() if name not in MOVING}
        found[reader.spec.mode] = (summary, reader.examples(), reader.controls(), contract, steps)
    return found


class Disk:
    """Calls of the file system, counted; from call `fatal` on something happens instead."""

    def __init__(self, fatal, happen, seed=0):
        self.fatal, self.happen, self.calls = fatal, happen, 0
        self.rng = random.Random(seed)
        self.real = {name: getattr(os, name) for name in ("write", "fsync", "ftruncate")}

    def count(self):
        self.calls += 1
        return self.calls - 1 >= self.fatal

    def write(self, fd, data):
        if self.count():
            part = bytes(data)[: self.rng.randrange(len(data) + 1)]
            if part and self.calls == self.fatal + 1:
                self.real["write"](fd, part)
            self.happen()
        return self.real["write"](fd, data)

    def fsync(self, fd):
        if self.count():
            self.happen()
        return self.real["fsync"](fd)

    def ftruncate(self, fd, size):
        if self.count() and self.happen is die:
            self.happen()
        return self.real["ftruncate"](fd, size)

    @contextmanager
    def mounted(self):
        with (
            mock.patch.object(files.os, "write", self.write),
            mock.patch.object(files.os, "fsync", self.fsync),
            mock.patch.object(files.os, "ftruncate", self.ftruncate),
        ):
            yield self


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def failing(number):
    def happen():
        raise OSError(number, os.strerror(number))

    return happen


def in_child(work):
    """Run `work` in a process of its own and return how it ended: 0, 6 for a `BrokenRun`, else the signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BrokenRun as error:
            code = 6 if error.what and error.fix else 1
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


_wholes = {}


def whole(folder):
    """The result of a run that nothing happened to, made once."""
    if "result" not in _wholes:
        execute(folder / "whole", Engine())
        _wholes["result"] = result(folder / "whole")
    return _wholes["result"]


def resumed(folder, told):
    """Go on with the run and say how it came out."""
    execute(folder / "run", Engine(), resume=True)
    if result(folder / "run") != whole(folder):
        return "wrong"
    return told


def killed(seed, folder):
    """SIGKILL at any write, sync, cut or rename, half a write done."""
    with stubs():
        disk = Disk(seed * 7 % CALLS, die, seed)

        def work():
            with disk.mounted():
                execute(folder / "run", Engine())

        return resumed(folder, "exact") if in_child(work) == -signal.SIGKILL else "wrong"


def full(seed, folder, number=errno.ENOSPC):
    """From some write on, the disk takes no more."""
    with stubs():
        disk = Disk(seed * 7 % CALLS, failing(number), seed)

        def work():
            with disk.mounted():
                execute(folder / "run", Engine())

        return resumed(folder, "error") if in_child(work) == 6 else "wrong"


def limited(seed, folder):
    """No file may grow beyond a limit that the kernel enforces."""
    with stubs():

        def work():
            limit = 200 + 331 * seed
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            execute(folder / "run", Engine())

        code = in_child(work)
        return resumed(folder, "exact" if code == 0 else "error") if code in (0, 6) else "wrong"


def read_only(seed, folder):
    """The file system turns read-only (EROFS), or the disk fails (EIO)."""
    return full(seed, folder, errno.EROFS if seed % 2 else errno.EIO)


def stopped(folder, seed):
    """Make a run that was interrupted at sample `seed % 5`; return its folders."""
    stop = KeyboardInterrupt()
    engine = Engine(lambda _, s: stop if s.index == seed % 5 and s.control is None else "right")
    with suppress(KeyboardInterrupt):
        execute(folder / "run", engine)
    return sorted((folder / "run").glob("[!.]*"))


def torn(seed, folder):
    """A file of an unfinished run lost its end."""
    with stubs():
        rng = random.Random(seed)
        place = rng.choice(stopped(folder, seed))
        names = ("examples.jsonl", "controls.jsonl", "telemetry.jsonl", "steps.jsonl.gz")
        path = rng.choice([p for name in names if (p := place / name).exists() and p.stat().st_size])
        data = path.read_bytes()
        path.write_bytes(data[: rng.randrange(len(data))])
        return resumed(folder, "exact")


def two_processes(seed, folder):
    """Somebody else is writing the folder."""
    with stubs():
        place = stopped(folder, seed)[seed % 2]
        ready, done = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            with RunWriter(place):
                os.write(ready[1], b"x")
                os.read(done[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        try:
            execute(folder / "run", Engine(), resume=True)
            told = "wrong"
        except BrokenRun as error:
            told = "error" if "another process" in error.what and error.fix else "wrong"
        finally:
            os.write(done[1], b"x")
            os.waitpid(pid, 0)
            for end in (*ready, *done):
                os.close(end)
        return resumed(folder, told)


def clock_jumps(seed, folder):
    """Every look at the wall clock finds it days away, in either direction."""
    rng = random.Random(seed)

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 1, 1, tzinfo=tz) + timedelta(seconds=rng.randrange(-(10**8), 10**8))

    def jump():
        return rng.uniform(-1e9, 1e10)

    with (
        stubs(),
        mock.patch.object(store, "datetime", Clock),
        mock.patch.object(time, "time", jump),
    ):
        stopped(folder, seed)
        return resumed(folder, "exact")


CASES = {
    "kill -9": killed,
    "full disk": full,
    "file size limit": limited,
    "read-only or failing disk": read_only,
    "torn end of a file": torn,
    "two processes, one folder": two_processes,
    "clock jumps": clock_jumps,
}
