"""Printed vectors, brute force, coverage and SciPy as independent sources for `rcq_cli.stats`."""

import hashlib
import itertools
import math
import random
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats as scipy_stats

from rcq_cli import stats

MCNEMAR = [
    (0, 0, 1, 1),
    (0, 5, 0.0625, 0.03125),
    (0, 6, 0.03125, 0.015625),
    (1, 7, 0.0703125, 0.0390625),
    (1, 9, 0.021484375, 0.01171875),
    (2, 10, 0.0385742188, 0.0224609375),
    (31, 0, 9.3132257e-10, 4.6566129e-10),
    (44, 3, 2.4647306e-10, 1.3125856e-10),
    (5, 15, 0.0413894653, 0.0266036987),
    (10, 25, 0.0166738478, 0.0113309842),
    (16, 16, 1, 0.9300250329),
    (5, 3, 0.7265625, 0.5078125),
    (2, 2, 1, 0.8125),
    (18, 0, 7.62939453e-6, 3.81469727e-6),
    (61, 0, 8.6736174e-19, 4.3368087e-19),
    (136, 3, 1.2848934e-36, None),
    (23, 21, 0.8803958, None),
]

# a, b, c, d, Tango 95 %, Tango 90 % lower, Newcombe 95 %
PAIRED = [
    (23, 16, 16, 45, -0.11300, 0.11300, -0.09435, -0.11079, 0.11079),
    (46, 5, 3, 46, -0.08681, 0.04248, -0.07392, -0.07735, 0.03779),
    (64, 2, 2, 32, -0.05285, 0.05285, -0.04147, -0.04461, 0.04461),
    (8, 31, 0, 61, -0.40626, -0.22780, -0.39024, -0.40267, -0.21616),
    (7, 44, 3, 46, -0.51526, -0.29930, -0.49876, -0.51187, -0.29378),
    (5, 61, 0, 34, -0.69983, -0.51203, -0.68632, -0.69681, -0.50105),
    (70, 5, 15, 10, 0.01345, 0.19240, 0.02819, 0.01153, 0.18921),
    (80, 1, 7, 12, 0.00595, 0.12925, 0.01640, 0.00093, 0.12446),
    (200, 2, 2, 16, -0.02452, 0.02452, -0.01913, -0.02441, 0.02441),
    (100, 1, 0, 9, -0.04971, 0.02496, -0.03972, -0.04790, 0.02658),
    (0, 0, 0, 5, -0.43448, 0.43448, -0.35112, -0.43448, 0.43448),
    (100, 0, 0, 0, -0.03699, 0.03699, -0.02634, -0.03699, 0.03699),
]

# D per cluster, n per cluster, theta, se, lower, upper, sign-flip p
CLUSTERS = [
    ([-3, 0, -1, 0, 2, -1], [10] * 6, -0.05, 0.0670820, -0.22244, 0.12244, None),
    ([12, -4.5, 4, 0, 1], [100, 150, 80, 120, 50], 0.025, 0.0292724, -0.05627, 0.10627, None),
    ([-3, -4, 4, 1, -1, 0, 1, 2, -1, 1], [10] * 10, 0, 0.07454, -0.16861, 0.16861, 1),
    ([0, 0, -1, 0, -1, 0, -1, 0, 1, 0], [10] * 10, -0.02, 0.0200, -0.06524, 0.02524, 0.625),
    ([-2, -9, -4, -2, -6, -1, 0, 0, -7, 0], [10] * 10, -0.31, 0.10269, -0.54229, -0.07771, 0.015625),
    ([-6, -10, -5, -8, -7, 0, -3, 3, -5, 0], [10] * 10, -0.41, 0.12863, -0.70097, -0.11903, 0.0234375),
    ([-7, -10, -5, -6, -8, -3, -10, -4, -8, 0], [10] * 10, -0.61, 0.10050, -0.83734, -0.38266, 0.00390625),
]


