"""NVML, asked once and carefully: every failure keeps its cause, none stops a command.

Each field is asked on its own, so that one a device lacks never hides another. A device is its UUID: NVML
counts in PCI order and knows nothing of CUDA_VISIBLE_DEVICES, so an ordinal names another device there.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from rcq_cli.readings import Reading, Status, absent, combine, measured

SOURCE = "nvml"


class NvmlProbe(NamedTuple):
    """What NVML said when it was opened."""

    status: Status
    detail: str
    """The cause in NVML's words, or the driver's version."""
    fix: str
    devices: tuple[str, ...]
    """`NAME (GPU-UUID)` of each device, in NVML's order."""


class Device(NamedTuple):
    """One device and what it says of itself."""

    uuid: str
    name: str
    readings: Mapping[str, Reading]
    """`memory_used_bytes`, `memory_total_bytes`, `process_bytes`, `utilisation_percent`, `sm_clock_mhz`,
    `clock_reasons` (bits), `energy_mj`."""


_INIT_ERRORS = {
    12: (Status.NO_DRIVER, "no NVIDIA driver on this host"),
    9: (Status.NO_DRIVER, "load the NVIDIA kernel module"),
    18: (Status.DRIVER_MISMATCH, "reboot after the driver update"),
    4: (Status.NO_PERMISSION, "the device nodes are not readable for this user"),
}
"""By NVML's return code; what follows is the fix."""
_FIELD_ERRORS = {
    3: Status.NOT_SUPPORTED,
    4: Status.NO_PERMISSION,
    13: Status.MISSING_SYMBOL,
    15: Status.DEVICE_LOST,
}
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
"""Bits of `clock_reasons`."""


def status_of(code: int) -> Status:
    """Return what a return code of one field means."""
    return _FIELD_ERRORS.get(code, Status.ERROR)


def probe() -> NvmlProbe:
    """Open NVML, count and name the devices, close it again; never raises."""
    try:
        import pynvml
    except ImportError as error:
        return NvmlProbe(Status.NO_LIBRARY, str(error), "pip install nvidia-ml-py", ())
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        code = int(error.value)
        status, fix = _INIT_ERRORS.get(code, (Status.ERROR, "run nvidia-smi and compare"))
        return NvmlProbe(status, f"{error} ({code})", fix, ())
    except OSError as error:
        return NvmlProbe(Status.NO_DRIVER, str(error), "no NVIDIA driver on this host", ())
    try:
        return _named(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _named(pynvml: Any) -> NvmlProbe:
    try:
        names = tuple(f"{_name(pynvml, h)} ({_uuid(pynvml, h)})" for h in _handles(pynvml))
        driver = f"driver {_text(pynvml.nvmlSystemGetDriverVersion())}"
    except pynvml.NVMLError as error:
        return NvmlProbe(Status.ERROR, f"{error} ({error.value})", "run nvidia-smi and compare", ())
    if not names:
        return NvmlProbe(Status.NO_DEVICE, "the driver answers, zero devices", "runs continue on the CPU", ())
    return NvmlProbe(Status.OK, driver, "", names)


def _handles(pynvml: Any) -> list[Any]:
    return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]


def _name(pynvml: Any, handle: Any) -> str:
    return _text(pynvml.nvmlDeviceGetName(handle))


def _uuid(pynvml: Any, handle: Any) -> str:
    return _text(pynvml.nvmlDeviceGetUUID(handle))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@contextmanager
def _opened() -> Iterator[Any]:
    """Yield pynvml with the library open; call only after `probe` said ok."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


# -- one device ---------------------------------------------------------------------------------------------


def devices() -> list[Device]:
    """Return every device with its readings, in NVML's order; nothing where NVML cannot be opened."""
    if probe().status is not Status.OK:
        return []
    with _opened() as pynvml:
        return [_device(pynvml, handle) for handle in _handles(pynvml)]


