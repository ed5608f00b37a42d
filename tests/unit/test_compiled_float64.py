"""Every compiled float64 piece against the function that defines it, on random and on hostile input."""

import math

import pytest
import torch

from rcq_cli.cache.tiers import TieredStore
from rcq_cli.certify import bounds as proven
from rcq_cli.certify.exact import score_slack
from rcq_cli.certify.spectral import theta
from rcq_cli.kernels import _cpu_float64, _cpu_float64_blocks, _cpu_float64_bounds
from rcq_cli.kernels.cpu import Cpu
from rcq_cli.kernels.reference import Reference
from rcq_cli.modes import certified_paper as paper
from rcq_cli.modes._compiled import CompiledStore, _slack_terms
from rcq_cli.protocols import Geometry
from tests.unit.float64_pieces import (
    DIM,
    GROUP,
    HEADS,
    KINDS,
    MASSES,
    SCALE,
    SIZE,
    ULP,
    UNDERFLOW,
    fill,
    masses_of,
    prove,
    rows,
)


def stores(kind="random", tokens=118, dtype=torch.float32):
    """The same tokens in the plain store and in the compiled one."""
    name = str(dtype).removeprefix("torch.")
    geometry = Geometry(HEADS * GROUP, HEADS, DIM, name, "cpu", SCALE)
    pair = TieredStore(geometry, paper.FORMAT, Reference()), CompiledStore(geometry, paper.FORMAT, Cpu())
    fill(pair, kind, tokens, dtype)
    return pair


def scored(store, query):
    notes = (*store.bounds()[:2], torch.full((HEADS, store.block_count + 1), torch.inf).double())
    return _cpu_float64.score(
        query, SCALE, store.layer(), notes, SIZE, store.tail_places()[0], store.tail_tokens,
        _slack_terms(DIM, SCALE),
    )  # fmt: skip


# -- passes over tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [7, 112, 113, 118, 127])
def test_scores_and_what_they_may_be_off(kind, dtype, tokens):
    if kind == "raw" and dtype == torch.float16:
        pytest.skip("float16 cannot hold what float16 metadata cannot")
    plain, store = stores(kind, tokens, dtype)
    query, blocks, tail = rows(HEADS, GROUP, DIM, seed=5), tokens // SIZE, tokens % SIZE
    found, fine = scored(store, query)
    assert fine
    notes = plain.bounds()
    norm = query.norm(dim=-1)[..., None] * proven.MARGIN
    slack = score_slack(norm, (notes.kappa + notes.rk)[:, None], SCALE, DIM)
    torch.testing.assert_close(found.slack, slack, **ULP)
    last = (query @ plain.tail_rows()[0].transpose(1, 2)) * SCALE
    torch.testing.assert_close(found.scores[:, :, -1, :tail], last, **ULP)
    assert bool((found.scores[:, :, -1, tail:] == -torch.inf).all())
    torch.testing.assert_close(found.delta[..., -1], slack[..., -1], **ULP)
    if blocks:
        codes = plain.codes()
        coded = Reference().score_blocks(query, codes) * SCALE
        torch.testing.assert_close(found.scores[:, :, :-1], coded, rtol=1e-12, atol=1e-11)
        half = Reference().half_steps(query, codes)
        torch.testing.assert_close(found.half_step[..., :-1], half, **ULP)
        reach = torch.minimum(half, norm * notes.rk[:, None, :-1]) * (SCALE * proven.MARGIN)
        torch.testing.assert_close(found.delta[..., :-1], reach + slack[..., :-1], **ULP)


@pytest.mark.parametrize("place", ["codes", "tail"])
def test_a_score_that_overflows_is_seen(place):
    _, store = stores()
    query = rows(HEADS, GROUP, DIM, seed=5)
    assert scored(store, query)[1]
    query[1, 2] *= 1e308 if place == "tail" else 1e307
    assert not scored(store, query)[1]


