"""Standard streams that are closed, full, or have lost their reader."""

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO


class _Forgiving(io.FileIO):
    """A file whose writes never fail: nobody could be told."""

    def write(self, data: object) -> int:
        """Write what can be written, and claim all of it."""
        with suppress(OSError):
            super().write(data)  # type: ignore[arg-type]
        return memoryview(data).nbytes  # type: ignore[arg-type]


def guard() -> None:
    """Make up for streams that were closed before the start, and let stderr take whatever comes.

    A message that cannot be shown must not change how a command ends.
    """
    if sys.stdout is None:
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()
    elif type(sys.stderr) is io.TextIOWrapper and sys.stderr.fileno() == 2:
        raw, encoding = _Forgiving(2, "w", closefd=False), sys.stderr.encoding
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=True
        )


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")  # open as long as the process runs


def tolerant(stream: TextIO) -> None:
    """Make `stream` write `?` for what its encoding lacks instead of failing."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


def to_devnull(stream: TextIO) -> None:
    """Point a stream that takes nothing any more at nothing: later writes and the last flush stay quiet."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