@pytest.mark.parametrize(("b", "c", "p", "mid"), MCNEMAR)
def test_mcnemar_gives_the_printed_p_values(b, c, p, mid):
    assert stats.mcnemar_exact(b, c) == pytest.approx(p, rel=1e-7)
    assert stats.mcnemar_exact(c, b) == stats.mcnemar_exact(b, c)
    if mid is not None:
        assert stats.mcnemar_mid_p(b, c) == pytest.approx(mid, rel=1e-7)


def test_mcnemar_agrees_with_the_binomial_test_of_scipy():
    for b, c in itertools.product(range(12), range(12)):
        if b + c:
            expected = scipy_stats.binomtest(b, b + c, 0.5).pvalue
            assert stats.mcnemar_exact(b, c) == pytest.approx(expected, rel=1e-12)


def test_mid_p_is_the_exact_p_less_half_of_the_observed_table():
    for b, c in itertools.product(range(12), range(12)):
        if b != c:
            exact = scipy_stats.binomtest(b, b + c, 0.5).pvalue
            expected = exact - scipy_stats.binom.pmf(b, b + c, 0.5)
            assert stats.mcnemar_mid_p(b, c) == pytest.approx(expected, rel=1e-10)
        elif b:
            assert stats.mcnemar_mid_p(b, c) == pytest.approx(1 - scipy_stats.binom.pmf(b, b + c, 0.5) / 2)
    assert [stats.mcnemar(5, 15, mid_p=mid_p) for mid_p in (False, True)] == pytest.approx(
        [0.0413894653, 0.0266036987], rel=1e-8
    )


def newcombe_by_hand(a, b, c, d):
    """Newcombe's method 10 from its definition: Wilson's limits as roots of (p - x)^2 = z^2 x (1 - x) / n."""
    n, z2 = a + b + c + d, scipy_stats.norm.ppf(0.975) ** 2

    def limits(right):
        p = right / n
        return sorted(np.roots([1 + z2 / n, -2 * p - z2 / n, p * p]).real.clip(0, 1))

    (low_r, high_r), (low_c, high_c) = limits(a + b), limits(a + c)
    p_r, p_c, margins = (a + b) / n, (a + c) / n, (a + b) * (c + d) * (a + c) * (b + d)
    numerator = a * d - b * c
    numerator = max(numerator - n / 2, 0) if numerator > 0 else numerator
    phi = numerator / math.sqrt(margins) if margins else 0
    below, above = (p_c - low_c, high_r - p_r), (high_c - p_c, p_r - low_r)
    lengths = [math.sqrt(u * u - 2 * phi * u * v + v * v) for u, v in (below, above)]
    return p_c - p_r - lengths[0], p_c - p_r + lengths[1]


def test_newcombe_equals_its_definition_over_all_small_tables():
    n = 9
    for a, b, c in itertools.product(range(n + 1), repeat=3):
        if a + b + c <= n:
            counts = (a, b, c, n - a - b - c)
            # a double root costs half of the digits of `roots`
            assert stats.newcombe_paired(*counts) == pytest.approx(newcombe_by_hand(*counts), abs=1e-7)


@pytest.mark.parametrize(
    ("a", "b", "c", "d", "lower", "upper", "lower90", "newcombe_l", "newcombe_u"), PAIRED
)
def test_intervals_of_the_printed_tables(a, b, c, d, lower, upper, lower90, newcombe_l, newcombe_u):
    n = a + b + c + d
    assert stats.tango_interval(b, c, n) == pytest.approx((lower, upper), abs=5.1e-6)
    assert stats.tango_interval(b, c, n, alpha=0.05).lower == pytest.approx(lower90, abs=5.1e-6)
    assert stats.newcombe_paired(a, b, c, d) == pytest.approx((newcombe_l, newcombe_u), abs=5.1e-6)


