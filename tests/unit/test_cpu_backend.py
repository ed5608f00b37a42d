"""Backend `cpu` against float64 attention, the reference store and its own promises."""

import copy
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from rcq_cli import LayerCache
from rcq_cli.api import MODES
from rcq_cli.backends import choose_backend
from rcq_cli.cache.tiers import ANNOTATIONS, JOINT
from rcq_cli.certify.fused import SHARED_BLOCKS, room_for
from rcq_cli.errors import BrokenRun
from rcq_cli.kernels import cpu
from rcq_cli.kernels._cpu_bounds import FLUSHED
from rcq_cli.kernels._cpu_score import EXP_SLACK, weigh
from rcq_cli.kernels._cpu_vector import FLUSH, LANES, exponential, floats_at, load, plain, store
from rcq_cli.protocols import Geometry
from tests.unit.exact_attention import data, truth

SCALE = {64: 0.125, 128: 128**-0.5, 80: 80**-0.5, 16: 0.25}


def check(cache: LayerCache, k: Tensor, v: Tensor, queries: int, spread: float, seed: int) -> Tensor:
    """Run steps and compare each with float64; return the rungs used."""
    gen, eps, rungs = torch.Generator().manual_seed(seed + 1), cache._state.options.eps, []
    g = cache.geometry
    for _ in range(queries):
        query = (spread * torch.randn(g.query_heads, g.head_dim, generator=gen)).to(k.dtype)
        step = cache.attend(query)
        bound = step.certificate.total_bound
        error = (step.output.double() - truth(query, k, v, g.scale)).norm(dim=-1)
        norm = step.output.double().norm(dim=-1)
        assert bool(torch.isfinite(bound).all())
        assert bool((error <= bound).all()), (error / bound).max()
        met = step.certificate.exact | (bound * (1 + eps) <= eps * norm * (1 + 1e-12))
        assert bool(met.all())
        rungs.append(step.certificate.rung)
    return torch.cat(rungs)


@pytest.mark.parametrize(
    "kind",
    ["plain", "outlier", "tiny", "huge", "constant", "zero", "lognormal", "offset", "ties", "late", "topics"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_error_stays_within_its_bound(kind: str, dtype: torch.dtype) -> None:
    heads, group, dim = {torch.float32: (2, 3, 64), torch.bfloat16: (2, 4, 128), torch.float16: (1, 1, 80)}[
        dtype
    ]
    k, v = (t.to(dtype) for t in data(kind, heads, 700, dim, seed=7))
    if not bool(torch.isfinite(k).all() and torch.isfinite(v).all()):
        pytest.skip("does not fit the dtype")
    cache = LayerCache(
        "certified", query_heads=heads * group, kv_heads=heads, head_dim=dim, dtype=dtype, backend="cpu"
    )
    cache.prefill(k[:, :690], v[:, :690])
    for t in range(690, 700):
        cache.append(k[:, t], v[:, t])
    for spread in (0.2, 1.0, 6.0):
        check(cache, k, v, 2, spread, seed=3)


@pytest.mark.parametrize("eps", [0.05, 1.0])
def test_values_whose_products_underflow_are_charged(eps: float) -> None:
    gen = torch.Generator().manual_seed(0)
    k = 1e6 * torch.randn(1, 3200, 16, generator=gen)
    v = torch.full((1, 3200, 16), 1.4e-45)
    v[:, :1600] *= -1
    cache = LayerCache("certified", query_heads=4, kv_heads=1, head_dim=16, backend="cpu", eps=eps)
    cache.prefill(k, v)
    for seed in range(6):
        query = 3e-6 * torch.randn(4, 16, generator=gen)
        step = cache.attend(query)
        error = (step.output.double() - truth(query, k, v, 0.25)).norm(dim=-1)
        assert bool((error <= step.certificate.total_bound).all()), seed


@njit
def weights_of(scores: int, count: int) -> None:
    """Replace scores by their exponentials."""
    numbers = floats_at(scores)
    for i in range(0, count, LANES):
        store(numbers, i, exponential(load(numbers, i)))


def test_weights_are_exponentials_or_zero_where_what_is_lost_is_charged() -> None:
    scores = np.concatenate(
        [
            np.linspace(-FLUSH - 2, 0, 99_968),
            np.linspace(-FLUSH - 1e-3, -FLUSH + 1e-3, 64),
            np.full(16, -3e38),
        ]
    ).astype(np.float32)
    weights, exact = scores.copy(), np.exp(scores.astype(np.float64))
    weights_of(weights.ctypes.data, len(weights))
    lost = weights == 0
    assert not lost[scores > -FLUSH].any()
    assert exact[lost].max() <= FLUSHED
    assert abs(weights[~lost] / exact[~lost] - 1).max() <= EXP_SLACK / 2


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 240, 255, 256, 257, 272, 273])
def test_block_edges_and_short_contexts(tokens: int) -> None:
    k, v = data("topics", 2, tokens, 16, seed=tokens)
    cache = LayerCache("certified", query_heads=4, kv_heads=2, head_dim=16, backend="cpu", block=16)
    cache.prefill(k, v)
    check(cache, k, v, 3, 2.0, seed=tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"block": 16, "key_meta": "float32"},
        {"block": 64, "group": 32, "value_meta": "float16"},
        {"block": 20, "group": 64},
        {"block": 3},
        {"group": 8},
        {"denominator": "abs", "eps": 0.1},
        {"denominator": "layer"},
        {"tau": 0.9},
        {"skip": False, "rounds": 0},
        {"eps": 0.001},
    ],
    ids=str,
)
def test_every_option_keeps_the_promise(options: dict) -> None:
    k, v = (t.bfloat16() for t in data("topics", 2, 600, 64, seed=5))
    cache = LayerCache(
        "certified", query_heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16, backend="cpu", **options
    )
    cache.prefill(k, v)
    if options.get("denominator", "out") == "out":
        check(cache, k, v, 3, 1.0, seed=5)
        return
    query = torch.ones(8, 64, dtype=torch.bfloat16)
    step = cache.attend(query)
    error = (step.output.double() - truth(query, k, v, 0.125)).norm(dim=-1)
    assert bool((error <= step.certificate.total_bound).all())


