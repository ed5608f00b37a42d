"""Backend `triton-fused` in Triton's interpreter, against float64 attention and the reference.

Run by `tests/unit/test_triton_backend.py` in a process of its own: whether kernels are interpreted is decided
when Triton is imported.
"""

from tests.interpreted import quick  # noqa: F401, I001  (first: it switches the interpreter on)

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rcq_cli import LayerCache
from rcq_cli.backends import choose_backend
from rcq_cli.certify import bounds as proven
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


@pytest.mark.parametrize(("kind", "dim", "block"), [("outlier", 32, 16), ("offset", 16, 7), ("far", 16, 8)])
def test_annotations_are_never_below_the_truth_and_close_to_it(kind, dim, block):
    k, v = (t.bfloat16() for t in data(kind, 2, 4 * block + 1, dim, seed=dim))
    cache = cache_of(2, 1, dim, torch.bfloat16, block=block, group=4)
    cache.prefill(k, v)
    store = cache._state.cache
    noted = store.bounds()
    keys, values = (t[:, : 4 * block].double().unflatten(1, (4, block)) for t in (k, v))
    codes = store.codes()
    left, residual = keys - REFERENCE.keys(codes), values - step.decode_values(codes, 4)
    centred = values - store.centred_on()[:, None, None]
    coded = ~store.raw.rows
    assert bool(coded.all()) == (kind != "far")
    joint = {"sk": left, "se": residual, "sv": centred}
    for name, longest, rows in zip(joint, ("rk", "eta", "rv"), joint.values(), strict=True):
        exact = torch.linalg.matrix_norm(rows, 2), rows.norm(dim=-1).amax(-1)
        if name != "sv":  # a raw block has no residual
            exact = tuple(torch.where(coded, norm, 0.0) for norm in exact)
        # of a raw block only the longest row is known
        for found, norm, rough in zip((name, longest), exact, (1.07 if coded.all() else 3, 1.0), strict=True):
            mine = getattr(noted, found)[:, :-1]
            assert bool((mine >= norm).all()), found
            assert bool((mine <= 1.002 * rough * norm).all()), found


@pytest.mark.parametrize("note", range(7))
def test_the_fingerprint_covers_every_annotation(note):
    k, v = (t.half() for t in data("mean", 2, 24, 16, seed=note))
    cache = cache_of(2, 1, 16, torch.float16, block=8)
    cache.prefill(k, v)
    store = cache._state.cache
    assert not store.changed_blocks(1).any()
    cell = store.annotations.data[1, 2].view(torch.int16)
    for bit in (0, 9, 14):
        cell[note] ^= 1 << bit
        assert store.changed_blocks(1).tolist() == [False, False, True]
        cell[note] ^= 1 << bit
    assert not store.changed_blocks(1).any()


def launched(cache: LayerCache, query: Tensor, spectra: float = 1.0, **limits) -> step.StepKernels:
    """Run the first round of a step on a cache and return its kernels; nothing is promoted.

    The norms of all values and of all residuals are enlarged by the square root of `spectra`.
    """
    store = cache._state.cache
    tiers = store.tiers()
    tiers = tiers._replace(spectra=tiers.spectra * spectra)
    budget = {"eps": 0.05, "absolute": False, "layer": False, "skip": True, "rounds": 0, "explore": 0.0}
    launch = step.StepKernels(
        tiers, store.slots(tiers), query, step.Limits(cache.geometry.scale, **budget | limits, tau=0.0)
    )
    launch.begin()
    return launch


def test_the_score_errors_of_a_block_together_are_no_larger_than_stated():
    """The worst query is the first right singular vector of K - K'."""
    keys = data("mean", 1, 64, 32, seed=4)[0].half()
    cache = cache_of(1, 2, 32, torch.float16, block=16, explore=0.0)
    cache.prefill(keys, keys)
    left = keys[0].double().unflatten(0, (4, 16)) - REFERENCE.keys(cache._state.cache.codes())[0]
    query = torch.stack((torch.linalg.svd(left[1]).Vh[0] * 6, torch.ones(32))).half()
    work = launched(cache, query).work
    stats = work.stats[:, :, :4].double()
    used = stats[score.PEAK.value].T[..., None] + work.weights[0, :4, :, :16].double().log()
    exact = (query.double() @ keys[0].double().T * 32**-0.5).unflatten(1, (4, 16)).transpose(0, 1)
    found, allowed = (exact - used).norm(dim=-1).T, stats[score.WIDE.value] * stats[score.DELTA.value]
    assert bool((found <= allowed).all())
    assert bool((stats[score.WIDE.value] <= 4.01).all())
    assert torch.equal(stats[score.WIDE.value][:, 0], stats[score.WIDE.value][:, 3])  # these are read exactly
    assert float(stats[score.WIDE.value][0, 0]) >= 4
    assert float(found[0, 1]) > 0.85 * float(allowed[0, 1])
    assert float(allowed[0, 1]) < 0.7 * 4 * float(stats[score.DELTA.value][0, 1])


