"""Backend `cpu`: what bounds the errors of a block together is never too small, and nearly reached."""

import pytest
import torch
from torch import Tensor

from rcq_cli import LayerCache
from rcq_cli.protocols import Certificate
from tests.unit.exact_attention import data, truth

BLOCK = 32


def aligned(codes: Tensor, sign: Tensor, steps: int) -> Tensor:
    """Return `[n, D]` rows whose rounding errors on a grid of `steps` are all about half a step times `sign`.

    The first two rows set the range of every channel to that of the grid, whose step is 1.
    """
    rows = codes + 0.5 - 0.02 * sign
    rows[0], rows[1] = 0.0, float(steps)
    return rows


def from_codes(query: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Certificate]:
    """Attend with queries `[n, D]` to `[T, D]` keys and values, nothing skipped or promoted.

    Return the norms of the errors `[n]` and what the certificate says.
    """
    heads, dim = query.shape
    cache = LayerCache(
        "certified", query_heads=heads, kv_heads=1, head_dim=dim, backend="cpu", skip=False, rounds=0,
        denominator="abs", eps=1e9,
    )  # fmt: skip
    cache.prefill(k[None], v[None])
    step = cache.attend(query)
    error = (step.output.double() - truth(query, k[None], v[None], dim**-0.5)).norm(dim=-1)
    return error, step.certificate