def test_values_that_are_not_read_stand_for_the_mean_and_cost_what_their_spectrum_allows() -> None:
    """A sixth of the mass lies evenly on thousands of tokens: leaving it out would cost far more than eps."""
    gen, tokens, dim = torch.Generator().manual_seed(5), 4096, 64
    keys = 0.05 * torch.randn(1, tokens, dim, generator=gen)
    mean = torch.randn(dim, generator=gen)
    noise = torch.randn(1, tokens, dim, generator=gen)
    values = mean + 0.25 * noise
    query = torch.randn(2, dim, generator=gen)
    query = query / query.norm(dim=-1, keepdim=True)
    direction = query.sum(0) / query.sum(0).square().sum()
    keys[:, 1040] += 160 * direction
    values[:, 1040] = -2 * mean
    cache = LayerCache(
        "certified", query_heads=2, kv_heads=1, head_dim=dim, dtype=torch.float32, backend="cpu"
    )
    cache.prefill(keys, values)
    step, exact = cache.attend(query), truth(query, keys, values, 0.125)
    c = step.certificate
    weights = torch.softmax(query.double() @ keys[0].double().T * 0.125, -1)
    weights[:, 1040] = 0
    outside = weights.sum(-1)
    assert bool(((outside > 0.1) & (outside < 0.25)).all())
    error, left_out = (step.output.double() - exact).norm(dim=-1), outside * (3 * mean.double()).norm()
    assert bool(((c.skipped_value_blocks > 0.9 * c.blocks) & ~c.exact).all())
    assert bool((left_out > 0.1 * exact.norm(dim=-1)).all())
    assert bool(((error < 0.05 * left_out) & (error <= c.total_bound)).all())
    triangle = outside * 0.25 * noise.norm(dim=-1).double().min()
    kept = torch.arange(tokens) != 1040
    spread = values[0, kept].double() - values[0, kept].double().mean(0)
    spectral = 0.8 * torch.linalg.matrix_norm(spread, 2) * weights.norm(dim=-1)  # of nine blocks in ten
    assert bool(((c.dropped_bound > spectral) & (c.dropped_bound < 0.5 * triangle)).all())


