"""Nothing slow is imported on the way to a help text, and the help comes at once."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rcq_cli import __version__
from rcq_cli.main import command_names

SLOW = ("torch", "transformers", "numpy", "numba", "triton", "pyarrow", "ray", "pynvml", "datasets")
ASK = """
import sys
sys.argv[0] = "rcq"
from rcq_cli.__main__ import main
try:
    main()
finally:
    sys.stderr.write("loaded:" + ",".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded_by(*argv: str, **env: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, *argv],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=60,
        check=False,
    )
    assert "loaded:" in done.stderr, done.stderr
    return set(done.stderr.rpartition("loaded:")[2].split(","))


def test_the_top_help_imports_neither_the_science_stack_nor_pydantic():
    assert loaded_by("--help") & {*SLOW, "pydantic", "rich"} == set()


def test_the_version_imports_no_typer():
    assert loaded_by("--version") & {*SLOW, "pydantic", "rich", "typer"} == set()


@pytest.mark.parametrize("command", command_names())
def test_the_help_of_a_command_imports_nothing_slow(command: str):
    assert loaded_by(command, "--help") & set(SLOW) == set()


def test_completion_imports_nothing_slow():
    env = {"_RCQ_COMPLETE": "complete_bash", "COMP_WORDS": "rcq eval --mo", "COMP_CWORD": "2"}
    assert loaded_by(**env) & set(SLOW) == set()


def test_completion_offers_the_options_of_a_command():
    env = {"_RCQ_COMPLETE": "complete_bash", "COMP_WORDS": "rcq eval --mo", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "rcq_cli"],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        check=False,
    )
    assert {"--mode", "--model"} <= set(done.stdout.split())


def test_the_version_is_that_of_the_package():
    done = subprocess.run(
        [sys.executable, "-m", "rcq_cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"rcq {__version__}\n"


def best_seconds(*argv: str, tries: int = 10) -> float:
    best = float("inf")
    for _ in range(tries):
        begin = time.perf_counter()
        subprocess.run([sys.executable, *argv], capture_output=True, check=True)
        best = min(best, time.perf_counter() - begin)
    return best


@pytest.mark.parametrize(("argv", "budget_s"), [("--version", 0.060), ("--help", 0.150)])
def test_startup_stays_within_three_times_its_budget(argv: str, budget_s: float):
    # budgets are stated for a machine on which a bare interpreter takes 10 ms
    scale = max(1.0, best_seconds("-c", "pass") / 0.010)
    assert best_seconds("-m", "rcq_cli", argv) < 3 * budget_s * scale


def test_command_files_say_in_their_first_line_what_the_help_lists():
    help_text = subprocess.run(
        [sys.executable, "-m", "rcq_cli", "--help"], capture_output=True, text=True, check=True
    )
    folder = Path(__file__).parents[2] / "rcq_cli" / "commands"
    for name in command_names():
        first = (folder / f"{name}.py").read_text("utf-8").splitlines()[0].strip('"').rstrip(".")
        words = " ".join(help_text.stdout.split())
        assert f"{name} {first}" in words
