"""The parts of a decode step by name, and the seam through which the code that runs them is timed.

`with phase("score"):` or `@phased("score")` marks a part. Without a clock, which is the normal state, a mark
costs one comparison. Parts may nest: a clock counts each one's own time, without what runs inside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, Protocol, TypeVar

PHASES = (
    "model",
    "append",
    "score",
    "select",
    "rank_check",
    "page_in",
    "attend",
    "bound",
    "fallback",
)
"""`model` is everything outside attention, `append` writes and encodes the new token, `score` computes
approximate scores, `select` decides what is read and promoted, `rank_check` scores originals and compares,
`page_in` copies originals, `attend` reads values, `bound` evaluates the certificate, `fallback` is rungs 3
and 4."""
UNATTRIBUTED = "unattributed"
"""What is left of a step; reported, never hidden."""

P = ParamSpec("P")
T = TypeVar("T")


class Clock(Protocol):
    """What listens to the marks."""

    def enter(self, name: str) -> None:
        """Note that phase `name` begins; the phase around it, if any, stands still."""

    def leave(self) -> None:
        """Note that the phase entered last ends."""

    def cover(self, whole: str, parts: tuple[str, ...]) -> None:
        """Note that in this step `whole` holds the time of `parts`, which nobody can tell apart."""


_clock: Clock | None = None
_OFF: AbstractContextManager[None] = nullcontext()


class _Mark:
    """A marked part under a clock."""

    __slots__ = ("clock", "name")

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.clock.enter(self.name)

    def __exit__(self, *exception: object) -> None:
        self.clock.leave()


def heard() -> bool:
    """Return whether a clock listens, so that work which runs as one piece can be taken apart."""
    return _clock is not None


def covers(whole: str, *parts: str) -> None:
    """Say that phase `whole` of this step does the work of `parts` too: they took time that has no mark."""
    if _clock is not None:
        _clock.cover(whole, parts)


def phase(name: str) -> AbstractContextManager[None]:
    """Return the context of phase `name`: nothing without a clock."""
    return _OFF if _clock is None else _Mark(_clock, name)


def phased(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Mark a whole function as phase `name`."""

    def mark(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def marked(*args: P.args, **kwargs: P.kwargs) -> T:
            if _clock is None:
                return function(*args, **kwargs)
            _clock.enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                _clock.leave()

        return marked

    return mark


@contextmanager
def listening(clock: Clock) -> Iterator[None]:
    """Let `clock` hear every mark of this process inside the block."""
    global _clock  # one step runs at a time; its layers need not carry a clock each
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
