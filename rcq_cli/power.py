"""How many pairs a comparison needs: power of McNemar's test, detectable losses, deciding sizes.

`mid_p` asks for the test by mid-p; without it every test is the exact one.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

from rcq_cli.stats import (
    ALPHA,
    SIGNIFICANCE,
    mcnemar,
    normal_quantile,
    smallest_passing_n,
    tango_statistic,
)

POWER = 0.80
"""Power at which a loss counts as detectable."""

_EXACT_PAIRS = 2000
_NEGLIGIBLE = 1e-13
_LARGEST_N = 1_000_000


def mcnemar_power(
    n: int,
    reference_only: float,
    candidate_only: float,
    level: float = SIGNIFICANCE,
    *,
    mid_p: bool = False,
) -> float:
    """Return the probability that McNemar's test rejects at `level`, by enumeration.

    `reference_only` and `candidate_only` are the true shares of discordant pairs of either kind.
    """
    discordant = reference_only + candidate_only
    if discordant <= 0:
        return 0.0
    power = 0.0
    for m in range(n + 1):
        weight = _binomial(m, n, min(discordant, 1.0))
        k = _largest_rejecting(m, level, mid_p) if weight > _NEGLIGIBLE else -1
        share = reference_only / discordant
        power += weight * sum(_binomial(i, m, share) + _binomial(m - i, m, share) for i in range(k + 1))
    return power


@lru_cache(maxsize=1024)
def minimum_detectable_loss(
    n: int, candidate_only: float, *, power: float = POWER, level: float = SIGNIFICANCE, mid_p: bool = False
) -> float | None:
    """Return the smallest net loss (a share of samples) that McNemar's test finds with `power`.

    `candidate_only` is the background share of pairs that only the candidate gets right. None when even the
    largest loss possible would not be found.
    """

    def found(loss: float) -> bool:
        return mcnemar_power(n, candidate_only + loss, candidate_only, level, mid_p=mid_p) >= power

    low, high = 0.0, 1 - 2 * candidate_only
    if high <= 0 or not found(high):
        return None
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def deciding_n(
    b: int,
    c: int,
    n: int,
    margin: float,
    *,
    alpha: float = ALPHA,
    family: float = 1,
    mid_p: bool = False,
) -> int | None:
    """Return about how many pairs decide a binary cell whose flips keep the shares b / n and c / n.

    The verdict aimed at is PASS for a loss below `margin`, else FAIL: a loss at least as large whose sign is
    sure after multiplying p by `family`. None when a million pairs do not suffice.
    """
    if b == c == 0:
        return smallest_passing_n(margin, alpha)
    z, gain, loss = normal_quantile(alpha), c / n, b / n
    if gain - loss > -margin:
        return _first_n(lambda size: tango_statistic(-margin, loss * size, gain * size, size) > z)
    return _first_n(lambda size: _loss_is_sure(loss * size, gain * size, z, family, mid_p))


def _loss_is_sure(b: float, c: float, z: float, family: float, mid_p: bool) -> bool:
    # T(0) = (c - b) / sqrt(b + c), so the upper end of Tango's interval is below 0 iff T(0) < -z
    score = (c - b) / math.sqrt(b + c)
    enumerated = b + c <= _EXACT_PAIRS
    p = mcnemar(round(b), round(c), mid_p=mid_p) if enumerated else 2 * NormalDist().cdf(score)
    return score < -z and p * family < SIGNIFICANCE


def _first_n(decided: Callable[[int], bool]) -> int | None:
    low, high = 0, 1
    while not decided(high):
        low, high = high, 2 * high
        if high > _LARGEST_N:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decided(middle) else (middle, high)
    return high


@lru_cache(maxsize=8192)
def _largest_rejecting(m: int, level: float, mid_p: bool) -> int:
    """Return the largest min(b, c) whose p is below `level` among m discordant pairs, else -1."""
    below, k = 0, -1
    while 2 * (k + 1) < m:
        observed = math.comb(m, k + 1)
        # p is twice the tail; the mid-p counts half of the table that was seen
        doubled = 2 * below + (observed if mid_p else 2 * observed)
        if doubled / 2**m >= level:
            break
        below += observed
        k += 1
    return k


def _binomial(k: int, n: int, p: float) -> float:
    """Return the probability of `k` successes in `n` trials."""
    if p <= 0 or p >= 1:
        return float(k == (n if p >= 1 else 0))
    log_ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(log_ways + k * math.log(p) + (n - k) * math.log1p(-p))
