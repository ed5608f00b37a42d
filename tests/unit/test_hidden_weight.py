"""Tokens that seem to weigh nothing: scores from codes are off by as much as their bound allows.

Keys of a block lie on a grid of steps chosen here, and some tokens half a step beside it in every channel,
all of them towards the query or all away from it. Weights that underflow and then turn out to count are the
hard case: they stand in no sum over used weights.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from rcq_cli import LayerCache
from tests.unit.exact_attention import truth

SIZE, DIM, USED = 32, 64, 16
"""Tokens of a block, channels, and channels in which keys are not 0."""
ANY = {"denominator": "abs", "eps": 1e9, "rounds": 0}
"""Nothing is promoted for the sake of the budget."""


class Attack(NamedTuple):
    """Queries `[R, D]`, keys and values `[1, T, D]`."""

    query: Tensor
    keys: Tensor
    values: Tensor


def hide(gen: np.random.Generator, query: np.ndarray, error: float, score: float, below: bool) -> np.ndarray:
    """Return the keys of a block with tokens of that `score` whose codes say `error` less, or more.

    Each of the first USED rows sets one end of the range of one channel, and scores far below all others.
    """
    sign, size = np.sign(query[:USED]), abs(query[0])
    step = 2 * error / (USED * size)
    token = sign * score / (USED * size)
    beside = np.where((sign > 0) == below, 0.499, 0.501)
    low = token - (127 + beside) * step
    far, near = (np.where((sign > 0) == up, low + 255 * step, low) for up in (False, True))
    rows = np.zeros((SIZE, DIM))
    rows[:, :USED] = far
    rows[np.arange(USED), np.arange(USED)] = near
    for row in USED + gen.permutation(SIZE - USED)[: gen.integers(1, 6)]:
        rows[row, :USED] = token - sign * step * (gen.integers(0, 3) if gen.random() < 0.3 else 0)
    return rows


def attack(seed: int) -> Attack:
    """Return blocks whose scores may be off by up to 59, between a first and a last one that are known."""
    gen = np.random.default_rng(seed)
    query, blocks = np.zeros(DIM), 3 + seed % 4
    query[:USED] = gen.choice((-1.0, 1.0), USED) * 2.0 ** gen.integers(-3, 4)
    keys, values = np.zeros((blocks, SIZE, DIM)), np.zeros((blocks, SIZE, DIM))
    values[..., 0] = gen.uniform(-1, 1) * 10 ** gen.uniform(-2, 3)
    for b in range(1, blocks - 1):
        error, score = min(59.0, math.exp(gen.uniform(-5, 4.2))), gen.uniform(-90, 20)
        if gen.random() < 0.6:  # about as far down as weights underflow
            error = gen.uniform(45, 59.5)
            score = error - gen.uniform(69, 76)
        keys[b] = hide(gen, query, error, score, bool(gen.random() < 0.8))
        here = np.flatnonzero(keys[b] @ query > score - error)
        ends = gen.uniform(-1, 1, len(here))
        values[b, here, gen.integers(1, DIM)] += 10 ** gen.uniform(-2, 5) * np.where(here % 2, 1.0, ends)
        values[b, 0, 1:] -= values[b, :, 1:].sum(0)  # their mean stays where it was
    for b in (0, -1):
        keys[b, :, :USED] = query[:USED] * gen.uniform(-5, 5) / (query**2).sum()
    rows = np.stack([query] + [query * gen.uniform(0.1, 1) for _ in range(seed % 4)])
    tail = int(gen.integers(0, 20))
    keys, values = (np.concatenate((x.reshape(-1, DIM), x[0, :tail])) for x in (keys, values))
    return Attack(*(torch.from_numpy(x).float() for x in (rows, keys[None], values[None])))


def beaten(found: Attack, backend: str, **options: object) -> float:
    """Return the largest error over its bound among the heads that are not recomputed; 0 if all are."""
    heads = len(found.query)
    cache = LayerCache(
        "certified", query_heads=heads, kv_heads=1, head_dim=DIM, backend=backend, scale=1.0, **options
    )
    cache.prefill(found.keys, found.values)
    step = cache.attend(found.query)
    error = (step.output.double() - truth(found.query, found.keys, found.values, 1.0)).norm(dim=-1)
    left = ~step.certificate.exact
    return float((error / step.certificate.total_bound)[left].max()) if bool(left.any()) else 0.0


@pytest.mark.parametrize("options", [{}, ANY, {**ANY, "skip": False}], ids=["budget", "skipping", "reading"])
@pytest.mark.parametrize(("backend", "seeds"), [("cpu", 400), ("reference", 40)])
def test_no_hidden_weight_beats_the_bound(backend: str, seeds: int, options: dict[str, object]) -> None:
    ratios = [beaten(attack(seed), backend, **options) for seed in range(seeds)]
    assert max(ratios) <= 1
    assert max(ratios) > 0.3  # bounds that say nothing would pass, too


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_weight_that_underflowed_counts_although_it_is_in_no_sum(backend: str) -> None:
    """It comes from a score 70.5 below all others, and may be e^-11.6; c0 is the output, its value far."""
    query = np.zeros(DIM)
    query[:USED] = np.tile((1.0, -1.0), USED // 2)
    keys, values = np.zeros((3, SIZE, DIM)), np.zeros((3, SIZE, DIM))
    gen = np.random.default_rng(0)
    keys[1] = hide(gen, query, 58.9, -11.6, True)
    values[..., 0] = 1.0
    hidden = np.flatnonzero(keys[1] @ query > -12)[0]
    values[1, hidden, 1], values[1, 0, 1] = 1e3, -1e3
    rows = query[None], keys.reshape(1, -1, DIM), values.reshape(1, -1, DIM)
    assert 0 < beaten(Attack(*(torch.from_numpy(x).float() for x in rows)), backend) <= 1
