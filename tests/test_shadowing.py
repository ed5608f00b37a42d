"""No file of this repository takes the place of a library when its folder comes first on the path."""

import functools
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BARE = ("kernels", "tasks", "profiles")
# what imports everything that a file of ours could shadow; the plain random module sits on `_random`
ASK = (
    "import random, types, queue, tokenize, profile, statistics, rcq_cli, torch, transformers, cProfile\n"
    "from transformers import LlamaForCausalLM\n"
    "cProfile.Profile().run('1')\n"
    "print('loaded', LlamaForCausalLM.__name__)\n"
)


def importable(folder: Path) -> list[str]:
    """Names that `import` would find in a folder that stands on the path."""
    modules = [p.stem for p in folder.glob("*.py")]
    packages = [p.parent.name for p in folder.glob("*/__init__.py")]
    return sorted({*modules, *packages} - {"__init__", "__main__"})


@functools.cache
def third_party() -> set[str]:
    return set(importlib.metadata.packages_distributions()) - {"rcq_cli"}


@pytest.mark.parametrize("folder", [".", *BARE, "tests", "tests/unit", "tests/contracts", "benchmarks"])
def test_no_name_at_the_top_of_a_bare_folder_is_that_of_a_library(folder):
    names = importable(ROOT / folder)
    assert [name for name in names if name in sys.stdlib_module_names] == []
    assert [name for name in names if name in third_party() and name != "rcq_cli"] == []


def test_no_folder_at_the_top_is_a_package_but_ours():
    packages = [p.parent.name for p in ROOT.glob("*/__init__.py")]
    assert packages == ["rcq_cli"]


def test_the_stack_loads_with_every_folder_of_ours_first_on_the_path():
    """One process with all of them in front: what any of them shadows is missed here."""
    folders = [str(ROOT / folder) for folder in (*BARE, ".")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys\nsys.path[:0] = {folders}\n{ASK}"],
        cwd=ROOT / "tasks",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip().splitlines()[-1:] == ["loaded LlamaForCausalLM"], done.stderr


@pytest.mark.parametrize("folder", BARE)
def test_the_standard_library_loads_with_a_folder_of_ours_as_working_directory(folder):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import random, types, queue, tokenize, profile, statistics, cProfile, logging, json",
        ],
        cwd=ROOT / folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_program_starts_as_a_module_from_the_repository(tmp_path):
    for cwd in (ROOT, tmp_path):
        done = subprocess.run(
            [sys.executable, "-m", "rcq_cli", "--version"],
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
