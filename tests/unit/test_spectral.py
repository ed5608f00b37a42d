"""The spectral bound is never below the largest eigenvalue and never far above, in any order of arrival."""

import math

import pytest
import torch

from rcq_cli.certify.spectral import SpectralBound, power_bound, theta


def largest_eigenvalue(rows: torch.Tensor) -> float:
    return float(torch.linalg.eigvalsh(rows.T @ rows)[-1])


def gram(rows: torch.Tensor) -> torch.Tensor:
    return (rows.T @ rows)[None]


@pytest.mark.parametrize("dim", [1, 2, 16, 64, 128])
@pytest.mark.parametrize("rank", [1, 3, 500])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_power_bound_lies_between_the_eigenvalue_and_its_known_factor(dim, rank, size):
    gen = torch.Generator().manual_seed(dim * 7 + rank)
    rows = torch.randn(rank, dim, generator=gen, dtype=torch.float64)
    truth = largest_eigenvalue(rows)
    bound = float(power_bound(gram(rows) * size**2)) / size**2
    assert truth <= bound <= truth * dim ** (1 / 32) * (1 + 2e-4)


def test_power_bound_is_exact_for_rank_one_and_zero_for_nothing():
    rows = torch.randn(1, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    truth = float(rows.square().sum())
    assert truth <= float(power_bound(gram(rows))) <= truth * (1 + 2e-4)
    assert float(power_bound(torch.zeros(1, 4, 4, dtype=torch.float64))) == 0


def test_power_bound_takes_the_worst_case_of_equal_eigenvalues():
    bound = float(power_bound(torch.eye(128, dtype=torch.float64)[None]))
    assert bound == pytest.approx(128 ** (1 / 32), rel=2e-4)


def streams(seed: int):
    """Chunks of `[n, 16]` rows: shapes, sizes and spectra vary along the stream."""
    gen = torch.Generator().manual_seed(seed)
    for _ in range(12):
        count = int(torch.randint(1, 30, (1,), generator=gen))
        rows = torch.randn(count, 16, generator=gen, dtype=torch.float64)
        yield rows * torch.randn(16, generator=gen, dtype=torch.float64).exp() * float(10 ** (seed % 5 - 2))


@pytest.mark.parametrize("seed", range(20))
def test_the_running_bound_covers_every_prefix_of_a_stream(seed):
    bound, seen = SpectralBound(1, 16), []
    for rows in streams(seed):
        bound.add(rows[None])
        seen.append(rows)
        truth = largest_eigenvalue(torch.cat(seen))
        # never below; a refresh is due at a tenth, so never far above either
        assert truth <= float(bound.value) <= truth * 16 ** (1 / 32) * 1.1 * (1 + 1e-3)


def test_one_token_far_larger_than_all_others_is_covered_at_once():
    gen = torch.Generator().manual_seed(11)
    bound = SpectralBound(1, 8)
    rows = torch.randn(50, 8, generator=gen, dtype=torch.float64)
    bound.add(rows[None])
    giant = 100 * rows[:1]
    bound.add(giant[None])
    assert float(bound.value) >= largest_eigenvalue(torch.cat((rows, giant)))


def test_token_by_token_is_covered_before_and_after_each_refresh():
    gen = torch.Generator().manual_seed(12)
    bound, rows = SpectralBound(1, 8), torch.randn(120, 8, generator=gen, dtype=torch.float64)
    for t in range(120):
        bound.add(rows[None, t : t + 1])
        assert float(bound.value) >= largest_eigenvalue(rows[: t + 1])
    assert float(bound.value) <= 1.3 * largest_eigenvalue(rows)


def test_heads_are_bounded_apart():
    gen = torch.Generator().manual_seed(13)
    rows = (
        torch.randn(3, 40, 8, generator=gen, dtype=torch.float64)
        * torch.tensor([1.0, 1e6, 0.0])[:, None, None]
    )
    bound = SpectralBound(3, 8)
    bound.add(rows)
    for head in range(3):
        truth = largest_eigenvalue(rows[head])
        assert truth <= float(bound.value[head]) <= truth * 1.2


def test_a_fork_does_not_move_with_its_origin():
    bound = SpectralBound(1, 4)
    bound.add(torch.ones(1, 2, 4, dtype=torch.float64))
    twin, before = bound.fork(), float(bound.value)
    bound.add(torch.full((1, 3, 4), 9.0, dtype=torch.float64))
    assert float(twin.value) == before
    twin.add(torch.full((1, 1, 4), 2.0, dtype=torch.float64))
    assert float(twin.value) >= 8 + 16
    assert float(bound.value) >= 8 + 3 * 324


def test_theta_is_infinite_when_as_many_roundings_as_the_precision_holds():
    assert theta(10, 2.0**-53) == pytest.approx(10 * 2.0**-53)
    assert theta(2.0**24, 2.0**-24) == math.inf