@pytest.mark.parametrize(
    ("b", "c", "lower", "upper"), [(23, 21, -0.05142, 0.03780), (136, 3, -0.50159, -0.38502)]
)
def test_tango_interval_of_the_pooled_published_tables(b, c, lower, upper):
    assert stats.tango_interval(b, c, 300) == pytest.approx((lower, upper), abs=5.1e-6)


def test_tango_interval_has_its_closed_form_without_discordant_pairs():
    z2 = scipy_stats.norm.ppf(0.975) ** 2
    for n in (1, 5, 22, 110, 550):
        assert stats.tango_interval(0, 0, n) == pytest.approx((-z2 / (n + z2), z2 / (n + z2)), abs=1e-12)


def likelihood_maximum(x, b, c, n):
    """Maximise b ln q + c ln(q + x) + (n - b - c) ln(1 - 2q - x) by golden-section search."""

    def log_likelihood(q):
        terms = ((b, q), (c, q + x), (n - b - c, 1 - 2 * q - x))
        if any(count and p <= 0 for count, p in terms):
            return -math.inf
        return sum(count * math.log(p) for count, p in terms if count)

    low, high = max(0.0, -x), (1 - x) / 2
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(200):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if log_likelihood(left) < log_likelihood(right):
            low = left
        else:
            high = right
    return (low + high) / 2


def test_tango_nuisance_probability_maximises_the_likelihood():
    draw = random.Random(7)
    for _ in range(200):
        n = draw.randint(5, 200)
        b, c = draw.randint(1, n // 2), draw.randint(1, n - n // 2 - 1)
        x = draw.uniform(-0.9, 0.9)
        expected = likelihood_maximum(x, b, c, n)
        assert stats.tango_reference_only(x, b, c, n) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("b", "c", "x", "q"), [(16, 16, -0.10, 0.22), (5, 3, 0.03, 0.0322548), (2, 2, -0.05, 0.0614575)]
)
def test_tango_nuisance_probability_of_the_printed_cases(b, c, x, q):
    assert stats.tango_reference_only(x, b, c, 100) == pytest.approx(q, abs=5e-8)


def test_swapping_the_arms_mirrors_the_tango_interval():
    for b, c, n in ((5, 3, 100), (31, 0, 100), (1, 7, 100), (0, 4, 9)):
        forward, backward = stats.tango_interval(b, c, n), stats.tango_interval(c, b, n)
        assert forward == pytest.approx((-backward.upper, -backward.lower), abs=1e-12)


def test_tango_statistic_falls_as_the_trial_value_rises():
    for b, c, n in ((5, 3, 100), (31, 0, 100), (0, 0, 20), (4, 9, 13)):
        values = [stats.tango_statistic(x / 500, b, c, n) for x in range(-499, 500)]
        assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(values))


@pytest.mark.parametrize(
    ("b", "c", "n", "margin", "z", "p"),
    [
        (16, 16, 100, 0.02, 0.3533, 0.36193),
        (5, 3, 100, 0.05, 0.9879, 0.16161),
        (2, 2, 100, 0.05, 1.8842, 0.02977),
        (0, 0, 188, 0.02, 1.9588, 0.02507),
        (0, 0, 189, 0.02, 1.9640, 0.02477),
        (1, 0, 110, 0.05, 1.9687, 0.02450),
        (2, 2, 110, 0.05, 2.0106, 0.02218),
        (3, 3, 110, 0.05, 1.8481, 0.03229),
        (2, 0, 110, 0.05, 1.5312, 0.06286),
        (31, 0, 100, 0.02, -5.3321, 1.0),
    ],
)
def test_noninferiority_statistic_and_p(b, c, n, margin, z, p):
    assert stats.tango_statistic(-margin, b, c, n) == pytest.approx(z, abs=5.1e-5)
    assert stats.noninferiority_p(b, c, n, margin) == pytest.approx(p, abs=5.1e-6)


