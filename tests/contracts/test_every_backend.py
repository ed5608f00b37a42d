"""What every backend owes: each operation against its definition, on odd sizes, groups and unfriendly memory.

Layouts of blocks are private to a backend, so each is held to its own decoded keys and values in float64; how
far these may be from the originals is held to the reference.
"""

import pytest
import torch

from rcq_cli.api import LayerCache
from rcq_cli.backends import BACKENDS, PREFERENCE, choose_backend
from rcq_cli.errors import SpecError, UnsupportedHere
from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels.reference import BACKEND as REFERENCE
from rcq_cli.protocols import Geometry

every_backend = pytest.mark.parametrize("name", BACKENDS.names())
LAYOUTS = [
    {"dim": 16, "block": 2, "group": 16},
    {"dim": 48, "block": 7, "group": 8},
    {"dim": 64, "block": 32, "group": 16},
    {"dim": 80, "block": 16, "group": 20},
    {"dim": 128, "block": 32, "group": 16},
    {"dim": 32, "block": 16, "group": 4, "key_meta": "float32", "value_meta": "float16"},
]
every_layout = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda x: f"D{x['dim']}-S{x['block']}-G{x['group']}"
)


def serving(name: str, dim: int, hq=4, hkv=2, dtype="float32"):
    """The backend, or a skip with the reason it gives."""
    backend = BACKENDS.load(name)
    reason = backend.unsupported(Geometry(hq, hkv, dim, dtype, "cpu", dim**-0.5))
    if reason:
        pytest.skip(f"{name}: {reason}")
    return backend


def rows(*shape, seed=0, outlier=False) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if outlier:
        x[..., 1] = 40 + 8 * x[..., 1]
    return x.half().double()


def layout_of(layout) -> tuple[int, int, TierFormat]:
    options = dict(layout)
    dim = options.pop("dim")
    return dim, options["block"], TierFormat(**options)


@every_backend
def test_it_has_a_name_and_says_why_it_cannot_run(name):
    backend = BACKENDS.load(name)
    assert backend.name == name
    reason = backend.unsupported(Geometry(4, 2, 64, "float32", "cpu", 0.125))
    assert reason is None or (isinstance(reason, str) and reason.isascii() and len(reason) > 10)
    if reason:
        with pytest.raises(UnsupportedHere, match="cannot run"):
            choose_backend(name, Geometry(4, 2, 64, "float32", "cpu", 0.125))


def test_auto_is_the_first_that_can_serve_and_every_entry_has_its_place():
    geometry = Geometry(4, 2, 64, "float32", "cpu", 0.125)
    able = [n for n in PREFERENCE if n in BACKENDS.names() and BACKENDS.load(n).unsupported(geometry) is None]
    assert choose_backend("auto", geometry).name == able[0]
    assert set(BACKENDS.names()) <= set(PREFERENCE)
    with pytest.raises(SpecError, match="unknown backend"):
        choose_backend("no-such-thing", geometry)


@every_backend
def test_at_least_the_reference_serves_everything_on_the_cpu(name):
    if name == "reference":
        for dim in (16, 48, 80, 256):
            for dtype in ("float32", "bfloat16", "float16"):
                assert REFERENCE.unsupported(Geometry(7, 7, dim, dtype, "cpu", 1.0)) is None


@every_backend
@every_layout
@pytest.mark.parametrize("outlier", [False, True])
def test_keys_come_back_as_near_as_from_the_reference(name, layout, outlier):
    dim, block, fmt = layout_of(layout)
    backend, keys = serving(name, dim), rows(2, 5, block, dim, outlier=outlier)
    blocks, raw = backend.quantize_keys(keys, fmt)
    expected, expected_raw = REFERENCE.quantize_keys(keys, fmt)
    assert torch.equal(raw, expected_raw)
    error = (keys - backend.keys(blocks).double()).abs()
    allowed = (keys - REFERENCE.keys(expected)).abs().amax(2, keepdim=True)
    step = (keys.amax(2, keepdim=True) - keys.amin(2, keepdim=True)) / 255
    assert bool((error <= torch.maximum(allowed, 0.51 * step) * 1.01 + 1e-6).all())


@every_backend
@every_layout
def test_values_come_back_as_near_as_from_the_reference(name, layout):
    dim, block, fmt = layout_of(layout)
    backend, values = serving(name, dim), rows(2, 5, block, dim, outlier=True)
    blocks, raw = backend.quantize_values(values, fmt)
    expected, expected_raw = REFERENCE.quantize_values(values, fmt)
    assert torch.equal(raw, expected_raw)
    error = (values - backend.values(blocks).double()).norm(dim=-1)
    assert bool((error <= 1.01 * (values - REFERENCE.values(expected)).norm(dim=-1) + 1e-6).all())


@every_backend
@every_layout
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_scores_are_dot_products_with_its_own_keys_within_its_roundoff(name, layout, group):
    dim, block, fmt = layout_of(layout)
    backend = serving(name, dim, 2 * group)
    blocks, _ = backend.quantize_keys(rows(2, 9, block, dim, outlier=True), fmt)
    query = rows(2, group, dim, seed=5)
    got = backend.score_blocks(query, blocks)
    assert got.shape == (2, group, 9, block)
    decoded = backend.keys(blocks).double()
    truth = torch.einsum("hrd,hmsd->hrms", query, decoded)
    # codes times scale and offset may cancel, so both sizes count; 10 more roundings than the dot product
    size = query.norm(dim=-1)[..., None, None] * backend.key_magnitude(blocks)[:, None, :, None].double()
    assert bool(((got.double() - truth).abs() <= (dim + 10) * backend.roundoff * size + 1e-300).all())


