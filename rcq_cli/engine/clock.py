"""Clocks of a decode step: host time for the CPU, a ring of events for CUDA; one interface.

Every step gives one `StepTimes`: the whole step and each phase's own time. Phases never overlap, so they and
`unattributed` sum to the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    covered: Mapping[str, str] = field(default_factory=dict)
    """Phases without a mark of their own, and the phase that holds their time."""
    layers: Sequence[Mapping[str, int]] = ()
    """Own time of the phases of each layer's attention; empty in steps whose layers are not told apart."""

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

    def cover(self, whole: str, parts: tuple[str, ...]) -> None:
        """Note phases whose time is inside another's."""

    def begin(self) -> None:
        """Begin a step."""

    def end(self) -> None:
        """End it."""

    def steps(self) -> list[StepTimes]:
        """Return every step so far; on a GPU this waits for it."""


FIRST_OF_A_LAYER = "append"
"""The phase every layer's attention enters once a step, before all others."""


class CpuClock:
    """Host time; `now` is replaced in tests by a scripted one. Returns nanoseconds.

    `every`: layers are told apart in each so many steps, the first one among them; 0: never.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns, every: int = 0) -> None:
        self._now, self._every = now, every
        self._steps: list[StepTimes] = []
        self._open: list[str] = []
        self._reset(0)

    def _reset(self, at: int) -> None:
        self._began = self._at = at
        self._spent: dict[str, int] = {}
        self._entries: dict[str, int] = {}
        self._covered: dict[str, str] = {}
        self._layers: list[dict[str, int]] = []

    def cover(self, whole: str, parts: tuple[str, ...]) -> None:
        """Note phases whose time is inside another's."""
        self._covered.update(dict.fromkeys(parts, whole))

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
        if name == FIRST_OF_A_LAYER and told_apart(self._every, len(self._steps)):
            self._layers.append({})

    def leave(self) -> None:
        """End the phase entered last; the one around it goes on."""
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now = self._now()
        if self._open:
            name, spent = self._open[-1], now - self._at
            self._spent[name] = self._spent.get(name, 0) + spent
            if self._layers and name != "model":
                self._layers[-1][name] = self._layers[-1].get(name, 0) + spent
        self._at = now

    def end(self) -> None:
        """End the step."""
        if self._open:
            raise ValueError(f"a step ended inside phase {self._open[-1]!r}")
        whole = self._now() - self._began
        self._steps.append(StepTimes(whole, self._spent, self._entries, self._covered, tuple(self._layers)))

    def steps(self) -> list[StepTimes]:
        """Return every step so far."""
        return list(self._steps)


def told_apart(every: int, step: int) -> bool:
    """Say whether a clock tells the layers of step number `step` apart."""
    return every > 0 and step % every == 0


class _Border(NamedTuple):
    """A point of a step: an event, and the phase that runs from it on."""

    event: Any
    phase: str | None
    """None between phases."""
    entered: bool
    layer: int
    """Layers begun so far, 0 where they are not told apart."""


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
        every: int = 0,
    ) -> None:
        self._make, self._wait = event or _cuda_event, wait or _cuda_wait
        self._window, self._every = window, every
        self._free: list[Any] = []
        self._pending: list[tuple[list[_Border], dict[str, str]]] = []
        self._borders: list[_Border] = []
        self._open: list[str] = []
        self._covered: dict[str, str] = {}
        self._layer = 0
        self._done: list[StepTimes] = []

    def cover(self, whole: str, parts: tuple[str, ...]) -> None:
        """Note phases whose time is inside another's."""
        self._covered.update(dict.fromkeys(parts, whole))

    def begin(self) -> None:
        """Begin a step."""
        self._open.clear()
        self._borders, self._covered, self._layer = [], {}, 0
        self._mark(None, entered=False)

    def enter(self, name: str) -> None:
        """Begin a phase, stopping the one around it."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}")
        self._open.append(name)
        steps = len(self._done) + len(self._pending)
        self._layer += name == FIRST_OF_A_LAYER and told_apart(self._every, steps)
        self._mark(name, entered=True)

    def leave(self) -> None:
        """End the phase entered last."""
        self._open.pop()
        self._mark(self._open[-1] if self._open else None, entered=False)

    def end(self) -> None:
        """End the step; the window's events are read once it is full."""
        self._mark(None, entered=False)
        self._pending.append((self._borders, self._covered))
        if len(self._pending) >= self._window:
            self._read()

    def _mark(self, phase: str | None, *, entered: bool) -> None:
        event = self._free.pop() if self._free else self._make()
        event.record()
        self._borders.append(_Border(event, phase, entered, self._layer))

    def _read(self) -> None:
        """Wait once, read the events of every pending step, take them back for later ones."""
        if not self._pending:
            return
        self._wait()
        for borders, covered in self._pending:
            self._done.append(_times(borders, covered))
            self._free += [border.event for border in borders]
        self._pending = []

    def steps(self) -> list[StepTimes]:
        """Return every step so far; waits for the device."""
        self._read()
        return list(self._done)


def _times(borders: list[_Border], covered: dict[str, str]) -> StepTimes:
    spent: dict[str, int] = {}
    entries: dict[str, int] = {}
    layers: list[dict[str, int]] = [{} for _ in range(borders[-1].layer)]
    for border, after in pairwise(borders):
        name = border.phase
        if name is not None:
            ns = _ns(border.event, after.event)
            spent[name] = spent.get(name, 0) + ns
            entries[name] = entries.get(name, 0) + border.entered
            if border.layer and name != "model":
                layers[border.layer - 1][name] = layers[border.layer - 1].get(name, 0) + ns
    return StepTimes(_ns(borders[0].event, borders[-1].event), spent, entries, covered, tuple(layers))


def _ns(start: Any, stop: Any) -> int:
    return round(start.elapsed_time(stop) * 1e6)


def _cuda_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)


def _cuda_wait() -> None:
    import torch

    torch.cuda.synchronize()


def clock_for(device: str, every: int = 0) -> StepClock:
    """Return the clock that suits `device`; `every`: tell layers apart in each so many steps."""
    return CudaClock(every=every) if device.startswith("cuda") else CpuClock(every=every)