def test_tango_interval_covers_the_truth():
    draws = np.random.Generator(np.random.PCG64(11)).multinomial(50, [0.05, 0.05, 0.90], size=2000)
    tables, counts = np.unique(draws, axis=0, return_counts=True)
    covered = sum(
        count
        for (b, c, _), count in zip(tables.tolist(), counts.tolist(), strict=True)
        if stats.tango_interval(b, c, 50).lower <= 0 <= stats.tango_interval(b, c, 50).upper
    )
    assert covered / 2000 >= 0.93


@pytest.mark.parametrize(
    ("right", "n", "lower", "upper"),
    [
        (20, 20, 0.83887, 1),
        (100, 100, 0.96301, 1),
        (110, 110, 0.96626, 1),
        (500, 500, 0.99238, 1),
        (95, 100, 0.88825, 0.97846),
        (0, 100, 0, 0.03699),
    ],
)
def test_wilson_interval(right, n, lower, upper):
    assert stats.wilson(right, n) == pytest.approx((lower, upper), abs=5.1e-6)


def test_newcombe_for_independent_arms_is_the_published_example():
    # Newcombe (1998), method 10, contrast (a): 56/70 against 48/80
    lower, upper = stats.newcombe_independent(48, 80, 56, 70)
    assert (lower, upper) == pytest.approx((0.0524, 0.3339), abs=5.1e-5)


def test_t_quantiles():
    printed = {1: 12.7062, 2: 4.3027, 4: 2.7764, 9: 2.2622, 12: 2.1788, 19: 2.0930}
    for df, t in printed.items():
        assert stats.t_quantile(0.025, df) == pytest.approx(t, abs=5.1e-5)
    for df, alpha in itertools.product((1, 1.7, 3, 30.5, 400), (0.4, 0.05, 0.001)):
        assert stats.t_quantile(alpha, df) == pytest.approx(scipy_stats.t.isf(alpha, df), rel=1e-9)


def test_incomplete_beta_agrees_with_scipy():
    for x, a, b in itertools.product((0.0, 0.01, 0.3, 0.77, 0.999, 1.0), (0.5, 2, 40), (0.5, 3, 25)):
        assert stats.beta_cdf(x, a, b) == pytest.approx(scipy_stats.beta.cdf(x, a, b), rel=1e-10, abs=1e-14)


@pytest.mark.parametrize(("sums", "sizes", "mean", "se", "lower", "upper", "p"), CLUSTERS)
def test_cluster_interval_and_sign_flip(sums, sizes, mean, se, lower, upper, p):
    estimate = stats.cluster_t(sums, sizes)
    assert (estimate.mean, estimate.se) == pytest.approx((mean, se), abs=5.1e-6)
    assert estimate.ci == pytest.approx((lower, upper), abs=5.1e-6)
    if p is not None:
        assert stats.sign_flip(sums, key="any") == pytest.approx(p, abs=1e-12)


def test_one_cluster_has_no_interval():
    assert stats.cluster_t([3.0], [10.0]) is None


@pytest.mark.parametrize("clusters", [5, 10])
def test_cluster_interval_covers_the_truth(clusters):
    draw = np.random.Generator(np.random.PCG64(clusters))
    covered = 0
    for _ in range(1500):
        sums = 10 * draw.normal(0, 0.05, clusters) + draw.normal(0, 0.10 * math.sqrt(10), clusters)
        ci = stats.cluster_t(sums.tolist(), [10] * clusters).ci
        covered += ci.lower <= 0 <= ci.upper
    assert 0.92 <= covered / 1500 <= 0.98


DIFFERENCES = [-0.5, -0.25, 0, 0.25, -0.5, -0.25, -0.125, 0, -0.25, 0.125]


@pytest.mark.parametrize("n", [2, 5, 40])
@pytest.mark.parametrize("score", [0.0, 1.0])
def test_scores_that_are_all_right_or_all_wrong_have_the_interval_of_wilson(n, score):
    assert stats.score_interval([score] * n).ci == pytest.approx(tuple(stats.wilson(score * n, n)))