@every_backend
@every_layout
def test_half_steps_bound_every_score_error_and_are_reached_by_the_grid(name, layout):
    dim, block, fmt = layout_of(layout)
    backend, keys = serving(name, dim), rows(2, 6, block, dim, outlier=True)
    blocks, raw = backend.quantize_keys(keys, fmt)
    assert not raw.any()
    query = rows(2, 2, dim, seed=7)
    bound = backend.half_steps(query, blocks).double() * (1 + 2.0**-12)
    residual = keys - backend.keys(blocks).double()
    assert bool((torch.einsum("hrd,hmsd->hrms", query, residual).abs().amax(-1) <= bound).all())
    # the widest a grid over [min, max] needs: 255 steps plus what rounding of metadata adds
    spread = torch.einsum("hrd,hmd->hrm", query.abs(), (keys.amax(2) - keys.amin(2)) / 255) / 2
    room = torch.einsum("hrd,hmd->hrm", query.abs(), keys.abs().amax(2)) * 2.0**-18 + 1e-6
    assert bool((bound <= spread * 1.01 + room).all())


@every_backend
@every_layout
def test_key_magnitude_covers_the_decoded_keys(name, layout):
    dim, block, fmt = layout_of(layout)
    backend = serving(name, dim)
    blocks, _ = backend.quantize_keys(rows(2, 4, block, dim, outlier=True), fmt)
    size = backend.keys(blocks).double().norm(dim=-1).amax(-1)
    assert bool((backend.key_magnitude(blocks).double() >= size * (1 - 1e-6)).all())


@every_backend
@pytest.mark.parametrize("kind", ["constant", "zero", "one-channel", "alternating"])
def test_degenerate_blocks_decode_to_finite_numbers_near_what_went_in(name, kind):
    backend, fmt = serving(name, 32), TierFormat(block=8)
    x = torch.zeros(2, 3, 8, 32, dtype=torch.float64)
    if kind == "constant":
        x += 2.5
    if kind == "one-channel":
        x[..., 7] = 3.0
    if kind == "alternating":
        x[:, :, ::2] = 1.0
    for quantise, decode in (
        (backend.quantize_keys, backend.keys),
        (backend.quantize_values, backend.values),
    ):
        blocks, raw = quantise(x, fmt)
        assert not raw.any()
        assert float((decode(blocks).double() - x).abs().max()) <= 0.02


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 2), (8, 1)])
def test_its_dense_call_is_the_one_of_an_unmodified_model(name, dtype, heads):
    hq, hkv = heads
    backend = serving(name, 64, hq, hkv, str(dtype).removeprefix("torch."))
    query, keys, values = (
        rows(hq, 64).to(dtype),
        rows(hkv, 77, 64, seed=1).to(dtype),
        rows(hkv, 77, 64, seed=2),
    )
    values = values.to(dtype)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query[None, :, None], keys[None], values[None], scale=0.1, enable_gqa=hq > hkv
    )[0, :, 0]
    assert torch.equal(backend.dense(query, keys, values, 0.1), expected)


@every_backend
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 95, 96, 97, 300])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 1)])
def test_a_whole_step_agrees_with_the_reference_within_both_bounds(name, tokens, heads):
    hq, hkv = heads
    serving(name, 64, hq, hkv, "float16")
    keys, values = (rows(hkv, tokens, 64, seed=i, outlier=True).half() for i in (1, 2))
    query, steps = rows(hq, 64, seed=3).half(), []
    for backend in (name, "reference"):
        cache = LayerCache(
            "certified",
            query_heads=hq,
            kv_heads=hkv,
            head_dim=64,
            dtype=torch.float16,
            backend=backend,
            eps=0.1,
        )
        cache.prefill(keys, values)
        steps.append(cache.attend(query))
    one, two = steps
    apart = (one.output.double() - two.output.double()).norm(dim=-1)
    assert bool((apart <= one.certificate.total_bound + two.certificate.total_bound).all())


@every_backend
def test_memory_that_held_nan_before_does_not_leak_into_results(name, monkeypatch):
    """Buffers are allocated uninitialised: whatever they held must be written before it is read."""
    serving(name, 32)
    keys, values, query = (rows(2, 150, 32, seed=i).float() for i in (1, 2, 3))

    def run():
        cache = LayerCache(
            "certified", query_heads=4, kv_heads=2, head_dim=32, backend=name, block=8, eps=0.05
        )
        cache.prefill(keys[:, :101], values[:, :101])
        outputs = []
        for t in range(101, 150):
            cache.append(keys[:, t], values[:, t])
            if t % 7 == 0:
                step = cache.attend(query[:, t].repeat_interleave(2, 0))
                outputs += [step.output.double(), step.certificate.total_bound[:, None]]
        return torch.cat(outputs, 1)

    expected, honest = run(), torch.empty
    honest_new = torch.Tensor.new_empty

    def poison(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(1)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(honest(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a, **k: poison(honest_new(self, *a, **k)))
    assert torch.equal(run(), expected)
