"""The statistics of paired comparisons, pure: numbers in, numbers out.

Words: `b` counts the pairs that only the reference got right, `c` those that only the candidate got right,
`a` both, `d` neither; a difference is candidate minus reference. `alpha` is one-sided throughout, so
alpha = 0.025 gives two-sided 95 % intervals. Random numbers come from a PCG64 generator whose seed is a
digest of a label, so that two processes draw the same ones; NumPy is imported only where it is used.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

ALPHA = 0.025
"""Default one-sided level of every interval."""
SIGNIFICANCE = 0.05
"""Two-sided level of every test."""
RESAMPLES = 10_000
"""Bootstrap resamples."""
FLIP_DRAWS = 100_000
"""Draws of a sampled sign-flip test."""
EXACT_FLIP_UNITS = 20
"""Up to this many units the sign-flip test enumerates every assignment."""

_BISECTIONS = 60
_CELLS_PER_CHUNK = 2_000_000


class Interval(NamedTuple):
    """A two-sided confidence interval, in the unit of its estimate."""

    lower: float
    upper: float


class MeanEstimate(NamedTuple):
    """A mean with its standard error, the degrees of freedom of that error, and the t interval."""

    mean: float
    se: float
    df: float
    ci: Interval


# -- quantiles ----------------------------------------------------------------------------------------------


def normal_quantile(alpha: float) -> float:
    """Return z with P(Z > z) = alpha."""
    return NormalDist().inv_cdf(1 - alpha)


def beta_cdf(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), by its continued fraction."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        # the fraction converges fast on the other side of the mean only
        return 1 - beta_cdf(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    upper, lower = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    fraction = lower
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        step = 1.0
        for term in (even, odd):
            lower = 1 / (1 + term * lower or tiny)
            upper = 1 + term / upper or tiny
            step = lower * upper
            fraction *= step
        if abs(step - 1) < 1e-15:
            break
    return math.exp(log_front) * fraction / a


def student_cdf(t: float, df: float) -> float:
    """Return P(T <= t) of Student's distribution; `df` need not be whole."""
    tail = 0.5 * beta_cdf(df / (df + t * t), df / 2, 0.5)
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=4096)
def t_quantile(alpha: float, df: float) -> float:
    """Return t with P(T > t) = alpha for 0 < alpha <= 0.5."""
    high = 1.0
    while 1 - student_cdf(high, df) > alpha:
        high *= 2
    return _bisect(lambda t: 1 - student_cdf(t, df) > alpha, 0.0, high)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile: the least value that `percent` % of the values do not exceed."""
    # the small slack keeps 0.29 * 100 = 28.999999999999996 at rank 29
    rank = math.ceil(percent / 100 * len(values) - 1e-9)
    return sorted(values)[max(rank, 1) - 1]


def _bisect(below: Callable[[float], bool], low: float, high: float) -> float:
    """Return where `below` turns from true to false in [low, high]."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2


# -- paired binary outcomes ---------------------------------------------------------------------------------


def mcnemar_exact(b: int, c: int) -> float:
    """Return the two-sided exact McNemar p: min(1, 2 sum_{i<=min(b,c)} C(m,i) / 2^m), m = b + c."""
    m = b + c
    return min(1.0, 2 * sum(math.comb(m, i) for i in range(min(b, c) + 1)) / (1 << m)) if m else 1.0


def mcnemar_mid_p(b: int, c: int) -> float:
    """Return the mid-p of McNemar's test, which counts half of the observed table."""
    m, k = b + c, min(b, c)
    if b == c:
        return 1.0 - math.comb(m, b) / (1 << (m + 1)) if m else 1.0
    return (2 * sum(math.comb(m, i) for i in range(k)) + math.comb(m, k)) / (1 << m)


def mcnemar(b: int, c: int, *, mid_p: bool = False) -> float:
    """Return McNemar's two-sided p, the exact one or its mid-p."""
    return mcnemar_mid_p(b, c) if mid_p else mcnemar_exact(b, c)


def tango_reference_only(x: float, b: float, c: float, n: float) -> float:
    """Return the maximum-likelihood probability of a reference-only pair when the true difference is `x`."""
    first, second, third = 2 * n, (2 * n + b - c) * x - (b + c), -b * x * (1 - x)
    return (math.sqrt(max(second * second - 4 * first * third, 0.0)) - second) / (2 * first)


