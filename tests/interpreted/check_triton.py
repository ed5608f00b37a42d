"""Backend `triton-fused` in Triton's interpreter, against float64 attention and the reference.

Run by `tests/unit/test_triton_backend.py` in a process of its own: whether kernels are interpreted is decided
when Triton is imported.
"""

from tests.interpreted import quick  # noqa: F401, I001  (first: it switches the interpreter on)

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rcq_cli import LayerCache
from rcq_cli.backends import choose_backend
from rcq_cli.errors import BrokenRun
from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels._triton import attend, judge, pages, plan, score, seal, step
from rcq_cli.kernels.reference import BACKEND as REFERENCE
from rcq_cli.protocols import Geometry
from tests.interpreted import small_kernels
from tests.unit.exact_attention import truth

# numpy warns of what kernels mask out
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def data(kind: str, heads: int, tokens: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(heads, tokens, dim, generator=gen) for _ in "kv")
    if kind == "outlier":
        k[..., 0], v[..., 3] = 60 * k[..., 0], 50 * v[..., 3]
    elif kind == "huge":
        k = 1500 * k
    elif kind == "offset":
        k, v = k + 12, v + 40
    elif kind == "far":
        v = v + 70000  # beyond float16: every block stays raw
    elif kind == "peaked":
        k[:, tokens // 3] *= 6
        v = v + 0.5
    elif kind == "mean":
        v = 0.3 * v + 1
    return k, v


def cache_of(kv_heads: int, queries: int, head_dim: int, dtype: torch.dtype, **options) -> LayerCache:
    """Return an empty cache with `queries` query heads per KV head."""
    return LayerCache(
        "certified", query_heads=kv_heads * queries, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
        backend="triton-fused", **options,
    )  # fmt: skip


def check(cache: LayerCache, k: Tensor, v: Tensor, query: Tensor):
    """Run one step; its error is within the bound, and the bound within the budget unless exact."""
    taken = cache.attend(query)
    c, g = taken.certificate, cache.geometry
    error = (taken.output.double() - truth(query, k, v, g.scale)).norm(dim=-1)
    assert bool(torch.isfinite(c.total_bound).all())
    assert bool((error <= c.total_bound).all()), (error / c.total_bound).max()
    eps = cache._state.options.eps
    met = c.exact | (c.total_bound * (1 + eps) <= eps * taken.output.double().norm(dim=-1) * (1 + 1e-9))
    assert bool(met.all())
    return c


CASES = [
    # kind, dtype, KV heads, group, head dim, tokens, options
    ("mean", torch.bfloat16, 2, 4, 64, 53, {"block": 16}),
    ("peaked", torch.float16, 1, 8, 128, 96, {}),
    ("outlier", torch.float32, 1, 3, 96, 40, {"block": 12, "group": 12, "explore": 1.0}),
    ("offset", torch.float16, 1, 1, 256, 33, {"block": 32}),
    ("huge", torch.float16, 1, 2, 16, 40, {"block": 8}),
    ("far", torch.bfloat16, 1, 2, 32, 20, {"block": 8}),
    ("mean", torch.float32, 2, 2, 48, 30, {"block": 7, "group": 8, "value_meta": "float16"}),
    ("mean", torch.float16, 1, 2, 32, 64, {"block": 16, "key_meta": "float32", "skip": False, "tau": 0.5}),
    ("peaked", torch.float16, 1, 2, 32, 43, {"block": 8, "denominator": "layer"}),
    ("mean", torch.float16, 1, 1, 16, 1, {}),
    ("mean", torch.float16, 1, 2, 16, 5, {"block": 8}),
    ("mean", torch.float16, 1, 2, 16, 8, {"block": 8, "rounds": 0}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-D{c[4]}-R{c[3]}-T{c[5]}")
def test_every_error_stays_within_its_bound_and_every_bound_within_its_budget(case):
    kind, dtype, heads, group, dim, tokens, options = case
    k, v = (t.to(dtype) for t in data(kind, heads, tokens, dim, seed=tokens))
    cache = cache_of(heads, group, dim, dtype, **options)
    cache.prefill(k, v)
    gen = torch.Generator().manual_seed(dim)
    for spread in (0.3, 2.0):
        query = (spread * torch.randn(heads * group, dim, generator=gen)).to(dtype)
        if options.get("denominator"):
            c = cache.attend(query)
            error = (c.output.double() - truth(query, k, v, cache.geometry.scale)).norm(dim=-1)
            assert bool((error <= c.certificate.total_bound).all())
            # every head within the root mean square share keeps the concatenated output within eps
            whole = c.certificate.total_bound.square().sum().sqrt()
            assert whole * 1.05 <= 0.05 * c.output.double().norm() or bool(c.certificate.exact.any())
        else:
            check(cache, k, v, query)


def test_a_growing_cache_keeps_its_promise_and_a_fork_goes_its_own_way():
    k, v = (t.half() for t in data("mean", 1, 44, 32, seed=3))
    cache = cache_of(1, 2, 32, torch.float16, block=8)
    cache.prefill(k[:, :30], v[:, :30])
    twin = cache._state.fork()
    query = torch.ones(2, 32, dtype=torch.float16)
    for t in range(30, 44):
        cache.append(k[:, t], v[:, t])
    check(cache, k, v, query)
    twin.prefill(-k[:, 30:41], v[:, 30:41])
    other = twin.attend(query)
    keys = torch.cat((k[:, :30], -k[:, 30:41]), 1)
    error = (other.output.double() - truth(query, keys, v[:, :41], cache.geometry.scale)).norm(dim=-1)
    assert bool((error <= other.certificate.total_bound).all())
    assert cache._state.cache.raw.rows.shape[1] == twin.cache.raw.rows.shape[1] == 5


def test_values_nobody_needs_are_skipped_and_their_mass_is_charged():
    k, v = (t.half() for t in data("peaked", 1, 96, 64, seed=5))
    cache = cache_of(1, 1, 64, torch.float16, block=16, explore=0.0)
    cache.prefill(k, v)
    query = 2 * k[:, 32].float() / k[:, 32].float().norm()
    check(cache, k, v, (query * 6).half())  # nothing is known yet: all is read
    c = check(cache, k, v, (query * 6).half())
    assert int(c.skipped_value_blocks[0]) > 0
    assert float(c.dropped_bound[0]) > 0


def test_what_was_promoted_before_is_not_brought_in_again():
    k, v = (t.half() for t in data("mean", 1, 96, 32, seed=6))
    cache = cache_of(1, 1, 32, torch.float16, block=8, explore=0.0)
    cache.prefill(k, v)
    query = torch.ones(1, 32, dtype=torch.float16)
    first = check(cache, k, v, query)
    assert first.paged_bytes >= 4 * 8 * 32 * 2  # the first and the newest block, keys and values
    for _ in range(2):
        last = check(cache, k, v, query)
    promoted = int(last.promoted_key_blocks[0] + last.promoted_value_blocks[0])
    assert last.paged_bytes < promoted * 8 * 32 * 2


@pytest.mark.parametrize("part", ["key_scale", "value_codes"])
def test_a_damaged_block_sends_the_layer_through_dense_attention_once(part):
    k, v = (t.half() for t in data("mean", 2, 40, 16, seed=8))
    cache = cache_of(2, 2, 16, torch.float16, block=8, explore=1.0)
    cache.prefill(k, v)
    cell = cache._state.cache.blocks[part].data[1, 2].view(torch.uint8).view(-1)
    cell[3] ^= 16
    query = torch.ones(4, 16, dtype=torch.float16)
    taken = cache.attend(query)
    assert taken.certificate.rung.tolist() == [4] * 4
    expected = torch.nn.functional.scaled_dot_product_attention(
        query[None, :, None], k[None], v[None], scale=0.25, enable_gqa=True
    )[0, :, 0]
    assert torch.equal(taken.output, expected)
    assert cache._state.cache.raw.rows.tolist() == [[False] * 5, [False, False, True, False, False]]
    assert bool((cache.attend(query).certificate.rung < 4).all())


def test_damaged_originals_stop_the_run():
    k, v = (t.half() for t in data("mean", 1, 24, 16, seed=9))
    cache = cache_of(1, 1, 16, torch.float16, block=8)
    cache.prefill(k, v)
    cache._state.cache.originals[0].data[0, 0, 0] += 1
    with pytest.raises(BrokenRun, match="block 0"):
        cache.attend(torch.ones(1, 16, dtype=torch.float16))


class Waits(TorchDispatchMode):
    """Counts what makes a host wait for a device: reading a number, and shapes that depend on data."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique"):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def test_a_step_reads_back_once_and_appending_never(monkeypatch):
    k, v = (t.half() for t in data("mean", 1, 40, 16, seed=2))
    cache = cache_of(1, 1, 16, torch.float16, block=8)
    cache.prefill(k[:, :24], v[:, :24])
    state = cache._state
    query = torch.ones(1, 16, dtype=torch.float16)
    state.attend(query)

    class Silent:
        """A kernel that is launched and does nothing: the interpreter itself reads tensors."""

        def __getitem__(self, grid):
            return lambda *_, **__: None

    launched = {
        score: ("score", "rescore", "verify"),
        plan: ("plan",),
        attend: ("attend",),
        judge: ("judge",),
        pages: ("assign", "page_in"),
        seal: ("seal_keys", "value_meta", "value_codes", "decode", "print_rows"),
    }
    for module, names in launched.items():
        for name in names:
            monkeypatch.setattr(module, name, Silent())
    with Waits() as waits:
        for t in range(24, 40):  # seals two blocks
            state.append(k[:, t], v[:, t])
        work = state._work(query)
        out = work.launch()
    assert waits.seen == []
    reads = []
    honest = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: reads.append(1) or honest(self))
    assert work._read_back(out) == ([0], [False])
    assert len(reads) == work.read_backs == 1


@pytest.mark.parametrize(("dim", "block", "narrow"), [(64, 16, True), (48, 7, False)])
def test_fast_scores_stay_within_delta_even_for_the_worst_query(dim, block, narrow):
    """The bound the score pass declares, against float64, for queries along the largest residual."""
    fmt = TierFormat(block=block, group=8, key_meta="float16" if narrow else "float32")
    keys = data("outlier", 1, 3 * block, dim, seed=dim)[0].half()
    cache = cache_of(1, 3, dim, torch.float16, block=block, group=8, key_meta=fmt.key_meta, explore=0.0)
    cache.prefill(keys, keys)
    store = cache._state.cache
    decoded = REFERENCE.keys(store.codes()).flatten(1, 2)
    gap = keys.double() - decoded
    worst = gap[0, gap[0].norm(dim=-1).argmax()]
    query = torch.stack((worst / worst.norm() * 8, worst.sign() * 3, torch.full_like(worst, 500))).half()
    tiers = store.tiers()
    limits = step.Limits(dim**-0.5, 0.05, False, False, True, 0, 0.0, 0.0)
    launch = step.StepKernels(tiers, store.slots(tiers), query, limits)
    launch.begin()
    stats = launch.work.stats[:, :, :3].double()
    weights = launch.work.weights[0, :3, :, :block].double()  # [M, R, S]
    used = stats[score.PEAK.value].T[..., None] + weights.log()
    exact = (query.double() @ keys[0].double().T * dim**-0.5).unflatten(1, (3, block)).transpose(0, 1)
    # weights below 2^-126 are not covered by Delta but by the underflow rule
    normal = weights >= 2.0**-126
    off = torch.where(normal, (exact - used).abs(), 0.0).amax(-1)
    delta = stats[score.DELTA.value].T
    assert bool((off <= delta).all())
    coded = 1  # pinned blocks are scored exactly: only the middle one still stands for its codes
    assert float((off[coded] / delta[coded])[0]) > 0.5  # Cauchy-Schwarz is reached
    rough = (query.double() @ decoded[0].T * dim**-0.5).unflatten(1, (3, block)).transpose(0, 1)
    apart = torch.where(normal, (rough - used).abs(), 0.0).amax(-1)[coded]
    assert bool((apart <= 0.2 * delta[coded]).all())  # what float32 and the split add is the small part


def test_helpers_hold_their_promises():
    x = torch.from_numpy(np.concatenate((np.logspace(-12, 2, 40), [0.25, 0.2499999, 0.0])))
    grown, shrunk, up, left = small_kernels.run(x)
    assert torch.allclose(grown, torch.expm1(x), rtol=2**-46, atol=0)
    assert torch.allclose(shrunk, -torch.expm1(-x), rtol=2**-46, atol=0)
    assert bool((up.double() >= x).all())
    assert bool((up.double() <= x * (1 + 2.0**-10) + 2.0**-24).all())
    assert bool((left.abs() <= x * 2.0**-22 + 2.0**-13).all())


def test_the_check_of_tensor_cores_passes_exact_sums_and_catches_sloppy_ones(monkeypatch):
    device = torch.device("cpu")
    assert step.core_error.__wrapped__(device) < 0.5
    honest = score.try_cores

    class Sloppy:
        def __getitem__(self, grid):
            def launch(query, *args, **options):
                honest[grid](query * (1 + 2.0**-12), *args, **options)

            return launch

    monkeypatch.setattr(score, "try_cores", Sloppy())
    assert step.core_error.__wrapped__(device) > 0.5


def test_the_geometry_it_refuses_is_named():
    backend = choose_backend("triton-fused", Geometry(4, 2, 64, "float32", "cpu", 0.125))
    assert "multiple of 16" in backend.unsupported(Geometry(1, 1, 264, "float32", "cpu", 1.0))
    assert "TRITON_INTERPRET" in backend.unsupported(Geometry(1, 1, 64, "float32", "cuda", 1.0))
