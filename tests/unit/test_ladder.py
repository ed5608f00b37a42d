"""The ladder: each rung is forced on purpose, and what comes back is certified or exact every time.

Failures are injected from outside: bounds made larger than they are (still true, so nothing may be lost),
stored bytes changed behind the back of the cache.
"""

import math

import numpy as np
import pytest
import torch

from rcq_cli.api import LayerCache
from rcq_cli.cache.tiers import JOINT, TieredStore
from rcq_cli.errors import BrokenRun
from rcq_cli.kernels.reference import BACKEND

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer(
    mode="certified", dtype=torch.float32, tokens=200, seed=0, hq=4, hkv=2, dim=32, sharp=1.0, **options
):
    gen = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(hkv, tokens, dim, generator=gen).to(dtype) for _ in "kv")
    query = (sharp * torch.randn(hq, dim, generator=gen)).to(dtype)
    options = {"block": 16, "explore": 0.0, "backend": "reference"} | options if mode != "dense" else {}
    cache = LayerCache(mode, query_heads=hq, kv_heads=hkv, head_dim=dim, dtype=dtype, **options)
    cache.prefill(keys, values)
    return cache, query, keys, values


def truth(query, keys, values) -> torch.Tensor:
    q, k, v = query.double(), keys.double(), values.double()
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    return (torch.softmax((k @ q[:, :, None])[..., 0] * q.shape[-1] ** -0.5, -1)[:, None] @ v)[:, 0]


def assert_within_bound(step, exact):
    error = (step.output.double() - exact).norm(dim=-1)
    assert bool((error <= step.certificate.total_bound * (1 + 1e-9) + 1e-13).all())


def enlarge(monkeypatch, **factors):
    """Make annotations of the store larger by a factor: bounds that are true but useless."""
    honest = TieredStore.bounds

    def bounds(self):
        noted = honest(self)
        return noted._replace(**{name: getattr(noted, name) * by for name, by in factors.items()})

    monkeypatch.setattr(TieredStore, "bounds", bounds)


def enlarge_scores(monkeypatch, backend, by):
    """Make the score error bound of a backend larger; the other ones on it need `enlarge(rk=by, sk=by)`."""
    honest = type(backend).half_steps
    monkeypatch.setattr(type(backend), "half_steps", lambda self, q, b: honest(self, q, b) * by)
    enlarge(monkeypatch, rk=by, sk=by)


def test_a_calm_layer_needs_no_rung():
    cache, query, keys, values = layer(eps=1.0, sharp=0.5)
    step = cache.attend(query)
    assert step.certificate.rung.tolist() == [0] * 4
    assert not step.certificate.exact.any()
    assert_within_bound(step, truth(query, keys, values))


def test_larger_key_bounds_promote_keys_and_end_in_exact_heads(monkeypatch):
    cache, query, keys, values = layer(eps=0.15)
    enlarge_scores(monkeypatch, cache._state.cache.backend, 20)
    some = cache.attend(query)
    assert bool(((some.certificate.rung == 1) | (some.certificate.rung == 2)).any())
    assert int(some.certificate.promoted_key_blocks.max()) > 2
    assert_within_bound(some, truth(query, keys, values))
    enlarge_scores(monkeypatch, cache._state.cache.backend, 1000)
    all_of_them = cache.attend(query)
    assert all_of_them.certificate.rung.tolist() == [3] * 4
    assert bool(all_of_them.certificate.exact.all())
    assert_within_bound(all_of_them, truth(query, keys, values))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("promoted", [False, True])
