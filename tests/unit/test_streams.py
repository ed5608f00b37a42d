"""Streams that are closed or full, names that are no text, signals that come twice: exit codes stay true."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RCQ = f"{sys.executable} -m rcq_cli"
SMALL = "--ctx 512 --samples 1"


def shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash that calls `rcq`."""
    line = command.replace("rcq", RCQ, 1)
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, check=False, timeout=120,
        env=os.environ | env,
    )  # fmt: skip


@pytest.mark.parametrize("command", ["--version", "--help", "modes", "modes --json"])
@pytest.mark.parametrize(
    ("stream", "code"), [(">&-", 0), ("2>&-", 0), ("2>/dev/full", 0), ("| true", 0), (">/dev/full", 6)]
)
def test_a_stream_that_takes_nothing_is_no_defect(command: str, stream: str, code: int) -> None:
    done = shell(f"rcq {command} {stream}")
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "RCQ-RUN-00" not in done.stderr
    assert ("No space left" in done.stderr) == (code == 6)


@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full", ">&-"])
def test_the_code_that_was_earned_does_not_depend_on_who_listens(tmp_path: Path, stream: str) -> None:
    command = f"rcq compare dense certified {SMALL} --strict --out {tmp_path}"
    assert shell(f"{command} >/dev/null").returncode == 3  # one sample decides nothing
    assert shell(f"{command} --resume {stream}").returncode == 3


def test_a_document_that_has_no_room_takes_nothing_else_along(tmp_path: Path) -> None:
    done = shell(f"rcq eval {SMALL} --out {tmp_path} --json /dev/full")
    assert done.returncode == 6
    assert "1.000" in done.stdout
    assert "'/dev/full'" in done.stderr
    assert "No space left" in done.stderr


@pytest.mark.parametrize("env", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_a_name_that_is_no_text_is_refused_before_anything_is_made(
    tmp_path: Path, env: dict[str, str]
) -> None:
    name = "$'bad\\xff'" if not env else "'rüns'"
    done = shell(f"rcq eval {SMALL} --out {tmp_path}/{name} --json", **env)
    assert done.returncode == 2
    assert "RCQ-USE-11" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "runs"
    link.symlink_to(tmp_path / "nowhere")
    done = shell(f"rcq eval {SMALL} --out {link}")
    assert done.returncode == 2
    assert "link to nothing" in done.stderr


@pytest.mark.parametrize("gap_s", [0.0, 0.05])
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_twice_ends_a_run_like_one(
    tmp_path: Path, kind: signal.Signals, gap_s: float
) -> None:
    command = f"{RCQ} eval --ctx 2k --samples 400 --out {tmp_path}"
    process = subprocess.Popen(command.split(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/examples.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(kind)
    time.sleep(gap_s)
    process.send_signal(kind)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "--resume" in errors