@pytest.mark.parametrize("sharp", [0.2, 1.0, 6.0, 40.0])
@pytest.mark.parametrize(("skip", "far"), [(False, 1.0), (True, 1.0), (False, 1e6)])
def test_what_is_judged_is_what_is_proven(sharp, skip, far):
    """Bounds of `judge` beside those of `rcq_cli.certify.bounds` on the statistics that it had."""
    k, v = (t.half() for t in data("peaked", 1, 87, 32, seed=12))
    cache = cache_of(1, 3, 32, torch.float16, block=8, explore=0.0)
    cache.prefill(k, v)
    query = (sharp * torch.randn(3, 32, generator=torch.Generator().manual_seed(2))).half()
    store = cache._state.cache
    for _ in range(2 if skip else 1):  # what to skip follows from the output of the step before
        launch = launched(cache, query, far, skip=skip, eps=40.0, absolute=True)
    fields, stats = launch.out.fields, launch.work.stats[:, :, :11].double()
    read, _, exact_values = (launch.work.flags[:, 0, :11] != 0).unbind()
    assert bool((~read).any()) == skip
    peak, mass, square, delta = (stats[i] for i in range(4))
    skipped = (~read).expand_as(peak)
    total = torch.where(skipped, 0.0, (peak - peak.amax(-1, keepdim=True)).exp() * mass).sum(-1, keepdim=True)
    relative = peak - peak.amax(-1, keepdim=True) - total.log()
    masses = proven.Masses(
        relative + mass.log(), square.log() + 2 * relative, relative - 90.0, skipped, relative
    )
    noted = store.bounds()
    rv, sv = (rows.expand_as(peak) for rows in (noted.rv, noted.sv))
    eta = torch.where(exact_values, 0.0, noted.eta).expand_as(peak)
    spectra = [far * spectrum.value.expand(3) for spectrum in (store.value_spectrum, store.residual_spectrum)]
    value = proven.value_split(masses, eta, spectra[1], noted.se).value()
    terms = proven.key_terms(masses, delta, stats[score.WIDE.value])
    away = (launch.out.output.double() - store.centred_on()[0]).norm(dim=-1)
    reach = away + fields[step.VALUE_BOUND] + fields[step.ROUNDING_BOUND]
    key = proven.key_split(terms, rv, reach, spectra[0], sv).value()
    key = torch.minimum(key, 2 * rv.amax(-1) * terms.total_variation * proven.MARGIN)
    mine = fields[step.KEY_BOUND] + fields[step.DROPPED_BOUND]
    # the kernel tries some splits, not all of them, and allows float32 masses 2^-16
    rough = 2.0**-12 * rv.amax(-1) * terms.cw.sum(-1) / terms.z_low
    for found, wanted in ((fields[step.VALUE_BOUND], value), (mine, key)):
        assert bool((found >= wanted * (1 - 1e-3)).all())
        assert bool((found <= wanted * 1.2 + rough).all())
    unknown = proven.key_split(proven.key_terms(masses, delta), rv, reach, spectra[0]).value()
    if far > 1:  # blocks one by one
        alone = proven.value_split(masses, eta, spectra[1]).value()
        assert bool((fields[step.VALUE_BOUND] <= (0.95 if sharp < 2 else 1.001) * alone).all())
    if sharp < 2:  # skipped weight moves as a whole, whatever is known
        assert bool((mine < (1.0 if skip else 0.95) * unknown).all())


def test_the_light_tokens_beside_the_heaviest_count_with_all_that_they_may_gain():
    """Weights .59 and .01 in a block whose light token may be a thousand times heavier, .4 in another one."""
    k, v = (t.half() for t in data("mean", 1, 24, 16, seed=14))
    cache = cache_of(1, 1, 16, torch.float16, block=8, explore=0.0)
    cache.prefill(k, v)
    launch = launched(cache, torch.ones(1, 16, dtype=torch.float16))
    stats, light, other = launch.work.stats[:, 0], 0.01 / 0.59, math.log(0.4 / 0.59)
    stats[:, :4] = 0.0  # blocks without mass stay out
    rows = (score.PEAK, score.MASS, score.SQUARE, score.DELTA, score.WIDE)
    for row, first, second in zip(
        rows, (0, 1 + light, 1 + light**2, math.log(1000), 1), (other, 1, 1, 1e-6, 1), strict=True
    ):
        stats[row.value, 0], stats[row.value, 1] = first, second
    launch.work.state[0, score.PEAK_ROW.value], launch.work.state[0, score.TODO.value] = 0.0, 1.0
    launch._judge(final=True)
    bound = float(launch.out.fields[step.KEY_BOUND] + launch.out.fields[step.DROPPED_BOUND])
    radius = 2 * float(cache._state.cache.bounds().rv[0, :2].max())
    moved = 0.01 * 1000 / (0.99 + 0.01 * 1000) - 0.01
    assert 0.89 * radius < moved * radius <= bound <= 1.001 * radius


def test_what_is_known_of_blocks_together_saves_promotions():
    k, v = (t.half() for t in data("mean", 1, 328, 32, seed=13))
    query = torch.randn(2, 32, generator=torch.Generator().manual_seed(3)).half()
    counts = []
    for known in (True, False):
        cache = cache_of(1, 2, 32, torch.float16, block=8, explore=0.0, eps=0.005)
        cache.prefill(k, v)
        store = cache._state.cache
        if not known:
            store.annotations.data[..., 4:] = torch.inf
            store.kernels.take_prints(store.tiers(), 0)
        for _ in range(2):
            c = check(cache, k, v, query)
        counts.append([int(c.promoted_key_blocks.sum()), int(c.promoted_value_blocks.sum())])
        assert not c.exact.any()
    assert counts[0][0] < counts[1][0]
    assert counts[0][1] < counts[1][1]


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
