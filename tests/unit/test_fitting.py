"""Fitting against brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rcq_cli.errors import SpecError
from rcq_cli.tasks._fitting import fill_floor, fit

COSTS = st.lists(st.integers(0, 7), min_size=5, max_size=400)


def _fit(costs, budget, advance, maximum=None):
    sizes = [sum(costs[:n]) for n in range(len(costs) + 1)]
    probes = []

    def build(n):
        probes.append(n)
        # beyond the list every unit costs one token
        return sizes[n] if n < len(sizes) else sizes[-1] + n - len(costs)

    return fit(build, int, budget, minimum=1, advance=advance, maximum=maximum), build, probes


@given(COSTS, st.integers(7, 2000), st.integers(-50, 50))
def test_it_finds_the_largest_fit_whatever_the_estimate(costs, budget, nonsense):
    fitted, build, _ = _fit(costs, budget, lambda n, _: n + nonsense)
    assert build(fitted.units) == fitted.prompt <= budget < build(fitted.units + 1)


@given(COSTS, st.integers(7, 2000))
def test_it_ends_within_the_bound_of_bisection(costs, budget):
    fitted, _, probes = _fit(costs, budget, lambda n, _: n)
    assert fitted.probes == len(probes) <= 8 + 2 * budget.bit_length() + 4


@given(st.integers(100, 10**6))
def test_a_good_estimate_takes_three_probes(budget):
    fitted, _, _ = _fit([], budget, lambda n, tokens: n + tokens)
    assert (fitted.units, fitted.probes) == (budget, 3)


@given(COSTS, st.integers(7, 2000), st.integers(1, 5))
def test_it_never_takes_more_units_than_there_are(costs, budget, maximum):
    fitted, build, probes = _fit(costs, budget, lambda n, tokens: n + tokens, maximum)
    assert max(probes) <= maximum
    assert fitted.units == maximum or build(fitted.units + 1) > budget


def test_a_minimum_above_the_budget_names_the_smallest_context():
    with pytest.raises(SpecError, match=r"ctx 148 is too small.*context of 248 tokens.*--ctx 248"):
        fit(lambda _: 200, int, 100, minimum=1, advance=lambda n, _: n, reserve=48)


@pytest.mark.parametrize(
    ("budget", "unit", "expected"), [(1000, 3, 0.98), (100, 10, 0.9), (100, 50, 0.8), (65488, 20, 0.98)]
)
def test_the_fill_floor(budget, unit, expected):
    assert fill_floor(budget, unit) == pytest.approx(expected)
