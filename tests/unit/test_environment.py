import subprocess
import sys

import pytest

from rcq_cli import contract, environment
from rcq_cli.readings import Reading, Status, absent, combine, measured
from rcq_cli.telemetry import host

STATUS_FILE = "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nRssAnon:\t 512 kB\n"


def test_every_field_of_the_machine_has_a_level():
    fields = environment.contract_fields(environment.collect("cpu"))
    assert {name.partition(".")[0] for name in fields} == {"software", "hardware", "determinism"}
    for name in fields:
        contract.level_of(name)


def test_only_variables_that_matter_are_recorded(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    found = environment.variables()
    assert (found["OMP_NUM_THREADS"], found["TRITON_INTERPRET"]) == ("3", "1")
    assert "SECRET_TOKEN" not in found


def test_threads_of_the_kernels_are_told_where_a_run_loads_none(monkeypatch):
    # a run of dense loads no kernels, and its times are compared with those of a run that does
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setenv("NUMBA_NUM_THREADS", "3")
    assert environment.collect("cpu")["hardware"]["threads"]["numba"] == 3
    monkeypatch.delenv("NUMBA_NUM_THREADS")
    found = environment.collect("cpu")["hardware"]["threads"]
    assert found["numba"] == found["usable_cpus"]


def test_a_copy_outside_a_checkout_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "rcq_cli" / "environment.py"))
    assert environment.source_state() == {"commit": None, "dirty": None}


def test_a_checkout_tells_its_commit_and_whether_it_was_changed(monkeypatch, tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        done = subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)
        return done.stdout.decode().strip()

    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-qm", "first")
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "rcq_cli" / "environment.py"))
    assert environment.source_state() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("b")
    assert environment.source_state()["dirty"] is True


# -- readings -----------------------------------------------------------------------------------------------


def test_memory_is_read_in_bytes(tmp_path):
    path = tmp_path / "status"
    path.write_text(STATUS_FILE)
    found = host.memory(path)
    assert [found[name].value for name in ("vm_hwm_bytes", "vm_rss_bytes", "rss_anon_bytes")] == [
        2048 * 1024,
        1024 * 1024,
        512 * 1024,
    ]
    assert (found["vm_locked_bytes"].value, found["vm_locked_bytes"].status) == (None, "not_supported")


def test_a_system_without_proc_says_so(tmp_path):
    found = host.memory(tmp_path / "none")
    assert {reading.status for reading in found.values()} == {Status.NOT_SUPPORTED}
    assert host.free_bytes("cpu", tmp_path / "none").value is None
    assert host.reset_peak(tmp_path / "no" / "file") is False


def test_free_memory_is_what_the_kernel_offers(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  9 kB\nMemAvailable:   7 kB\n")
    assert host.free_bytes("cpu", path) == measured(7 * 1024, "proc.MemAvailable")


@pytest.mark.skipif(not host.CLEAR.exists(), reason="this system has no /proc/self/clear_refs")
def test_a_reset_peak_forgets_what_was_freed():
    code = (
        "from rcq_cli.telemetry.host import memory, reset_peak\n"
        "block = b'x' * (200 << 20); del block\n"
        "before = memory()['vm_hwm_bytes'].value\n"
        "print(reset_peak(), before - memory()['vm_hwm_bytes'].value)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    reset, fell = done.stdout.split()
    assert reset == "False" or int(fell) > 150 << 20


@pytest.mark.parametrize(
    ("value", "status", "source"),
    [(None, Status.OK, "x"), (0, Status.NO_DRIVER, "x"), (float("nan"), Status.OK, "x"), (1, Status.OK, "")],
)
def test_a_reading_has_a_value_or_a_reason(value, status, source):
    with pytest.raises(ValueError, match="reading"):
        Reading(value, status, source)


def test_a_missing_reading_makes_the_result_missing_with_its_cause():
    missing = absent(Status.NO_DRIVER, "nvml", "no library")
    found = combine(lambda a, b: a - b, measured(3, "proc"), missing)
    assert (found.value, found.status, found.detail) == (None, Status.NO_DRIVER, "no library")
    assert combine(lambda a, b: a - b, measured(3, "a"), measured(1, "b")) == Reading(
        2, Status.INFERRED, "a+b"
    )
