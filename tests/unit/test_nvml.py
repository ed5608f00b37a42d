"""NVML in every way it fails, against a library built for the purpose; nothing stops a command."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rcq_cli.readings import Status, absent, measured
from rcq_cli.telemetry import nvml
from rcq_cli.telemetry.nvml import Device, Sampler, Visible, full_uuid, status_of, visible_devices

SOURCE = Path(__file__).parents[1] / "fakes" / "nvml.c"
GIB = 1 << 30
A, B = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "ab")
MIG = "MIG-cccccccc-0000-0000-0000-000000000000"
ASK = """
import json
from rcq_cli.telemetry import nvml
found = nvml.probe()
devices = [(d.uuid, d.name, {n: r.to_json() for n, r in d.readings.items()}) for d in nvml.devices()]
by_uuid = {u: nvml.device(u).readings["memory_used_bytes"].to_json() for u in UUIDS}
probe = [str(found.status), found.detail, found.fix]
print(json.dumps({"probe": probe, "devices": devices, "by_uuid": by_uuid}))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the fake library with")
    folders = {}
    for name, flags in (("new", ()), ("old", ("-DOLDSYM",)), ("none", None)):
        folders[name] = tmp_path_factory.mktemp(name)
        if flags is not None:
            target = folders[name] / "libnvidia-ml.so.1"
            subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", target, SOURCE], check=True)
    return folders


def ask(libraries, mode):
    kind = {"oldsym": "old", "nolib": "none"}.get(mode, "new")
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries[kind]), "FAKE_NVML": mode}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"UUIDS = {A[4:]!r}, {B[4:]!r}{ASK}"],
        env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("mode", "status", "told"),
    [
        ("nolib", "no_driver", "no NVIDIA driver"),
        ("nodriver", "no_driver", "kernel module"),
        ("mismatch", "driver_mismatch", "reboot"),
        ("noperm", "no_permission", "not readable"),
        ("zero", "no_device", "continue on the CPU"),
    ],
)
def test_a_library_that_does_not_open_says_why_and_what_helps(libraries, mode, status, told):
    found = ask(libraries, mode)
    assert found["probe"][0] == status
    assert told in found["probe"][2]
    assert found["devices"] == []
    # a device asked for by its UUID carries the cause too
    assert {reading["status"] for reading in found["by_uuid"].values()} == {status}


def readings(libraries, mode):
    found = ask(libraries, mode)
    assert found["probe"][0] == "ok"
    return found["devices"][0][2]


def test_a_healthy_device_gives_every_number(libraries):
    found = readings(libraries, "ok")
    assert {name: reading["value"] for name, reading in found.items()} == {
        "memory_used_bytes": 10 * GIB,
        "memory_total_bytes": 80 * GIB,
        "process_bytes": GIB,
        "utilisation_percent": 37,
        "sm_clock_mhz": 1410,
        "clock_reasons": 4,
        "energy_mj": 123456,
    }
    assert found["memory_used_bytes"]["source"] == "nvml.v2"


@pytest.mark.parametrize(
    ("mode", "statuses"),
    [
        ("jetson", {"memory_used_bytes": "not_supported", "process_bytes": "not_supported",
                    "energy_mj": "not_supported", "utilisation_percent": "ok"}),
        ("gb10", {"memory_used_bytes": "not_supported", "process_bytes": "ok", "utilisation_percent": "ok"}),
        ("lost", dict.fromkeys(nvml.FIELDS, "device_lost")),
        ("wsl", {"process_bytes": "hidden_by_driver", "memory_used_bytes": "ok"}),
        ("oldsym", {"process_bytes": "missing_symbol", "clock_reasons": "missing_symbol",
                    "memory_used_bytes": "ok"}),
        ("container", {"process_bytes": "pid_namespace", "memory_used_bytes": "ok"}),
        ("idle", {"process_bytes": "not_applicable"}),
        ("mig", {"utilisation_percent": "not_supported", "memory_used_bytes": "ok"}),
        ("noenergy", {"energy_mj": "error", "sm_clock_mhz": "ok"}),
    ],
)  # fmt: skip
def test_one_field_that_fails_leaves_the_others(libraries, mode, statuses):
    found = readings(libraries, mode)
    assert {name: found[name]["status"] for name in statuses} == statuses
    for reading in found.values():
        assert (reading["value"] is None) == (reading["status"] != "ok")
        assert reading["value"] is None or reading["value"] < 2**40


def test_an_old_driver_falls_back_to_version_one_and_says_so(libraries):
    memory = readings(libraries, "oldsym")["memory_used_bytes"]
    assert (memory["value"], memory["source"]) == (10 * GIB, "nvml.v1")
    assert "reserves" in memory["detail"]


def test_reserved_memory_is_not_counted_as_used(libraries):
    memory = readings(libraries, "reserved")["memory_used_bytes"]
    assert (memory["value"], memory["source"]) == (10 * GIB, "nvml.v2")


def test_a_process_in_both_lists_counts_once(libraries):
    assert readings(libraries, "twice")["process_bytes"]["value"] == GIB


def test_mig_says_that_it_has_no_utilisation(libraries):
    found = ask(libraries, "mig")
    assert found["devices"][0][0] == MIG
    assert found["devices"][0][2]["utilisation_percent"]["detail"] == "utilisation is not available on MIG"


def test_a_device_is_found_by_its_uuid_whatever_the_order(libraries):
    found = ask(libraries, "order")
    assert [device[1] for device in found["devices"]] == ["Fake A", "Fake B"]
    assert found["by_uuid"][A[4:]]["value"] == 10 * GIB
    assert found["by_uuid"][B[4:]]["value"] == 20 * GIB


