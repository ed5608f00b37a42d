"""The largest number of units (words, lines, documents) with which a prompt stays within its budget."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor
from typing import Generic, NamedTuple, TypeVar

from rcq_cli.errors import SpecError

T = TypeVar("T")

_TRUSTED_ESTIMATES = 8
"""Probes after which plain bisection replaces the estimates, so that a bad estimate cannot cost more."""


class Fitted(NamedTuple, Generic[T]):
    """The prompt that fits, the units it holds, and how many prompts were built to find it."""

    units: int
    prompt: T
    probes: int


def fit(
    build: Callable[[int], T],
    size: Callable[[T], int],
    budget: int,
    *,
    minimum: int,
    advance: Callable[[int, int], int],
    maximum: int | None = None,
    reserve: int = 0,
    most: int | None = None,
    slack: int | None = None,
) -> Fitted[T]:
    """Return the largest n with `size(build(n)) <= budget < size(build(n + 1))`; n never exceeds `maximum`.

    `advance(n, tokens)` estimates the number of units whose prompt is `tokens` (negative: fewer) longer than
    that of n units; only the number of probes depends on it. `reserve` are the tokens of the context outside
    the budget. For prompts that are costly to build, the search ends early at one that leaves at most `slack`
    tokens, or after `most` prompts beyond the smallest. Raises `SpecError` naming the smallest possible
    context if `minimum` units do not fit.
    """
    low, fitting = minimum, build(minimum)
    at, length, probes = low, size(fitting), 1
    if length > budget:
        raise too_small(budget + reserve, length + reserve)
    high = None if maximum is None else maximum + 1
    while high is None or high - low > 1:
        full = slack is not None and budget - size(fitting) <= slack
        if low > minimum and (full or (most is not None and probes > most)):
            break
        if probes < _TRUSTED_ESTIMATES:
            n = advance(at, budget - length)
        else:
            n = 2 * low if high is None else (low + high) // 2
        n = max(low + 1, n if high is None else min(n, high - 1))
        built = build(n)
        at, length, probes = n, size(built), probes + 1
        if length <= budget:
            low, fitting = n, built
        else:
            high = n
    return Fitted(low, fitting, probes)


class Secant:
    """Estimates units from tokens by the prompts built so far; `rate` is the first guess, tokens per unit.

    Steps stay a little short, so that an estimate rarely overshoots the budget.
    """

    def __init__(self, budget: int, rate: float) -> None:
        self._budget, self._rate = budget, rate
        self._points: list[tuple[int, int]] = []

    def advance(self, n: int, tokens: int) -> int:
        """Return about how many units take `tokens` tokens more than the prompt of n units, just built."""
        self._points.append((n, self._budget - tokens))
        if len(self._points) > 1:
            (before, length), (after, longer) = self._points[-2:]
            if (longer - length) * (after - before) > 0:
                self._rate = (longer - length) / (after - before)
        short = 0.995 if len(self._points) == 1 else 0.999
        return n + (
            floor(short * tokens / self._rate) if tokens > 0 else ceil(tokens / self._rate / short) - 1
        )


def fill_floor(budget: int, largest_unit: int, base: float = 0.98) -> float:
    """Return the share of the budget that a prompt must fill; `largest_unit` in tokens."""
    return max(0.80, min(base, 1 - largest_unit / budget))


def too_small(ctx: int, minimum: int) -> SpecError:
    """Return the error for a context below the minimum."""
    return SpecError(
        f"ctx {ctx} is too small for this task",
        why=f"its smallest prompt needs a context of {minimum} tokens here",
        fix=f"use --ctx {minimum} or more",
        id="RCQ-USE-20",
    )