def test_scores_that_agree_have_width_and_no_interval_leaves_the_scale():
    # z^2 = 3.841459: (4 * .5) / (4 + z^2), and z^2 more scores of 1
    assert stats.score_interval([0.5] * 4).ci == pytest.approx((0.2550545, 0.7449455), abs=1e-6)
    # mean .75, s .5, t(3) 3.18245: the t interval is [-.0456, 1.5456]
    assert stats.score_interval([0.0, 1.0, 1.0, 1.0]).ci == (0.0, 1.0)
    assert stats.score_interval([0.5]) is None


def test_scores_with_spread_keep_their_t_interval():
    values = [0.25, 0.5, 0.75] * 30
    assert stats.score_interval(values) == stats.t_interval(values)


def test_t_interval_of_the_printed_differences():
    estimate = stats.t_interval(DIFFERENCES)
    assert estimate.mean == pytest.approx(-0.15)
    assert estimate.se * math.sqrt(10) == pytest.approx(0.2486072, abs=5e-8)
    assert estimate.ci == pytest.approx((-0.3278429, 0.0278429), abs=5e-8)


@pytest.mark.parametrize(("values", "p"), [(DIFFERENCES, 0.125), ([-0.2] * 5, 0.0625), ([-0.3] * 6, 0.03125)])
def test_sign_flip_is_exact_for_few_units(values, p):
    assert stats.sign_flip(values, key="any") == pytest.approx(p, abs=1e-12)


def test_sampled_sign_flip_is_near_the_exact_binomial_value():
    values = [-1.0] * 20 + [1.0] * 8
    exact = scipy_stats.binomtest(8, 28, 0.5).pvalue
    assert stats.sign_flip(values, key="cell") == pytest.approx(exact, abs=0.003)


def test_sampled_sign_flip_never_claims_zero():
    assert stats.sign_flip([-1.0] * 60, key="cell") == pytest.approx(1 / 100_001)


def test_published_perplexity_interval():
    # 20 chunks with mean -.0016 and standard deviation .0190
    base = [math.sin(i) for i in range(20)]
    mean, sd = np.mean(base), np.std(base, ddof=1)
    values = [-0.0016 + 0.0190 * (v - mean) / sd for v in base]
    assert stats.t_interval(values).ci == pytest.approx((-0.01049, 0.00729), abs=5.1e-6)


def test_guard_gives_an_interval_without_spread_the_width_of_tango():
    estimate = stats.t_interval([0.0] * 100)
    assert stats.guard(estimate.ci, estimate.mean, 100) == pytest.approx((-0.03699, 0.03699), abs=5.1e-6)


def test_welch_interval_agrees_with_scipy():
    first, second = [0.1, 0.4, 0.5, 0.9, 0.3], [0.2, 0.9, 1.0, 0.8]
    expected = scipy_stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    assert stats.welch(first, second).ci == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_bootstrap_reproduces_the_published_interval():
    values = [-1.0] * 31 + [0.0] * 69
    interval = stats.bootstrap((values, [1.0] * 100), key="naive 8K")
    assert interval == pytest.approx((-0.40, -0.22), abs=0.0101)


def test_cluster_bootstrap_is_wider_than_one_that_ignores_clusters():
    sums = [-2, -9, -4, -2, -6, -1, 0, 0, -7, 0]
    interval = stats.bootstrap((sums, [10.0] * 10), key="k")
    assert interval.lower < -0.40
    assert interval.upper > -0.22


def test_bootstrap_is_identical_in_another_process():
    call = "stats.bootstrap(([1., -2., 0., 5.], [3., 4., 5., 6.]), key='cell')"
    code = f"from rcq_cli import stats; print(*{call})"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = stats.bootstrap(([1.0, -2.0, 0.0, 5.0], [3.0, 4.0, 5.0, 6.0]), key="cell")
    assert other.stdout.split() == [repr(v) for v in here]


