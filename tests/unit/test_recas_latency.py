import numpy as np
import pytest

from rcq_cli.recas import latency
from rcq_cli.recas.latency import Layer, layer_latency, sparse_step
from rcq_cli.recas.utility import DECAY, Weights


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def attention(query, keys, values):
    scores = keys.astype(np.float64) @ query.astype(np.float64) / 8
    return softmax(scores) @ values.astype(np.float64)


def chosen(layer):
    """Tokens of each head that the next step reads, by asking one head at a time."""
    found = []
    for head in range(8):
        one = slice(head, head + 1)
        query = layer.query[one] * np.float32(1 / 8)
        keys, values = layer.kept_keys[one], layer.kept_values[one]
        columns, always = layer.columns[one].copy(), layer.always[one]
        out = np.empty((1, 64), dtype=np.float32)
        sparse_step(query, keys, values, columns, always, layer.active, layer.room, out)
        found.append(layer.room[6][: layer.active].copy())
    return found


def test_the_sparse_step_is_softmax_attention_on_what_it_reads():
    layer = Layer(1024, 400, 300)
    for _ in range(5):
        layer.turn()
        read, output = chosen(layer), layer.sparse().copy()
        for head in range(8):
            keys, values = layer.kept_keys[head, read[head]], layer.kept_values[head, read[head]]
            assert len(set(read[head].tolist())) == 300
            assert output[head] == pytest.approx(attention(layer.query[head], keys, values), abs=2e-6)


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
    weights = Weights()
    for head, read in enumerate(chosen(layer)):
        scores = layer.kept_keys[head].astype(np.float64) @ layer.query[head] / 8
        standard = (scores - scores.mean()) / scores.std()
        z = np.sqrt(400 * layer.columns[head, 0])
        worth = weights.alpha / (1 + np.exp(-standard)) + weights.beta * z / (1 + z)
        rank = standard + 0.5 * (worth + weights.gamma * layer.columns[head, 1])
        rank[layer.always[head]] = np.inf
        least = np.sort(rank)[::-1][299]
        # of the bin on the edge any will do, so the last few may differ
        assert set(np.flatnonzero(rank > least + 0.02)) <= set(read)
        assert not set(np.flatnonzero(rank < least - 0.02)) & set(read)


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
    assert timing.ratio == timing.sparse_ms[0] / timing.full_ms[0]
    assert found.ratio == pytest.approx(timing.ratio)
