"""certified-paper: the published rules by hand, and our bounds that hold whatever those rules decide."""

import math

import pytest
import torch

from rcq_cli import LayerCache
from rcq_cli.errors import BrokenRun
from rcq_cli.modes import certified_paper as paper
from rcq_cli.modes.certified_paper import (
    Options,
    order_failures,
    reported_key_error,
    select,
    values_to_promote,
)


def shares(*values):
    return torch.tensor(values, dtype=torch.float64)[None, None]


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(tokens=800, hq=4, hkv=2, dim=64, seed=0, spread=1.0, **options):
    cache = LayerCache(
        "certified-paper", query_heads=hq, kv_heads=hkv, head_dim=dim, backend="reference", **options
    )
    cache.prefill(rows(hkv, tokens, dim, seed=seed + 1) * spread, rows(hkv, tokens, dim, seed=seed + 2))
    return cache


def exact(cache, query):
    return cache._state.exact(query)


# -- selection ----------------------------------------------------------------------------------------------


def test_the_shortest_prefix_that_covers_tau_is_chosen():
    found = select(shares(0.1, 0.5, 0.05, 0.3, 0.05), Options(tau=0.9, k_min=1, k_max=10))
    # tail .05 + .5 + .3 + .1 = .95 reaches .9, and .05 stays uncovered: expanded to all
    assert found.expanded.item() is True
    assert found.chosen[0, 0].tolist() == [True] * 4
    found = select(shares(0.099, 0.57, 0.001, 0.3, 0.03), Options(tau=0.99, k_min=1, k_max=10))
    assert found.expanded.item() is False
    assert found.chosen[0, 0].tolist() == [True, True, False, True]
    assert found.uncovered.item() == pytest.approx(0.001)


def test_the_number_of_blocks_is_clamped_and_expanded_once():
    flat = torch.full((1, 1, 41), 1 / 41, dtype=torch.float64)
    found = select(flat, Options(k_max=8))
    assert int(found.chosen.sum()) == 16  # 8, then twice as many
    assert found.expanded.item() is True
    assert found.uncovered.item() == pytest.approx(24 / 41)
    peaked = shares(0.999, *[0.0001] * 9, 0.0001)
    found = select(peaked, Options(k_min=2))
    assert int(found.chosen.sum()) == 2
    assert found.chosen[0, 0, :2].tolist() == [True, True]  # of equal ones the older


def test_value_rules_of_text_and_code_differ():
    error = shares(0.04, 0.06, 0.03, 0.2)
    assert values_to_promote(error, Options())[0, 0].tolist() == [False, True, False, True]
    greedy = values_to_promote(error, Options(value_rule="greedy"))
    # largest first until what is left is at most .05: .2, .06, .04
    assert greedy[0, 0].tolist() == [True, True, False, True]


def test_the_reported_key_error_is_the_published_formula():
    """At delta .18 and a tail of .005: .006 V_max, .007 with the larger inflation."""
    one = torch.tensor(1.0, dtype=torch.float64)
    for inflate, expected in ((2, 0.0062), (3, 0.0074)):
        found = reported_key_error(one, 0.18 * one, 0.005 * one, inflate).item()
        closed = 2 * math.exp(inflate * 0.18) * 0.005 * (math.exp(0.36) - 1)
        assert found == pytest.approx(closed, rel=1e-12)
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("lead", [0.9, 1.01])
def test_the_boundary_check_fires_when_a_hidden_block_could_overtake(lead):
    exact_mass, coded = shares(5.0, 1.0, 0.0), shares(5.0, 1.0, 5.0 - lead * 0.3)
    known = torch.tensor([[[True, True, False]]])
    _, boundary = order_failures(exact_mass, coded, known, torch.full((1, 1), 0.3).double(), 1)
    assert boundary.item() is (lead < 1)


def test_the_rank_check_compares_the_leading_blocks():
    known = torch.tensor([[[True, True, True, False]]])
    delta = torch.zeros(1, 1, dtype=torch.float64)
    coded = shares(2.0, 3.0, 1.0, -9.0)
    assert order_failures(shares(3.1, 3.0, 1.0, 0.0), coded, known, delta, 1)[0].item() is True
    assert order_failures(shares(2.1, 3.0, 1.0, 0.0), coded, known, delta, 1)[0].item() is False
    # the second place differs
    assert order_failures(shares(1.0, 3.0, 2.0, 0.0), coded, known, delta, 1)[0].item() is False
    assert order_failures(shares(1.0, 3.0, 2.0, 0.0), coded, known, delta, 2)[0].item() is True