def test_another_cell_draws_other_numbers():
    draws = [stats.generator(label).integers(0, 2**62, size=4).tolist() for label in ("boot|a", "boot|b")]
    assert draws[0] != draws[1]


def test_seed_is_the_first_eight_bytes_of_the_digest():
    seed = int(hashlib.sha256(b"boot|a").hexdigest()[:16], 16)
    expected = np.random.Generator(np.random.PCG64(seed)).integers(0, 2**62, size=4)
    assert stats.generator("boot|a").integers(0, 2**62, size=4).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("raw", "adjusted"),
    [
        ([0.001, 0.012, 0.03, 0.04, 0.5], [0.005, 0.048, 0.09, 0.09, 0.5]),
        ([9.3132257e-10, 2.4647306e-10, 8.6736174e-19], [9.3132257e-10, 4.9294613e-10, 2.6020852e-18]),
        ([], []),
    ],
)
def test_holm_adjustment(raw, adjusted):
    assert stats.holm(raw) == pytest.approx(adjusted, rel=1e-7)


@pytest.mark.parametrize(
    ("alpha", "sizes"), [(0.025, (381, 189, 125, 73, 35, 22)), (0.05, (268, 133, 88, 52, 25, 16))]
)
def test_smallest_passing_n(alpha, sizes):
    for margin, n in zip((0.01, 0.02, 0.03, 0.05, 0.10, 0.15), sizes, strict=True):
        assert stats.smallest_passing_n(margin, alpha) == n
        assert stats.tango_interval(0, 0, n, alpha).lower > -margin
        assert stats.tango_interval(0, 0, n - 1, alpha).lower <= -margin


LARGEST_K = {
    0.01: (None, None, None, None, None, 1, 2, 11, 13),
    0.02: (None, None, 0, 0, 3, 11, 14, 50, 61),
    0.03: (None, None, 2, 3, 11, 27, 34, 116, 140),
    0.05: (1, 2, 11, 14, 34, 80, 97, 325, 394),
    0.10: (12, 14, 52, 63, 143, 250, 275, 500, 550),
}


@pytest.mark.parametrize("margin", LARGEST_K)
def test_largest_number_of_balanced_flips_that_passes(margin):
    z = stats.normal_quantile(0.025)
    for n, expected in zip((100, 110, 200, 220, 330, 500, 550, 1000, 1100), LARGEST_K[margin], strict=True):
        passing = [k for k in range(n // 2 + 1) if stats.tango_statistic(-margin, k, k, n) > z]
        assert (max(passing) if passing else None) == expected


def test_percentile_takes_the_nearest_rank():
    values = [15, 20, 35, 40, 50]
    assert [stats.percentile(values, p) for p in (0, 5, 30, 40, 50, 100)] == [15, 15, 20, 20, 35, 50]


@pytest.mark.parametrize(
    ("r", "n", "length"), [(0, 500, 1), (0.5, 500, 12), (0.7, 500, 18), (0.9, 500, 41), (0.7, 200, 14)]
)
def test_block_length(r, n, length):
    assert stats.block_length(r, n) == length


def test_block_bootstrap_covers_where_the_plain_one_does_not(monkeypatch):
    draw = np.random.Generator(np.random.PCG64(5))

    def series():
        noise, values = draw.normal(size=500), np.empty(500)
        values[0] = noise[0] / math.sqrt(1 - 0.49)
        for i in range(1, 500):
            values[i] = 0.7 * values[i - 1] + noise[i]
        # the constant keeps the ratio of medians a shift of the median
        return (1000 + values).tolist()

    def coverage():
        reference = [[1000.0] * 8]
        covered = 0
        for i in range(300):
            _, ci = stats.latency_ratio(reference, [series()], key=str(i), resamples=200)
            covered += ci.lower <= 1 <= ci.upper
        return covered / 300

    assert coverage() >= 0.88
    monkeypatch.setattr(stats, "block_length", lambda _r, _n: 1)
    assert coverage() <= 0.75