def tango_statistic(x: float, b: float, c: float, n: float) -> float:
    """Return Tango's score statistic T(x) = (c - b - n x) / sqrt(n (2 q + x (1 - x))); it decreases in x."""
    numerator = c - b - n * x
    radicand = n * (2 * tango_reference_only(x, b, c, n) + x * (1 - x))
    if radicand <= 1e-13 * n:
        return 0.0 if abs(numerator) <= 1e-9 else math.copysign(math.inf, numerator)
    return numerator / math.sqrt(radicand)


def tango_interval(b: float, c: float, n: float, alpha: float = ALPHA) -> Interval:
    """Return Tango's score interval of the paired difference (c - b) / n."""
    z, estimate = normal_quantile(alpha), (c - b) / n
    lower = _bisect(lambda x: tango_statistic(x, b, c, n) > z, -1.0, estimate)
    upper = _bisect(lambda x: tango_statistic(x, b, c, n) > -z, estimate, 1.0)
    return Interval(lower, upper)


def noninferiority_p(b: int, c: int, n: int, margin: float) -> float:
    """Return the one-sided p of "the candidate is worse by at least `margin`", 1 - Phi(T(-margin))."""
    return NormalDist().cdf(-tango_statistic(-margin, b, c, n))


def wilson(successes: float, n: int, alpha: float = ALPHA) -> Interval:
    """Return Wilson's interval of one proportion, clipped to [0, 1]."""
    z2 = normal_quantile(alpha) ** 2
    p = successes / n
    centre = p + z2 / (2 * n)
    half = math.sqrt(z2) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return Interval(max(0.0, (centre - half) / (1 + z2 / n)), min(1.0, (centre + half) / (1 + z2 / n)))


def clopper_pearson(successes: int, n: int, alpha: float = ALPHA) -> Interval:
    """Return the exact interval of a share: at either end a count so far off has probability alpha."""
    low, high = 0.0, 1.0
    if successes > 0:
        low = _bisect(lambda p: beta_cdf(p, successes, n - successes + 1) < alpha, 0.0, 1.0)
    if successes < n:
        high = _bisect(lambda p: beta_cdf(p, successes + 1, n - successes) < 1 - alpha, 0.0, 1.0)
    return Interval(low, high)


def newcombe_paired(a: int, b: int, c: int, d: int, alpha: float = ALPHA) -> Interval:
    """Return Newcombe's square-and-add interval of the paired difference, correlation included."""
    n = a + b + c + d
    product = (a + b) * (c + d) * (a + c) * (b + d)
    excess = a * d - b * c
    shift = max(excess - n / 2, 0.0) if excess > 0 else excess
    phi = shift / math.sqrt(product) if product else 0.0
    return _square_and_add(
        (a + b) / n, wilson(a + b, n, alpha), (a + c) / n, wilson(a + c, n, alpha), correlation=phi
    )


def newcombe_independent(right_r: int, n_r: int, right_c: int, n_c: int, alpha: float = ALPHA) -> Interval:
    """Return Newcombe's interval of candidate minus reference for two independent proportions."""
    reference, candidate = wilson(right_r, n_r, alpha), wilson(right_c, n_c, alpha)
    return _square_and_add(right_r / n_r, reference, right_c / n_c, candidate, correlation=0.0)


def _square_and_add(
    p_r: float, reference: Interval, p_c: float, candidate: Interval, *, correlation: float
) -> Interval:
    def spread(ours: float, theirs: float) -> float:
        return math.sqrt(max(ours * ours - 2 * correlation * ours * theirs + theirs * theirs, 0.0))

    difference = p_c - p_r
    return Interval(
        difference - spread(p_c - candidate.lower, reference.upper - p_r),
        difference + spread(candidate.upper - p_c, p_r - reference.lower),
    )


# -- means, clusters ----------------------------------------------------------------------------------------


def cluster_t(sums: Sequence[float], sizes: Sequence[float], alpha: float = ALPHA) -> MeanEstimate | None:
    """Return the mean sum(D) / sum(n) over K clusters with its t interval on K - 1 degrees of freedom.

    se^2 = K / (K - 1) sum_k (D_k - mean n_k)^2 / N^2. Clusters of one sample give the ordinary t interval;
    sizes may be weights. None for fewer than two clusters, which say nothing about the spread between them.
    """
    k, total = len(sums), math.fsum(sizes)
    if k < 2:
        return None
    mean = math.fsum(sums) / total
    residuals = math.fsum((s - mean * n) ** 2 for s, n in zip(sums, sizes, strict=True))
    se = math.sqrt(k / (k - 1) * residuals) / total
    half = t_quantile(alpha, k - 1) * se
    return MeanEstimate(mean, se, k - 1, Interval(mean - half, mean + half))