def test_the_score_errors_of_a_block_together_are_no_larger_than_stated(promoted, backend):
    """The worst query is the first right singular vector of K - K'."""
    cache, _, keys, _ = layer(eps=1.0, tokens=208, backend=backend, denominator="layer")
    store = cache._state.cache
    left = keys[0].double().unflatten(0, (13, 16)) - BACKEND.keys(store.codes())[0]
    worst = torch.linalg.svd(left[5]).Vh[0]
    work = cache._state._work(torch.stack((worst, worst, torch.ones(32), torch.ones(32))).float() * 7)
    work._weigh()
    work.promote_keys(torch.full_like(work.read, promoted))
    errors = (work.query @ keys.double().mT * work.scale).unflatten(-1, (13, 16)) - work.scores
    found = errors.norm(dim=-1)
    delta, wide = (rows[..., :-1] for rows in work._score_errors())
    allowed = wide * delta
    assert bool((errors.abs().amax(-1) <= delta).all())
    assert bool((found <= allowed).all())
    assert bool((allowed <= math.sqrt(16) * 1.001 * delta).all())
    if not promoted:  # sqrt(S) times delta would be far off; the power bound is 16^(1/64) too large at most
        assert float(found[0, 0, 5]) > 0.95 * float(allowed[0, 0, 5])
        assert float(allowed[0, 0, 5]) < 0.6 * math.sqrt(16) * float(delta[0, 0, 5])


def test_what_is_known_of_blocks_together_saves_promotions(monkeypatch):
    cache, query, keys, values = layer(eps=0.5, tokens=640)
    known = cache.attend(query)
    assert_within_bound(known, truth(query, keys, values))
    honest = TieredStore.bounds
    nothing = dict.fromkeys(JOINT)
    monkeypatch.setattr(TieredStore, "bounds", lambda self: honest(self)._replace(**nothing))
    unknown = cache.attend(query)
    for name in ("promoted_key_blocks", "promoted_value_blocks"):
        assert getattr(known.certificate, name).sum() < getattr(unknown.certificate, name).sum()


def test_larger_value_bounds_promote_values_alone(monkeypatch):
    cache, query, keys, values = layer(eps=1.0, sharp=3.0, skip=False)
    assert 2 not in cache.attend(query).certificate.rung.tolist()
    enlarge(monkeypatch, eta=1000, se=1000)
    cache._state.cache.residual_spectrum.parts[0] *= 1e6
    step = cache.attend(query)
    assert 1 not in step.certificate.rung.tolist()
    assert 2 in step.certificate.rung.tolist()
    assert_within_bound(step, truth(query, keys, values))


def test_rung_two_comes_back_certified_when_the_keys_are_exact_already():
    """Keys on the grid have no error, so the values alone decide."""
    gen = torch.Generator().manual_seed(1)
    keys = torch.randint(-2, 3, (1, 256, 32), generator=gen).float()
    keys[0, ::16], keys[0, 1::16] = 0.0, 0.0
    keys *= 0.0
    keys[0, 40] = 3.0
    values = torch.randn(1, 256, 32, generator=gen)
    values[0, 32:48] *= 20
    cache = LayerCache("certified", query_heads=1, kv_heads=1, head_dim=32, eps=0.05, block=16, explore=0.0)
    cache.prefill(keys, values)
    query = torch.full((1, 32), 0.3)
    step = cache.attend(query)
    assert step.certificate.rung.tolist() == [2]
    assert not bool(step.certificate.exact)
    assert int(step.certificate.promoted_value_blocks) > 2
    assert_within_bound(step, truth(query, keys, values))


def test_without_rounds_a_head_over_budget_is_exact_at_once():
    cache, query, keys, values = layer(eps=1e-4, rounds=0)
    c = cache.attend(query).certificate
    assert c.rung.tolist() == [3] * 4
    assert c.promoted_key_blocks.tolist() == c.promoted_value_blocks.tolist() == [c.blocks] * 4
    assert_within_bound(cache.attend(query), truth(query, keys, values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (2, 2), (8, 1)])
@pytest.mark.parametrize("tokens", [64, 203])
def test_a_changed_code_sends_the_layer_through_the_dense_call_bit_for_bit(dtype, heads, tokens):
    hq, hkv = heads
    cache, query, keys, values = layer(dtype=dtype, hq=hq, hkv=hkv, tokens=tokens, eps=0.5)
    dense, *_ = layer("dense", dtype, tokens, hq=hq, hkv=hkv)
    cache._state.cache.blocks["key_codes"].data[0, 0, 3, 5] += 1
    step = cache.attend(query)
    assert torch.equal(step.output, dense.attend(query).output)
    assert step.certificate.rung.tolist() == [4] * hq
    assert bool(step.certificate.exact.all())
    assert_within_bound(step, truth(query, keys, values))
    c = step.certificate
    assert (c.key_bound + c.value_bound + c.dropped_bound).tolist() == [0.0] * hq


