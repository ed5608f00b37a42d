"""NVML, asked once and carefully: every failure keeps its cause, none stops a command."""

from __future__ import annotations

from typing import Any, NamedTuple

from rcq_cli.readings import Reading, Status, absent

SOURCE = "nvml"


class NvmlProbe(NamedTuple):
    """What NVML said when it was opened."""

    status: Status
    detail: str
    """The cause in NVML's words, or the driver's version."""
    fix: str
    devices: tuple[str, ...]
    """`NAME (GPU-UUID)` of each device, in NVML's order."""


_INIT_ERRORS = {
    12: (Status.NO_DRIVER, "no NVIDIA driver on this host"),
    9: (Status.NO_DRIVER, "load the NVIDIA kernel module"),
    18: (Status.DRIVER_MISMATCH, "reboot after the driver update"),
    4: (Status.NO_PERMISSION, "the device nodes are not readable for this user"),
}
"""By NVML's return code; what follows is the fix."""


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
        return _devices(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _devices(pynvml: Any) -> NvmlProbe:
    try:
        count = pynvml.nvmlDeviceGetCount()
        if count == 0:
            return NvmlProbe(
                Status.NO_DEVICE, "the driver answers, zero devices", "runs continue on the CPU", ()
            )
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        names = tuple(
            f"{_text(pynvml.nvmlDeviceGetName(h))} ({_text(pynvml.nvmlDeviceGetUUID(h))})" for h in handles
        )
        driver = f"driver {_text(pynvml.nvmlSystemGetDriverVersion())}"
    except pynvml.NVMLError as error:
        return NvmlProbe(Status.ERROR, f"{error} ({error.value})", "run nvidia-smi and compare", ())
    return NvmlProbe(Status.OK, driver, "", names)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def process_bytes(device: str) -> Reading:
    """Return the device memory this process holds, by NVML."""
    if not device.startswith("cuda"):
        found = probe()
        status = Status.NOT_APPLICABLE if found.status is Status.OK else found.status
        return absent(
            status, SOURCE, found.detail if found.status is not Status.OK else f"the run is on {device}"
        )
    return absent(Status.NOT_SUPPORTED, SOURCE, "not built yet")