def t_interval(values: Sequence[float], alpha: float = ALPHA) -> MeanEstimate | None:
    """Return the mean of independent values with its t interval, None for fewer than two."""
    return cluster_t(values, [1.0] * len(values), alpha)


def score_interval(values: Sequence[float], alpha: float = ALPHA) -> MeanEstimate | None:
    """Return the mean of independent scores in [0, 1] with its t interval, inside [0, 1] and never a point.

    Each end lies at least as far out as z^2 more scores of 0, or of 1, would bring the mean: for scores that
    are all 0 or all 1 these are the ends of Wilson's interval. None for fewer than two values.
    """
    found = t_interval(values, alpha)
    if found is None:
        return None
    n, z2 = len(values), normal_quantile(alpha) ** 2
    low = min(found.ci.lower, found.mean * n / (n + z2))
    high = max(found.ci.upper, (found.mean * n + z2) / (n + z2))
    return found._replace(ci=Interval(max(0.0, low), min(1.0, high)))


def welch(
    reference: Sequence[float], candidate: Sequence[float], alpha: float = ALPHA
) -> MeanEstimate | None:
    """Return the difference of two independent means, candidate minus reference, with Welch's interval."""
    parts = [t_interval(reference, alpha), t_interval(candidate, alpha)]
    first, second = parts
    if first is None or second is None:
        return None
    return combine([-1.0, 1.0], [first, second], alpha)


def combine(weights: Sequence[float], parts: Sequence[MeanEstimate], alpha: float = ALPHA) -> MeanEstimate:
    """Return a weighted sum of independent means; its degrees of freedom follow Satterthwaite."""
    variances = [(w * part.se) ** 2 for w, part in zip(weights, parts, strict=True)]
    variance = math.fsum(variances)
    spread = math.fsum(v * v / part.df for v, part in zip(variances, parts, strict=True))
    df = variance * variance / spread if spread > 0 else math.fsum(part.df for part in parts)
    mean = math.fsum(w * part.mean for w, part in zip(weights, parts, strict=True))
    half = t_quantile(alpha, df) * math.sqrt(variance)
    return MeanEstimate(mean, math.sqrt(variance), df, Interval(mean - half, mean + half))


def guard(ci: Interval, mean: float, n: float, alpha: float = ALPHA, width: float = 1.0) -> Interval:
    """Widen the interval of a mean of bounded scores so that a lack of spread is not taken for certainty.

    No end is nearer to the mean than z^2 R / (n + z^2), which is Tango's interval without a discordant pair;
    R is the `width` of the score range.
    """
    z2 = normal_quantile(alpha) ** 2
    half = z2 * width / (n + z2)
    return Interval(min(ci.lower, mean - half), max(ci.upper, mean + half))


# -- resampling ---------------------------------------------------------------------------------------------


def generator(label: str) -> "np.random.Generator":
    """Return a PCG64 generator seeded with the first 8 bytes of sha256(label), big end first."""
    import numpy as np

    seed = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big")
    return np.random.Generator(np.random.PCG64(seed))


