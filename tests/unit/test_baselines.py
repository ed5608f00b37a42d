"""The worked examples of every baseline, by hand, and what each must never do."""

import pytest
import torch

from rcq_cli import LayerCache, SpecError
from rcq_cli.cache.statistics import Collector, Statistics, group_probabilities, probe_rows
from rcq_cli.kernels.reference import BACKEND
from rcq_cli.modes import h2o, h2o_norm, scissorhands, snapkv, streaming_llm, topscore, tova, tova_layer
from rcq_cli.modes._evicting import all_but_lowest, top
from rcq_cli.protocols import Geometry, Needs
from rcq_cli.recas import utility

DIM = 16


def state(mode, *, heads=1, group=1, dim=DIM, dtype="float32", **options):
    geometry = Geometry(heads * group, heads, dim, dtype, "cpu", dim**-0.5)
    return mode.MODE.open(geometry, mode_options(mode, **options), BACKEND)


def mode_options(mode, **options):
    kind = mode.MODE.Options
    return kind(**options)


def rows(*probabilities):
    """Lower triangular rows as `[1, n, n]`."""
    square = torch.zeros(len(probabilities), len(probabilities))
    for i, row in enumerate(probabilities):
        square[i, : len(row)] = torch.tensor(row)
    return square[None]


class Seen:
    """Statistics with given rows, whatever the keys."""

    def __init__(self, square):
        self.square, self.tokens, self.rows_seen = square, square.shape[2], square.shape[2]
        self.columns = square.sum(1)

    def last(self, _keys, count):
        return self.square[:, -count:]


def filled(layer, tokens):
    layer.prefill(*torch.randn(2, layer.geometry.kv_heads, tokens, layer.geometry.head_dim))
    return layer


def held(layer):
    return layer.positions.rows.tolist()


# -- selection ----------------------------------------------------------------------------------------------


def test_ties_keep_the_lower_position():
    assert top(torch.zeros(2, 6), 3).tolist() == [[0, 1, 2]] * 2


def test_of_a_tie_the_older_is_dropped():
    assert all_but_lowest(torch.zeros(1, 4), 1).tolist() == [[1, 2, 3]]


# -- streaming-llm ------------------------------------------------------------------------------------------


def test_streaming_keeps_sinks_and_window_and_trims_before_it_attends():
    layer = filled(state(streaming_llm, start=2, recent=3), 10)
    layer.end_prefill(None)
    assert held(layer) == [[0, 1, 7, 8, 9]]
    layer.append(*torch.randn(2, 1, DIM))
    assert held(layer) == [[0, 1, 8, 9, 10]]
    assert (layer.held, layer.tokens) == (5, 11)


# -- h2o ----------------------------------------------------------------------------------------------------

FOUR = rows([1], [0.5, 0.5], [0.2, 0.2, 0.6], [0.05, 0.05, 0.6, 0.3])


def test_h2o_keeps_the_largest_sums_and_goes_on_adding():
    layer = filled(state(h2o, keep_tokens=2), 4)
    layer.end_prefill(Seen(FOUR))
    assert held(layer) == [[0, 3]]
    torch.testing.assert_close(layer.sums, torch.tensor([[1.75, 0.3]]))
    layer.append(*torch.randn(2, 1, DIM))
    row = torch.tensor([[0.2, 0.5, 0.3]])
    layer.observe(row)
    torch.testing.assert_close(layer.sums, torch.tensor([[1.95, 0.8, 0.3]]))
    layer._keep(layer.compress(row))
    assert held(layer) == [[0, 4]]


def test_h2o_norm_divides_by_the_rows_that_saw_a_token():
    layer = filled(state(h2o_norm, keep_tokens=2), 4)
    layer.sums, layer.rows = Seen(FOUR).columns, 4
    torch.testing.assert_close(layer._scores(), torch.tensor([[0.4375, 0.25, 0.6, 0.3]]))
    layer.end_prefill(Seen(FOUR))
    assert held(layer) == [[2, 3]]


def test_h2o_defaults_to_a_tenth_and_a_tenth():
    layer = filled(state(h2o), 257)
    layer.end_prefill(Seen(torch.eye(257)[None]))
    assert (layer.budget, layer.recent, layer.held) == (25 + 25, 25, 50)


