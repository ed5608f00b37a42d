"""Show what this machine can do, and what to do about the rest."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import typer

from rcq_cli.commands._options import Format, JsonTarget, Quiet, shell_of
from rcq_cli.table import Cell, Column, Table

PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "numba",
    "pyarrow",
    "tokenizers",
    "nvidia-ml-py",
    "triton",
    "ray",
    "gguf",
)
OPTIONAL = {"triton": "gpu", "ray": "ray", "gguf": "gguf"}
"""Packages rcq works without, and the extra that brings them."""
STYLES = {
    "ok": "good",
    "missing": "bad",
    "error": "bad",
    **dict.fromkeys(("absent", "no_library", "no_driver", "no_device", "not_supported"), "doubt"),
    **dict.fromkeys(("driver_mismatch", "no_permission"), "bad"),
}


class Probe(NamedTuple):
    """One row: what was looked for, what was found, and what would help."""

    name: str
    status: str
    """`ok`, `absent` (rcq works without), `missing` (it does not), or a status of a reading."""
    value: str | None
    source: str
    reason: str = ""
    fix: str = ""


BANDWIDTH = typer.Option(False, "--bandwidth", help="Measure the bandwidth of memory and links too.")


def command(
    context: typer.Context,
    bandwidth: bool = BANDWIDTH,
    format: Format = "table",
    json: JsonTarget = None,
    quiet: Quiet = False,
) -> int:
    """Show what this machine can do: each probe with its status, the reason and a fix."""
    from rcq_cli.shell import SCHEMA, Result

    shell = shell_of(context)
    shell.parsed("doctor", format=format, json_target=json, quiet=quiet)
    found = [*probes_of_this_machine(), *(_bandwidth() if bandwidth else ())]
    probes = [probe._asdict() for probe in found]
    document = {"schema": SCHEMA, "command": "doctor", "probes": probes}
    shell.answer(Result(document, lambda: tables(found), probes))
    return 0


def tables(probes: Sequence[Probe]) -> tuple[Table, ...]:
    """Return what works and where that is known from, then what does not, with reasons and fixes below."""
    works = [probe for probe in probes if probe.status == "ok"]
    fails = [probe for probe in probes if probe.status != "ok"]
    columns = tuple(Column(title) for title in ("name", "found", "source"))
    rows = tuple((Cell(p.name), Cell(_found(p), "good"), Cell(p.source, "faint")) for p in works)
    shown = (Table("works here", columns, rows),)
    if not fails:
        return shown
    columns = tuple(Column(title) for title in ("name", "status", "source"))
    rows = tuple(
        (Cell(p.name), Cell(p.status, STYLES.get(p.status, "")), Cell(p.source, "faint")) for p in fails
    )
    return (*shown, Table("does not work here, or says nothing", columns, rows, tuple(map(_told, fails))))


def _found(probe: Probe) -> str:
    """Return the value of a probe that works, else what is said of it."""
    if probe.value is None:
        return probe.reason or "ok"
    return f"{probe.value} ({probe.reason})" if probe.reason else probe.value


def _told(probe: Probe) -> str:
    """Return why a probe found nothing, and what would help."""
    why = ", ".join(filter(None, (probe.value, probe.reason))) or probe.status
    return f"{probe.name}: {why}" + (f"; {probe.fix}" if probe.fix else "")


def probes_of_this_machine() -> Iterator[Probe]:
    """Yield every probe; none raises."""
    yield from _software()
    yield from _host()
    yield from _readings()
    yield from _devices()
    yield from _backends()
    yield from _models()
    yield _cache()
    yield from _corpora()


def _software() -> Iterator[Probe]:
    from rcq_cli import __version__

    yield Probe("rcq", "ok", __version__, "rcq_cli")
    yield Probe("python", "ok", platform.python_version(), "platform")
    yield Probe("system", "ok", platform.platform(terse=True), "platform")
    for name in PACKAGES:
        try:
            yield Probe(name, "ok", metadata.version(name), "metadata")
        except metadata.PackageNotFoundError:
            extra = OPTIONAL.get(name)
            fix = f"pip install 'rcq[{extra}]'" if extra else f"pip install {name}"
            yield Probe(name, "absent" if extra else "missing", None, "metadata", "not installed", fix)
    try:
        legacy = metadata.version("pynvml")
    except metadata.PackageNotFoundError:
        return
    reason = "a retired package that warns on import; nvidia-ml-py is the one rcq uses"
    yield Probe("pynvml", "error", legacy, "metadata", reason, "pip uninstall pynvml")


def _host() -> Iterator[Probe]:
    from rcq_cli.environment import usable_cpus

    yield Probe("cpu", "ok", f"{usable_cpus()} usable of {os.cpu_count()} cores, {_cpu_name()}", "os")
    total = _memory_bytes()
    if total is None:
        yield Probe("memory", "not_supported", None, "proc.meminfo", "this system has no /proc/meminfo")
    else:
        yield Probe("memory", "ok", f"{total / 2**30:.1f} GiB available", "proc.meminfo")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _memory_bytes() -> int | None:
    """Return what the kernel says a new process could take."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(found, None)