def test_codes_are_those_of_the_reference_store() -> None:
    k, v = data("plain", 2, 320, 64, seed=1)
    stores = []
    for backend in ("cpu", "reference"):
        cache = LayerCache("certified", query_heads=2, kv_heads=2, head_dim=64, backend=backend)
        cache.prefill(k, v)
        stores.append(cache._state.cache)
    ours, theirs = (store.codes() for store in stores)
    assert set(ours) == set(theirs)
    for name, rows in theirs.items():
        assert torch.equal(ours[name], rows), name
    ours, theirs = (store.bounds() for store in stores)
    for name in ANNOTATIONS:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name in JOINT:  # bounded in float32 there
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0.07, atol=0)


def test_naive_is_attention_on_what_the_codes_stand_for() -> None:
    k, v = data("topics", 2, 290, 64, seed=2)
    outputs = []
    query = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    for backend in ("cpu", "reference"):
        cache = LayerCache("naive", query_heads=6, kv_heads=2, head_dim=64, backend=backend)
        cache.prefill(k, v)
        outputs.append(cache.attend(query).output)
    assert torch.allclose(*outputs, atol=2e-4)
    assert not torch.allclose(outputs[0].double(), truth(query, k, v, 0.125), atol=1e-3)


@pytest.mark.parametrize("tokens", [2100, 32 * SHARED_BLOCKS + 5])
def test_two_threads_give_what_one_gives_where_they_share_a_kv_head_and_where_not(tokens: int) -> None:
    k, v = data("topics", 1, tokens, 64, seed=4)
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            cache = LayerCache(
                "certified", query_heads=8, kv_heads=1, head_dim=64, backend="cpu", explore=0.0
            )
            cache.prefill(k, v)
            check(cache, k, v, 3, 1.5, seed=4)
            outputs.append(cache.attend(torch.ones(8, 64)).output)
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(*outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["topics", "late", "outlier"])
def test_a_token_appended_alone_is_stored_as_it_came_and_enters_the_spectral_bound(
    kind: str, dtype: torch.dtype
) -> None:
    k, v = (t.to(dtype) for t in data(kind, 2, 190, 64, seed=8))
    cache = LayerCache(
        "certified", query_heads=4, kv_heads=2, head_dim=64, dtype=dtype, backend="cpu", scale=0.125
    )
    cache.prefill(k[:, :50], v[:, :50])
    store = cache._state.cache
    for t in range(50, 190):
        cache.append(k[:, t], v[:, t])
        centred = v[:, : t + 1].double() - store.centre[:, None]
        largest = torch.linalg.eigvalsh(centred.transpose(1, 2) @ centred)[:, -1]
        assert (store.value_spectrum.value >= largest).all()
        # a refresh costs a factor of 64^(1/32), a tenth may be new
        assert (store.value_spectrum.value <= 1.3 * largest).all()
        tail = torch.stack((k, v))[:, :, t + 1 - store.tail_tokens : t + 1]
        assert torch.equal(store.tail[:, :, : store.tail_tokens], tail)
    for slab, rows in zip(store.originals, (k, v), strict=True):
        assert torch.equal(slab.rows, rows)


def test_scratch_depends_on_the_context_and_not_on_what_ran_before() -> None:
    def scratch(tokens: int) -> int:
        k, v = data("plain", 1, tokens, 64, seed=1)
        cache = LayerCache("certified", query_heads=1, kv_heads=1, head_dim=64, backend="cpu")
        cache.prefill(k, v)
        cache.attend(torch.ones(1, 64))
        return cache.bytes()["scratch"]

    with ThreadPoolExecutor(1) as fresh:
        first = fresh.submit(scratch, 640).result()
    assert scratch(20_000) > scratch(5_000) > scratch(640) == first
    for blocks in range(1, 5000):
        assert 0 <= room_for(blocks) - blocks <= max(15, blocks // 8)


def test_threads_may_attend_on_one_cache_at_once() -> None:
    k, v = data("topics", 2, 700, 64, seed=9)
    cache = LayerCache("certified", query_heads=4, kv_heads=2, head_dim=64, backend="cpu", explore=0.0)
    cache.prefill(k, v)
    gen = torch.Generator().manual_seed(9)
    queries = [torch.randn(4, 64, generator=gen) for _ in range(200)]
    alone = [cache.attend(query).output for query in queries]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda query: cache.attend(query).output, queries))
    assert all(map(torch.equal, alone, together))