def test_a_generated_token_that_gets_the_mass_survives_in_h2o():
    torch.manual_seed(0)
    layer = filled(state(h2o, keep_tokens=16), 64)
    queries = torch.randn(1, 64, DIM)
    collector = Collector((Needs(column_sums=True),), 64, DIM**-0.5)
    collector.add(queries, layer.keys.rows)
    layer.end_prefill(collector.result())
    query = torch.randn(1, DIM)
    planted = 30 * query / query.norm()
    for step in range(40):
        key = planted if step == 3 else torch.randn(1, DIM) / 10
        layer.append(key, torch.randn(1, DIM))
        layer.attend(query)
    assert 64 + 3 in held(layer)[0]
    assert layer.held == 16


# -- scissorhands -------------------------------------------------------------------------------------------


def test_scissorhands_counts_rows_below_the_uniform_share():
    layer = filled(state(scissorhands, recent=1, keep_tokens=4), 4)
    layer.ended, layer.budget = True, 3
    for row in ([0.4, 0.1, 0.3, 0.2], [0.3, 0.1, 0.4, 0.2], [0.5, 0.05, 0.15, 0.3]):
        layer.observe(torch.tensor([row]))
    assert layer.verdicts().tolist() == [[0, 3, 1, 2]]
    layer.budget = 4
    layer._keep(torch.tensor([[0, 1, 2, 3]]))
    layer.budget = 3  # drops max(3 // 2, 1) = 1
    assert layer.compress(None).tolist() == [[0, 2, 3]]
    layer.budget = 2  # drops max(1, 2) = 2
    assert layer.compress(None).tolist() == [[0, 3]]


def test_scissorhands_is_a_saw_tooth_with_the_recent_tokens_always_there():
    torch.manual_seed(1)
    layer = filled(state(scissorhands, keep_tokens=40, recent=10, window=16), 100)
    collector = Collector((Needs(last_rows=16),), 100, DIM**-0.5)
    collector.add(torch.randn(1, 100, DIM), layer.keys.rows)
    layer.end_prefill(collector.result())
    assert layer.held == 40
    seen = set()
    for _ in range(60):
        layer.append(*torch.randn(2, 1, DIM))
        layer.attend(torch.randn(1, DIM))
        seen.add(layer.held)
        assert held(layer)[0][-10:] == list(range(layer.tokens - 10, layer.tokens))
    assert min(seen) == 40 - 20 + 1
    assert max(seen) == 40


def test_a_verdict_older_than_the_window_is_forgotten():
    layer = filled(state(scissorhands, window=3, keep_tokens=20), 2)
    layer.ended, layer.budget = True, 20
    low, high = torch.tensor([[0.1, 0.9]]), torch.tensor([[0.9, 0.1]])
    for row in (low, low, low):
        layer.observe(row)
    assert layer.verdicts().tolist() == [[3, 0]]
    for row in (high, high):
        layer.observe(row)
    assert layer.verdicts().tolist() == [[1, 2]]


# -- snapkv -------------------------------------------------------------------------------------------------


def test_snapkv_pools_after_cutting_the_window_off():
    scores = torch.tensor([[0.1, 0, 0.5, 0, 0, 0.2]])
    pooled = snapkv.pooled(scores, 3, "max")
    torch.testing.assert_close(pooled, torch.tensor([[0.1, 0.5, 0.5, 0.5, 0.2, 0.2]]))
    assert top(pooled, 3).tolist() == [[1, 2, 3]]
    mean = snapkv.pooled(scores, 3, "avg")
    torch.testing.assert_close(mean, torch.tensor([[0.1, 0.6, 0.5, 0.5, 0.2, 0.2]]) / 3)
    assert top(mean, 2).tolist() == [[1, 2]]


def test_snapkv_keeps_its_window_and_everything_generated():
    layer = filled(state(snapkv, window=4, kernel=3, keep_tokens=8), 20)
    square = torch.full((1, 20, 20), 0.01)
    square[:, -4:, 9] = 0.9
    layer.end_prefill(Seen(square))
    assert held(layer) == [[0, 8, 9, 10, 16, 17, 18, 19]]
    for _ in range(3):
        layer.append(*torch.randn(2, 1, DIM))
        layer.attend(torch.randn(1, DIM))
    assert held(layer)[0][-3:] == [20, 21, 22]
    assert layer.held == 11


