import math

import numpy as np
import pytest

from rcq_cli.recas.estimator import (
    Calibrator,
    MassEstimator,
    conformal_rank,
    from_logit,
    ridge,
    to_logit,
    upper_estimate,
)


@pytest.mark.parametrize(("n", "k"), [(9, 9), (19, 18), (20, 19), (50, 46), (100, 91), (199, 180)])
def test_conformal_ranks_are_those_of_the_table(n, k):
    assert conformal_rank(n, 0.1) == k


def test_fewer_than_nine_probes_promise_nothing_at_ten_percent():
    for n in range(9):
        assert upper_estimate(0.01, [0.0] * n, 0.1) == 1.0
    assert upper_estimate(0.01, [0.0] * 9, 0.1) == 0.01


def test_a_level_of_zero_or_less_promises_nothing():
    assert upper_estimate(0.0, [-1.0] * 500, 0.0) == 1.0
    assert upper_estimate(0.0, [-1.0] * 500, -0.02) == 1.0


@pytest.mark.parametrize("n", [9, 20, 50, 100])
def test_coverage_of_exchangeable_residuals_is_k_over_n_plus_one(n):
    draws = np.random.default_rng(5).random((20000, n + 1))
    rank = conformal_rank(n, 0.1)
    covered = np.mean(draws[:, n] <= np.sort(draws[:, :n], axis=1)[:, rank - 1])
    assert covered == pytest.approx(rank / (n + 1), abs=0.01)


def test_the_upper_estimate_takes_that_very_order_statistic():
    residuals = list(np.random.default_rng(6).random(50) / 10)
    assert upper_estimate(0.2, residuals, 0.1) == pytest.approx(0.2 + sorted(residuals)[45])


def adversary(kind, draw, steps):
    """Masses that see the upper estimate of the very step and go just above it, after a calm beginning."""
    calibrator = Calibrator()
    for i in range(steps):
        upper = calibrator.upper(0.5)
        hit = {"always": True, "random": draw.random() < 0.5, "bursts": (i // 40) % 2 == 0}[kind]
        calm = 0.2 * draw.random()
        calibrator.observe([min(1.0, upper + 1e-6) if hit and i >= 100 else calm], [0.5])
    return calibrator


@pytest.mark.parametrize("kind", ["always", "random", "bursts"])
def test_no_sequence_misses_more_than_the_identity_allows(kind):
    for seed in range(5):
        for steps in (130, 400, 1200):
            found = adversary(kind, np.random.default_rng(seed), steps)
            assert 0 < found.misses / steps <= 0.1 + (0.1 + 0.02) / (0.02 * steps) + 1e-12


def test_the_level_follows_its_recursion():
    calibrator = Calibrator()
    calibrator.residuals = [0.0] * 200
    calibrator.observe([0.9], [0.5])
    assert calibrator.level == pytest.approx(0.1 + 0.02 * (0.1 - 1))
    calibrator.observe([0.1], [0.5])
    assert calibrator.level == pytest.approx(0.1 + 0.02 * (0.1 - 1) + 0.02 * 0.1)


def test_one_missed_head_is_a_miss():
    calibrator = Calibrator()
    calibrator.residuals = [0.0] * 200
    calibrator.observe([0.1, 0.1, 0.9], [0.5, 0.5, 0.5])
    assert (calibrator.misses, calibrator.tested, calibrator.probes) == (1, 1, 1)


def test_logits_and_masses_are_inverse():
    for mass in (0.0, 1e-4, 0.3, 1.0):
        assert from_logit(to_logit(mass)) == pytest.approx(mass, abs=2e-6)
    assert from_logit(-800.0) == 0.0
    assert from_logit(800.0) == 1.0


def test_ridge_is_the_minimum_of_its_penalised_sum():
    draw = np.random.default_rng(7)
    rows, targets = draw.standard_normal((40, 3)), draw.standard_normal(40)
    weights = ridge(rows, targets, 0.05)

    def loss(w):
        return ((rows @ w - targets) ** 2).sum() + 40 * 0.05 * (w**2).sum()

    for _ in range(50):
        assert loss(weights) <= loss(weights + draw.standard_normal(3) * 1e-3)


def test_the_estimator_learns_a_mass_that_depends_on_a_feature():
    draw = np.random.default_rng(8)
    estimator = MassEstimator()
    assert estimator.estimate([0.0, 0.0]) is None
    for _ in range(200):
        x = draw.standard_normal(2)
        estimator.train(list(x), from_logit(-4 + x[0]))
    errors = []
    for _ in range(100):
        x = draw.standard_normal(2)
        errors.append(abs(to_logit(estimator.estimate(list(x))) - (-4 + x[0])))
    assert np.mean(errors) < 0.1


def test_before_the_first_fit_the_last_probe_speaks():
    estimator = MassEstimator()
    estimator.train([1.0], 0.25)
    assert estimator.estimate([3.0]) == pytest.approx(0.25, abs=1e-5)
    assert math.isfinite(estimator.estimate([1e9]))


@pytest.mark.parametrize(("target", "least"), [(0.5, 1), (0.1, 9), (0.05, 19), (0.01, 99)])
def test_a_calibrator_is_ready_with_the_first_probe_that_lets_it_promise_something(target, least):
    calibrator = Calibrator(target)
    for count in range(least + 1):
        assert calibrator.ready == (count >= least)
        assert (upper_estimate(0.01, calibrator.residuals, target) < 1) == calibrator.ready
        calibrator.residuals = [*calibrator.residuals, 0.0]
