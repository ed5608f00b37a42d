import pytest
import torch

from rcq_cli.certify.bounds import Masses
from rcq_cli.recas import joint
from rcq_cli.recas.joint import BLOCK, Head, joint_certificate

REGIMES = {"diffuse": 0.3, "moderate": 1.0, "peaked": 3.0, "needle": 1.0, "ties": 2.0}


def make(regime, seed, tokens=256, dim=32):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    query, keys, values = normal(dim), normal(tokens, dim), normal(tokens, 16) * normal(16) + normal(16)
    keys[:, 3] *= 12
    keys *= REGIMES[regime]
    if regime == "needle":
        keys[tokens // 3] = query * 4
    if regime == "ties":
        keys[: tokens // 2] = keys[:1] + 1e-3 * keys[: tokens // 2]
    return Head(query, keys, values, dim**-0.5)


def exact(head):
    mass = torch.softmax(head.keys @ head.query * head.scale, 0)
    return mass, mass @ head.values


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("share", [0.2, 0.345, 0.7])
def test_error_and_dropped_mass_stay_within_the_certificate(regime, share):
    for seed in range(12):
        head = make(regime, seed)
        order = (head.keys @ head.query).argsort(descending=True)
        if seed % 3 == 0:
            order = torch.randperm(256, generator=torch.Generator().manual_seed(seed))
        read = torch.zeros(256, dtype=torch.bool)
        read[order[: int(share * 256)]] = True
        mass, full = exact(head)
        found = joint_certificate(head, read)
        assert (full - found.output).norm() <= found.bound
        assert found.mass[0] <= mass[~read].sum() <= found.mass[1]


def test_the_ghosts_are_what_the_bound_is_made_for(monkeypatch):
    """Scores at either end of the proven interval, as an adversary would choose them."""
    real = joint._ghost_scores
    for sign in (1.0, -1.0):

        def shifted(head, sign=sign):
            _, delta, slack = real(head)
            wide = delta + 0.4
            return head.keys @ head.query * head.scale - sign * 0.4, wide, slack

        monkeypatch.setattr(joint, "_ghost_scores", shifted)
        ratios = []
        for seed in range(20):
            head = make("moderate", seed)
            read = torch.rand(256, generator=torch.Generator().manual_seed(seed)) < 0.5
            mass, full = exact(head)
            found = joint_certificate(head, read)
            assert (full - found.output).norm() <= found.bound
            edge = found.mass[1] if sign > 0 else found.mass[0]
            ratios.append(float(mass[~read].sum()) / edge)
        # the true mass sits at the end of the interval, up to the INT8 part of its width
        assert min(ratios) == pytest.approx(1.0, abs=0.2)


def test_nothing_dropped_leaves_rounding_alone():
    head = make("moderate", 1)
    found = joint_certificate(head, torch.ones(256, dtype=torch.bool))
    assert found.mass == (0.0, 0.0)
    assert found.bound < 1e-9
    assert torch.allclose(found.output, exact(head)[1], atol=1e-12)


def test_exact_ghosts_give_the_bound_of_the_dropped_mass(monkeypatch):
    monkeypatch.setattr(
        joint,
        "_ghost_scores",
        lambda head: (head.keys @ head.query * head.scale, torch.zeros(16), torch.zeros(16)),
    )
    head = make("moderate", 2)
    read = torch.arange(256) % 3 > 0
    mass, _ = exact(head)
    lost = mass[~read].sum()
    found = joint_certificate(head, read)
    assert found.mass[0] == pytest.approx(float(lost), rel=1e-3)
    assert found.mass[1] == pytest.approx(float(lost), rel=1e-3)
    centre = head.values.mean(0)
    radius = (head.values - centre).norm(dim=-1)
    assert found.bound <= float(lost * (radius.max() + (centre - found.output).norm())) * 1.002
    assert len(head.keys) // BLOCK == 16


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_interval_of_the_dropped_mass_is_reached_by_the_worst_scores(sign):
    draw = torch.Generator().manual_seed(11)
    weights = torch.rand(3, 6, dtype=torch.float64, generator=draw)
    errors = torch.rand(3, 6, dtype=torch.float64, generator=draw)
    skipped = torch.tensor([[False, True, True, False, False, True]]).expand(3, 6)
    masses = Masses(weights.log(), 2 * weights.log(), torch.full((3, 6), -700.0).double(), skipped)
    low, high = joint.dropped_interval(masses, errors)
    moved = weights * torch.where(skipped, sign * errors, -sign * errors).exp()
    share = torch.where(skipped, moved, 0.0).sum(-1) / moved.sum(-1)
    torch.testing.assert_close(high if sign > 0 else low, share, rtol=1e-3, atol=0)
    assert (low <= share).all()
    assert (share <= high).all()


def test_the_interval_survives_errors_that_overflow():
    weights = torch.tensor([[0.0, -5.0]]).double()
    errors = torch.tensor([[1.0, 2000.0]]).double()
    skipped = torch.tensor([[False, True]])
    low, high = joint.dropped_interval(Masses(weights, weights, weights - 700, skipped), errors)
    assert (low.item(), high.item()) == (0.0, 1.0)
    nothing = torch.zeros_like(skipped)
    low, high = joint.dropped_interval(Masses(weights, weights, weights - 700, nothing), errors)
    assert (low.item(), high.item()) == (0.0, 0.0)