# -- topscore -----------------------------------------------------------------------------------------------


def test_topscore_weighs_match_and_history():
    history, match = torch.tensor([[1, 0.2, 0.6, 0.4]]), torch.tensor([[0.1, 1, 0.3, 0.2]])
    worth = utility.utility(match, history, torch.zeros(1, 4), utility.Weights(0.5, 0.5, 0.0))
    torch.testing.assert_close(worth, torch.tensor([[0.55, 0.6, 0.45, 0.3]]))
    assert topscore.best(worth, 2, 0, 1).tolist() == [[1, 3]]
    assert topscore.best(worth, 3, 1, 1).tolist() == [[0, 1, 3]]


def prompt(seed, heads=2, group=2, tokens=300):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(n, tokens, 32, generator=draw) for n in (heads, heads, heads * group)]


def test_topscore_keeps_what_recas_keeps_without_stages():
    for seed in range(5):
        caches = [
            LayerCache(mode, query_heads=4, kv_heads=2, head_dim=32, keep_tokens=150, **options)
            for mode, options in (
                ("topscore", {"recent": 100}),
                ("recas", {"window": 100, "gamma": 0.0, "adapt": False}),
            )
        ]
        for cache in caches:
            cache.prefill(*prompt(seed))
            cache.bytes()
        kept = [cache._state.positions.rows for cache in caches]
        assert torch.equal(*kept)
        assert kept[0].shape == (2, 150)


def test_topscore_slides_its_window_and_drops_what_leaves_it():
    cache = LayerCache("topscore", query_heads=4, kv_heads=2, head_dim=32, keep_tokens=20, recent=3)
    cache.prefill(*prompt(7))
    cache.bytes()
    static = cache._state.positions.rows[:, :17].clone()
    for newest in (300, 301, 302, 303):
        cache.append(torch.randn(2, 32), torch.randn(2, 32))
        cache.attend(torch.randn(4, 32))
        assert torch.equal(cache._state.positions.rows[:, :17], static)
        assert held(cache._state)[0][-3:] == [newest - 2, newest - 1, newest]


# -- tova ---------------------------------------------------------------------------------------------------


def test_tova_goes_by_the_last_row_and_keeps_the_newest():
    layer = filled(state(tova, keep_tokens=3), 4)
    square = torch.full((1, 4, 4), 0.25)
    square[0, -1] = torch.tensor([0.4, 0.05, 0.25, 0.3])
    layer.end_prefill(Seen(square))
    assert held(layer) == [[0, 2, 3]]
    square[0, -1] = torch.tensor([0.5, 0.3, 0.2, 0])
    again = filled(state(tova, keep_tokens=3), 4)
    again.end_prefill(Seen(square))
    assert held(again) == [[0, 1, 3]]


def test_tova_drops_exactly_one_per_step():
    torch.manual_seed(2)
    layer = filled(state(tova, heads=2, group=3, keep_tokens=8), 30)
    collector = Collector((Needs(last_rows=1),), 30, DIM**-0.5)
    collector.add(torch.randn(6, 30, DIM), layer.keys.rows)
    layer.end_prefill(collector.result())
    for _ in range(5):
        before = [set(head) for head in held(layer)]
        layer.append(*torch.randn(2, 2, DIM))
        layer.attend(torch.randn(6, DIM))
        for old, new in zip(before, map(set, held(layer)), strict=True):
            assert len(new) == 8
            assert len(old - new) == 1
            assert layer.tokens - 1 in new


def test_tova_layer_keeps_one_set_for_all_heads():
    torch.manual_seed(3)
    layer = filled(state(tova_layer, heads=3, group=2, keep_tokens=8), 30)
    collector = Collector((Needs(last_rows=1),), 30, DIM**-0.5)
    queries = torch.randn(6, 30, DIM)
    collector.add(queries, layer.keys.rows)
    keys = layer.keys.rows.clone()
    layer.end_prefill(collector.result())
    mean = group_probabilities(queries[:, -1:], keys, DIM**-0.5)[:, 0].double().mean(0)
    best = [*sorted(mean[:-1].argsort(descending=True)[:7].tolist()), 29]
    assert held(layer) == [best] * 3


# -- statistics ---------------------------------------------------------------------------------------------