def test_kernels_leave_pytorch_the_number_of_threads_it_has() -> None:
    code = (
        "import torch\nfrom rcq_cli import LayerCache\nfrom rcq_cli.environment import collect\n"
        "cache = LayerCache('certified', query_heads=4, kv_heads=2, head_dim=64, backend='cpu')\n"
        "cache.prefill(torch.randn(2, 100, 64), torch.randn(2, 100, 64))\n"
        "cache.attend(torch.randn(4, 64))\ncollect('cpu')\nprint(torch.get_num_threads())"
    )
    for torch_threads, numba_threads in (("1", "2"), ("2", "1")):
        env = os.environ | {"OMP_NUM_THREADS": torch_threads, "NUMBA_NUM_THREADS": numba_threads}
        result = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == torch_threads


def test_a_fork_and_its_origin_go_separate_ways() -> None:
    k, v = data("topics", 2, 500, 64, seed=6)
    cache = LayerCache("certified", query_heads=4, kv_heads=2, head_dim=64, backend="cpu")
    cache.prefill(k[:, :400], v[:, :400])
    twin = cache._state.fork()
    cache.prefill(-k[:, 400:], v[:, 400:])
    twin.prefill(k[:, 400:], v[:, 400:])
    query = torch.ones(4, 64)
    mine, other = cache.attend(query), twin.attend(query)
    for step, keys in ((mine, torch.cat((k[:, :400], -k[:, 400:]), 1)), (other, k)):
        error = (step.output.double() - truth(query, keys, v, 0.125)).norm(dim=-1)
        assert bool((error <= step.certificate.total_bound).all())


@pytest.mark.parametrize("record", ["keys", "values"])
def test_a_damaged_block_sends_the_layer_through_dense_attention(record: str) -> None:
    k, v = data("topics", 2, 320, 64, seed=8)
    cache = LayerCache("certified", query_heads=4, kv_heads=2, head_dim=64, backend="cpu", eps=1e-4)
    cache.prefill(k, v)
    cache._state.cache.blocks[record].data[1, 4, 100] ^= 16
    query = torch.randn(4, 64, generator=torch.Generator().manual_seed(8))
    step = cache.attend(query)
    assert step.certificate.rung.tolist() == [4] * 4
    assert bool(step.certificate.exact.all())
    dense = LayerCache("dense", query_heads=4, kv_heads=2, head_dim=64, backend="cpu")
    dense.prefill(k, v)
    assert torch.equal(step.output, dense.attend(query).output)
    assert cache._state.cache.raw.rows[1].tolist() == [False] * 4 + [True] + [False] * 5
    assert bool((cache.attend(query).certificate.rung < 4).all())


@pytest.mark.parametrize("tokens", [320, 333])
def test_codes_that_do_not_fit_the_originals_are_found_by_their_scores(tokens: int) -> None:
    """A record that was wrong before it was hashed: only the comparison of scores can tell."""
    k, v = data("topics", 1, tokens, 64, seed=8)
    cache = LayerCache("certified", query_heads=1, kv_heads=1, head_dim=64, backend="cpu", explore=0.0)
    cache.prefill(k, v)
    store = cache._state.cache
    store.blocks["keys"].data[0, 0, :2048] ^= 64  # all codes of the first block, which is always promoted
    piece = cpu.compiled(cpu.print_piece).ctypes
    call = store.call()
    store.checks.data[0, 0, 0] = piece(call.address, 0, 0, 0)
    query = torch.randn(1, 64, generator=torch.Generator().manual_seed(8))
    assert cache.attend(query).certificate.rung.tolist() == [4]
    assert store.raw.rows[0].tolist() == [True] + [False] * (tokens // 32 - 1)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_block_that_loses_its_raw_flag_is_trusted_with_nothing(backend: str) -> None:
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 330, 64, generator=gen) for _ in "kv")
    k[:, 64:96] *= 3e5
    cache = LayerCache(
        "certified", query_heads=8, kv_heads=2, head_dim=64, backend=backend, explore=0.0, scale=0.125
    )
    cache.prefill(k, v)
    store = cache._state.cache
    assert store.raw.rows[1].tolist() == [False] * 2 + [True] + [False] * 7
    store.raw.data[1, 2] = False
    check(cache, k, v, 4, 1e-3, seed=5)


