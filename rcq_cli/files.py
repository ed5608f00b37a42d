"""Files that survive a kill and a full disk: whole ones by temp and rename, lines by durable appends."""

import errno
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rcq_cli.errors import BrokenRun

SCHEMA = 1
"""Version of every record on disk."""
DAMAGED = "restore the file, or run it again with --fresh"
"""What to do about a file of a run that cannot be read."""


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a `BrokenRun` that says what is safe."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        fix = "every finished sample is on disk: free space or mend the folder, then --resume"
        raise BrokenRun(f"cannot write {path}", why=why, fix=fix, id="RCQ-RUN-01") from error


def unwritable(folder: Path) -> OSError | None:
    """Return why no file can be made in `folder`, found by making one; None when it can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write `record` as readable JSON by temp and rename; NaN and infinity are refused."""
    data = json_bytes(record)
    replace_with(path, lambda temp: temp.write_bytes(data))


def json_bytes(record: Mapping[str, Any]) -> bytes:
    """Return what `write_json` writes."""
    text = json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8")


def file_sha256(path: Path, length: int | None = None) -> str:
    """Return the digest of a file, or of its first `length` bytes; raise `BrokenRun` if it cannot be read."""
    try:
        with path.open("rb") as file:
            if length is not None:
                return hashlib.sha256(file.read(length)).hexdigest()
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BrokenRun(f"{path} cannot be read", str(error), DAMAGED, "RCQ-RUN-03") from error


def replace_with(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, make it durable, then put it in the place of `path`."""
    temp = path.with_name(f".{path.name}.part")
    with disk(path):
        write(temp)
        with temp.open("rb") as file:
            os.fsync(file.fileno())
        temp.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a file written whole; raise `BrokenRun` when it cannot be read."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenRun(f"{path} cannot be read", str(error), DAMAGED, "RCQ-RUN-03") from error
    if not isinstance(value, dict):
        raise BrokenRun(f"{path} is no JSON object", fix=DAMAGED, id="RCQ-RUN-03")
    if value.get("schema") != SCHEMA:
        why = f"it has schema {value.get('schema')!r}, this rcq reads {SCHEMA}"
        raise BrokenRun(f"{path} is of another version", why, DAMAGED, "RCQ-RUN-03")
    return value


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int, bool]:
    """Return the records of a JSONL file, the bytes they fill, and whether a torn last line was left out.

    Raises `BrokenRun` for a broken line that is not the last.
    """
    if not path.exists():
        return [], 0, False
    found: list[dict[str, Any]] = []
    good = 0
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise BrokenRun(f"{path} cannot be read", str(error), DAMAGED, "RCQ-RUN-03") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            if number < len(lines):
                raise BrokenRun(f"{path} line {number} is broken", "no JSON object", DAMAGED, "RCQ-RUN-03")
            return found, good, True
        found.append(record)
        good += len(line)
    return found, good, False


class Appender:
    """One append-only file: what was half written is cut off, what is written is on disk."""

    def __init__(self, path: Path, good_bytes: int) -> None:
        self.path = path
        with disk(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = good_bytes

    def lock(self) -> bool:
        """Take the file for this process alone; False where the file system knows no locks."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what, why = f"{self.path.parent} is being written by another process", "that one holds its lock"
            raise BrokenRun(what, why, "wait for it, or use --fresh", "RCQ-RUN-02") from error
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                return False
            raise
        return True

    @property
    def size(self) -> int:
        """Return the bytes written so far."""
        return self._size

    def trim(self, good_bytes: int) -> None:
        """Cut off what lies behind `good_bytes`."""
        with disk(self.path):
            os.ftruncate(self._fd, good_bytes)
        self._size = good_bytes

    def append(self, data: bytes) -> None:
        """Write all of `data` durably, or leave the file as it was and raise `BrokenRun`."""
        try:
            with disk(self.path):
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
                os.fsync(self._fd)
        except BrokenRun:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        """Let go of the file and of its lock."""
        os.close(self._fd)
