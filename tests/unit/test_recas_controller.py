import numpy as np
import pytest

from rcq_cli.recas.controller import Controller, allowed_mass


def curve(scale):
    return lambda budget: min(1.0, scale / budget)


def changes(controller, masses, allowed, available):
    budgets = [controller.budget]
    for mass in masses:
        budgets.append(controller.step(mass, allowed, available).budget)
    return np.array(budgets)


def test_the_budget_settles_inside_the_band_and_stays():
    controller = Controller(budget=200, floor=133)
    budgets = changes(controller, [curve(20.0)] * 2000, 0.02, 10**6)
    final = budgets[-1]
    assert 0.5 * 0.02 <= 20.0 / final <= 0.02
    assert (budgets[-200:] == final).all()


@pytest.mark.parametrize("factor", [3.0, 40.0])
def test_a_jump_of_the_mass_is_answered_in_the_same_step(factor):
    controller = Controller(budget=1500, floor=133)
    decision = controller.step(curve(20.0 * factor), 0.02, 10**6)
    assert not decision.exhausted
    assert 20.0 * factor / decision.budget <= 0.02


def test_a_noisy_mass_changes_the_budget_at_most_once_in_sixteen_steps_once_settled():
    draw = np.random.default_rng(3)
    controller = Controller(budget=1400, floor=133)
    masses = [curve(20.0 * factor) for factor in draw.uniform(0.8, 1.2, 3000)]
    budgets = changes(controller, masses, 0.02, 10**6)[200:]
    moved = np.flatnonzero(np.diff(budgets))
    assert (np.diff(moved) >= 16).all()


def test_shrinks_lie_sixteen_steps_apart():
    budgets = changes(Controller(budget=4000, floor=133), [curve(0.001)] * 400, 0.02, 10**6)
    shrunk = np.flatnonzero(np.diff(budgets) < 0)
    assert len(shrunk) == 400 // 16
    assert (np.diff(shrunk) == 16).all()


def test_the_budget_never_falls_below_its_floor_and_never_grows_by_shrinking():
    controller = Controller(budget=140, floor=133)
    assert changes(controller, [curve(0.0)] * 500, 0.02, 10**6).min() == 133
    small = Controller(budget=100, floor=133)
    assert changes(small, [curve(0.0)] * 50, 0.02, 10**6).tolist() == [100] * 51


def test_exit_is_within_bounds_or_flagged():
    draw = np.random.default_rng(4)
    for _ in range(300):
        scale, available = draw.uniform(0, 400), int(draw.integers(200, 5000))
        controller = Controller(budget=200, floor=133)
        decision = controller.step(curve(scale), 0.02, available)
        assert decision.exhausted == (scale / available > 0.02 if scale / 200 > 0.02 else False)
        assert decision.exhausted or scale / decision.budget <= 0.02
        assert decision.budget <= available


def test_a_mass_that_is_not_a_number_counts_as_too_large():
    assert Controller(budget=200, floor=133).step(lambda _: float("nan"), 0.5, 300).exhausted


def test_allowed_mass_moves_the_output_by_exactly_the_limit():
    assert allowed_mass(0.5, 10.0) * 10.0 == 0.5
    assert allowed_mass(0.5, 0.0) == float("inf")
