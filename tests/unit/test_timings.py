"""Statistics of step times: honest percentiles, warm-up, interleaved ratios."""

import math
import random

import pytest

from rcq_cli.timings import MINIMUM_N, abba, growth_exponent, paired_ratio, settled, summary


@pytest.mark.parametrize(("percent", "needed"), MINIMUM_N.items())
def test_the_least_n_is_the_first_whose_maximum_covers_the_percentile(percent: int, needed: int):
    # P(largest of n lies above the p-quantile) = 1 - p^n
    assert 1 - (percent / 100) ** needed >= 0.95
    assert 1 - (percent / 100) ** (needed - 1) < 0.95


@pytest.mark.parametrize(
    ("n", "known"),
    [(4, []), (5, ["p50"]), (28, ["p50"]), (29, ["p50", "p90"]), (298, ["p50", "p90", "p95"]),
     (299, ["p50", "p90", "p95", "p99"])],
)  # fmt: skip
def test_a_percentile_the_steps_do_not_support_is_null_with_a_reason(n: int, known: list[str]):
    record = summary(list(range(1, n + 1)))
    for name in ("p50", "p90", "p95", "p99"):
        if name in known:
            assert record[name] == math.ceil(int(name[1:]) / 100 * n) / 1e6
        else:
            assert record[name] is None
            assert f"n is {n}" in record[f"{name}_status"]


def test_outliers_are_counted_and_kept():
    record = summary([100, 101, 99, 100, 102, 98, 5000])
    assert record["outliers"] == 1
    assert record["max"] == 5000 / 1e6
    assert record["n"] == 7


def test_a_cold_start_is_not_settled_until_sixteen_steps_agree():
    cold = [9000, 4000, 2000, 1500, 1300, 1200, 1100, 1050]
    assert not settled(cold)
    assert not settled(cold + [1000] * 8)
    assert settled(cold + [1000] * 16)
    assert not settled([1000] * 8 + [1021] * 8)
    assert settled([1000] * 8 + [1019] * 8)


def test_the_ratio_of_interleaved_arms_leaves_out_the_steps_after_a_switch():
    reference = [[9_000_000, 9_000_000, *[1_000_000] * 10] for _ in range(12)]
    candidate = [[1, 1, *[500_000 + 1000 * i] * 10] for i in range(12)]
    found = paired_ratio(reference, candidate)
    expected = math.exp(sum(math.log(0.5 + 0.001 * i) for i in range(12)) / 12)
    assert found.value == pytest.approx(expected)
    assert found.verdict == "faster"
    assert found.ci is not None
    assert found.ci.lower < expected < found.ci.upper


def test_equal_arms_under_slow_drift_are_rarely_called_different():
    wrong = 0
    for seed in range(200):
        draw, drift, state = random.Random(seed), 0.0, 0.0
        arms = {"reference": [], "candidate": []}
        for pair in abba(12):
            for arm in pair:
                block = []
                for _ in range(25):
                    drift += 0.0005
                    state = 0.6 * state + draw.gauss(0, 0.02)
                    block.append(round(10_000_000 * math.exp(drift + state)))
                arms[arm].append(block)
        wrong += paired_ratio(arms["reference"], arms["candidate"]).verdict in ("faster", "slower")
    assert wrong <= 16


def test_small_differences_are_the_same_and_wide_intervals_undecided():
    same = paired_ratio([[10**8] * 5] * 6, [[10**8 + 10**5] * 5] * 6)
    assert same.verdict == "same"
    apart = paired_ratio([[10**8] * 5] * 4, [[5 * 10**7] * 5, [2 * 10**8] * 5] * 2)
    assert apart.verdict == "inconclusive"
    assert paired_ratio([[10**8] * 5], [[10**7] * 5]).verdict == "inconclusive"


def test_the_growth_exponent_is_that_of_a_power_law():
    sizes = [1024, 4096, 16384]
    assert growth_exponent(sizes, [3e-7 * s**1.5 for s in sizes]) == pytest.approx(1.5)
    assert growth_exponent([4096], [1.0]) is None
