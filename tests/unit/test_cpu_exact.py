"""Scores of originals in backend `cpu`: right for any number of heads and tokens."""

import numpy as np
import pytest
import torch
from numba import njit

from rcq_cli.kernels import _cpu_state as state
from rcq_cli.kernels._cpu_exact import exact_scores
from rcq_cli.kernels._cpu_state import Shape, shape_at, store_at
from rcq_cli.kernels._cpu_vector import bytes_at, floats_at, longs_at

UNTOUCHED = 7.5
PADDED = 32


@njit
def scored(call: int, source: int, tokens: int, head: int, low: int, high: int, scores: int, to: int) -> bool:
    """Call the kernel on the call, the originals and the scores at those addresses."""
    words = longs_at(call)
    shape, tiers = shape_at(words), store_at(words)
    return exact_scores(shape, tiers, bytes_at(source), 0, tokens, head, low, high, floats_at(scores), to)


def call_of(group: int, dim: int, kind: int, queries: np.ndarray) -> state.Call:
    sizes = dict.fromkeys(Shape._fields, 0) | {"heads": 2, "group": group, "dim": dim, "padded": PADDED}
    call = state.Call(Shape(**sizes | {"kind": kind}))
    call.put(state.SCRATCH, queries.ctypes.data, *[0] * 20)
    return call


@pytest.mark.parametrize("dtype", state.KINDS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 11])
def test_guarded_scores_of_originals(group: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(group)
    for dim, tokens in ((64, 32), (16, 1), (80, 31), (128, 2), (96, 3), (64, 17)):
        keys = torch.randn(tokens, dim, generator=draw).to(dtype)
        queries = torch.randn(2 * group + 8, dim, generator=draw).numpy()
        call = call_of(group, dim, state.KINDS[dtype], queries)
        for low, high in {(0, group), (group - 1, group), (group // 2, group // 2 + 1)}:
            scores = np.full((group + 8) * PADDED, UNTOUCHED, np.float32)
            where = (keys.data_ptr(), tokens, 1, low, high, scores.ctypes.data, 2 * PADDED)
            assert scored(call.address, *where)
            rows = scores.reshape(-1, PADDED)
            truth = queries[group + low : group + high].astype(np.float64) @ keys.double().numpy().T
            written = rows[2 + low : 2 + high]
            assert np.allclose(written[:, :tokens], truth, rtol=1e-5, atol=1e-4)
            assert not written[:, tokens:].any()
            assert (np.delete(rows, np.s_[2 + low : 2 + high], 0) == UNTOUCHED).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_guarded_scores_tell_that_they_are_not_finite(bad: float) -> None:
    queries, keys = np.ones((3, 64), np.float32), torch.ones(5, 64)
    call, scores = call_of(3, 64, 0, np.tile(queries, (4, 1))), np.zeros(11 * PADDED, np.float32)
    where = (keys.data_ptr(), 5, 0, 0, 3, scores.ctypes.data, 0)
    assert scored(call.address, *where)
    keys[4, 63] = bad
    assert not scored(call.address, *where)