def device(uuid: str) -> Device:
    """Return the device with the UUID torch gives, which may lack the prefix; never raises."""
    found, name = probe(), full_uuid(uuid)
    if found.status is not Status.OK:
        return Device(name, "", dict.fromkeys(FIELDS, absent(found.status, SOURCE, found.detail)))
    with _opened() as pynvml:
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        except pynvml.NVMLError as error:
            why = f"{error} ({error.value}): {name} is not visible to NVML"
            return Device(name, "", dict.fromkeys(FIELDS, absent(Status.NO_DEVICE, SOURCE, why)))
        return _device(pynvml, handle)


FIELDS = (
    "memory_used_bytes",
    "memory_total_bytes",
    "process_bytes",
    "utilisation_percent",
    "sm_clock_mhz",
    "clock_reasons",
    "energy_mj",
)


def full_uuid(uuid: str) -> str:
    """Return a UUID as NVML writes it: torch leaves out `GPU-`."""
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _device(pynvml: Any, handle: Any) -> Device:
    uuid = _uuid(pynvml, handle)
    used, total = _memory(pynvml, handle)

    def field(source: str, ask: Callable[[], Any]) -> Reading:
        return _field(pynvml, source, ask)

    busy = field("nvml", lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    if uuid.startswith("MIG-") and busy.value is None:
        busy = absent(busy.status, busy.source, "utilisation is not available on MIG")
    readings = {
        "memory_used_bytes": used,
        "memory_total_bytes": total,
        "process_bytes": _process(pynvml, handle),
        "utilisation_percent": busy,
        "sm_clock_mhz": field("nvml", lambda: pynvml.nvmlDeviceGetClockInfo(handle, 1)),
        "clock_reasons": field("nvml", lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        "energy_mj": field("nvml", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)),
    }
    return Device(uuid, _name(pynvml, handle), readings)


def _field(pynvml: Any, source: str, ask: Callable[[], Any]) -> Reading:
    try:
        return measured(int(ask()), source)
    except pynvml.NVMLError as error:
        return absent(status_of(int(error.value)), source, f"{error} ({error.value})")


def _memory(pynvml: Any, handle: Any) -> tuple[Reading, Reading]:
    """Return used and total memory; version 1 counts what the driver reserves as used, so 2 comes first."""
    for version, source, told in (
        (pynvml.nvmlMemory_v2, "nvml.v2", ""),
        (None, "nvml.v1", "what the driver reserves counts as used"),
    ):
        try:
            found = pynvml.nvmlDeviceGetMemoryInfo(handle, version)
            return measured(found.used, source, told), measured(found.total, source)
        except pynvml.NVMLError as error:
            missing = absent(status_of(int(error.value)), source, f"{error} ({error.value})")
            if missing.status is not Status.MISSING_SYMBOL:
                break
    return missing, missing


def _process(pynvml: Any, handle: Any) -> Reading:
    """Return what this process holds: the larger of its entries, since both lists may have one."""
    listed: list[Any] = []
    failed: Reading | None = None
    # with an old driver the names without a version raise something that is no NVMLError
    for ask in (
        pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
    ):
        try:
            listed += ask(handle)
        except pynvml.NVMLError as error:
            failed = failed or absent(status_of(int(error.value)), SOURCE, f"{error} ({error.value})")
    mine = [entry.usedGpuMemory for entry in listed if entry.pid == os.getpid()]
    if not mine and failed is not None:
        return failed
    if not listed:
        return absent(Status.NOT_APPLICABLE, SOURCE, "no process uses this device")
    if not mine:
        return absent(
            Status.PID_NAMESPACE, SOURCE, "the list holds processes of the host, this one is not among them"
        )
    known = [size for size in mine if size is not None]
    if not known:
        return absent(Status.HIDDEN_BY_DRIVER, SOURCE, "the driver does not say how much")
    return measured(max(known), SOURCE)


def process_bytes(device_name: str, before: Reading | None = None) -> Reading:
    """Return the device memory of this process on `device_name` (`cuda:0`, `cpu`).

    `before` is the device's used memory before its context was made: where the process cannot be told apart,
    the difference stands in for it (`inferred`).
    """
    if not device_name.startswith("cuda"):
        found = probe()
        if found.status is Status.OK:
            return absent(Status.NOT_APPLICABLE, SOURCE, f"the run is on {device_name}")
        return absent(found.status, SOURCE, found.detail)
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return absent(Status.NO_DEVICE, SOURCE, "torch sees no device")
    found_device = device(str(torch.cuda.get_device_properties(device_name).uuid))
    return process_or_delta(found_device, before)


def process_or_delta(found: Device, before: Reading | None) -> Reading:
    """Return the process's own bytes, else what the device's used memory grew by since `before`."""
    own = found.readings["process_bytes"]
    hidden = (Status.PID_NAMESPACE, Status.HIDDEN_BY_DRIVER, Status.NOT_SUPPORTED, Status.MISSING_SYMBOL)
    if own.value is not None or before is None or own.status not in hidden:
        return own
    return combine(lambda now, then: now - then, found.readings["memory_used_bytes"], before)


def reasons_text(bits: int) -> str:
    """Return the reasons behind a clock in words."""
    return ", ".join(name for bit, name in REASONS.items() if bits & bit) or "none"


class Visible(NamedTuple):
    """One entry of CUDA_VISIBLE_DEVICES."""

    kind: str
    """`ordinal`, `uuid` or `invalid`; CUDA ignores an invalid one and all that follow."""
    text: str


def visible_devices(text: str | None) -> tuple[Visible, ...] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES, None when it is not set; never converts blindly.

    Entries may be ordinals, UUIDs, leading parts of UUIDs and MIG names.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    return tuple(Visible(_kind(word), word) for word in words)


def _kind(word: str) -> str:
    if re.fullmatch(r"\d+", word, re.ASCII):
        return "ordinal"
    return "uuid" if re.match(r"(GPU|MIG)-", word) else "invalid"


# -- over time ----------------------------------------------------------------------------------------------


class Sampler:
    """Asks for device facts in a thread of its own, and says what that cost.

    `read` returns readings by name. A slow `read` thins the samples out; a lost device ends them. Peaks of a
    sampled series are lower bounds: allocators know better.
    """

    def __init__(self, read: Callable[[], Mapping[str, Reading]], period_s: float = 0.1) -> None:
        self._read, self._period_s = read, period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rcq-sampler", daemon=True)
        self.samples: list[Mapping[str, Reading]] = []
        self.missed = 0
        """Ticks that passed while a sample was being taken."""
        self.cpu_ns = 0
        self.ended = ""

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=2)

    def _work(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            began = time.thread_time_ns()
            found = self._read()
            self.cpu_ns += time.thread_time_ns() - began
            self.samples.append(found)
            if any(reading.status is Status.DEVICE_LOST for reading in found.values()):
                self.ended = "the device was lost"
                return
            late = int(max(time.monotonic() - due, 0.0) / self._period_s)
            self.missed += late
            due += (late + 1) * self._period_s
            self._stop.wait(max(due - time.monotonic(), 0.0))

    def peak(self, name: str) -> Reading:
        """Return the largest value of a field as a sampled reading, or why there is none."""
        found = [sample[name] for sample in self.samples]
        values = [reading.value for reading in found if reading.value is not None]
        if values:
            return Reading(max(values), Status.SAMPLED, found[0].source, f"every {self._period_s:g} s")
        return found[0] if found else absent(Status.NOT_REQUESTED, SOURCE, "no sample was taken")

    def to_json(self) -> dict[str, Any]:
        """Return what the series is worth: coverage counts samples with a value, not samples."""
        names = self.samples[0] if self.samples else ()
        return {
            "samples": len(self.samples),
            "missed_ticks": self.missed,
            "sampler_cpu_ms": self.cpu_ns / 1e6,
            "ended": self.ended,
            "coverage": {
                name: sum(sample[name].value is not None for sample in self.samples) / len(self.samples)
                for name in names
            },
        }
