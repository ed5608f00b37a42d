"""The machine and the software a run was made with, recorded once per run."""

import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rcq_cli import __version__
from rcq_cli.files import SCHEMA

PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "numpy",
    "numba",
    "tokenizers",
    "pyarrow",
    "accelerate",
    "gguf",
)
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_HOME",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
PREFIXES = ("TRITON_", "RCQ_")


def collect(device: str) -> dict[str, Any]:
    """Return the record of `environment.json` for a run on `device` (`cpu`, `cuda:0`).

    `software`, `hardware` and `determinism` are groups of contract fields; `variables` are the foreign
    environment variables that can change a result or a time.
    """
    return {
        "schema": SCHEMA,
        "software": _software(),
        "hardware": _hardware(device),
        "determinism": _determinism(),
        "variables": variables(),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def contract_fields(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups that belong to a contract as flat `group.field` entries."""
    groups = ("software", "hardware", "determinism")
    return {f"{group}.{name}": value for group in groups for name, value in environment[group].items()}


def variables() -> dict[str, str]:
    """Return the variables that are set, of those that matter."""
    return {k: v for k, v in sorted(os.environ.items()) if k in VARIABLES or k.startswith(PREFIXES)}


def source_state() -> dict[str, Any]:
    """Return commit and dirty flag of the checkout rcq runs from; nulls for an installed copy."""
    root = Path(__file__).resolve().parent.parent
    commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    if commit is None:
        return {"commit": None, "dirty": None}
    status = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        # without the flag a status refreshes the index, and a git that is killed leaves its lock behind
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _software() -> dict[str, Any]:
    state = source_state()
    return {
        "rcq": __version__,
        "rcq_minor": ".".join(__version__.split(".")[:2]),
        "rcq_commit": state["commit"],
        "rcq_dirty": state["dirty"],
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "cuda": _torch_version("cuda"),
        "driver": _driver(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_version(name: str) -> str | None:
    """Return `torch.version.cuda` and the like; None without torch loaded, which no run is."""
    torch = sys.modules.get("torch")
    return None if torch is None else getattr(torch.version, name, None)


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    try:
        found = re.search(r"Kernel Module\s.*?(\d+\.\d+[.\d]*)", path.read_text("utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def _hardware(device: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "threads": _threads(),
        "device": device.partition(":")[0],
        "gpu": None,
        "gpu_count": 0,
        "gpu_memory_bytes": None,
        "gpu_sm_count": None,
        "gpu_uuid_sha256": None,
    }
    torch = sys.modules.get("torch")
    if not device.startswith("cuda") or torch is None or not torch.cuda.is_available():
        return fields
    properties = torch.cuda.get_device_properties(torch.device(device))
    uuid = str(getattr(properties, "uuid", "")) or None
    return fields | {
        "gpu": properties.name,
        "gpu_count": torch.cuda.device_count(),
        "gpu_memory_bytes": properties.total_memory,
        "gpu_sm_count": properties.multi_processor_count,
        "gpu_uuid_sha256": uuid and hashlib.sha256(uuid.encode()).hexdigest()[:12],
    }


def cpu_model() -> str | None:
    """Return the processor's name as the kernel gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return platform.processor() or None
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found[1].strip() if found else platform.machine() or None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _determinism() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {"deterministic": None, "tf32": None, "cublas_workspace": None}
    return {
        "deterministic": bool(torch.are_deterministic_algorithms_enabled()),
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


def usable_cpus() -> int | None:
    """Return how many processors this process may run on; None where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _threads() -> dict[str, int | None]:
    torch = sys.modules.get("torch")
    usable = usable_cpus()
    # what Numba takes, also where a mode did not load it: times of such a run are compared with the others'
    asked = os.environ.get("NUMBA_NUM_THREADS", "")
    return {
        "torch": None if torch is None else torch.get_num_threads(),
        "numba": int(asked) if asked.isdecimal() else usable,
        "usable_cpus": usable,
    }
