"""The promise of mode `certified`: ||output - exact|| <= total_bound, always finite, and within eps or exact.

The truth is softmax attention in extended precision on the very keys and values given, written here.
Every test takes the backend as a parameter; one that cannot serve a case is skipped with its own reason.
"""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rcq_cli.api import LayerCache
from rcq_cli.backends import BACKENDS
from rcq_cli.protocols import Geometry

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTRIBUTES = ("key_bound", "value_bound", "dropped_bound", "rounding_bound", "total_bound")
backends = pytest.mark.parametrize("backend", BACKENDS.names())


def attention(query, keys, values, scale) -> np.ndarray:
    """`[Hq, D]` softmax attention in extended precision (64 bits of mantissa where the machine has them)."""
    q, k, v = (t.double().numpy().astype(np.longdouble) for t in (query, keys, values))
    group, rows = len(q) // len(k), []
    for head, row in enumerate(q):
        scores = (k[head // group] @ row) * np.longdouble(scale)
        weights = np.exp(scores - scores.max())
        rows.append(weights @ v[head // group] / weights.sum())
    return np.array(rows)


def attention_with_digits(query, keys, values, scale, digits) -> np.ndarray:
    """The same with as many digits as it takes, one head."""
    with mpmath.workdps(digits):
        scores = [mpmath.fdot(k.tolist(), query.tolist()) * scale for k in keys.double()]
        top = max(scores)
        weights = [mpmath.exp(s - top) for s in scores]
        total = mpmath.fsum(weights)
        columns = values.double().T.tolist()
        return np.array([float(mpmath.fdot(weights, column) / total) for column in columns])


def make(backend: str, *, query_heads=1, kv_heads=1, head_dim=16, dtype="float32", scale=None, **options):
    given_scale = head_dim**-0.5 if scale is None else scale
    geometry = Geometry(query_heads, kv_heads, head_dim, dtype, "cpu", float(given_scale))
    reason = BACKENDS.load(backend).unsupported(geometry)
    if reason:
        pytest.skip(f"{backend}: {reason}")
    return LayerCache(
        "certified",
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=DTYPES[dtype],
        scale=scale,
        backend=backend,
        **options,
    )


def check(step, truth: np.ndarray, eps: float | None) -> np.ndarray:
    """Assert the whole promise of one step and return error / bound per head."""
    c = step.certificate
    key, value, dropped, fp, total = (getattr(c, name).numpy() for name in ATTRIBUTES)
    assert total.dtype == np.float64
    assert np.isfinite(total).all()
    assert (np.stack((key, value, dropped, fp)) >= 0).all()
    np.testing.assert_allclose(total, key + value + dropped + fp, rtol=1e-15)
    exact, output = c.exact.numpy(), step.output.double().numpy()
    assert (np.stack((key, value, dropped))[:, exact] == 0).all()
    error = np.sqrt(((truth - output) ** 2).sum(-1)).astype(np.float64)
    assert (error <= total).all(), (error, total, exact)
    if eps is not None:
        room = np.linalg.norm(output, axis=-1) - total
        assert (exact | (total == 0) | ((room > 0) & (total <= eps * room))).all()
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(error / total)


# -- data ---------------------------------------------------------------------------------------------------


def shaped(kind: str, x: torch.Tensor, other: torch.Tensor, info) -> torch.Tensor:
    """Standard normal `x` `[H, T, D]` turned into `kind`; `other` is a second draw of the same shape."""
    match kind:
        case "outlier-channel":
            return torch.cat((x[..., :-1], 100 * x[..., -1:]), -1)
        case "near-ties":
            return x[:, :1] + 1e-4 * x
        case "log-normal":
            return x * (3 * other[..., :1]).exp()
        case "low-rank":
            return x[..., :1] * other[:1, :1]
        case "offset":
            return 40 + 0.05 * x
        case "one-huge-token":
            return torch.where(torch.arange(x.shape[1])[:, None] == x.shape[1] // 3, 1e4 * x, x)
        case "plus-minus-1500":
            return 1500 * x.sign()
        case "largest":
            return x / x.abs().amax() * info.max
        case "constant":
            return torch.full_like(x, -3.7)
    return x * {"normal": 1.0, "tiny": 1e-30, "subnormal": 0.3 * info.tiny, "zero": 0.0}[kind]


SHAPES = (
    "normal", "outlier-channel", "near-ties", "tiny", "subnormal", "largest", "constant", "zero",
    "log-normal", "low-rank", "offset", "plus-minus-1500", "one-huge-token",
)  # fmt: skip


def draw(kind: str, shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    gen, info = torch.Generator().manual_seed(seed), torch.finfo(DTYPES[dtype])
    x, other = (torch.randn(*shape, generator=gen, dtype=torch.float64) for _ in range(2))
    x = shaped(kind, x, other, info)
    return x.clamp(-info.max, info.max).to(DTYPES[dtype])


@st.composite
def cases(draw_from):
    pick = lambda *values: draw_from(st.sampled_from(values))  # noqa: E731
    tokens = draw_from(st.integers(1, 90))
    return {
        "dtype": pick(*DTYPES),
        "heads": pick((1, 1), (2, 2), (3, 1), (6, 2), (8, 1)),
        "dim": pick(16, 16, 48, 80, 256),
        "tokens": tokens,
        "prefilled": draw_from(st.integers(max(0, tokens - 12), tokens)),
        "kinds": (pick(*SHAPES), pick(*SHAPES), pick("normal", "outlier-channel", "largest", "zero", "tiny")),
        "scale": pick(None, None, None, 0.0, -0.3, 1e-30, 1e6),
        "eps": pick(1e-6, 1e-3, 0.01, 0.05, 0.05, 0.3, 1.0),
        "block": pick(2, 4, 8, 32),
        "group": pick(4, 8, 16),
        "metas": (pick("float16", "float32"), pick("two-level", "float16")),
        "skip": pick(True, True, False),
        "rounds": pick(0, 2, 4, 4),
        "tau": pick(0.0, 0.0, 0.6),
        "seed": draw_from(st.integers(0, 2**16)),
    }


@backends
@settings(
    deadline=None,
    max_examples=70,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=cases())
def test_the_promise_holds_for_any_finite_input(backend, case):
    (hq, hkv), dim, seed = case["heads"], case["dim"], case["seed"]
    keys, values, query = (
        draw(kind, shape, case["dtype"], seed + i)
        for i, (kind, shape) in enumerate(
            zip(case["kinds"], ((hkv, case["tokens"], dim),) * 2 + ((hq, 1, dim),), strict=True)
        )
    )
    cache = make(
        backend,
        query_heads=hq,
        kv_heads=hkv,
        head_dim=dim,
        dtype=case["dtype"],
        scale=case["scale"],
        **{name: case[name] for name in ("eps", "block", "group", "skip", "rounds", "tau")},
        key_meta=case["metas"][0],
        value_meta=case["metas"][1],
    )
    done = case["prefilled"]
    if done:
        cache.prefill(keys[:, :done], values[:, :done])
    for t in range(done, case["tokens"]):
        cache.append(keys[:, t], values[:, t])
    step = cache.attend(query[:, 0])
    assert step.output.dtype == DTYPES[case["dtype"]]
    assert not (step.certificate.rung == 4).any()  # sound arithmetic never accuses the store of corruption
    scale = dim**-0.5 if case["scale"] is None else case["scale"]
    check(step, attention(query[:, 0], keys, values, scale), case["eps"])


# -- realistic heads: the certificate must also be worth something ------------------------------------------


def head_like_a_model(tokens=700, dim=64, group=3, seed=0, sharpness=1.0):
    """Keys with outlier channels and positions, low-rank plus log-normal values, a sink, one needle."""
    gen = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, tokens, dim, generator=gen)
    keys[..., 3] += 12
    keys[..., 7] *= 6
    query = sharpness * torch.randn(group, dim, generator=gen)
    keys[0, 0] = 4 * query.mean(0)
    keys[0, tokens // 2] = 3 * query[0] / sharpness
    basis = torch.randn(4, dim, generator=gen)
    values = torch.randn(1, tokens, 4, generator=gen) @ basis + 0.3 * torch.randn(
        1, tokens, dim, generator=gen
    )
    return query.half(), keys.half(), values.half()


@backends
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("eps", [0.01, 0.05, 0.1])
def test_heads_like_those_of_a_model_are_certified_within_eps_and_mostly_from_codes(backend, eps, sharpness):
    query, keys, values = head_like_a_model(sharpness=sharpness)
    cache = make(backend, query_heads=3, head_dim=64, dtype="float16", eps=eps, block=16)
    cache.prefill(keys, values)
    step = cache.attend(query)
    check(step, attention(query, keys, values, 64**-0.5), eps)
    if eps >= 0.05 and sharpness <= 1:
        assert not step.certificate.exact.any()
        assert int(step.certificate.promoted_key_blocks.max()) < step.certificate.blocks


# -- adversarial directions ---------------------------------------------------------------------------------


def key_residuals(cache, keys):
    """k - k' of all completed blocks, read from the layer's store."""
    store = cache._state.cache
    coded = store.backend.keys(store.codes())[0].flatten(0, 1).double()
    return keys[0, : len(coded)].double() - coded


def value_residuals(cache, values):
    store = cache._state.cache
    coded = store.backend.values(store.codes())[0].flatten(0, 1).double()
    return values[0, : len(coded)].double() - coded


@backends
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["normal", "outlier-channel", "offset", "log-normal"])
def test_queries_aimed_at_the_residuals_of_the_keys_do_not_beat_the_bound(backend, dtype, shape):
    dim, tokens = 32, 70
    keys, values = draw(shape, (1, tokens, dim), dtype, 1), draw("normal", (1, tokens, dim), dtype, 2)
    cache = make(backend, head_dim=dim, dtype=dtype, eps=1.0, block=8, skip=False, explore=0.0)
    cache.prefill(keys, values)
    residual = key_residuals(cache, keys)
    worst, size = int(residual.norm(dim=1).argmax()), float(keys.double().norm(dim=-1).mean())
    gen = torch.Generator().manual_seed(3)
    some = torch.randn(dim, generator=gen, dtype=torch.float64)
    directions = (
        residual[worst],
        -residual[worst],
        residual[worst].sign(),
        residual[worst].sign() * some.abs(),
        residual[worst] + 0.01 * some,
    )
    ratios = []
    for direction in directions:
        for strength in (1.0, 30.0, 3000.0):
            query = (direction / direction.norm() * strength / size * dim**0.5)[None].to(DTYPES[dtype])
            if not bool(torch.isfinite(query).all()):
                continue
            truth = attention(query, keys, values, dim**-0.5)
            ratios.append(float(check(cache.attend(query), truth, 1.0).max()))
    assert max(ratios) > 1e-4


@backends
def test_an_open_tail_far_from_all_other_values_counts_in_the_bound(backend):
    """The radius of values must span the tail: mass moves between it and the coded blocks."""
    dim, tokens = 32, 70
    keys, values = (
        draw("normal", (1, tokens, dim), "float32", 1),
        draw("normal", (1, tokens, dim), "float32", 2),
    )
    values[:, 64:] += 1e4
    cache = make(backend, head_dim=dim, eps=1.0, block=8, skip=False, explore=0.0, rounds=0)
    cache.prefill(keys[:, :64], values[:, :64])
    cache.prefill(keys[:, 64:], values[:, 64:])
    residual, ratios = key_residuals(cache, keys), []
    for aim in (residual.sum(0), residual[16:24].sum(0), residual[int(residual.norm(dim=1).argmax())]):
        for strength in (0.3, 3.0, 30.0):
            query = (strength * dim**0.5 * aim / aim.norm())[None].float()
            step = cache.attend(query)
            ratios.append(float(check(step, attention(query, keys, values, dim**-0.5), 1.0).max()))
    assert max(ratios) > 0.01


@backends
def test_weights_aimed_at_the_residuals_of_the_values_come_close_to_the_bound_and_stay_below(backend):
    """Keys are distinct one-hot rows times a large number, so that a query picks any weights it likes."""
    dim = tokens = 32
    keys = 8 * torch.eye(dim)[None]
    values = draw("log-normal", (1, tokens, dim), "float32", 5)
    cache = make(backend, head_dim=dim, eps=1.0, block=4, skip=False, explore=0.0, rounds=0)
    cache.prefill(keys, values)
    residual = value_residuals(cache, values)
    ratios = []
    for seed in range(20):
        gen = torch.Generator().manual_seed(seed)
        direction = torch.randn(dim, generator=gen, dtype=torch.float64)
        aligned = (residual @ direction).clamp_min(1e-9) ** (1 + seed % 4)
        query = (aligned.log() * dim**0.5 / 8).float()[None]
        truth = attention(query, keys, values, dim**-0.5)
        ratios.append(float(check(cache.attend(query), truth, 1.0).max()))
    assert max(ratios) > 0.05


def lifted_block(keys_at: float, query_at: float, dim: int, seed: int, drop: float):
    """A middle block whose INT8 scores lie far below the true ones: residuals aligned with the query.

    Two extreme tokens of alternating signs stretch the grid and cancel in the score; the other two sit just
    below half a step, so every channel adds to the error. All other tokens end `drop` below the true score.
    """
    gen = torch.Generator().manual_seed(seed)
    step = 2 * keys_at / 255
    grid = -keys_at + 128 * step
    codes = torch.randint(-100, 100, (2, dim), generator=gen)
    signs = 1 - 2 * (torch.arange(dim) % 2)
    query = torch.full((1, dim), float(query_at))
    block = torch.cat((keys_at * signs[None], -keys_at * signs[None], (codes + 0.49) * step + grid))
    true = float(block[2] @ query[0])
    other = query * ((true - drop * dim**0.5) / float(query.square().sum()))
    keys = torch.cat((other.expand(4, dim), block, other.expand(8, dim)))[None]
    values = torch.ones(1, 16, dim)
    values[0, 4:8] = torch.tensor([-1.0, 1.0, 3.0, 1.0])[:, None]
    return query, keys, values


@backends
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [200.0, 1500.0, 12000.0, 60000.0])
@pytest.mark.parametrize("query_at", [0.5, 6.0, 10.0, 20.0])
def test_a_block_that_underflows_but_truly_holds_the_maximum_is_not_lost(backend, dtype, size, query_at):
    """Scores 100 to 10,000 nats off: exp underflows, squares underflow, and the truth is elsewhere."""
    for seed, drop in ((0, 0.3), (1, -3.0), (2, 5.0)):
        query, keys, values = (
            t.clamp(-6.5e4, 6.5e4).to(DTYPES[dtype]) for t in lifted_block(size, query_at, 64, seed, drop)
        )
        for skip in (False, True):
            cache = make(backend, head_dim=64, dtype=dtype, eps=0.5, block=4, explore=0.0, skip=skip)
            cache.prefill(keys, values)
            check(cache.attend(query), attention(query, keys, values, 0.125), 0.5)


@backends
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1e18, 1e30, 3e38])
def test_scores_beyond_float32_are_exact_to_the_digit_that_matters(backend, dtype, size):
    gen = torch.Generator().manual_seed(9)
    keys = (torch.randn(1, 12, 16, generator=gen).clamp(-1, 1) * size).to(DTYPES[dtype])
    values = (torch.randn(1, 12, 16, generator=gen).clamp(-1, 1) * size).to(DTYPES[dtype])
    query = torch.randn(1, 16, generator=gen).to(DTYPES[dtype])
    cache = make(backend, dtype=dtype, block=4)
    cache.prefill(keys, values)
    truth = attention_with_digits(query[0], keys[0], values[0], 0.25, 120)
    check(cache.attend(query), truth[None], 0.05)


@backends
def test_scores_that_cancel_lose_digits_and_the_bound_knows_how_many(backend):
    """Summands of 1e12 cancel to scores near 1: every key is exact here, so rounding alone is at stake."""
    keys, query = draw("normal", (1, 40, 16), "float32", 1), draw("normal", (1, 16), "float32", 2)
    keys[..., 0] = keys[..., 15] = 1.234567e6
    query[:, 0], query[:, 15] = 1.0e6, -1.0e6
    values = draw("normal", (1, 40, 16), "float32", 3)
    cache = make(backend, eps=0.5, block=16, skip=False)
    cache.prefill(keys, values)
    step = cache.attend(query)
    ratio = check(step, attention(query, keys, values, 0.25), 0.5)
    assert step.certificate.promoted_key_blocks.tolist() == [2]
    assert ratio.max() > 1e-4


@backends
def test_one_token_of_all_and_thousands_of_tokens_of_next_to_none(backend):
    """One weight 1 and 4000 weights near 2^-24: what a running float32 sum would lose."""
    keys = torch.zeros(1, 4001, 16)
    keys[0, 2000, 0] = 24 * math.log(2) * 4
    values = draw("normal", (1, 4001, 16), "float32", 4) + 100
    query = torch.zeros(1, 16)
    query[0, 0] = 1.0
    cache = make(backend, eps=0.05)
    cache.prefill(keys, values)
    check(cache.attend(query), attention(query, keys, values, 0.25), 0.05)


@backends
def test_equal_weights_over_many_tokens_with_cancelling_values(backend):
    keys = torch.full((1, 3000, 16), 40.0) + 1e-3 * draw("normal", (1, 3000, 16), "float32", 1)
    values = draw("normal", (1, 3000, 16), "float32", 2)
    query = draw("normal", (2, 16), "float32", 3)
    for denominator in ("out", "layer"):
        cache = make(backend, query_heads=2, eps=0.1, denominator=denominator)
        cache.prefill(keys, values)
        step = cache.attend(query)
        check(step, attention(query, keys, values, 0.25), 0.1 if denominator == "out" else None)


@backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_opens_at_the_limit_and_not_before(backend, dtype):
    """Without rounds and skipping the bound does not depend on eps, so eps can be put on either side."""
    query, keys, values = (t.to(DTYPES[dtype]) for t in head_like_a_model(tokens=200, dim=32, group=1))

    def attend(eps):
        cache = make(backend, head_dim=32, dtype=dtype, eps=eps, block=16, rounds=0, skip=False, explore=0.0)
        cache.prefill(keys, values)
        return cache.attend(query).certificate

    loose = attend(1.0)
    assert not bool(loose.exact)
    needed = float(loose.total_bound / (loose.output_norm - loose.total_bound))
    for factor in (0.5, 0.8, 0.95, 0.999):
        assert bool(attend(needed * factor).exact)
    for factor in (1.001, 1.05, 1.3):
        same = attend(needed * factor)
        assert not bool(same.exact)
        assert torch.equal(same.total_bound, loose.total_bound)


@backends
def test_the_layer_denominator_bounds_the_error_of_the_concatenated_output(backend):
    keys, values = (draw("normal", (2, 300, 32), "float32", seed) for seed in (1, 2))
    query = draw("normal", (4, 32), "float32", 3)
    cache = make(backend, query_heads=4, kv_heads=2, head_dim=32, eps=0.02, denominator="layer")
    cache.prefill(keys, values)
    step = cache.attend(query)
    truth = attention(query, keys, values, 32**-0.5)
    check(step, truth, None)
    c = step.certificate
    certified = c.total_bound[~c.exact].square().sum().sqrt()
    assert float(certified) <= 0.02 / 1.02 * float(c.output_norm.square().sum().sqrt())
    assert np.linalg.norm(truth - step.output.double().numpy()) <= 0.02 * np.linalg.norm(truth)


@backends
def test_the_absolute_denominator_is_in_the_unit_of_the_values(backend):
    keys, values = (draw("normal", (1, 200, 16), "float32", seed) for seed in (1, 2))
    query = draw("normal", (1, 16), "float32", 3)
    for size in (1.0, 1000.0):
        cache = make(backend, eps=0.02 * size, denominator="abs")
        cache.prefill(keys, values * size)
        step = cache.attend(query)
        check(step, attention(query, keys, values * size, 0.25), None)
        assert bool(((step.certificate.total_bound <= 0.02 * size) | step.certificate.exact).all())


@backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_values_give_zero_with_bound_zero(backend, dtype):
    keys = draw("normal", (1, 50, 16), dtype, 1)
    cache = make(backend, dtype=dtype, block=8)
    cache.prefill(keys, torch.zeros_like(keys))
    step = cache.attend(draw("normal", (1, 16), dtype, 2))
    assert step.output.abs().max() == 0
    assert float(step.certificate.total_bound) == 0
    assert not bool(step.certificate.exact)


@backends
def test_every_step_of_a_growing_cache_keeps_the_promise_and_steps_do_not_change_the_cache(backend):
    keys, values = (draw("log-normal", (1, 40, 16), "bfloat16", seed) for seed in (1, 2))
    queries = draw("normal", (40, 2, 16), "bfloat16", 3)
    cache = make(backend, query_heads=2, dtype="bfloat16", block=8, explore=1.0)
    for t in range(40):
        cache.append(keys[:, t], values[:, t])
        truth = attention(queries[t], keys[:, : t + 1], values[:, : t + 1], 0.25)
        first = cache.attend(queries[t])
        check(first, truth, 0.05)
        assert torch.equal(cache.attend(queries[t]).output, first.output)


@backends
def test_a_smaller_budget_never_gives_a_larger_bound_than_it_allows_and_costs_promotions(backend):
    query, keys, values = head_like_a_model(tokens=400, dim=32, group=1, sharpness=0.2)
    promoted = []
    for eps in (1.0, 0.1, 0.03, 0.01):
        cache = make(backend, head_dim=32, dtype="float16", eps=eps, block=16, explore=0.0)
        cache.prefill(keys, values)
        step = cache.attend(query)
        check(step, attention(query, keys, values, 32**-0.5), eps)
        c = step.certificate
        promoted.append(int(c.promoted_key_blocks + c.promoted_value_blocks))
    assert promoted == sorted(promoted)
    assert promoted[-1] > promoted[0]