# -- the mode -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("options", [{}, {"value_rule": "greedy"}, {"delta": "d1"}, {"k_max": 4}])
def test_our_bound_holds_whatever_the_policy_does(spread, options):
    cache = filled(900, spread=spread, **options)
    for t in range(6):
        cache.append(rows(2, 64, seed=50 + t) * spread, rows(2, 64, seed=60 + t))
        query = rows(4, 64, seed=70 + t) * 2
        step = cache.attend(query)
        error = (step.output.double() - exact(cache, query)).norm(dim=-1)
        assert bool((error <= step.certificate.total_bound).all())
        assert bool(torch.isfinite(step.certificate.total_bound).all())


def test_the_reported_figures_come_from_the_stored_data():
    cache = filled(500, hq=1, hkv=1, k_max=2, ranks=1)
    query = rows(1, 64, seed=9)
    reported = cache.attend(query).certificate.reported
    keys = rows(1, 500, 64, seed=1).double()
    blocks = keys[0, :496].view(31, 16, 64)
    steps = (blocks.amax(1) - blocks.amin(1)) / 255
    d0 = (0.5 * steps @ query[0].double().abs()).amax() / 8
    assert reported["delta"].item() == pytest.approx(d0.item(), rel=1e-5)
    logits = keys[0] @ query[0].double() / 8
    mass = torch.softmax(logits, -1)
    per_block = mass[:496].view(31, 16).sum(1).sort(descending=True).values
    # two blocks, expanded to four; INT8 scores move the masses by a few parts in a thousand
    assert reported["uncovered"].item() == pytest.approx(per_block[4:].sum().item(), rel=2e-2)
    norm = rows(1, 500, 64, seed=2).double().norm(dim=-1).amax()
    closed = 2 * norm * math.exp(2 * d0) * reported["uncovered"].item() * math.expm1(2 * d0)
    assert reported["key_bound"].item() == pytest.approx(closed.item(), rel=1e-4)


def test_the_largest_value_counts_wherever_it_stands():
    """In the open tail, where a port of the published code forgets it."""
    cache = filled(160)
    before = cache._state.value_norm.clone()
    cache.append(rows(2, 64, seed=5), 100 * torch.ones(2, 64))
    assert cache._state.cache.tail_tokens == 1
    assert bool((cache._state.value_norm >= 800 - 1e-9).all())
    assert bool((before < 20).all())


def test_a_failed_order_check_makes_the_head_exact():
    """Equal blocks: each could overtake the other within delta."""
    cache = LayerCache(
        "certified-paper", query_heads=2, kv_heads=1, head_dim=16, backend="reference", k_max=1, k_min=1
    )
    block = rows(1, 16, 16, seed=1)
    keys = torch.cat([block + 0.01 * rows(1, 16, 16, seed=10 + i) for i in range(20)], 1)
    cache.prefill(keys, rows(1, 320, 16, seed=2))
    query = rows(2, 16, seed=3)
    step = cache.attend(query)
    assert step.certificate.rung.tolist() == [3, 3]
    assert bool(step.certificate.exact.all())
    torch.testing.assert_close(step.output.double(), exact(cache, query), rtol=0, atol=1e-6)
    assert cache._state.engagement().details["paper_boundary_failures"] == 2


def test_a_corrupted_code_is_found_and_the_layer_recomputed():
    cache = filled(640, explore=1.0)
    store = cache._state.cache
    store.blocks["key_codes"].data[0, 3, 5, 7] ^= 0x40
    query = rows(4, 64, seed=9)
    step = cache.attend(query)
    assert step.certificate.rung.tolist() == [4] * 4
    torch.testing.assert_close(step.output.double(), exact(cache, query), rtol=1e-4, atol=1e-5)