def test_a_device_that_is_not_visible_is_no_device(libraries):
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries["new"]), "FAKE_NVML": "ok"}
    code = "from rcq_cli.telemetry import nvml; print(nvml.device('x').readings['process_bytes'].status)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "no_device\n"


def test_a_slow_library_thins_the_samples_out(libraries):
    code = """
import json, time
from rcq_cli.telemetry import nvml
began = time.monotonic()
with nvml.Sampler(lambda: nvml.devices()[0].readings, period_s=0.05) as sampler:
    time.sleep(1.0)
print(json.dumps(sampler.to_json() | {"wall": time.monotonic() - began}))
"""
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries["new"]), "FAKE_NVML": "slow"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert 1 <= found["samples"] <= 4
    assert found["missed_ticks"] >= 5
    assert found["wall"] < 4
    assert found["coverage"]["memory_used_bytes"] == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [(3, Status.NOT_SUPPORTED), (4, Status.NO_PERMISSION), (13, Status.MISSING_SYMBOL),
     (15, Status.DEVICE_LOST), (10, Status.ERROR), (999, Status.ERROR)],
)  # fmt: skip
def test_return_codes_mean_what_the_header_says(code, status):
    assert status_of(code) is status


def test_without_the_process_the_growth_of_the_device_stands_in_for_it():
    used, before = measured(7 * GIB, "nvml.v2"), measured(4 * GIB, "nvml.v2")
    hidden = {"memory_used_bytes": used, "process_bytes": absent(Status.PID_NAMESPACE, "nvml")}
    found = nvml.process_or_delta(Device(A, "", hidden), before)
    assert (found.value, found.status) == (3 * GIB, Status.INFERRED)
    assert nvml.process_or_delta(Device(A, "", hidden), None).status is Status.PID_NAMESPACE
    blind = hidden | {"memory_used_bytes": absent(Status.NOT_SUPPORTED, "nvml.v2")}
    assert nvml.process_or_delta(Device(A, "", blind), before).value is None
    lost = hidden | {"process_bytes": absent(Status.DEVICE_LOST, "nvml")}
    assert nvml.process_or_delta(Device(A, "", lost), before).status is Status.DEVICE_LOST


def test_a_lost_device_ends_the_samples():
    with Sampler(lambda: {"x": absent(Status.DEVICE_LOST, "nvml")}, period_s=0.01) as sampler:
        time.sleep(0.2)
    assert len(sampler.samples) == 1
    assert sampler.to_json()["ended"] == "the device was lost"
    assert sampler.peak("x").status is Status.DEVICE_LOST


def test_coverage_counts_samples_with_a_value():
    values = iter([measured(1, "s"), absent(Status.ERROR, "s"), measured(5, "s"), absent(Status.ERROR, "s")])
    sampler = Sampler(dict)
    sampler.samples = [{"x": reading} for reading in values]
    assert sampler.to_json()["coverage"] == {"x": 0.5}
    assert (sampler.peak("x").value, sampler.peak("x").status) == (5, Status.SAMPLED)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (None, None),
        ("", ()),
        ("0,1", ("ordinal", "ordinal")),
        ("GPU-aaaa, MIG-cccc", ("uuid", "uuid")),
        ("-1", ("invalid",)),
        ("cuda:0,NoDevFiles", ("invalid", "invalid")),
        ("\u0663", ("invalid",)),
    ],
)
def test_visible_devices_are_read_without_guessing(text, kinds):
    found = visible_devices(text)
    assert (found is None and kinds is None) or tuple(entry.kind for entry in found) == kinds


def test_uuids_get_the_prefix_torch_leaves_out():
    assert (full_uuid("aaaa"), full_uuid("GPU-aaaa"), full_uuid(MIG)) == ("GPU-aaaa", "GPU-aaaa", MIG)
    assert visible_devices("2") == (Visible("ordinal", "2"),)


def test_reasons_for_a_clock_are_words():
    assert nvml.reasons_text(0) == "none"
    assert nvml.reasons_text(0x4 | 0x40) == "software power cap, hardware thermal slowdown"


def test_the_cpu_has_no_process_memory_on_a_device():
    found = nvml.process_bytes("cpu")
    assert found.value is None
    assert found.status is not Status.OK


def doctor_rows(libraries, mode, **env):
    kind = {"oldsym": "old", "nolib": "none"}.get(mode, "new")
    code = """
import json
from rcq_cli.commands import doctor
rows = [*doctor._visible(), *doctor._nvml_rows(), *doctor._readings()]
print(json.dumps([row._asdict() for row in rows]))
"""
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries[kind]), "FAKE_NVML": mode, **env}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_the_doctor_has_a_row_per_field_with_status_and_reason(libraries):
    rows = doctor_rows(libraries, "gb10", CUDA_VISIBLE_DEVICES="0,GPU-aaaa")
    assert rows["CUDA_VISIBLE_DEVICES"]["status"] == "ok"
    memory = rows[f"gpu {A[:12]} memory_used_bytes"]
    assert (memory["status"], memory["value"]) == ("not_supported", None)
    assert "Not Supported (3)" in memory["reason"]
    assert rows[f"gpu {A[:12]} clock_reasons"]["value"] == "software power cap"
    assert {"memory peak", "cpu quota", "load average", "last-level cache", "cpu governor"} <= set(rows)
    for row in rows.values():
        assert row["value"] is not None or row["reason"]


def test_the_doctor_names_a_visible_device_that_is_none(libraries):
    row = doctor_rows(libraries, "nolib", CUDA_VISIBLE_DEVICES="0,x1")["CUDA_VISIBLE_DEVICES"]
    assert row["status"] == "error"
    assert "'x1' is no device" in row["reason"]
