"""What long work says while it runs: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from rcq_cli.glyphs import View
from rcq_cli.table import duration

FIRST_S = 4.0
"""Seconds until the first heartbeat line; the promise is at most five."""
EVERY_S = 30.0
"""Seconds between two heartbeat lines."""
CONTROLS = " controls "
"""What the name of a cell holds while its controls are answered."""


class Progress(Protocol):
    """Told by the run core what happens; never decides anything."""

    def start(self, total: int, title: str) -> None:
        """Begin work of `total` samples; `title` is the command."""

    def doing(self, what: str) -> None:
        """Say what is going on before the first sample is finished (`loading smollm2-135m`)."""

    def update(
        self,
        cell: str,
        done: int,
        total: int,
        score: float | None = None,
        tokens_per_s: float | None = None,
        errors: int = 0,
    ) -> None:
        """Say that `done` of the `total` samples of `cell` (`niah certified T=8192`) are finished."""

    def note(self, text: str) -> None:
        """Print one line that stays."""

    def close(self) -> None:
        """End; safe to call twice."""


@dataclass
class State:
    """The last thing known, and what is left over all cells."""

    title: str = ""
    planned: int = 0
    what: str = "preparing"
    """Said until a cell is known."""
    cell: str = ""
    done: int = 0
    total: int = 0
    score: float | None = None
    tokens_per_s: float | None = None
    errors: int = 0
    started: float = 0.0
    first: float | None = None
    """When the first sample was finished; what came before (loading, compiling) happens once."""
    finished: dict[str, int] = field(default_factory=dict)
    """Samples finished per cell; controls are not part of the plan."""
    resumed: dict[str, int] = field(default_factory=dict)
    """Samples that were already there when a cell was first heard of; they took no time."""

    def take(
        self,
        now: float,
        cell: str,
        done: int,
        total: int,
        score: float | None,
        tokens_per_s: float | None,
        errors: int,
    ) -> None:
        """Remember an update; a first one of several samples tells that earlier ones were resumed."""
        if CONTROLS not in cell:
            self.resumed.setdefault(cell, max(done - 1, 0))
            self.finished[cell] = done
            self.first = now if self.first is None else self.first
        self.cell, self.done, self.total = cell, done, total
        self.score, self.tokens_per_s, self.errors = score, tokens_per_s, errors

    def eta_s(self, now: float) -> float | None:
        """Seconds left at the pace since the first sample; None before the second one."""
        done = sum(self.finished.values())
        worked, left = done - sum(self.resumed.values()) - 1, self.planned - done
        if self.first is None or worked <= 0 or left <= 0:
            return None
        return (now - self.first) / worked * left

    def line(self, now: float) -> str:
        """Return `eval 00:03:30 niah 41/100 certified T=8192 12.3 tok/s eta 04:58 errors 0`."""
        elapsed = round(now - self.started)
        clock = f"{elapsed // 3600:02d}:{elapsed // 60 % 60:02d}:{elapsed % 60:02d}"
        if not self.cell:
            return f"{self.title} {clock} {self.what}"
        task, _, rest = self.cell.partition(" ")
        parts = [f"{self.title} {clock} {task} {self.done}/{self.total}", rest]
        parts.append("" if self.score is None else f"score {self.score:.3f}")
        parts.append("" if self.tokens_per_s is None else f"{self.tokens_per_s:.1f} tok/s")
        eta = self.eta_s(now)
        parts.append("" if eta is None else f"eta {duration(eta)}")
        return " ".join(part for part in (*parts, f"errors {self.errors}") if part)


class Silent:
    """Says nothing (`-q`)."""

    def start(self, total: int, title: str) -> None:
        """Do nothing."""

    def doing(self, what: str) -> None:
        """Do nothing."""

    def update(
        self,
        cell: str,
        done: int,
        total: int,
        score: float | None = None,
        tokens_per_s: float | None = None,
        errors: int = 0,
    ) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Heartbeat:
    """One line after a few seconds, then one every half minute, from a thread of its own."""

    def __init__(
        self,
        stream: TextIO,
        *,
        first_s: float = FIRST_S,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._first_s, self._every_s, self._clock = stream, first_s, every_s, clock
        self._state = State()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, total: int, title: str) -> None:
        """Begin to beat; once it beats, take the better known total."""
        if self._thread is not None:
            self._state.planned = total
            return
        self._state = State(title=title, planned=total, started=self._clock())
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="rcq-heartbeat", daemon=True)
        self._thread.start()

    def doing(self, what: str) -> None:
        """Keep what the next line will say."""
        self._state.what = what

    def update(
        self,
        cell: str,
        done: int,
        total: int,
        score: float | None = None,
        tokens_per_s: float | None = None,
        errors: int = 0,
    ) -> None:
        """Keep what the next line will say."""
        self._state.take(self._clock(), cell, done, total, score, tokens_per_s, errors)

    def note(self, text: str) -> None:
        """Print `text` now."""
        self._write(text)

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
            self._thread = None

    def _beat(self) -> None:
        wait = self._first_s
        while not self._stop.wait(wait):
            self._write(self._state.line(self._clock()))
            wait = self._every_s

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stop.set()


class Bar:
    """A live bar: what is running, samples done, score so far, time left."""

    def __init__(self, stream: TextIO, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._view, self._clock = stream, view, clock
        self._state = State()
        self._live: Any = None
        self._task: Any = None

    def start(self, total: int, title: str) -> None:
        """Show the bar; once it is there, take the better known total."""
        if self._live is not None:
            self._state.planned = total
            self._live.update(self._task, total=total or None)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(
            file=self._stream, no_color=not self._view.color, width=self._view.width, highlight=False
        )
        self._state = State(title=title, planned=total, started=self._clock())
        self._live = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            transient=True,
            refresh_per_second=4,
        )
        self._task = self._live.add_task(f"{title} {self._state.what}", total=total or None, figures="")
        self._live.start()

    def doing(self, what: str) -> None:
        """Show `what` until a sample is finished."""
        self._state.what = what
        if self._live is not None and not self._state.cell:
            self._live.update(self._task, description=f"{self._state.title} {what}")

    def update(
        self,
        cell: str,
        done: int,
        total: int,
        score: float | None = None,
        tokens_per_s: float | None = None,
        errors: int = 0,
    ) -> None:
        """Move the bar."""
        if self._live is None:
            return
        state = self._state
        now = self._clock()
        state.take(now, cell, done, total, score, tokens_per_s, errors)
        eta = state.eta_s(now)
        figures = [f"{done}/{total}", "" if score is None else f"score {score:.3f}"]
        figures += ["" if eta is None else f"eta {duration(eta)}", f"errors {errors}" if errors else ""]
        self._live.update(
            self._task,
            completed=sum(state.finished.values()),
            description=f"{state.title} {cell}",
            figures=" ".join(f for f in figures if f),
        )

    def note(self, text: str) -> None:
        """Print `text` above the bar."""
        if self._live is None:
            self._stream.write(text + "\n")
        else:
            self._live.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def progress_for(stream: TextIO, view: View, *, quiet: bool = False) -> Progress:
    """Return what suits the stream: nothing under `-q`, a bar on a terminal, a heartbeat elsewhere."""
    if quiet:
        return Silent()
    return Bar(stream, view) if view.terminal else Heartbeat(stream)
