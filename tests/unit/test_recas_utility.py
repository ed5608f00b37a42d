import math

import pytest
import torch

from rcq_cli.recas.utility import (
    Weights,
    accumulate,
    compatibility,
    heavy_hitter,
    mean_attention,
    stage_evidence,
    utility,
)


def test_compatibility_ignores_shift_and_scale_of_the_scores():
    scores = torch.tensor([[3.0, -1.0, 0.5, 7.0]], dtype=torch.float64)
    assert torch.allclose(compatibility(scores), compatibility(250 * scores - 3), atol=1e-12)


def test_compatibility_of_two_scores_is_the_logistic_of_plus_and_minus_one():
    tr = compatibility(torch.tensor([2.0, 10.0], dtype=torch.float64))
    assert tr.tolist() == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)], abs=1e-12)


def test_constant_scores_give_one_half():
    assert compatibility(torch.full((5,), 40.0)).tolist() == [0.5] * 5


def test_a_token_that_always_gets_its_uniform_share_scores_one_half_at_any_age():
    n, history = 8, torch.zeros(8, dtype=torch.float64)
    for age in range(1, 200):
        history = accumulate(history, torch.full((n,), 1 / n, dtype=torch.float64))
        mean = mean_attention(history, torch.tensor(float(age)))
        assert torch.allclose(heavy_hitter(mean, n), torch.full_like(mean, 0.5), atol=1e-12)


def test_many_rows_at_once_equal_one_row_after_the_other():
    rows = torch.rand(37, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    history = torch.rand(11, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    one_by_one = history
    for row in rows:
        one_by_one = accumulate(one_by_one, row, 0.9)
    assert torch.allclose(accumulate(history, rows, 0.9), one_by_one, atol=1e-12)


def test_no_attention_at_all_scores_zero_and_more_attention_scores_more():
    hi = heavy_hitter(torch.tensor([0.0, 0.1, 0.2, 1.0]), 10)
    assert hi[0] == 0
    assert (hi.diff() > 0).all()
    assert hi.max() < 1


def test_stage_evidence_halves_the_distance_to_one_with_each_link():
    assert stage_evidence(torch.tensor([0.0, 1.0, 2.0, 5.0])).tolist() == [0.0, 0.5, 0.75, 1 - 1 / 32]


def test_lexicographic_weights_put_the_worst_linked_token_above_the_best_unlinked_one():
    weights = Weights(0.7, 0.9, 0.1).lexicographic()
    one, zero = torch.ones(()), torch.zeros(())
    unlinked = utility(one, one, zero, weights)
    linked = utility(zero, zero, stage_evidence(one), weights)
    assert linked >= unlinked


def test_weights_that_already_order_by_links_stay_as_they_are():
    assert Weights(0.1, 0.1, 3.0).lexicographic() == Weights(0.1, 0.1, 3.0)