def _devices() -> Iterator[Probe]:
    from rcq_cli.telemetry.nvml import probe

    yield from _visible()
    nvml = probe()
    value = ", ".join(nvml.devices) or None
    yield Probe("nvml", str(nvml.status), value, "nvml", nvml.detail, nvml.fix)
    yield from _nvml_rows()
    try:
        import torch
    except ImportError as error:
        yield Probe("torch device", "missing", None, "torch", str(error), "pip install torch")
        return
    yield Probe("cpu threads", "ok", str(torch.get_num_threads()), "torch")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Probe("cuda", "ok", ", ".join(names), "torch", f"CUDA {torch.version.cuda}")
        return
    built = torch.version.cuda is not None
    reason = "torch sees no device" if built else f"torch {torch.__version__} is built without CUDA"
    yield Probe("cuda", "no_device", None, "torch", reason, "runs continue on the CPU")


def _visible() -> Iterator[Probe]:
    from rcq_cli.telemetry.nvml import visible_devices

    name = "CUDA_VISIBLE_DEVICES"
    found = visible_devices(os.environ.get(name))
    if found is None:
        return
    invalid = next((entry.text for entry in found if entry.kind == "invalid"), None)
    if invalid is not None:
        reason = f"{invalid!r} is no device: CUDA ignores it and what follows"
        yield Probe(name, "error", os.environ[name], "env", reason, "give ordinals or GPU-... names")
    else:
        told = "" if found else "empty: no device is visible"
        yield Probe(name, "ok", os.environ[name], "env", told)


def _nvml_rows() -> Iterator[Probe]:
    """Yield a row per field of each device; one that fails says why and hides no other."""
    from rcq_cli.telemetry.nvml import devices, reasons_text

    for device in devices():
        for name, reading in device.readings.items():
            value = None if reading.value is None else f"{reading.value}"
            if name == "clock_reasons" and reading.value is not None:
                value = reasons_text(int(reading.value))
            reason = reading.detail or f"{device.name} {device.uuid}"
            yield Probe(f"gpu {device.uuid[:12]} {name}", str(reading.status), value, reading.source, reason)


def _readings() -> Iterator[Probe]:
    """Yield what the measurements of this machine stand on."""
    from rcq_cli.telemetry import bandwidth, host

    refused = "" if host.reset_peak() else "the kernel refuses to reset it: peaks start with the process"
    yield Probe("memory peak", "no_permission" if refused else "ok", "VmHWM", "proc.VmHWM", refused)
    rows = {
        "cpu quota": (host.cpu_quota(), " cores"),
        "load average": (host.load_average(), ""),
        "last-level cache": (bandwidth.last_level_cache(), " bytes"),
    }
    for name, (reading, unit) in rows.items():
        value = None if reading.value is None else f"{reading.value:g}{unit}"
        if unit == " bytes" and reading.value is not None:
            value = f"{int(reading.value)} bytes"
        yield Probe(name, str(reading.status), value, reading.source, reading.detail)
    governor = host.governor()
    status, why = ("ok", "") if governor else ("not_supported", "the kernel does not say")
    yield Probe("cpu governor", status, governor, "sysfs.cpufreq", why)


def _bandwidth() -> Iterator[Probe]:
    """Yield the ceilings that a profile compares with; this takes a second."""
    from rcq_cli.telemetry import bandwidth

    for name, reading in bandwidth.measure("cuda" if _has_cuda() else "cpu").items():
        value = None if reading.value is None else f"{reading.value:.1f} GB/s"
        title = name.removesuffix("_gb_per_s")
        yield Probe(f"bandwidth {title}", str(reading.status), value, reading.source, reading.detail)


def _backends() -> Iterator[Probe]:
    from rcq_cli.backends import BACKENDS
    from rcq_cli.protocols import Geometry

    device = "cuda" if _has_cuda() else "cpu"
    geometry = Geometry(
        query_heads=8, kv_heads=2, head_dim=128, dtype="float32", device=device, scale=128**-0.5
    )
    for name in BACKENDS.names():
        reason = _attempt(lambda name=name: BACKENDS.load(name).unsupported(geometry))
        status = "ok" if reason is None else "absent"
        yield Probe(f"backend {name}", status, device if reason is None else None, "kernels", reason or "")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _models() -> Iterator[Probe]:
    from rcq_cli.commands.models import availability_of
    from rcq_cli.sources import built_in

    for name in built_in():
        found = availability_of(name)
        status = "ok" if found.available else "absent"
        yield Probe(f"model {name}", status, None, "models", found.reason, found.fix)


def _cache() -> Probe:
    from rcq_cli.commands.models import cache_folder
    from rcq_cli.files import unwritable

    folder = cache_folder()
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    error = unwritable(place)
    if error is None:
        return Probe("cache folder", "ok", str(folder), "RCQ_HOME")
    why = f"not writable: {error.strerror or error}"
    return Probe("cache folder", "no_permission", str(folder), "RCQ_HOME", why, "set RCQ_HOME to a folder")


def _corpora() -> Iterator[Probe]:
    from rcq_cli.presets import TASKS
    from rcq_cli.tasks._corpora import open_corpus

    reason = _attempt(lambda: open_corpus("builtin") and None)
    yield Probe("corpus builtin", "ok" if reason is None else "error", None, "tasks", reason or "")
    for name in TASKS.names():
        reason = _attempt(lambda name=name: TASKS.load(name) and None)
        yield Probe(f"task {name}", "ok" if reason is None else "error", None, "tasks", reason or "")


def _attempt(action: Any) -> str | None:
    """Return what `action` returns, or its failure as text: a broken plug-in is one row of the report."""
    try:
        result: str | None = action()
    except Exception as error:  # noqa: BLE001  whatever a plug-in raises is what the row reports
        return f"{type(error).__name__}: {error}"
    return result
