"""Memory bandwidth of this machine, measured in this run with the threads of this run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rcq_cli.readings import Reading, Status, absent, measured

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
LARGEST = 1 << 29
"""Bytes of the working set at most; a machine with a larger cache gets a note in the reading."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def last_level_cache(folder: Path = CACHES) -> Reading:
    """Return the size of the largest cache of the first core, in bytes."""
    sizes = []
    for path in folder.glob("index*/size"):
        try:
            found = re.fullmatch(r"(\d+)([KMG]?)", path.read_text("ascii").strip())
        except OSError:
            found = None
        if found:
            sizes.append(int(found[1]) * _UNITS[found[2]])
    if not sizes:
        return absent(Status.NOT_SUPPORTED, "sysfs.cache", f"no cache is listed in {folder}")
    return measured(max(sizes), "sysfs.cache")


def working_set(cache: Reading) -> tuple[int, str]:
    """Return the bytes to stream, four times the last-level cache where that fits, and a note where not."""
    if cache.value is None:
        return LARGEST // 2, "last-level cache unknown"
    wanted = max(4 * int(cache.value), 1 << 26)
    if wanted <= LARGEST:
        return wanted, ""
    return LARGEST, f"the working set is {LARGEST / cache.value:.1f} times the cache, not 4"


def measure(device: str, repeats: int = 5, bytes_: int | None = None) -> dict[str, Reading]:
    """Return `read_gb_per_s` and `copy_gb_per_s` (1e9, copies count read and write), the best of `repeats`.

    On a GPU these are the device's own memory and the host link (`h2d_gb_per_s`) from pinned memory.
    """
    import torch

    if device.startswith("cuda"):
        return _measure_cuda(torch, device, repeats)
    size, note = working_set(last_level_cache())
    size = bytes_ or size
    told = "; ".join(
        filter(None, (f"threads {torch.get_num_threads()}, {size >> 20} MiB, best of {repeats}", note))
    )
    try:
        source = torch.ones(size // 4, dtype=torch.float32)
        target = torch.empty_like(source)
    except (RuntimeError, MemoryError) as error:
        why = str(error).splitlines()[0]
        return {
            name: absent(Status.ERROR, "torch.stream", why) for name in ("read_gb_per_s", "copy_gb_per_s")
        }
    # which of the two readers is faster differs between builds of torch
    rows = source.view(-1, 1024)
    read = min(_best(lambda: source.sum(), repeats), _best(lambda: rows @ rows[0], repeats))
    copy = _best(lambda: target.copy_(source), repeats)
    return {
        "read_gb_per_s": measured(source.nbytes / read, "torch.stream", told),
        "copy_gb_per_s": measured(2 * source.nbytes / copy, "torch.stream", told),
    }


def evictor(device: str) -> Callable[[], None]:
    """Return what replaces everything in the processor's caches, by writing more than they hold."""
    import torch

    size = 1 << 28 if device.startswith("cuda") else working_set(last_level_cache())[0]
    room = torch.zeros(size // 4, dtype=torch.float32, device=device)

    def evict() -> None:
        room.add_(1.0)

    return evict


def _best(action: Callable[[], Any], repeats: int) -> int:
    """Return the shortest time in nanoseconds; one call before it touches every page."""
    action()
    times = []
    for _ in range(repeats):
        began = time.perf_counter_ns()
        action()
        times.append(time.perf_counter_ns() - began)
    return max(min(times), 1)


def _measure_cuda(torch: Any, device: str, repeats: int) -> dict[str, Reading]:
    """Time copies with events: device to device, and pinned host to device."""
    source = torch.ones(1 << 26, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    host = torch.ones(1 << 25, dtype=torch.float32).pin_memory()
    landing = torch.empty_like(host, device=device)
    told = f"best of {repeats}, {source.nbytes >> 20} MiB"
    copy = _best_cuda(torch, lambda: target.copy_(source), repeats)
    read = _best_cuda(torch, lambda: source.sum(), repeats)
    link = _best_cuda(torch, lambda: landing.copy_(host, non_blocking=True), repeats)
    return {
        "read_gb_per_s": measured(source.nbytes / read, "cuda.stream", told),
        "copy_gb_per_s": measured(2 * source.nbytes / copy, "cuda.stream", told),
        "h2d_gb_per_s": measured(host.nbytes / link, "cuda.stream", told),
    }


def _best_cuda(torch: Any, action: Callable[[], Any], repeats: int) -> float:
    action()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e6)
    return max(min(times), 1.0)
