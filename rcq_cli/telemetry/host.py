"""Host memory of this process, as the kernel counts it."""

import re
import sys
from pathlib import Path

from rcq_cli.readings import Reading, Status, absent, measured

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
FIELDS = {
    "VmHWM": "vm_hwm_bytes",
    "VmRSS": "vm_rss_bytes",
    "RssAnon": "rss_anon_bytes",
    "RssFile": "rss_file_bytes",
    "VmLck": "vm_locked_bytes",
}
"""Peak resident, resident, resident and not backed by files, backed by files, locked; by the name of the
reading."""


def memory(path: Path = STATUS) -> dict[str, Reading]:
    """Return one reading per field of `/proc/self/status`, in bytes.

    `vm_hwm_bytes` is the peak since `reset_peak`, or since the process began where that is refused. A child
    begins with the peak of its parent, so a peak means something only after a reset.
    """
    try:
        lines = dict(
            line.split(":", 1)
            for line in path.read_text("ascii", errors="replace").splitlines()
            if ":" in line
        )
    except FileNotFoundError as error:
        return {
            name: absent(Status.NOT_SUPPORTED, f"proc.{field}", str(error)) for field, name in FIELDS.items()
        }
    except OSError as error:
        return {
            name: absent(Status.NO_PERMISSION, f"proc.{field}", str(error)) for field, name in FIELDS.items()
        }
    return {name: _reading(field, lines.get(field)) for field, name in FIELDS.items()}


def _reading(field: str, text: str | None) -> Reading:
    if text is None:
        return absent(Status.NOT_SUPPORTED, f"proc.{field}", "the kernel does not list it")
    number, _, unit = text.strip().partition(" ")
    if not number.isdecimal() or unit.strip() != "kB":
        return absent(Status.ERROR, f"proc.{field}", f"unexpected {text.strip()!r}")
    return measured(int(number) * 1024, f"proc.{field}")


def free_bytes(device: str, path: Path = Path("/proc/meminfo")) -> Reading:
    """Return the bytes that can still be had on `device` (`cpu`, `cuda:0`)."""
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None and torch.cuda.is_available():
        return measured(torch.cuda.mem_get_info(device)[0], "torch.mem_get_info")
    try:
        found = re.search(
            r"^MemAvailable:\s*(\d+) kB$", path.read_text("ascii", errors="replace"), re.MULTILINE
        )
    except OSError as error:
        return absent(Status.NOT_SUPPORTED, "proc.MemAvailable", str(error))
    if found is None:
        return absent(Status.NOT_SUPPORTED, "proc.MemAvailable", "the kernel does not list it")
    return measured(int(found[1]) * 1024, "proc.MemAvailable")


def reset_peak(path: Path = CLEAR) -> bool:
    """Set the peak back to what is resident now; False where the kernel refuses it."""
    try:
        path.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def load_average(path: Path = Path("/proc/loadavg")) -> Reading:
    """Return the runnable processes over the last minute, this one included."""
    try:
        return measured(float(path.read_text("ascii").split()[0]), "proc.loadavg")
    except (OSError, ValueError, IndexError) as error:
        return absent(Status.NOT_SUPPORTED, "proc.loadavg", str(error))


CGROUP = Path("/sys/fs/cgroup")


def cpu_quota(root: Path = CGROUP) -> Reading:
    """Return the cores this group of processes may use; `not_applicable` without a limit."""
    pairs = (
        (("cpu.max",), "cgroup.v2"),
        (("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"), "cgroup.v1"),
    )
    for names, source in pairs:
        try:
            words = " ".join((root / name).read_text("ascii") for name in names).split()
        except OSError:
            continue
        if words[0] in ("max", "-1"):
            return absent(Status.NOT_APPLICABLE, source, "no limit is set")
        return measured(int(words[0]) / int(words[1]), source)
    return absent(Status.NOT_SUPPORTED, "cgroup", f"neither cpu.max nor cpu.cfs_quota_us below {root}")


def governor(path: Path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")) -> str | None:
    """Return how the first core chooses its frequency, None where the kernel does not say."""
    try:
        return path.read_text("ascii").strip()
    except OSError:
        return None