@pytest.mark.parametrize(
    "name", ["key_codes", "key_scale", "key_offset", "value_codes", "value_low", "annotations"]
)
def test_a_changed_bit_anywhere_in_a_promoted_block_is_noticed_and_set_aside(name):
    cache, query, keys, values = layer(eps=0.5)
    state = cache._state.cache
    damaged = state.annotations if name == "annotations" else state.blocks[name]
    row = damaged.data[1, 0].view(-1).view(torch.uint8)
    row[3] ^= 1
    step = cache.attend(query)
    assert step.certificate.rung.tolist() == [4] * 4
    assert state.raw.rows[1, 0]
    assert int(state.raw.rows.sum()) == 1
    after = cache.attend(query)  # the block is read from its originals from now on
    assert 4 not in after.certificate.rung.tolist()
    for made in (step, after):
        assert_within_bound(made, truth(query, keys, values))


def test_exploration_finds_damage_in_blocks_that_nobody_promotes():
    cache, query, keys, values = layer(eps=1.0, sharp=0.3, tokens=320, explore=0.2)
    cache._state.cache.blocks["key_codes"].data[0, 7, 0, 0] ^= 1
    rungs = []
    for _ in range(60):
        step = cache.attend(query)
        rungs.append(int(step.certificate.rung.max()))
        assert_within_bound(step, truth(query, keys, values))
        if rungs[-1] == 4:
            break
    assert rungs[-1] == 4
    assert set(rungs[:-1]) <= {0, 1, 2, 3}


def test_without_exploration_unpromoted_damage_stays_unseen():
    """What exploration is for: the control of the test above."""
    cache, query, *_ = layer(eps=1.0, sharp=0.3, tokens=320, explore=0.0)
    cache._state.cache.blocks["key_codes"].data[0, 7, 0, 0] ^= 1
    assert max(int(cache.attend(query).certificate.rung.max()) for _ in range(20)) < 4


def test_the_score_check_alone_finds_a_wrong_code(monkeypatch):
    """Without any checksum the theorem |exact - coded| <= delta still proves the damage."""
    cache, query, keys, values = layer(eps=0.5)
    cache._state.cache.blocks["key_codes"].data[0, 0, 3] += 40
    never = lambda self, heads, blocks: torch.zeros(len(heads), dtype=torch.bool)  # noqa: E731, ARG005
    monkeypatch.setattr(TieredStore, "damaged", never)
    step = cache.attend(query)
    assert step.certificate.rung.tolist() == [4] * 4
    assert_within_bound(step, truth(query, keys, values))


@pytest.mark.parametrize("which", [0, 1])
def test_a_changed_original_ends_the_run(which):
    cache, query, *_ = layer(eps=0.5)
    cache._state.cache.originals[which].data[1, 5, 5] += 1
    with pytest.raises(BrokenRun, match="block 0, KV head 1"):
        cache.attend(query)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exact_head_is_the_true_output_rounded_once(dtype):
    cache, query, keys, values = layer(dtype=dtype, eps=1e-6, rounds=0)
    step = cache.attend(query)
    assert bool(step.certificate.exact.all())
    expected = truth(query, keys, values)
    spacing = expected.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).tiny
    assert bool(((step.output.double() - expected).abs() <= 0.5001 * spacing + 1e-14).all())
    assert_within_bound(step, expected)


@pytest.mark.parametrize("skip", [True, False])
def test_skipping_leaves_out_values_and_the_certificate_pays_for_it(skip):
    cache, query, keys, values = layer(eps=0.1, sharp=6.0, tokens=600, skip=skip)
    step = cache.attend(query)
    c = step.certificate
    assert_within_bound(step, truth(query, keys, values))
    skipped = c.skipped_value_blocks[~c.exact]
    assert len(skipped)
    assert bool((skipped > 0).any()) == skip
    assert bool((c.dropped_bound[~c.exact] > 0).any()) == skip