@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_damaged_record_is_found_by_looking_around(part: str) -> None:
    k, v = data("topics", 1, 330, 64, seed=5)
    cache = LayerCache("certified", query_heads=4, kv_heads=1, head_dim=64, backend="cpu", explore=1.0)
    cache.prefill(k, v)
    store = cache._state.cache
    store.blocks[part].data[0, 4, -1] ^= 1
    query, steps = torch.zeros(4, 64), 0  # even attention: nothing else makes it look at this block
    while not store.raw.rows[0, 4]:
        step, steps = cache.attend(query), steps + 1
        assert steps < 10
    assert step.certificate.rung.tolist() == [4] * 4


@pytest.mark.parametrize("entry", [0, 1])
def test_a_changed_bound_of_a_raw_block_is_found(entry: int) -> None:
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 330, 64, generator=gen) for _ in "kv")
    k[:, 64:96] *= 3e5
    cache = LayerCache("certified", query_heads=4, kv_heads=1, head_dim=64, backend="cpu", explore=0.0)
    cache.prefill(k, v)
    store, query = cache._state.cache, torch.randn(4, 64, generator=gen)
    assert store.raw.rows[0].tolist() == [False] * 2 + [True] + [False] * 7
    kept = store.raw_bounds.data[0, 2, entry].clone()
    for bit in range(64):
        store.raw_bounds.data[0, 2, entry] = kept
        store.raw_bounds.data.view(torch.int64)[0, 2, entry] ^= 1 << bit if bit < 63 else -(1 << 63)
        with pytest.raises(BrokenRun):
            cache.verify()
        with pytest.raises(BrokenRun):
            cache.attend(query)
    store.raw_bounds.data[0, 2, entry] = kept
    cache.verify()
    cache.attend(query)


def test_a_change_of_any_word_changes_the_fingerprint() -> None:
    k, v = data("plain", 2, 64, 32, seed=3)
    cache = LayerCache("certified", query_heads=2, kv_heads=2, head_dim=32, backend="cpu")
    cache.prefill(k, v)
    store = cache._state.cache
    call = store.call()
    piece, seen = cpu.compiled(cpu.print_piece).ctypes, set()
    records = {0: store.blocks["keys"], 1: store.blocks["values"]}
    for part, record in records.items():
        data_, before = record.data[1, 1], piece(call.address, part, 1, 1)
        assert before == store.checks.data[1, 1, part]
        for byte in range(len(data_)):
            data_[byte] ^= 1 << byte % 8
            seen.add(piece(call.address, part, 1, 1))
            data_[byte] ^= 1 << byte % 8
        assert piece(call.address, part, 1, 1) == before
        assert before not in seen
        order = torch.arange(len(data_)).unflatten(0, (-1, 4)).roll(1, 0).flatten()
        data_[:] = data_[order]  # the same words elsewhere
        assert piece(call.address, part, 1, 1) != before
    assert len(seen) == sum(record.data.shape[2] for record in records.values())


def test_damaged_originals_stop_the_run() -> None:
    k, v = data("topics", 1, 320, 64, seed=9)
    cache = LayerCache("certified", query_heads=1, kv_heads=1, head_dim=64, backend="cpu")
    cache.prefill(k, v)
    cache._state.cache.originals[0].data[0, 0, 0] += 1
    with pytest.raises(BrokenRun, match="block 0"):
        cache.attend(torch.ones(1, 64))


