"""The bounds as inequalities: enumerated sign vectors, adversarial weights, extreme exponents, equalities.

An instance is a handful of tokens with scores that err by at most delta per block. What really happens is
computed here, in float64 or with mpmath; the bounds see the masses of the erring scores alone.
"""

import itertools
import math
from typing import NamedTuple

import mpmath
import numpy as np
import pytest
import torch

from rcq_cli.certify.bounds import (
    MARGIN,
    KeyTerms,
    Masses,
    breadth,
    key_split,
    key_terms,
    rounding,
    value_split,
)

UNDERFLOW = 2.0**-1022


def f64(x) -> torch.Tensor:
    return torch.as_tensor(np.asarray(x, dtype=np.float64))


class Instance(NamedTuple):
    """Tokens with approximate scores, their block, the bound of each block and which blocks are skipped."""

    scores: np.ndarray
    block: np.ndarray
    delta: np.ndarray
    skipped: np.ndarray
    values: np.ndarray

    @property
    def blocks(self) -> int:
        return len(self.delta)


def masses(x: Instance) -> Masses:
    """What a step knows: logarithms of block masses relative to the active total."""
    active = ~x.skipped[x.block]
    top = x.scores[active].max()
    total = np.exp(x.scores[active] - top).sum()
    log_weight, log_square, log_flushed, log_peak = (np.full(x.blocks, -np.inf) for _ in range(4))
    for b in range(x.blocks):
        s = x.scores[x.block == b] - top
        log_weight[b] = s.max() + np.log(np.exp(s - s.max()).sum()) - np.log(total)
        log_square[b] = 2 * s.max() + np.log(np.exp(2 * (s - s.max())).sum()) - 2 * np.log(total)
        log_flushed[b] = np.log(len(s)) + min(s.max(), math.log(UNDERFLOW)) - np.log(total)
        log_peak[b] = s.max() - np.log(total)
    logs = (f64(a) for a in (log_weight, log_square, log_flushed))
    return Masses(*logs, torch.tensor(x.skipped), f64(log_peak))


def used_output(x: Instance) -> tuple[np.ndarray, np.ndarray]:
    """Weights over all tokens (0 on skipped ones) and the output they give."""
    active = ~x.skipped[x.block]
    weights = np.where(active, np.exp(x.scores - x.scores[active].max()), 0.0)
    weights /= weights.sum()
    return weights, weights @ x.values


def exact_weights(x: Instance, errors: np.ndarray) -> np.ndarray:
    true = x.scores + errors
    weights = np.exp(true - true.max())
    return weights / weights.sum()


def joint_bound(
    x: Instance, centre: np.ndarray, wide: np.ndarray | None = None, spectrum: float | None = None
) -> tuple[float, float]:
    """Bound of key and dropping error together, and the bound on total variation.

    With `wide` errors of a block have norm wide * delta, and spectral norms of blocks are known.
    """
    _, output = used_output(x)
    m, delta = masses(x), f64(x.delta)
    terms = key_terms(m, delta, None if wide is None else f64(wide))
    centred = x.values - centre
    radius = f64([np.linalg.norm(centred[x.block == b], axis=1).max() for b in range(x.blocks)])
    away = f64(float(np.linalg.norm(centre - output)))
    if spectrum is None:
        spectrum = float(np.linalg.eigvalsh(centred.T @ centred)[-1]) * (1 + 1e-12)
    joint = None if wide is None else f64([np.linalg.norm(centred[x.block == b], 2) for b in range(x.blocks)])
    split = key_split(terms, radius, away, f64(spectrum), joint)
    variation = float(terms.total_variation)
    return min(float(split.value()), 2 * float(radius.max()) * variation), variation


def error_vectors(x: Instance, gen: np.random.Generator, interior: int = 5):
    """Every extreme choice of score errors (each token at plus or minus its bound), and some inside."""
    limit = x.delta[x.block]
    for signs in itertools.product((-1.0, 1.0), repeat=len(limit)):
        yield limit * signs
    for _ in range(interior):
        yield limit * gen.uniform(-1, 1, len(limit))


def worst_case(x: Instance, seed: int) -> tuple[float, float]:
    """Largest output error and largest total variation that any choice of score errors causes."""
    weights, output = used_output(x)
    worst = worst_tv = 0.0
    for errors in error_vectors(x, np.random.default_rng(seed)):
        p = exact_weights(x, errors)
        worst = max(worst, float(np.linalg.norm(p @ x.values - output)))
        worst_tv = max(worst_tv, float(0.5 * np.abs(p - weights).sum()))
    return worst, worst_tv


