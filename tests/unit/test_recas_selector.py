import pytest
import torch

from rcq_cli.recas.dropped import dropped_bound, raw_bound, widest_bound
from rcq_cli.recas.selector import covering, protected, sparse_scores, top
from rcq_cli.recas.utility import Weights, stage_evidence, utility


def none(n):
    return torch.zeros(n, dtype=torch.bool)


def test_sinks_and_window_are_protected():
    assert protected(10, 2, 3).nonzero()[:, 0].tolist() == [0, 1, 7, 8, 9]
    assert protected(4, 2, 3).all()


def test_top_takes_the_best_and_ties_go_to_the_newer():
    score = torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0])
    assert top(score, 2, none(5)).tolist() == [False, False, True, True, False]


def test_top_keeps_protected_tokens_within_its_count():
    score = torch.tensor([0.0, 5.0, 4.0, 3.0, 1.0])
    assert top(score, 3, protected(5, 1, 1)).tolist() == [True, True, False, False, True]
    assert top(score, 1, protected(5, 1, 1)).tolist() == [True, False, False, False, True]


def test_covering_is_the_shortest_prefix_that_reaches_the_share():
    draw = torch.Generator().manual_seed(3)
    for _ in range(200):
        score = torch.rand(12, dtype=torch.float64, generator=draw)
        mass = torch.rand(12, dtype=torch.float64, generator=draw)
        mass /= mass.sum()
        chosen = covering(score, mass, 0.7, none(12))
        order = sorted(range(12), key=lambda i: -float(score[i]))
        count = next(k for k in range(13) if float(mass[order[:k]].sum()) >= 0.7)
        assert set(chosen.nonzero()[:, 0].tolist()) == set(order[:count])


def test_covering_everything_leaves_nothing_out():
    assert covering(torch.rand(9), torch.zeros(9), 1.0, none(9)).all()


def test_covering_works_head_by_head():
    score, mass = torch.rand(3, 20), torch.rand(3, 20)
    both = covering(score, mass, 0.5, none(20))
    assert torch.equal(both[1], covering(score[1], mass[1], 0.5, none(20)))


def test_a_dormant_linked_unit_stays_under_lexicographic_weights_whatever_attention_it_got():
    n, linked = 300, slice(40, 56)
    links = torch.zeros(n, dtype=torch.float64)
    links[linked] = 1
    draw = torch.Generator().manual_seed(5)
    weights = Weights().lexicographic()
    for _ in range(50):
        tr, hi = torch.rand(2, n, dtype=torch.float64, generator=draw)
        tr[linked] = hi[linked] = 0
        kept = top(utility(tr, hi, stage_evidence(links), weights), 16 + 132, protected(n))
        assert kept[linked].all()


def test_no_utility_weight_leaves_the_order_of_the_scores():
    standard, worth = torch.randn(20), torch.rand(20)
    assert torch.equal(sparse_scores(standard, worth, 0.0), standard)


# -- the dropped mass ---------------------------------------------------------------------------------------


def head(draw, n=64, d=8):
    mass = torch.softmax(3 * torch.randn(n, dtype=torch.float64, generator=draw), 0)
    values = torch.randn(n, d, dtype=torch.float64, generator=draw)
    values += 3 * torch.randn(d, dtype=torch.float64, generator=draw)
    keep = torch.rand(n, generator=draw) < 0.6
    keep[0], keep[1] = True, False
    return mass, values, keep


def test_every_form_of_the_bound_holds_and_the_identity_is_exact():
    draw = torch.Generator().manual_seed(11)
    for _ in range(600):
        mass, values, keep = head(draw)
        lost, full, raw = mass[~keep].sum(), mass @ values, mass[keep] @ values[keep]
        output = raw / mass[keep].sum()
        error, centre = (full - output).norm(), values.mean(0)
        mean_lost = mass[~keep] @ values[~keep] / lost
        assert torch.allclose(full - output, lost * (mean_lost - output), rtol=1e-9, atol=1e-12)
        radius = (values - centre).norm(dim=-1)
        drift = (centre - output).norm()
        centred = values - centre
        spectrum = torch.linalg.eigvalsh(centred.T @ centred)[-1]
        tight = dropped_bound(lost, radius[~keep].max(), drift)
        assert error <= tight * (1 + 1e-12)
        both = dropped_bound(lost, radius[~keep].max(), drift, spectrum, mass[~keep].square().sum())
        assert error <= both * (1 + 1e-12)
        assert both <= tight
        assert error <= widest_bound(lost, values.norm(dim=-1).max()) * (1 + 1e-12)
        assert (full - raw).norm() <= raw_bound(lost, values[~keep].norm(dim=-1).max()) * (1 + 1e-12)


def test_two_opposite_values_attain_the_widest_bound():
    value = torch.tensor([3.0, 4.0], dtype=torch.float64)
    lost = torch.tensor(0.3, dtype=torch.float64)
    error = (0.7 * value - 0.3 * value - value).norm()
    assert float(error / widest_bound(lost, torch.tensor(5.0))) == pytest.approx(1.0, abs=1e-12)


def test_the_worked_example_of_one_head_and_one_step():
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    mass = torch.softmax(scores, 0)
    full, output = mass @ values, mass[:3] @ values[:3] / mass[:3].sum()
    assert full.tolist() == pytest.approx([0.5567699, 0.2048242], abs=1e-7)
    assert output.tolist() == pytest.approx([0.5752104, 0.2447285], abs=1e-7)
    bound = widest_bound(mass[3], torch.tensor(1.0))
    assert float(bound) == pytest.approx(0.0641172, abs=1e-7)
    assert float((full - output).norm()) == pytest.approx(0.0439591, abs=1e-7)
