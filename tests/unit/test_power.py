"""Printed tables and enumeration as sources for `rcq_cli.power`."""

import math
from itertools import takewhile

import pytest
from scipy.stats import binom

from rcq_cli import power, stats

RATES = ((0.03, 0.01), (0.05, 0.01), (0.10, 0.02), (0.15, 0.02), (0.30, 0.02))
POWER = {
    20: (0, 0, 0.01, 0.05, 0.46),
    50: (0, 0.02, 0.20, 0.51, 0.97),
    100: (0.03, 0.20, 0.56, 0.90, 1),
    110: (0.05, 0.24, 0.62, 0.93, 1),
    200: (0.17, 0.56, 0.91, 1, 1),
    500: (0.54, 0.96, 1, 1, 1),
    550: (0.59, 0.97, 1, 1, 1),
}


@pytest.mark.parametrize("n", POWER)
def test_mcnemar_power(n):
    found = [power.mcnemar_power(n, b, c) for b, c in RATES]
    assert found == pytest.approx(POWER[n], abs=0.0052)


def test_mcnemar_power_equals_the_sum_over_all_tables():
    n, p_b, p_c = 12, 0.4, 0.1
    expected = math.fsum(
        math.comb(n, b) * math.comb(n - b, c) * p_b**b * p_c**c * (1 - p_b - p_c) ** (n - b - c)
        for b in range(n + 1)
        for c in range(n + 1 - b)
        if stats.mcnemar_exact(b, c) < 0.05
    )
    assert power.mcnemar_power(n, p_b, p_c) == pytest.approx(expected, rel=1e-10)


def mid_p_by_scipy(b, c):
    """Twice the probability of less than the smaller count, and once that of the count itself."""
    m, k = b + c, min(b, c)
    if b == c:
        return 1 - float(binom.pmf(k, m, 0.5)) / 2 if m else 1.0
    return float(2 * binom.cdf(k - 1, m, 0.5) + binom.pmf(k, m, 0.5))


def test_power_of_the_mid_p_test_equals_the_sum_over_all_tables():
    n, p_b, p_c = 14, 0.4, 0.1
    expected = math.fsum(
        math.comb(n, b) * math.comb(n - b, c) * p_b**b * p_c**c * (1 - p_b - p_c) ** (n - b - c)
        for b in range(n + 1)
        for c in range(n + 1 - b)
        if mid_p_by_scipy(b, c) < 0.05
    )
    assert power.mcnemar_power(n, p_b, p_c, mid_p=True) == pytest.approx(expected, rel=1e-10)
    assert power.mcnemar_power(n, p_b, p_c) < expected


@pytest.mark.parametrize(
    ("background", "points"),
    [
        (0.00, (33.6, 15.4, 7.8, 7.1, 3.6, 1.4, 0.7)),
        (0.01, (35.4, 17.2, 9.6, 8.9, 5.1, 2.7, 1.7)),
        (0.05, (42.8, 23.0, 14.2, 13.3, 8.3, 4.7, 3.1)),
    ],
)
def test_minimum_detectable_loss(background, points):
    sizes = (22, 50, 100, 110, 220, 550, 1100)
    found = [100 * power.minimum_detectable_loss(n, background) for n in sizes]
    assert found == pytest.approx(points, abs=0.055)


def test_no_loss_is_detectable_with_five_pairs():
    assert power.minimum_detectable_loss(5, 0.0) is None


def test_five_pairs_can_show_a_total_loss_by_mid_p():
    # five of five: mid-p 1/32; all five flip with probability q^5, and q^5 = .8
    assert power.minimum_detectable_loss(5, 0.0, mid_p=True) == pytest.approx(0.8**0.2, abs=1e-6)


PASSING = {
    (0.05, 110): (0.90, 0.76, 0.50, 0.33, 0.21),
    (0.05, 220): (1, 0.98, 0.83, 0.60, 0.37),
    (0.02, 220): (0.45, 0.33, 0.23, 0.15, 0.10),
    (0.10, 110): (1, 1, 0.97, 0.86, 0.62),
}


@pytest.mark.parametrize(("margin", "n"), PASSING)
def test_probability_of_a_pass_for_equal_arms(margin, n):
    z = stats.normal_quantile(0.025)
    limits = [
        len(list(takewhile(lambda b, c=c: stats.tango_statistic(-margin, b, c, n) > z, range(n - c + 1))))
        for c in range(n + 1)
    ]
    for flips, expected in zip((0.01, 0.02, 0.05, 0.10, 0.20), PASSING[margin, n], strict=True):
        log_p, log_rest = math.log(flips / 2), math.log1p(-flips)
        found = math.fsum(
            math.exp(
                math.lgamma(n + 1) - math.lgamma(b + 1) - math.lgamma(c + 1) - math.lgamma(n - b - c + 1)
                + (b + c) * log_p + (n - b - c) * log_rest
            )
            for c, limit in enumerate(limits)
            for b in range(limit)
        )  # fmt: skip
        assert found == pytest.approx(expected, abs=0.0052)


@pytest.mark.parametrize(("b", "c", "n", "margin"), [(2, 2, 100, 0.05), (0, 0, 20, 0.15), (3, 3, 110, 0.05)])
def test_deciding_n_is_where_the_pass_begins(b, c, n, margin):
    size = power.deciding_n(b, c, n, margin)
    z = stats.normal_quantile(0.025)
    assert size > n
    assert stats.tango_statistic(-margin, b / n * size, c / n * size, size) > z
    smaller = size - 1
    assert stats.tango_statistic(-margin, b / n * smaller, c / n * smaller, smaller) <= z


def test_deciding_n_of_a_loss_is_where_it_becomes_sure():
    # five of five flips go one way: p = .0625; six are needed, that is 6/5 of the pairs
    size = power.deciding_n(5, 0, 22, 0.15)
    assert stats.mcnemar_exact(round(5 / 22 * size), 0) < 0.05
    assert stats.mcnemar_exact(round(5 / 22 * (size - 1)), 0) >= 0.05


def test_a_larger_family_needs_more_pairs():
    assert power.deciding_n(5, 0, 22, 0.15, family=4) > power.deciding_n(5, 0, 22, 0.15)


def test_a_difference_at_the_margin_itself_is_never_excluded_by_more_pairs():
    assert power.deciding_n(20_001, 0, 1_000_000, 0.0200011) is None