def brute_force(queries, keys, scale):
    """Group-mean causal probabilities `[Hkv, T, T]` in float64, one row at a time."""
    group = queries.shape[0] // keys.shape[0]
    tokens = keys.shape[1]
    out = torch.zeros(keys.shape[0], tokens, tokens, dtype=torch.float64)
    for h in range(queries.shape[0]):
        for i in range(tokens):
            logits = keys[h // group, : i + 1].double() @ queries[h, i].double() * scale
            out[h // group, i, : i + 1] += torch.softmax(logits, -1) / group
    return out


@pytest.mark.parametrize("chunks", [(37,), (7, 7, 7, 7, 7, 2), (1,) * 37, (20, 1, 16)])
@pytest.mark.parametrize("group", [1, 3])
def test_statistics_do_not_depend_on_chunks(chunks, group):
    torch.manual_seed(4)
    queries, keys = torch.randn(2 * group, 37, DIM), torch.randn(2, 37, DIM)
    needs = (Needs(last_rows=5), Needs(column_sums=True), Needs(probe_share=0.1, probe_seed=3))
    collector = Collector(needs, 37, 0.3)
    done = 0
    for size in chunks:
        done += size
        collector.add(queries[:, done - size : done], keys[:, :done])
    seen = collector.result()
    truth = brute_force(queries, keys, 0.3)
    torch.testing.assert_close(seen.columns.double(), truth.sum(1), rtol=0, atol=1e-5)
    torch.testing.assert_close(seen.last(keys, 5).double(), truth[:, -5:], rtol=0, atol=1e-6)
    probes = probe_rows(0.1, 3, 37)
    torch.testing.assert_close(seen.probabilities(keys, probes).double(), truth[:, probes], rtol=0, atol=1e-6)
    # every row has mass one
    torch.testing.assert_close(seen.columns.sum(-1), torch.full((2,), 37.0))


def test_probe_rows_are_the_last_and_a_seeded_draw_of_the_others():
    rows_ = probe_rows(0.05, 7, 1000).tolist()
    assert len(rows_) == len(set(rows_)) == 100
    assert rows_[-50:] == list(range(950, 1000))
    assert rows_ == probe_rows(0.05, 7, 1000).tolist()
    assert rows_ != probe_rows(0.05, 8, 1000).tolist()


def test_only_the_rows_asked_for_are_kept():
    collector = Collector((Needs(last_rows=4),), 50, 1.0)
    collector.add(torch.randn(6, 50, DIM), torch.randn(2, 50, DIM))
    seen = collector.result()
    assert isinstance(seen, Statistics)
    assert seen.columns is None
    assert seen.queries.shape == (6, 4, DIM)


# -- budgets ------------------------------------------------------------------------------------------------


def test_one_budget_at_most():
    with pytest.raises(SpecError, match="at once"):
        mode_options(h2o, keep_tokens=10, keep_fraction=0.5)


@pytest.mark.parametrize("options", [{"keep_fraction": 0.0}, {"keep_fraction": 1.5}, {"keep_tokens": 0}])
def test_budgets_out_of_range_are_refused(options):
    with pytest.raises(SpecError, match="not allowed"):
        mode_options(tova, **options)


def test_a_budget_below_the_window_is_refused():
    with pytest.raises(SpecError, match="33 or more"):
        mode_options(snapkv, keep_tokens=32)


def test_bytes_are_a_budget_that_the_ledger_keeps():
    torch.manual_seed(5)
    cache = LayerCache("tova", query_heads=4, kv_heads=2, head_dim=32, budget_bytes=40_000)
    cache.prefill(torch.randn(2, 500, 32), torch.randn(2, 500, 32), torch.randn(4, 500, 32))
    token = 2 * (2 * 32 * 4 + 4)
    assert 40_000 - token < cache.bytes()["device"] <= 40_000


def test_a_share_is_frozen_when_the_prompt_ends():
    torch.manual_seed(6)
    cache = LayerCache("h2o", query_heads=2, kv_heads=2, head_dim=16, keep_fraction=0.2)
    cache.prefill(torch.randn(2, 100, 16), torch.randn(2, 100, 16), torch.randn(2, 100, 16))
    for _ in range(30):
        cache.append(torch.randn(2, 16), torch.randn(2, 16))
        cache.attend(torch.randn(2, 16))
        assert cache._state.held == 20
