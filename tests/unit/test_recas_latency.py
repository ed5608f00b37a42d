import numpy as np
import pytest

from rcq_cli.recas import latency
from rcq_cli.recas.latency import REFRESH, Layer, layer_latency
from rcq_cli.recas.utility import DECAY, Weights


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def attention(query, keys, values):
    scores = keys.astype(np.float64) @ query.astype(np.float64) / 8
    return softmax(scores) @ values.astype(np.float64)


def test_the_sparse_step_is_softmax_attention_on_what_it_reads():
    layer = Layer(1024, 400, 300)
    for step in range(2 * REFRESH + 3):
        layer.turn()
        output = layer.sparse().copy()
        for head in range(8):
            expected = attention(
                layer.query[head], layer.kept_keys[head, :300], layer.kept_values[head, :300]
            )
            assert output[head] == pytest.approx(expected, abs=2e-6), step


def test_reading_everything_is_the_full_step():
    layer = Layer(512, 512, 512)
    layer.turn()
    full = [run().numpy() for run in layer.full_ways().values()]
    sparse = layer.sparse()
    for output in full:
        assert output == pytest.approx(sparse, abs=2e-6)


def test_what_is_read_are_the_best_by_score_and_utility_and_the_protected():
    layer = Layer(1024, 400, 300)
    layer.columns[:, 0] = np.random.default_rng(1).random((8, 400)) / 200
    keys, columns, always = layer.kept_keys.copy(), layer.columns.copy(), layer.always.copy()
    layer.sparse()
    for head in range(8):
        scores = keys[head].astype(np.float64) @ layer.query[head] / 8
        standard = (scores - scores.mean()) / scores.std()
        z = np.sqrt(400 * columns[head, 0])
        weights = Weights()
        worth = weights.alpha / (1 + np.exp(-standard)) + weights.beta * z / (1 + z)
        rank = standard + 0.5 * (worth + weights.gamma * columns[head, 1])
        rank[always[head]] = np.inf
        best = np.sort(rank)[::-1][:300]
        read = {row.tobytes() for row in layer.kept_keys[head, :300]}
        # of the bin on the edge any will do, so the last few may differ
        sure = np.flatnonzero(rank > best[-1] + 0.02)
        assert len(read) == 300
        assert {keys[head, i].tobytes() for i in sure} <= read
        out = np.flatnonzero(rank < best[-1] - 0.02)
        assert not {keys[head, i].tobytes() for i in out} & read


def test_moving_rows_loses_none_and_keeps_columns_with_their_rows():
    layer = Layer(1024, 400, 200)
    before = {row.tobytes(): link for row, link in zip(layer.kept_keys[3], layer.columns[3, 1], strict=True)}
    for _ in range(3 * REFRESH):
        layer.turn()
        layer.sparse()
    after = {row.tobytes(): link for row, link in zip(layer.kept_keys[3], layer.columns[3, 1], strict=True)}
    assert before == after


def test_the_history_is_a_weighted_mean_of_what_was_read():
    layer = Layer(512, 300, 300)
    expected = layer.columns[2, 0].astype(np.float64)
    for _ in range(5):
        layer.turn()
        layer.sparse()
        scores = layer.kept_keys[2].astype(np.float64) @ layer.query[2] / 8
        expected = DECAY * expected + (1 - DECAY) * softmax(scores)
    assert layer.columns[2, 0] == pytest.approx(expected, rel=1e-4)


def test_timings_name_the_sizes_they_were_taken_at(monkeypatch):
    monkeypatch.setattr(latency, "WARM_UP", 0)
    found = layer_latency(0.4, 0.3, lengths=(1024,), steps=8)
    (timing,) = found.lengths
    assert (timing.tokens, timing.kept_tokens, timing.active_tokens) == (1024, 410, 307)
    assert found.ratio == timing.ratio == timing.sparse_ms[0] / timing.full_ms[0]