def bootstrap(
    *strata: tuple[Sequence[float], Sequence[float]],
    key: str,
    alpha: float = ALPHA,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the percentile interval of sum(D) / sum(n) when whole clusters are drawn again.

    A stratum is the sums D and the sizes n of its clusters; with several, each is resampled by itself and the
    unweighted mean over strata is taken. `key` names the cell and fixes the draws.
    """
    random, means = generator(f"boot|{key}"), [0.0] * resamples
    for sums, sizes in strata:
        drawn = _resampled_means(sums, sizes, random, resamples)
        means = [mean + value / len(strata) for mean, value in zip(means, drawn, strict=True)]
    return Interval(percentile(means, 100 * alpha), percentile(means, 100 * (1 - alpha)))


def _resampled_means(
    sums: Sequence[float], sizes: Sequence[float], random: "np.random.Generator", resamples: int
) -> list[float]:
    import numpy as np

    k = len(sums)
    totals, counts = np.asarray(sums, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    means: list[float] = []
    for rows in _chunks(resamples, k):
        drawn = random.integers(0, k, size=(rows, k))
        means.extend((totals[drawn].sum(axis=1) / counts[drawn].sum(axis=1)).tolist())
    return means


def sign_flip(sums: Sequence[float], *, key: str, draws: int = FLIP_DRAWS) -> float:
    """Return the two-sided p of "the sum has no sign", flipping the sign of each unit (a pair, a cluster).

    Exact up to 20 units; else (hits + 1) / (draws + 1) over random assignments.
    """
    import numpy as np

    units = np.asarray([s for s in sums if s != 0], dtype=np.float64)
    # flips of equal size must count as equal whatever the order of summation
    threshold = abs(math.fsum(sums)) - 1e-9 * float(np.abs(units).sum())
    if len(units) <= EXACT_FLIP_UNITS:
        totals = np.zeros(1)
        for unit in units:
            totals = np.concatenate([totals + unit, totals - unit])
        return float((np.abs(totals) >= threshold).mean())
    random, hits = generator(f"flip|{key}"), 0
    for rows in _chunks(draws, len(units)):
        signs: Any = random.integers(0, 2, size=(rows, len(units)), dtype=np.int8)
        totals = (2.0 * signs - 1.0) @ units
        hits += int((np.abs(totals) >= threshold).sum())
    return (hits + 1) / (draws + 1)


def _chunks(rows: int, columns: int) -> list[int]:
    """Split `rows` draws of `columns` numbers so that memory stays small."""
    size = max(1, _CELLS_PER_CHUNK // max(columns, 1))
    return [min(size, rows - start) for start in range(0, rows, size)]


# -- several cells ------------------------------------------------------------------------------------------


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


SMALLEST_MARGIN = 1e-9
"""No run has the samples that could pass at a smaller one (see `smallest_passing_n`)."""


def smallest_passing_n(margin: float, alpha: float = ALPHA) -> int:
    """Return n0, the fewest pairs that pass at `margin` with none discordant: floor(z^2/mu - z^2) + 1."""
    z2 = normal_quantile(alpha) ** 2
    return math.floor(z2 / margin - z2) + 1


# -- latency ------------------------------------------------------------------------------------------------


def block_length(lag_one: float, n: int) -> int:
    """Return the block length for `n` steps: (6 r^2 / (1 - r^2)^2)^(1/3) n^(1/3), r clipped to [0, .97]."""
    r = min(max(lag_one, 0.0), 0.97)
    length = math.ceil(math.cbrt(6 * r * r / (1 - r * r) ** 2 * n))
    return max(1, min(length, n // 4))


def lag_one_autocorrelation(values: Sequence[float]) -> float:
    """Return the lag-1 autocorrelation of a series, 0 for a constant one."""
    mean = math.fsum(values) / len(values)
    centred = [v - mean for v in values]
    power = math.fsum(v * v for v in centred)
    return math.fsum(u * v for u, v in pairwise(centred)) / power if power > 0 else 0.0


def latency_ratio(
    reference: Sequence[Sequence[float]],
    candidate: Sequence[Sequence[float]],
    *,
    key: str,
    alpha: float = ALPHA,
    resamples: int = 2000,
) -> tuple[float, Interval]:
    """Return median(candidate) / median(reference) of step times, with a circular block bootstrap interval.

    Each arm is a list of runs, each run its step times; runs are drawn again first, then blocks inside each,
    since steps of a run are correlated and runs drift.
    """
    import numpy as np

    random = generator(f"latency|{key}")
    medians = [_block_medians(runs, random, resamples) for runs in (reference, candidate)]
    ratios = (medians[1] / medians[0]).tolist()
    point = float(np.median(np.concatenate(candidate)) / np.median(np.concatenate(reference)))
    return point, Interval(percentile(ratios, 100 * alpha), percentile(ratios, 100 * (1 - alpha)))


def _block_medians(
    runs: Sequence[Sequence[float]], random: "np.random.Generator", resamples: int
) -> "np.ndarray[Any, Any]":
    import numpy as np

    series = [np.asarray(run, dtype=np.float64) for run in runs]
    lengths = [block_length(lag_one_autocorrelation(run), len(run)) for run in runs]
    longest, medians = max(map(len, series)), []
    for rows in _chunks(resamples, len(runs) * longest):
        drawn = np.full((rows, len(runs), longest), np.nan)
        chosen = random.integers(0, len(runs), size=(rows, len(runs)))
        for r, (run, length) in enumerate(zip(series, lengths, strict=True)):
            rows_of, slots = np.nonzero(chosen == r)
            starts = random.integers(0, len(run), size=(len(slots), -(-len(run) // length), 1))
            places = (starts + np.arange(length)).reshape(len(starts), -1)[:, : len(run)]
            drawn[rows_of, slots, : len(run)] = run[places % len(run)]
        medians.append(np.nanmedian(drawn.reshape(rows, -1), axis=1))
    return np.concatenate(medians)