@pytest.mark.parametrize(("dim", "most"), [(128, 0.45), (64, 0.48)])
def test_tier_one_is_small(dim: int, most: float) -> None:
    k, v = (t.bfloat16() for t in data("plain", 1, 32768, dim, seed=0))
    cache = LayerCache(
        "certified", query_heads=1, kv_heads=1, head_dim=dim, dtype=torch.bfloat16, backend="cpu"
    )
    cache.prefill(k, v)
    held = cache.bytes()
    # the bytes of theory 1.4, 18 + 1 bytes of notes and flag a block, and an open tail without tokens
    blocks = 1024
    record = dim + 4 * dim // 32 + dim // 2 + 4 + 2 * dim // 16
    tail, centre, spectra = 2 * 8 * dim * 2, 4 * dim, 16
    assert held["device"] == blocks * (32 * record + 19) + tail + centre + spectra
    assert held["device"] <= most * held["dense_equivalent"]


@pytest.mark.parametrize("first", ["total_bound", "exact", "blocks", "paged_bytes", "reported"])
def test_a_certificate_is_whole_whatever_is_asked_for_first(first: str) -> None:
    k, v = data("topics", 2, 600, 64, seed=3)
    cache = LayerCache("certified", query_heads=4, kv_heads=2, head_dim=64, backend="cpu")
    cache.prefill(k, v)
    found = [cache.attend(torch.ones(4, 64)).certificate for _ in range(3)]
    getattr(found[0], first)
    for c in (copy.deepcopy(found[0]), pickle.loads(pickle.dumps(found[1])), replace(found[2], reported={})):
        named = asdict(c)
        bounds = [named.pop(f"{name}_bound") for name in ("key", "value", "dropped", "rounding", "total")]
        assert torch.equal(sum(bounds[:4]), bounds[4])
        kinds = {name: held.dtype for name, held in named.items() if isinstance(held, Tensor)}
        assert kinds.pop("output_norm") is torch.float64
        assert (kinds.pop("exact"), kinds.pop("rung")) == (torch.bool, torch.int8)
        assert len(kinds) == 3
        assert set(kinds.values()) == {torch.int32}
        assert c.blocks == 18
        assert c.reported == {}
    assert not hasattr(found[0], "nonsense")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [16, 4096, 48, 40, 2**16 + 16])
def test_numbers_that_are_not_finite_are_found_wherever_they_are(count: int, dtype: torch.dtype) -> None:
    cpu.warm()
    largest = torch.finfo(dtype).max
    numbers = torch.full((count,), largest, dtype=dtype)
    numbers[::2] = -largest
    assert cpu.BACKEND.finite(numbers)
    assert cpu.BACKEND.finite(numbers[::2])
    for place in {*range(0, count, max(1, count // 64)), count - 1}:
        for bad in (torch.nan, torch.inf, -torch.inf):
            spoilt = numbers.clone()
            spoilt[place] = bad
            assert not cpu.BACKEND.finite(spoilt)


def test_auto_picks_this_backend_and_reasons_are_stated() -> None:
    geometry = Geometry(4, 2, 64, "float32", "cpu", 0.125)
    assert choose_backend("auto", geometry).name == "cpu"
    backend = choose_backend("cpu", geometry)
    assert "multiple of 16" in backend.unsupported(Geometry(4, 2, 24, "float32", "cpu", 0.2))
    options = MODES.load("certified").Options(group=8)
    assert "multiple of 16" in backend.unfused(options.format())


def test_two_parts_of_the_kernels_never_share_a_name() -> None:
    with pytest.raises(ValueError, match=r"two parts .* called .*_cpu_score\.weigh; `variant`"):
        plain(weigh.py_func)


def test_import_compiles_nothing_and_an_unwritable_cache_does_no_harm(tmp_path: object) -> None:
    code = (
        "from rcq_cli.kernels import cpu, _cpu_vector as v\n"
        "print(cpu.compiled.cache_info().currsize, v._folder())"
    )
    for folder, expected in ((str(tmp_path), "0 " + str(tmp_path)), ("/proc/none", "0 None")):
        env = os.environ | {"NUMBA_CACHE_DIR": folder}
        result = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert result.stdout.startswith(expected)