def test_counters_of_the_policy_add_up():
    cache = filled(800)
    for t in range(5):
        cache.append(rows(2, 64, seed=50 + t), rows(2, 64, seed=60 + t))
        cache.attend(rows(4, 64, seed=70 + t))
    record = cache._state.engagement()
    assert sum(record.details[f"paper_rung_{i}"] for i in range(5)) == 5 * 4
    assert record.details["paper_delta_max"] > 0
    assert record.engaged


def test_it_never_claims_more_than_to_report():
    assert paper.MODE.label == "reported"


def test_the_storage_is_that_of_the_paper():
    """288 B per token and KV head at head dim 128, 56.25 % of a 16-bit cache, without annotations."""
    less, more = (
        filled(n, dim=128).bytes()["device"] for n in (320, 640)
    )  # fmt: skip
    assert more - less == 2 * (320 * 288 + 20 * 9)


# -- the compiled pieces ------------------------------------------------------------------------------------


def pair_of(dtype="float32", spread=1.0, **options):
    """The same prompt and steps under torch's float64 operations and under the compiled pieces."""
    caches = []
    wide = getattr(torch, dtype)
    for backend in ("reference", "cpu"):
        cache = LayerCache(
            "certified-paper", query_heads=6, kv_heads=2, head_dim=64, dtype=wide, backend=backend, **options
        )
        cache.prefill((rows(2, 500, 64, seed=1) * spread).to(wide), rows(2, 500, 64, seed=2).to(wide))
        caches.append(cache)
    return caches


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"spread": 4.0}, {"k_max": 3, "explore": 0.5}, {"ranks": 3}])
def test_compiled_pieces_decide_and_bound_as_torch_does(dtype, options):
    pair = pair_of(dtype, **options)
    wide = getattr(torch, dtype)
    for t in range(20):  # over the end of a block
        key, value, query = (rows(n, 64, seed=100 * t + n).to(wide) for n in (2, 2, 6))
        for cache in pair:
            cache.append(key, value)
        theirs, ours = (cache.attend(query) for cache in pair)
        torch.testing.assert_close(ours.output, theirs.output, rtol=1e-6, atol=1e-7)
        for name in ("rung", "exact", "promoted_key_blocks", "promoted_value_blocks"):
            assert torch.equal(getattr(ours.certificate, name), getattr(theirs.certificate, name)), name
        for name in ("key_bound", "value_bound", "rounding_bound", "total_bound"):
            torch.testing.assert_close(
                getattr(ours.certificate, name), getattr(theirs.certificate, name), rtol=1e-9, atol=1e-12
            )
        for name, values in theirs.certificate.reported.items():
            torch.testing.assert_close(ours.certificate.reported[name], values, rtol=1e-9, atol=1e-12)
        error = (ours.output.double() - exact(pair[1], query)).norm(dim=-1)
        assert bool((error <= ours.certificate.total_bound).all())
    records = [cache._state.engagement().details for cache in pair]
    assert records[0] == pytest.approx(records[1], rel=1e-9)


def test_compiled_pieces_work_on_forks_and_on_several_threads():
    pair = pair_of()
    threads = torch.get_num_threads()
    forks = [cache._state.fork() for cache in pair]
    query = rows(6, 64, seed=4)
    try:
        torch.set_num_threads(2)
        theirs, ours = (fork.attend(query) for fork in forks)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(ours.output, theirs.output, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.certificate.total_bound, theirs.certificate.total_bound)


@pytest.mark.parametrize("place", ["key_codes", "value_codes", "key_scale", "value_offset"])
def test_compiled_checks_find_what_changed_in_tier_1(place):
    _, cache = pair_of(explore=1.0)
    store = cache._state.cache
    words = store.blocks[place].data.view(torch.uint8)
    words[1, 3].flatten()[5] ^= 1
    step = cache.attend(rows(6, 64, seed=9))
    assert step.certificate.rung.tolist() == [4] * 6
    assert store.raw.rows.nonzero().tolist() == [[1, 3]]


def test_compiled_checks_find_originals_that_changed():
    _, cache = pair_of(explore=1.0)
    cache._state.cache.originals[1].data[0, 40, 7] += 1
    with pytest.raises(BrokenRun, match="block 2, KV head 0"):
        cache.attend(rows(6, 64, seed=9))
    with pytest.raises(BrokenRun, match="block 2, KV head 0"):
        cache._state.check_intact()