def test_skipped_values_are_really_not_read():
    """Values of skipped blocks may be replaced by anything: the output stays, bit for bit."""
    cache, query, keys, values = layer(eps=0.1, sharp=6.0, tokens=600, hq=1, hkv=1)
    read = []
    backend = cache._state.cache.backend
    honest = type(backend).values
    step = None

    def spy(self, blocks):
        read.append(next(iter(blocks.values())).shape[0])
        return honest(self, blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(backend), "values", spy)
        step = cache.attend(query)
    c = step.certificate
    assert not bool(c.exact)
    assert sum(read) <= c.blocks - int(c.skipped_value_blocks)
    assert int(c.skipped_value_blocks) > 0
    assert_within_bound(step, truth(query, keys, values))


def test_counters_of_the_certificate_add_up():
    for seed in range(6):
        cache, query, *_ = layer(eps=0.03, sharp=2.0, seed=seed, tokens=330)
        c = cache.attend(query).certificate
        assert c.blocks == 330 // 16
        for count in (c.promoted_key_blocks, c.promoted_value_blocks, c.skipped_value_blocks):
            assert bool(((count >= 0) & (count <= c.blocks)).all())
        assert bool((c.promoted_value_blocks + c.skipped_value_blocks <= c.blocks)[~c.exact].all())
        assert bool((c.promoted_key_blocks[c.exact] == c.blocks).all())
        assert bool(((c.rung >= 3) == c.exact).all())
        assert c.paged_bytes > 0


def test_bytes_paged_in_are_those_of_the_blocks_used():
    cache, query, *_ = layer(eps=1.0, sharp=0.3, hq=2, hkv=2)
    c = cache.attend(query).certificate
    assert c.rung.tolist() == [0, 0]
    # first and last block, keys for the scores and values for the sum, two KV heads, float32
    assert c.paged_bytes == 2 * 2 * 16 * 32 * 4 * 2


def test_tau_promotes_the_heaviest_blocks_up_to_its_mass():
    cache, query, keys, _ = layer(eps=1.0, hq=1, hkv=1, tokens=320, tau=0.8)
    c = cache.attend(query).certificate
    weights = torch.softmax((keys[0] @ query[0]).double() * 32**-0.5, -1).view(20, 16).sum(1)
    ordered, total, needed = weights.sort(descending=True).values, 0.0, 0
    while total < 0.8:
        total, needed = total + float(ordered[needed]), needed + 1
    assert needed <= int(c.promoted_key_blocks) <= needed + 2


def test_a_layer_repeats_itself_and_a_fork_repeats_its_origin():
    cache, query, *_ = layer(eps=0.05, explore=0.3)
    twin = cache._state.fork()
    for _ in range(3):
        a, b = cache.attend(query), twin.attend(query)
        assert torch.equal(a.output, b.output)
        assert torch.equal(a.certificate.total_bound, b.certificate.total_bound)
        assert a.certificate.paged_bytes == b.certificate.paged_bytes


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33])
def test_short_caches_and_every_length_of_tail_are_served(tokens):
    cache, query, keys, values = layer(tokens=tokens, eps=0.05)
    step = cache.attend(query)
    assert step.certificate.blocks == tokens // 16
    assert_within_bound(step, truth(query, keys, values))


def test_every_combination_of_eps_and_regime_keeps_the_relative_promise():
    worst = 0.0
    for sharp in (0.2, 1.0, 4.0):
        for eps in (0.01, 0.02, 0.05, 0.1):
            cache, query, keys, values = layer(eps=eps, sharp=sharp, tokens=400, dtype=torch.float16, seed=3)
            step, exact = cache.attend(query), truth(query, keys, values)
            relative = (step.output.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
            assert bool((relative <= eps).all())
            worst = max(worst, float((relative / eps).max()))
    assert 0 < worst < 1
    assert np.isfinite(worst)
