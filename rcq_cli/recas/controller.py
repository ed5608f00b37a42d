"""How many tokens are kept: grown at once when the dropped mass may be too large, shrunk slowly.

The asymmetry is deliberate. Between two shrinks lie at least `PATIENCE` steps, a shrink is never undone in
the step that made it, and with the band (1/2, 1) no oscillation of a shorter period exists.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor
from typing import NamedTuple

GROW = 1.25
SHRINK = 0.95
BAND = 0.5
PATIENCE = 16


def allowed_mass(limit: float, reach: float) -> float:
    """Return delta* = limit / R: the dropped mass that moves an output by at most `limit`.

    `reach` is R >= ||v - o'|| over the dropped values v. Same unit for both; infinite where nothing can move.
    """
    return limit / reach if reach > 0 else float("inf")


class Decision(NamedTuple):
    """The outcome of one step."""

    budget: int
    exhausted: bool
    """No budget keeps the mass within bounds: read everything there is in this step."""


@dataclass(slots=True)
class Controller:
    """The budget of one layer, in tokens per KV head."""

    budget: int
    floor: int
    """Fewest tokens: sinks, window and one more."""
    calm_steps: int = 0

    def step(self, mass: Callable[[int], float], allowed: float, available: int) -> Decision:
        """Return the budget of this step; `mass(b)` is the upper estimate of the dropped mass at budget b.

        At exit the mass is at most `allowed`, or the decision is `exhausted`.
        """
        found = mass(self.budget)
        while not found <= allowed and self.budget < available:
            self.budget = min(available, ceil(GROW * self.budget))
            self.calm_steps = 0
            found = mass(self.budget)
        if not found <= allowed:
            self.calm_steps = 0
            return Decision(self.budget, True)
        self.calm_steps = self.calm_steps + 1 if found < BAND * allowed else 0
        if self.calm_steps >= PATIENCE:
            self.calm_steps = 0
            self.budget = min(self.budget, max(self.floor, floor(SHRINK * self.budget)))
        return Decision(self.budget, False)