def random_instance(seed: int, *, skip: bool, size: float = 1.0) -> Instance:
    gen = np.random.default_rng(seed)
    block = np.sort(np.concatenate((np.arange(4), gen.integers(0, 4, 4))))
    skipped = np.array([False, False, skip, skip and bool(seed % 2)])
    delta = size * gen.choice([1e-9, 0.02, 0.3, 1.5], 4)
    values = gen.normal(size=(8, 3)) * np.exp(gen.normal(size=(8, 1)))
    return Instance(gen.normal(size=8) * gen.choice([0.3, 2, 8]), block, delta, skipped, values)


def worst_case_of_norm(x: Instance, wide: np.ndarray) -> tuple[float, float]:
    """The same among errors whose norm over block b is at most wide[b] * delta[b].

    Tokens move up, down or not at all, as far as the norm allows that many of their block.
    """
    weights, output = used_output(x)
    signs = np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=len(x.scores))))
    moving = np.stack([(signs[:, x.block == b] != 0).sum(1) for b in range(x.blocks)], 1)
    reach = x.delta * np.minimum(1.0, wide / np.sqrt(np.maximum(moving, 1)))
    true = x.scores + signs * reach[:, x.block]
    p = np.exp(true - true.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    error = np.linalg.norm(p @ x.values - output, axis=1)
    return float(error.max()), float(0.5 * np.abs(p - weights).sum(1).max())


def random_breadth(seed: int) -> np.ndarray:
    return np.random.default_rng(1000 + seed).choice([0.2, 0.6, 1.0, 1.3, 3.0], 4)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("size", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(14))
def test_no_score_errors_of_a_known_norm_beat_the_joint_bound_or_the_total_variation(seed, size, skip):
    x, wide = random_instance(seed, skip=skip, size=size), random_breadth(seed)
    centre = np.random.default_rng(seed).normal(size=3) * (seed % 3)
    bound, variation = joint_bound(x, centre, wide)
    worst, worst_tv = worst_case_of_norm(x, wide)
    assert worst <= bound
    assert worst_tv <= variation
    assert size > 1 or bound < 60 * worst + 1e-6


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("gap", [0.5, 3.0, 8.0, 30.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_head_that_reads_one_token_keeps_its_bound_when_errors_have_a_known_norm(seed, gap, skip):
    x, wide = random_instance(seed, skip=skip, size=2.0), random_breadth(seed)
    scores = x.scores.copy()
    scores[seed % 2] = scores.max() + gap
    x = x._replace(scores=scores)
    bound, variation = joint_bound(x, np.zeros(3), wide)
    worst, worst_tv = worst_case_of_norm(x, wide)
    assert worst <= bound
    assert worst_tv <= variation
    assert gap < 30 or variation < 1e-5


def test_the_light_tokens_beside_the_heaviest_count_with_all_that_they_may_gain():
    """Where one token holds all but the square root of S2, its share is not to be taken off the block's."""
    weights = np.array([0.59, 0.01, 0.4])
    delta = np.array([math.log(1000), 1e-12])
    x = Instance(np.log(weights), np.array([0, 0, 1]), delta, np.zeros(2, bool), np.eye(3))
    wide = np.ones(2)
    _, variation = joint_bound(x, np.zeros(3), wide)
    p = exact_weights(x, np.array([0.0, delta[0], 0.0]))
    assert 0.89 < 0.5 * np.abs(p - weights).sum() <= variation
    calm = x._replace(delta=np.array([0.02, 1e-12]), scores=np.log([0.99, 0.005, 0.005]))
    worst, reached = worst_case_of_norm(calm, wide)[1], joint_bound(calm, np.zeros(3), wide)[1]
    assert worst <= reached <= 0.01001  # 1 - 0.99, although 0.02 of almost everything may move


@pytest.mark.parametrize("pattern", [[1, -1] * 8, [4, -4] + [1, -1] * 7], ids=["even", "one far value"])
def test_errors_that_follow_the_values_reach_the_joint_bound(pattern):
    """(1 / n) ||e|| ||a||, once as cw rv and once as sqrt(c2) sv; the spectral form is out of the way."""
    away, delta = np.array(pattern, dtype=np.float64), 1e-4
    values = np.stack((away, np.zeros(16)), 1)
    x = Instance(np.zeros(16), np.zeros(16, int), np.array([delta]), np.array([False]), values)
    bound, variation = joint_bound(x, np.zeros(2), np.ones(1), spectrum=1e9)
    p = exact_weights(x, delta * away / np.linalg.norm(away))
    error = float(np.linalg.norm(p @ values))
    assert error <= bound <= error * 1.001
    moved = 0.5 * np.abs(p - 1 / 16).sum()
    assert moved <= variation <= 1.001 * delta / 4


def test_one_token_that_moves_reaches_the_squares_of_the_spectral_form():
    """pmax^2 wide^2 x^2: one of sixteen rows along its own axis takes all of the norm."""
    delta = 1e-4
    x = Instance(np.zeros(16), np.zeros(16, int), np.array([delta]), np.array([False]), np.eye(16))
    terms = key_terms(masses(x), f64(x.delta), f64([1.0]))
    assert float(terms.c2) == pytest.approx((delta / 16) ** 2, rel=1e-3)
    assert float(terms.cw) == pytest.approx(delta / 4, rel=1e-3)  # all of them alike: (1 / n) sum |e|
    plain = key_terms(masses(x), f64(x.delta))
    assert float(plain.c2) == pytest.approx(16 * (delta / 16) ** 2, rel=1e-3)
    assert float(plain.cw) == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_knowing_more_of_a_block_never_makes_a_bound_larger(seed, skip):
    x = random_instance(seed, skip=skip, size=(0.1, 1.0, 3.0)[seed % 3])
    m, delta, near = masses(x), f64(x.delta), 1 + 1e-12
    grown, shift = m.log_weight.exp(), torch.expm1(delta)
    old = KeyTerms(
        torch.where(m.skipped, grown * delta.exp(), grown * shift),
        m.log_square.exp() * torch.where(m.skipped, delta.exp(), shift).square(),
        (grown * (-delta).exp()).sum() / MARGIN,
        f64(1.0),
    )
    new = key_terms(m, delta, f64(random_breadth(seed)))
    assert bool((new.cw <= old.cw * near).all())
    assert bool((new.c2 <= old.c2 * near).all())
    assert new.total_variation <= key_terms(m._replace(log_peak=None), delta).total_variation * near
    radius = f64([np.linalg.norm(x.values[x.block == b], axis=1).max() for b in range(4)])
    joint = f64([np.linalg.norm(x.values[x.block == b], 2) for b in range(4)])
    for spectrum in (1e-3, 4.0, 1e6):
        before = key_split(old, radius, f64(0.3), f64(spectrum)).value()
        assert key_split(new, radius, f64(0.3), f64(spectrum), joint).value() <= before * near


def test_errors_of_one_direction_are_as_broad_as_their_matrix_and_others_as_the_block():
    delta, rest = f64([0.2, 0.2, 0.2]), f64([0.0, 0.2, 0.1])
    wide = breadth(delta, rest, f64([0.3, 0.0, 0.1]), 16)
    assert wide.tolist() == pytest.approx([1.5, 4.0, 2.5], rel=1e-3)
    assert bool((wide >= f64([1.5, 4.0, 2.5])).all())
    unknown = breadth(
        f64([math.inf, math.inf, 1.0]), f64([math.inf, 0.0, 0.0]), f64([0.0, math.inf, 1e9]), 16
    )
    assert unknown.tolist() == pytest.approx([4.0] * 3, rel=1e-3)


@pytest.mark.parametrize("wide", [0.0, 1e-300, 1.0])
@pytest.mark.parametrize("size", [800.0, 1e30, math.inf])
def test_what_cannot_be_evaluated_counts_as_infinite(size, wide):
    x = random_instance(3, skip=True, size=1.0)._replace(delta=np.full(4, size))
    bound, variation = joint_bound(x, np.zeros(3), np.full(4, wide))
    _, output = used_output(x)
    assert variation == 1.0
    assert np.linalg.norm(x.values - output, axis=1).max() <= bound < math.inf


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("seed", range(14))
def test_no_choice_of_score_errors_beats_the_joint_bound_or_the_total_variation(seed, skip):
    x = random_instance(seed, skip=skip)
    centre = np.random.default_rng(seed).normal(size=3) * (seed % 3)
    bound, variation = joint_bound(x, centre)
    worst, worst_tv = worst_case(x, seed)
    assert worst <= bound
    assert worst_tv <= variation
    assert bound < 40 * worst + 1e-6  # a bound that says nothing would pass the lines above


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("gap", [0.5, 3.0, 8.0, 30.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_head_that_reads_one_token_is_known_well_and_no_choice_of_score_errors_beats_its_bound(
    seed, gap, skip
):
    x = random_instance(seed, skip=skip, size=2.0)
    scores = x.scores.copy()
    scores[seed % 2] = scores.max() + gap  # blocks 0 and 1 are never skipped
    x = x._replace(scores=scores)
    bound, variation = joint_bound(x, np.zeros(3))
    worst, worst_tv = worst_case(x, seed)
    assert worst <= bound
    assert worst_tv <= variation
    if gap == 30.0:  # scores that err by 3 nats, and yet
        assert variation < 1e-5


def test_the_total_variation_of_one_error_bound_is_tanh_of_half_of_it_and_is_reached():
    """x = 1 / (1 + e^delta) of the mass moving up attains tanh(delta / 2)."""
    for delta in (0.01, 0.5, 3.0):
        x = 1 / (1 + math.exp(delta))
        scores = np.log(np.array([x, 1 - x]))
        instance = Instance(scores, np.array([0, 1]), np.full(2, delta), np.zeros(2, bool), np.eye(2))
        _, variation = joint_bound(instance, np.zeros(2))
        p = exact_weights(instance, np.array([delta, -delta]))
        reached = 0.5 * np.abs(p - np.array([x, 1 - x])).sum()
        assert reached == pytest.approx(math.tanh(delta / 2), rel=1e-12)
        assert reached <= variation <= reached * 1.001


def test_the_triangle_bound_becomes_an_equality_for_two_tokens_and_small_errors():
    delta = 1e-4
    values = np.array([[1.0, 0.0], [-1.0, 0.0]])
    x = Instance(np.zeros(2), np.array([0, 1]), np.full(2, delta), np.zeros(2, bool), values)
    bound, _ = joint_bound(x, np.zeros(2))
    p = exact_weights(x, np.array([delta, -delta]))
    error = float(np.linalg.norm(p @ values))
    assert error <= bound <= error * 1.001


@pytest.mark.parametrize("gap", [157.0, 400.0, 690.0, 900.0])
@pytest.mark.parametrize("skipped", [False, True])
def test_a_block_far_below_the_maximum_counts_when_its_score_error_can_lift_it(gap, skipped):
    """Squared weights underflow below e^-372 and weights below e^-708: neither may drop out of the bound."""
    mpmath.mp.dps = 60
    values = np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 16.0]])
    block = np.array([0, 1, 2])
    for lift in (-2.0, 0.0, 3.0, 120.0):
        delta = np.array([1e-12, 1e-12, gap + lift])
        x = Instance(np.array([0.0, -1.0, -gap]), block, delta, np.array([False, False, skipped]), values)
        bound, variation = joint_bound(x, np.zeros(2))
        weights = [mpmath.exp(s + e) for s, e in zip(x.scores, delta, strict=True)]
        share = float(weights[2] / sum(weights))
        assert 16 * share <= bound <= 40
        assert share <= variation <= 1


def test_a_light_token_going_up_while_the_heavy_one_goes_down_is_covered():
    """The normaliser falls to 0.39 here: a bound that took it for 1 would be too small."""
    for share in (0.001, 0.02, 0.1):
        values = np.array([[1.0, 0.0], [-1.0, 0.0]])
        x = Instance(np.log([share, 1 - share]), np.arange(2), np.ones(2), np.zeros(2, bool), values)
        _, output = used_output(x)
        bound, _ = joint_bound(x, output)
        p = exact_weights(x, np.array([1.0, -1.0]))
        assert np.linalg.norm(p @ values - output) <= bound


def test_weights_that_were_flushed_to_zero_count_with_what_their_scores_may_hide():
    """A block of no mass at all at exp(-157) in float32 may truly hold everything when scores err by 277."""
    log_weight = f64([0.0, -np.inf])
    log_flushed = f64([-np.inf, math.log(4 * 2.0**-126)])
    m = Masses(log_weight, 2 * log_weight, log_flushed, torch.tensor([False, False]))
    terms = key_terms(m, f64([1e-6, 277.0]))
    radius = f64([0.0, 16.0])
    bound = min(
        float(key_split(terms, radius, f64(0.0), f64(256.0)).value()), 32 * float(terms.total_variation)
    )
    assert 16.0 <= bound <= 32.1


@pytest.mark.parametrize("size", [800.0, 1e4, 1e30])
def test_bounds_stay_finite_and_cover_when_every_error_bound_is_enormous(size):
    x = random_instance(3, skip=True, size=size)
    bound, variation = joint_bound(x, np.zeros(3))
    _, output = used_output(x)
    assert variation == 1.0
    assert np.linalg.norm(x.values - output, axis=1).max() <= bound < math.inf


def test_skipping_a_block_costs_at_most_the_mass_it_may_hold():
    """Dropping with exact scores: o - o' = delta_p (mean of dropped - mean of kept), an identity."""
    values = np.array([[1.0, 0.0], [0.9, 0.2], [-2.0, 1.0]])
    exact = np.array([1e-14, 1e-14, 1e-14])
    x = Instance(np.array([0.0, -0.3, -4.0]), np.arange(3), exact, np.array([False, False, True]), values)
    bound, variation = joint_bound(x, values[:2].mean(0))
    p, (_, output) = exact_weights(x, np.zeros(3)), used_output(x)
    identity = p[2] * np.linalg.norm(values[2] - output)
    assert np.linalg.norm(p @ values - output) == pytest.approx(identity, rel=1e-12)
    assert identity <= bound <= 1.2 * identity
    assert p[2] <= variation <= 1.001 * p[2]


def test_the_bound_does_not_depend_on_where_the_centre_is_for_soundness():
    x = random_instance(5, skip=True)
    _, output = used_output(x)
    worst = max(
        np.linalg.norm(exact_weights(x, e) @ x.values - output)
        for e in error_vectors(x, np.random.default_rng(0))
    )
    for shift in (0.0, 1.0, 100.0):
        assert worst <= joint_bound(x, np.full(3, shift))[0]


def test_every_split_of_the_sorted_sum_is_offered_and_the_smallest_is_taken():
    x = random_instance(8, skip=False)
    m, delta = masses(x), f64(x.delta)
    terms = key_terms(m, delta)
    radius = f64([np.linalg.norm(x.values[x.block == b], axis=1).max() for b in range(4)])
    spectrum = f64(float(np.linalg.eigvalsh(x.values.T @ x.values)[-1]))
    got = float(key_split(terms, radius, f64(0.7), spectrum).value())
    cw, c2, z = terms.cw.numpy(), terms.c2.numpy(), float(terms.z_low)
    order = np.argsort(-cw * (radius.numpy() + 0.7), kind="stable")
    options = []
    for j in range(5):
        head, rest = order[:j], order[j:]
        triangle = (cw[head] * (radius.numpy()[head] + 0.7)).sum()
        options.append((triangle + math.sqrt(float(spectrum) * c2[rest].sum()) + 0.7 * cw[rest].sum()) / z)
    assert got == pytest.approx(min(options) * MARGIN, rel=1e-9)


def test_removing_contributions_predicts_what_remains():
    x = random_instance(2, skip=True)
    terms = key_terms(masses(x), f64(x.delta))
    split = key_split(terms, torch.ones(4, dtype=torch.float64), f64(0.5), f64(4.0))
    left = split.after_removing()
    assert float(left[0]) == pytest.approx(float(split.value()), rel=1e-12)
    assert bool((left[1:] <= left[:-1] * (1 + 1e-12)).all())
    assert float(left[-1]) == 0


def value_instance(seed: int, tokens: int = 24, blocks: int = 4):
    gen = np.random.default_rng(seed)
    residual = gen.normal(size=(tokens, 5)) * gen.choice([0.1, 1.0, 30.0], (tokens, 1))
    return gen, residual, np.repeat(np.arange(blocks), tokens // blocks)


def value_masses(weights: np.ndarray, block: np.ndarray) -> Masses:
    count = block.max() + 1
    with np.errstate(divide="ignore"):
        mass = np.log([weights[block == b].sum() for b in range(count)])
        square = np.log([(weights[block == b] ** 2).sum() for b in range(count)])
    nothing = torch.full((count,), -torch.inf, dtype=torch.float64)
    return Masses(f64(mass), f64(square), nothing, torch.zeros(count, dtype=torch.bool))


def value_bound(
    weights: np.ndarray,
    residual: np.ndarray,
    block: np.ndarray,
    spectrum: float | None = None,
    *,
    joint=False,
) -> float:
    rows = [residual[block == b] for b in range(block.max() + 1)]
    eta = f64([np.linalg.norm(part, axis=1).max() for part in rows])
    if spectrum is None:
        spectrum = float(np.linalg.eigvalsh(residual.T @ residual)[-1]) * (1 + 1e-12)
    together = f64([np.linalg.norm(part, 2) for part in rows]) if joint else None
    return float(value_split(value_masses(weights, block), eta, f64(spectrum), together).value())


@pytest.mark.parametrize("seed", range(30))
def test_no_weights_beat_the_value_bound(seed):
    gen, residual, block = value_instance(seed)
    direction = gen.normal(size=5)
    for power in (0, 1, 3, 5):
        weights = np.maximum(residual @ direction, 0) ** power + 1e-300
        weights /= weights.sum()
        for spectrum in (None, 1e9):
            plain = value_bound(weights, residual, block, spectrum)
            bound = value_bound(weights, residual, block, spectrum, joint=True)
            assert np.linalg.norm(weights @ residual) <= bound <= plain * (1 + 1e-12)


def test_residuals_of_a_block_that_have_nothing_in_common_reach_its_spectral_norm():
    residual, block = 3 * np.eye(16), np.zeros(16, int)
    weights = np.full(16, 1 / 16)
    assert value_bound(weights, residual, block, 1e9, joint=True) == pytest.approx(3 / 4, rel=1e-3)
    assert value_bound(weights, residual, block, 1e9) == pytest.approx(3.0, rel=1e-3)
    unknown = value_split(value_masses(weights, block), f64([3.0]), f64(1e9), f64([math.inf]))
    assert float(unknown.value()) == pytest.approx(3.0, rel=1e-3)


def test_the_value_bound_is_exact_for_one_token_and_for_equal_residuals():
    residual = np.array([[3.0, -4.0]])
    assert value_bound(np.ones(1), residual, np.zeros(1, int)) == pytest.approx(5.0, rel=1e-3)
    equal = np.tile(np.array([[1.0, 2.0, 2.0]]), (64, 1))
    weights = np.full(64, 1 / 64)
    assert value_bound(weights, equal, np.repeat(np.arange(8), 8)) == pytest.approx(3.0, rel=1e-3)


def test_the_value_bound_has_the_unit_of_the_values():
    gen, residual, block = value_instance(7)
    weights = gen.dirichlet(np.ones(24))
    once = value_bound(weights, residual, block)
    assert value_bound(weights, 1000 * residual, block) == pytest.approx(1000 * once, rel=1e-9)


def test_promoted_and_skipped_blocks_add_nothing_to_the_value_bound():
    block = value_instance(9)[2]
    m = value_masses(np.full(24, 1 / 24), block)
    eta = f64([1.0, 2.0, 0.0, 4.0])
    skipped = torch.tensor([False, False, False, True])
    bound = float(value_split(m._replace(skipped=skipped), eta, f64(1e9)).value())
    assert bound == pytest.approx((1.0 + 2.0) / 4, rel=1e-3)


@pytest.mark.parametrize("tokens", [3, 500, 20000])
def test_the_rounding_term_covers_a_weighted_sum_in_the_precision_it_names(tokens):
    """float32 sums in one run, against float64; the term is asked for float32 units."""
    gen = np.random.default_rng(tokens)
    weights = np.exp(gen.normal(size=tokens) * 3).astype(np.float32)
    weights /= weights.max()
    values = (gen.normal(size=(tokens, 16)) + 30).astype(np.float32)
    top, bottom = np.zeros(16, np.float32), np.float32(0)
    for start in range(tokens):
        top = (top + weights[start] * values[start]).astype(np.float32)
        bottom = np.float32(bottom + weights[start])
    got = (top / bottom).astype(np.float64)
    w, v = weights.astype(np.float64), values.astype(np.float64)
    truth, mean = w @ v / w.sum(), float(w @ np.linalg.norm(v, axis=1) / w.sum())
    args = (f64(mean), f64(float(np.linalg.norm(got))), tokens, 16)
    term = float(rounding(*args, f64(float(w.sum())), (2.0**-24, 2.0**-126)))
    assert np.linalg.norm(got - truth) <= term
    assert float(rounding(*args, f64(float(w.sum())), (2.0**-53, 2.0**-1022))) < 1e-6 * term


def test_all_zero_values_have_no_rounding_error():
    zero = torch.zeros(2, dtype=torch.float64)
    assert rounding(zero, zero, 100, 16, torch.ones(2), (2.0**-24, 2.0**-126)).tolist() == [0, 0]
