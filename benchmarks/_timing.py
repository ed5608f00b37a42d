"""Interleaved timing: every side runs in every round, so that a busy machine troubles all of them alike."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rcq_cli.phases import listening


class Spread(NamedTuple):
    """Quartiles of repeated runs, milliseconds."""

    low: float
    median: float
    high: float


class Timed(NamedTuple):
    wall: Spread
    cpu: Spread
    """CPU time of the whole process: with one thread it does not see other programs."""


def interleaved(sides: dict[str, Callable[[int], object]], rounds: int) -> dict[str, Timed]:
    """Run every side once a round, in turning order, after one round that is not counted."""
    names = list(sides)
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names if turn % 2 else reversed(names):
            begun, used = time.perf_counter(), time.process_time()
            sides[name](turn)
            used, spent = time.process_time() - used, time.perf_counter() - begun
            if turn:
                wall[name].append(1e3 * spent)
                cpu[name].append(1e3 * used)
    return {name: Timed(spread(wall[name]), spread(cpu[name])) for name in names}


def spread(samples: list[float]) -> Spread:
    ordered = sorted(samples)
    return Spread(*(ordered[min(len(ordered) - 1, len(ordered) * q // 4)] for q in (1, 2, 3)))


class PhaseClock:
    """CPU milliseconds of each phase of the steps it hears."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.open: list[tuple[str, float]] = []

    def enter(self, name: str) -> None:
        self.open.append((name, time.process_time()))

    def cover(self, whole: str, parts: tuple[str, ...]) -> None:
        """Leave a phase that stands for several as it is."""

    def leave(self) -> None:
        name, begun = self.open.pop()
        self.spent[name] = self.spent.get(name, 0.0) + 1e3 * (time.process_time() - begun)


@contextmanager
def phases() -> Iterator[dict[str, float]]:
    """Collect the phases of the steps inside the block."""
    clock = PhaseClock()
    with listening(clock):
        yield clock.spent