@pytest.mark.parametrize("spread", [0.1, 3.0, 400.0])
def test_weights_and_their_sums(spread):
    scores = rows(HEADS, GROUP, 9, SIZE, seed=3) * spread
    scores[:, :, -1, 5:] = -torch.inf
    scores[1, 0, -1] = -torch.inf  # a tail without tokens
    weights, sums = torch.empty_like(scores), rows(4, HEADS, GROUP, 9).unbind()
    _cpu_float64.weigh(scores, weights, *sums)
    peak, mass, square, log_mass = sums
    top = scores.amax(-1)
    expected = torch.where(scores == -torch.inf, 0.0, (scores - top[..., None]).exp())
    torch.testing.assert_close(peak, top, rtol=0, atol=0)
    torch.testing.assert_close(weights, expected, **ULP)
    torch.testing.assert_close(mass, expected.sum(-1), **ULP)
    torch.testing.assert_close(square, expected.square().sum(-1), **ULP)
    torch.testing.assert_close(log_mass, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


PAIRS = (torch.tensor([0, 0, 1, 1]), torch.tensor([0, 5, 2, 6]))


def promoted(store, scores, query, allowed=1.0):
    limit = torch.full((HEADS, GROUP, store.block_count), allowed, dtype=torch.float64)
    take = torch.tensor([True, False, True, True])
    return _cpu_float64.promote(query, SCALE, store.layer(), PAIRS, take, limit, scores), take


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_promotion_scores_originals(dtype):
    plain, store = stores(dtype=dtype)
    query = rows(HEADS, GROUP, DIM, seed=5)
    before = scored(store, query)[0].scores
    after = before.clone()
    found, take = promoted(store, after, query)
    assert not bool(found.unlike.any() | found.changed.any())
    head, block = PAIRS
    keys = plain.original_blocks(head, block)[0].double()
    expected = before.clone()
    exact = (query[head] @ keys.transpose(1, 2)) * SCALE
    expected[head[take], :, block[take]] = exact[take]
    torch.testing.assert_close(after, expected, **ULP)
    # the largest difference is what decides
    off = (exact - before[head, :, block]).abs().amax((1, 2)).tolist()
    for i, largest in enumerate(off):
        for limit in (largest * (1 - 1e-9), largest * (1 + 1e-9)):
            unlike = promoted(store, before.clone(), query, limit)[0].unlike
            assert bool(unlike[i]) is (limit < largest)


@pytest.mark.parametrize("name", ["key_codes", "key_offset", "value_codes", "value_scale", "annotations"])
def test_promotion_sees_what_changed_in_tier_1(name):
    _, store = stores()
    query = rows(HEADS, GROUP, DIM, seed=5)
    slab = store.annotations if name == "annotations" else store.blocks[name]
    slab.data[1, 2].flatten().view(torch.uint8)[-1] ^= 1
    found, _ = promoted(store, scored(store, query)[0].scores, query, 100.0)
    assert found.unlike.tolist() == [False, False, True, False]
    assert not bool(found.changed.any())


@pytest.mark.parametrize("side", [0, 1])
def test_promotion_and_sums_see_originals_that_changed(side):
    _, store = stores()
    store.originals[side].data[0, 5 * SIZE + 15, DIM - 1] += 1
    query = rows(HEADS, GROUP, DIM, seed=5)
    scores = scored(store, query)[0].scores
    found, _ = promoted(store, scores, query, 100.0)
    assert found.changed.tolist() == [False, True, False, False]
    exact = torch.zeros(HEADS, store.block_count, dtype=torch.bool)
    exact[0, 4:6] = True
    _, changed = summed(store, rows(HEADS, GROUP, 8, SIZE).abs(), rows(HEADS, GROUP, 8).abs(), exact)
    assert changed.nonzero().tolist() == [[0, 5]]


def summed(store, weights, share, exact):
    place = store.tail_places()[1]
    return _cpu_float64.sum_values(weights, share, store.layer(), exact, place, store.tail_tokens, DIM)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chosen", ["none", "some", "all"])
def test_values_are_summed_from_codes_originals_and_tail(kind, dtype, chosen):
    if kind == "raw" and dtype == torch.float16:
        pytest.skip("float16 cannot hold what float16 metadata cannot")
    plain, store = stores(kind, dtype=dtype)
    count = store.block_count
    exact = torch.zeros(HEADS, count, dtype=torch.bool)
    exact[:] = {"none": False, "some": torch.arange(count) % 3 == 0, "all": True}[chosen]
    exact |= store.raw.rows
    weights, share = rows(HEADS, GROUP, count + 1, SIZE).abs(), rows(HEADS, GROUP, count + 1, seed=8).abs()
    weights[:, :, -1, store.tail_tokens :] = 0.0
    found, changed = summed(store, weights, share, exact)
    values = Reference().values(plain.codes())
    head, block = exact.nonzero(as_tuple=True)
    values[head, block] = plain.original_blocks(head, block)[1].double()
    expected = torch.einsum("hrm,hrms,hmsd->hrd", share[..., :-1], weights[:, :, :-1], values)
    tail = weights[:, :, -1, : store.tail_tokens] @ plain.tail_rows()[1]
    torch.testing.assert_close(found, expected + share[..., -1:] * tail, rtol=1e-11, atol=1e-11)
    assert not bool(changed.any())


def test_checksums_are_those_taken_when_sealing():
    _, store = stores()
    pairs = torch.arange(HEADS).repeat_interleave(7), torch.arange(7).repeat(HEADS)
    layer = store.layer()
    for words, column in ((layer.tier_1, 0), (layer.originals, 1)):
        found = _cpu_float64.checksums(layer, words, pairs)
        assert torch.equal(found, store.checks.rows[..., column].flatten())
    assert not bool(store.damaged(*pairs).any())


# -- passes over blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [7, 112, 118])
def test_annotations_are_those_of_the_store(kind, tokens):
    plain, store = stores(kind, tokens)
    if kind == "raw" and tokens > 16:
        assert bool(store.raw.rows.any())
    for name, found, expected in zip(plain.bounds()._fields, store.bounds(), plain.bounds(), strict=True):
        torch.testing.assert_close(
            found, expected, rtol=1e-14, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


EXACT = torch.arange(80).view(2, 40) % 3 == 0


def weighed(kind, seed=0, read=None):
    tail = 0 if kind == "no tail" else 4
    values = (rows(HEADS, 41, seed=6).abs(), EXACT)
    read = torch.ones_like(EXACT) if read is None else read
    return _cpu_float64_bounds.weighed(masses_of(kind, seed=seed), read, values, (SIZE, tail), UNDERFLOW)


@pytest.mark.parametrize("kind", MASSES)
def test_masses_are_relative_to_their_total(kind):
    peak, mass, square = masses_of(kind)
    found = weighed(kind)
    log_weight = torch.log_softmax(peak + mass.log(), -1)
    total = ((peak - peak.amax(-1, keepdim=True)).exp() * mass).sum(-1)
    torch.testing.assert_close(found.log_weight, log_weight, **ULP)
    torch.testing.assert_close(found.total, total, **ULP)
    error = log_weight.exp()[..., :-1] * rows(HEADS, 41, seed=6).abs()[:, None, :-1]
    torch.testing.assert_close(found.error, torch.where(EXACT[:, None], 0.0, error), **ULP)
    below = peak - peak.amax(-1, keepdim=True)
    torch.testing.assert_close(found.share, below.exp() / total[..., None], **ULP)
    log_square = square.log() + 2 * (below - total.log()[..., None])
    torch.testing.assert_close(found.log_square, log_square, **ULP)
    tokens = torch.full((41,), 16.0).double()
    tokens[-1] = 0 if kind == "no tail" else 4
    flushed = tokens.log() + below.clamp_max(math.log(UNDERFLOW)) - total.log()[..., None]
    torch.testing.assert_close(found.log_flushed, flushed, **ULP)


@pytest.mark.parametrize("kind", MASSES)
@pytest.mark.parametrize(
    "options",
    [{}, {"k_min": 3, "k_max": 5}, {"k_max": 1000}, {"tau": 0.0}, {"tau": 1 - 1e-9}, {"k_min": 100}],
)
def test_selection_is_that_of_the_policy(kind, options):
    chosen = paper.Options(**options)
    for seed in range(4):
        peak, mass, _ = masses_of(kind, seed=seed)
        coded = peak + mass.log()
        expected = paper.select(coded.softmax(-1), chosen)
        found = _cpu_float64_blocks.choose(
            coded, chosen.tau, chosen.k_min, chosen.k_max, paper.EXPANSION_MASS
        )
        assert torch.equal(found.chosen, expected.chosen)
        assert torch.equal(found.expanded, expected.expanded)
        torch.testing.assert_close(found.uncovered, expected.uncovered, **ULP)


@pytest.mark.parametrize("ranks", [1, 2, 5, 1000])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.6, 1.0])
@pytest.mark.parametrize("levels", [3, 1000])
def test_order_checks_are_those_of_the_policy(ranks, share, levels):
    """With three levels most masses are ties."""
    for seed in range(8):
        noise = torch.Generator().manual_seed(seed)
        exact, coded = (torch.randint(levels, (HEADS, GROUP, 21), generator=noise).double() for _ in range(2))
        coded = torch.where(torch.rand(coded.shape, generator=noise) < 0.8, exact, coded)
        known = torch.rand(HEADS, 20, generator=noise) < share
        delta = torch.rand(HEADS, GROUP, generator=noise).double() * levels / 4
        wide = known[:, None].expand(-1, GROUP, -1)
        expected = paper.order_failures(exact[..., :-1], coded[..., :-1], wide, delta, ranks)
        found = _cpu_float64_blocks.order_failures(exact, coded, known, delta, ranks)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("kind", MASSES)
