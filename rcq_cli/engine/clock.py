"""Clocks of a decode step: host time for the CPU, a ring of events for CUDA; one interface.

Every step gives one `StepTimes`: the whole step and each phase's own time. Phases never overlap, so they and
`unattributed` sum to the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from rcq_cli.phases import PHASES, UNATTRIBUTED


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step, in nanoseconds."""

    step_ns: int
    phase_ns: Mapping[str, int]
    """Own time of each phase that was entered."""
    entries: Mapping[str, int]
    """How often each phase was entered."""

    @property
    def unattributed_ns(self) -> int:
        """Return what no phase covers."""
        return self.step_ns - sum(self.phase_ns.values())

    def of(self, name: str) -> int | None:
        """Return the time of a phase, None when it was never entered."""
        return self.unattributed_ns if name == UNATTRIBUTED else self.phase_ns.get(name)


class StepClock(Protocol):
    """A clock that hears phases between `begin` and `end` of a step."""

    def enter(self, name: str) -> None:
        """Begin a phase."""

    def leave(self) -> None:
        """End the phase entered last."""

    def begin(self) -> None:
        """Begin a step."""

    def end(self) -> None:
        """End it."""

    def steps(self) -> list[StepTimes]:
        """Return every step so far; on a GPU this waits for it."""


class CpuClock:
    """Host time; `now` is replaced in tests by a scripted one. Returns nanoseconds."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._steps: list[StepTimes] = []
        self._open: list[str] = []
        self._reset(0)

    def _reset(self, at: int) -> None:
        self._began = self._at = at
        self._spent: dict[str, int] = {}
        self._entries: dict[str, int] = {}

    def begin(self) -> None:
        """Begin a step; marks heard since the last one are forgotten."""
        self._open.clear()
        self._reset(self._now())

    def enter(self, name: str) -> None:
        """Begin a phase, stopping the one around it."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}")
        self._charge()
        self._open.append(name)
        self._entries[name] = self._entries.get(name, 0) + 1

    def leave(self) -> None:
        """End the phase entered last; the one around it goes on."""
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now = self._now()
        if self._open:
            name = self._open[-1]
            self._spent[name] = self._spent.get(name, 0) + now - self._at
        self._at = now

    def end(self) -> None:
        """End the step."""
        if self._open:
            raise ValueError(f"a step ended inside phase {self._open[-1]!r}")
        self._steps.append(StepTimes(self._now() - self._began, self._spent, self._entries))

    def steps(self) -> list[StepTimes]:
        """Return every step so far."""
        return list(self._steps)


class _Border(NamedTuple):
    """A point of a step: an event, and the phase that runs from it on."""

    event: Any
    phase: str | None
    """None between phases."""
    entered: bool


class CudaClock:
    """Pairs of CUDA events on the stream that runs the phase; one wait per window of steps.

    Not exercised without a GPU: its bookkeeping is tested with scripted events, its figures are not. `event`
    makes a timing event (`record()`, `elapsed_time(other)` in ms) and `wait` finishes the device; both are
    torch's by default. There is no `now()`: a host clock around unsynchronised work would lie.
    """

    def __init__(
        self,
        window: int = 64,
        event: Callable[[], Any] | None = None,
        wait: Callable[[], None] | None = None,
    ) -> None:
        self._make, self._wait = event or _cuda_event, wait or _cuda_wait
        self._window = window
        self._free: list[Any] = []
        self._pending: list[list[_Border]] = []
        self._borders: list[_Border] = []
        self._open: list[str] = []
        self._done: list[StepTimes] = []

    def begin(self) -> None:
        """Begin a step."""
        self._open.clear()
        self._borders = []
        self._mark(None, entered=False)

    def enter(self, name: str) -> None:
        """Begin a phase, stopping the one around it."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}")
        self._open.append(name)
        self._mark(name, entered=True)

    def leave(self) -> None:
        """End the phase entered last."""
        self._open.pop()
        self._mark(self._open[-1] if self._open else None, entered=False)

    def end(self) -> None:
        """End the step; the window's events are read once it is full."""
        self._mark(None, entered=False)
        self._pending.append(self._borders)
        if len(self._pending) >= self._window:
            self._read()

    def _mark(self, phase: str | None, *, entered: bool) -> None:
        event = self._free.pop() if self._free else self._make()
        event.record()
        self._borders.append(_Border(event, phase, entered))

    def _read(self) -> None:
        """Wait once, read the events of every pending step, take them back for later ones."""
        if not self._pending:
            return
        self._wait()
        for borders in self._pending:
            self._done.append(_times(borders))
            self._free += [border.event for border in borders]
        self._pending = []

    def steps(self) -> list[StepTimes]:
        """Return every step so far; waits for the device."""
        self._read()
        return list(self._done)


def _times(borders: list[_Border]) -> StepTimes:
    spent: dict[str, int] = {}
    entries: dict[str, int] = {}
    for border, after in pairwise(borders):
        if border.phase is not None:
            spent[border.phase] = spent.get(border.phase, 0) + _ns(border.event, after.event)
            entries[border.phase] = entries.get(border.phase, 0) + border.entered
    return StepTimes(_ns(borders[0].event, borders[-1].event), spent, entries)


def _ns(start: Any, stop: Any) -> int:
    return round(start.elapsed_time(stop) * 1e6)


def _cuda_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)


def _cuda_wait() -> None:
    import torch

    torch.cuda.synchronize()


def clock_for(device: str) -> StepClock:
    """Return the clock that suits `device`."""
    return CudaClock() if device.startswith("cuda") else CpuClock()
