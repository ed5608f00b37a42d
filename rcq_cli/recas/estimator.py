"""An estimate of the dropped mass from what is at hand, and an upper estimate calibrated on probes.

A probe is full attention over all originals for one step: it shows the true mass. Periodic probes train the
estimator; randomised ones, drawn independently of the data, calibrate it and measure its coverage. The split
keeps calibration residuals out of training. What comes out is an estimate, never a bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RIDGE = 1e-2
TRAINING_WINDOW = 256
REFIT_EVERY = 32
RESIDUAL_WINDOW = 200
_TINY = 1e-6


def to_logit(mass: float) -> float:
    """Return ln((m + 1e-6) / (1 - m + 1e-6)), finite for every mass in [0, 1]."""
    return math.log((mass + _TINY) / (1 - mass + _TINY))


def from_logit(value: float) -> float:
    """Return the mass of a logit, the logistic function."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def ridge(rows: Floats, targets: Floats, strength: float = RIDGE) -> Floats:
    """Return (X'X + n strength I)^-1 X'y of `[n, k]` rows, by Cholesky in float64."""
    size = len(rows)
    gram = rows.T @ rows + size * strength * np.eye(rows.shape[1])
    factor = np.linalg.cholesky(gram)
    return np.linalg.solve(factor.T, np.linalg.solve(factor, rows.T @ targets))


@dataclass(slots=True)
class MassEstimator:
    """Ridge regression of the logit of the dropped mass on features, refitted every 32 periodic probes."""

    rows: list[list[float]] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)
    weights: Floats | None = None
    mean: Floats | None = None
    spread: Floats | None = None
    unfitted: int = 0

    def train(self, features: list[float], mass: float) -> None:
        """Take a periodic probe; the first few make a fit each, later ones every 32."""
        self.rows = [*self.rows, features][-TRAINING_WINDOW:]
        self.targets = [*self.targets, to_logit(mass)][-TRAINING_WINDOW:]
        self.unfitted += 1
        if len(self.rows) >= 2 and (self.unfitted >= REFIT_EVERY or len(self.rows) <= REFIT_EVERY):
            self._fit()

    def _fit(self) -> None:
        rows, targets = np.array(self.rows), np.array(self.targets)
        self.mean, self.spread = rows.mean(0), np.maximum(rows.std(0), 1e-9)
        design = np.column_stack((np.ones(len(rows)), (rows - self.mean) / self.spread))
        self.weights = ridge(design, targets)
        self.unfitted = 0

    def estimate(self, features: list[float]) -> float | None:
        """Return the estimated mass, the last probe's before the first fit, None before any probe."""
        if self.weights is None or self.mean is None or self.spread is None:
            return from_logit(self.targets[-1]) if self.targets else None
        standard = (np.array(features) - self.mean) / self.spread
        return from_logit(float(self.weights[0] + standard @ self.weights[1:]))


def conformal_rank(count: int, miss: float) -> int:
    """Return k = ceil((n + 1)(1 - miss)): the k-th smallest of n residuals covers a new one with 1 - miss.

    k > n means that n residuals cannot promise that.
    """
    # (n + 1)(1 - miss) is often whole, and then must not be rounded up for a trailing digit
    return max(1, math.ceil((count + 1) * (1 - miss) - 1e-9))


def upper_estimate(estimate: float, residuals: list[float], miss: float) -> float:
    """Return min(1, max(0, estimate + r_(k))) of the split conformal rule, 1 where n is too small for it."""
    rank = conformal_rank(len(residuals), miss)
    if miss <= 0 or rank > len(residuals):
        return 1.0
    return min(1.0, max(0.0, estimate + sorted(residuals)[rank - 1]))


@dataclass(slots=True)
class Calibrator:
    """Adaptive conformal inference: the miss rate asked of the residuals follows what was really missed.

    For any sequence of masses the mean miss rate is at most target + (start + step) / (step n): misses need
    a positive level, so it never falls below -step, and clipping at 1 only lowers it. This is a long-run
    average at probe steps.
    """

    target: float = 0.1
    step: float = 0.02
    level: float = field(init=False)
    residuals: list[float] = field(default_factory=list)
    probes: int = 0
    misses: int = 0
    tested: int = 0
    """Probes that met an upper estimate below 1, so that a miss was possible."""

    def __post_init__(self) -> None:
        self.level = self.target

    @property
    def ready(self) -> bool:
        """Return whether there are probes enough for an upper estimate below 1 at the rate asked for."""
        return conformal_rank(len(self.residuals), self.target) <= len(self.residuals)

    def upper(self, estimate: float) -> float:
        """Return the calibrated upper estimate of a mass; 1 before there are enough probes."""
        return upper_estimate(estimate, self.residuals, self.level)

    def observe(self, masses: list[float], estimates: list[float]) -> None:
        """Take a randomised probe: true and estimated mass of every head; the largest residual counts.

        One quantile for all heads, since quantiles per head say little about all of them at once.
        """
        uppers = [self.upper(estimate) for estimate in estimates]
        missed = any(mass > upper for mass, upper in zip(masses, uppers, strict=True))
        self.probes += 1
        self.misses += missed
        self.tested += min(uppers) < 1
        self.level = min(1.0, self.level + self.step * (self.target - missed))
        residual = max(mass - estimate for mass, estimate in zip(masses, estimates, strict=True))
        self.residuals = [*self.residuals, residual][-RESIDUAL_WINDOW:]