@pytest.mark.parametrize("delta", [1e-9, 0.02, 1.5, 60.0, 800.0])
@pytest.mark.parametrize("exact", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("joint", [True, False])
def test_bounds_are_those_that_are_proven(kind, delta, exact, joint):
    masses, count, tokens = weighed(kind), 40, 644
    noise = torch.Generator().manual_seed(7)

    def positive(*shape):
        return torch.rand(*shape, generator=noise).double()

    eta = torch.cat((positive(HEADS, count), torch.zeros(HEADS, 1)), 1)
    joint = (positive(HEADS, count + 1) * most for most in ((2, 9) if joint else (math.inf, math.inf)))
    spread = _cpu_float64_bounds.Spread(
        eta, positive(HEADS, count + 1) * 5, *joint, rows(HEADS, DIM, seed=3), positive(HEADS),
        positive(HEADS) * 90,
    )  # fmt: skip
    slack = positive(HEADS, GROUP, count + 1) * 1e-12 + 1e-12
    coded = positive(HEADS, GROUP, count + 1) * delta + slack
    wide = positive(HEADS, GROUP, count + 1) * 4
    known = [torch.rand(HEADS, count, generator=noise) < exact for _ in "kv"]
    outputs = (
        rows(HEADS, GROUP, DIM, seed=4),
        rows(HEADS, GROUP, DIM, seed=4) + 1e-7,
        positive(HEADS, GROUP) * 1e-7,
    )
    relative = theta(tokens + 24 + 16 * math.sqrt(DIM), 2.0**-53)
    known = (*known, torch.ones(HEADS, count, dtype=torch.bool))
    nowhere = torch.full((HEADS, GROUP), torch.inf, dtype=torch.float64)
    found = _cpu_float64_bounds.bounds(
        masses, spread, (slack, coded, wide), known, outputs, nowhere,
        (relative, 2.0**-53, math.sqrt(DIM) * tokens * UNDERFLOW),
    )  # fmt: skip
    nothing = proven.Masses(*masses[:3], torch.zeros(masses.share.shape, dtype=torch.bool), masses.log_peak)
    expected = prove(nothing, masses.total, spread, (slack, coded, wide), *known[:2], outputs, tokens)
    assert not bool(found.dropped.any())
    for name in ("key", "value", "rounding"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(
            mine, theirs, rtol=1e-10, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert bool((mine >= 0).all()), name


def test_a_bound_that_is_no_number_counts_as_infinite():
    masses = weighed("random")
    infinite = torch.full((HEADS, 41), torch.inf, dtype=torch.float64)
    one = torch.ones(HEADS, GROUP, 41, dtype=torch.float64)
    spread = _cpu_float64_bounds.Spread(
        torch.zeros(HEADS, 41).double(),
        infinite,
        infinite,
        infinite,
        rows(HEADS, DIM),
        one[:, 0, 0].clone(),
        one[:, 0, 0].clone(),
    )
    exact = torch.zeros(HEADS, 40, dtype=torch.bool)
    outputs = (rows(HEADS, GROUP, DIM), rows(HEADS, GROUP, DIM), one[..., 0].clone())
    found = _cpu_float64_bounds.bounds(
        masses, spread, (one, one, one), (exact, exact, ~exact), outputs, one[..., 0], (1e-9, 1e-16, 0.0)
    )
    assert bool((found.key == torch.inf).all())