def measured(cache: LayerCache, k: Tensor, v: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return K - K', V - V', V - c0 `[H, M, S, D]` and their annotated spectral norms `[H, M, 3]`."""
    store = cache._state.cache
    blocks = store.codes()
    keys = blocks["key_codes"].double() * blocks["key_scale"].double()[..., None, :]
    keys += blocks["key_offset"].double()[..., None, :]
    shape = keys.shape
    key_rows, value_rows = (t[:, : shape[1] * BLOCK].double().unflatten(1, (-1, BLOCK)) for t in (k, v))
    around = value_rows - store.centred_on()[:, None, None]
    left = [key_rows - keys, value_rows - store.backend.values(blocks), around]
    return left, store.annotations.rows[..., 6:9].double()


@pytest.mark.parametrize("kind", ["plain", "outlier", "offset", "lognormal", "topics", "constant", "tiny"])
@pytest.mark.parametrize("dim", [16, 128])
def test_annotated_spectral_norms_cover_the_true_ones_closely(kind: str, dim: int) -> None:
    k, v = data(kind, 2, 330, dim, seed=3)
    cache = LayerCache("certified", query_heads=2, kv_heads=2, head_dim=dim, backend="cpu")
    cache.prefill(k, v)
    left, noted = measured(cache, k, v)
    raw = cache._state.cache.raw.rows
    for rows, stated in zip(left, noted.unbind(-1), strict=True):
        true = torch.linalg.matrix_norm(rows, ord=2)
        assert bool((stated >= true)[~raw].all())
        # a flat spectrum of 32 is overstated by 32^(1/32), rounding up to float16 by 2^-10 and its tiniest
        assert bool((stated <= 1.12 * true * (1 + 2.0**-9) + 2.0**-24)[~raw].all())


@pytest.mark.parametrize(("heads", "sharp"), [(1, 0), (2, 1), (4, 0), (4, 3), (7, 5)])
def test_aligned_errors_of_the_values_of_one_block_come_close_to_their_bound(heads: int, sharp: int) -> None:
    """One block holds the weight of one head, evenly, and its values are all rounded the same way.

    The others attend to one token of every block.
    """
    gen, dim, blocks = torch.Generator().manual_seed(0), 64, 16
    k, v = torch.zeros(blocks * BLOCK, dim), torch.randn(blocks * BLOCK, dim, generator=gen)
    heavy = slice(5 * BLOCK, 6 * BLOCK)
    k[heavy, 0] = k[::BLOCK, 1] = 20.0
    sign = torch.randint(0, 2, (dim,), generator=gen) * 2.0 - 1
    v[heavy] = 7.5 - 0.45 * sign
    v[heavy, ::16], v[heavy, 1::16] = 0.0, 15.0  # every group of every token has its ends on the grid
    query = torch.zeros(heads, dim)
    query[:, 1] = 10.0
    query[sharp, :2] = torch.tensor([10.0, 0.0])
    error, certificate = from_codes(query, k, v)
    assert 0.9 * certificate.value_bound[sharp] < error[sharp]
    assert bool((error <= certificate.total_bound).all())


@pytest.mark.parametrize("heads", [1, 3])
def test_values_that_are_left_out_together_count_by_what_they_can_add_up_to(heads: int) -> None:
    """All weight lies evenly on one block; the mean of its values is far shorter than the longest of them."""
    gen, dim, blocks = torch.Generator().manual_seed(1), 64, 16
    k, v = torch.zeros(blocks * BLOCK, dim), torch.randn(blocks * BLOCK, dim, generator=gen)
    heavy = slice(5 * BLOCK, 6 * BLOCK)
    k[heavy, 0] = 20.0
    query = torch.zeros(heads, dim)
    query[:, 0] = 10.0
    cache = LayerCache(
        "certified", query_heads=heads, kv_heads=1, head_dim=dim, backend="cpu", denominator="abs", eps=1e9
    )
    cache.prefill(k[None], v[None])
    step = cache.attend(query)
    error = (step.output.double() - truth(query, k[None], v[None], dim**-0.5)).norm(dim=-1)
    around = (v[heavy] - v.mean(0)).double()
    dropped, norm = step.certificate.dropped_bound, torch.linalg.matrix_norm(around, ord=2)
    assert bool((step.certificate.skipped_value_blocks >= blocks - 2).all())
    assert bool((0.5 * dropped < error).all())
    assert bool((error <= step.certificate.total_bound).all())
    assert bool((dropped < 1.2 * norm / BLOCK**0.5).all())
    assert bool((dropped < 0.5 * around.norm(dim=-1).max()).all())


def keys_rounded_alike(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a query `[1, D]` and `[T, D]` keys and values.

    The scores of some blocks are all too low and of some all too high, evenly; those of most are exact.
    """
    gen, dim, blocks = torch.Generator().manual_seed(seed), 64, 24
    sign = torch.randint(0, 2, (dim,), generator=gen) * 2.0 - 1
    side = torch.where(torch.arange(blocks) % 2 == 0, 1.0, -1.0)
    codes = torch.full((BLOCK, dim), 100.0)
    calm = torch.arange(blocks) % 8 > 1
    wrong = (aligned(codes.clone(), sign * s, 255) for s in side)
    k = torch.cat([codes + 0.5 if still else rows for still, rows in zip(calm, wrong, strict=True)]) / 64
    ends = torch.arange(dim) % 2 * 15.0  # the codes of these values are exact
    v = side.repeat_interleave(BLOCK)[:, None] * ends
    # opposite halves of the channels cancel the common part of the scores
    return (sign - sign.mean())[None], k, v


@pytest.mark.parametrize("heads", [1, 2, 3, 8])  # alone, a pair, a team with a row to spare, two teams
@pytest.mark.parametrize("seed", range(3))
def test_aligned_errors_of_keys_come_close_to_their_bound(seed: int, heads: int) -> None:
    query, k, v = keys_rounded_alike(seed)
    error, certificate = from_codes(query.expand(heads, -1), k, v)
    assert bool((0.8 * certificate.key_bound < error).all())
    assert bool((error <= certificate.total_bound).all())


@pytest.mark.parametrize("heads", [1, 3])
def test_scores_that_miss_by_all_they_may_are_no_fault(heads: int) -> None:
    """Promoting compares exact scores with coded ones: beyond their bound something would be damaged."""
    query, k, v = keys_rounded_alike(0)
    cache = LayerCache(
        "certified", query_heads=heads, kv_heads=1, head_dim=64, backend="cpu", eps=1e-3, explore=1.0
    )
    cache.prefill(k[None], v[None])
    certificate = cache.attend(query.expand(heads, -1)).certificate
    assert bool((certificate.promoted_key_blocks > 2).all())
    assert bool((certificate.rung < 4).all())
