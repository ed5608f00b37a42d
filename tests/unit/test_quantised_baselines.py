"""kivi, zipcache, quest and the coarser naive modes: worked examples, bytes in closed form, invariants."""

import hashlib
import math

import pytest
import torch

from rcq_cli import LayerCache, SpecError
from rcq_cli.api import MODES
from rcq_cli.cache.slab import Slab
from rcq_cli.cache.statistics import Statistics
from rcq_cli.kernels.reference import BACKEND
from rcq_cli.modes import kivi, zipcache
from rcq_cli.modes._coded import CodedLayer
from rcq_cli.modes._quantiser import CodedRows, Layout, decode, encode, pack, unpack
from rcq_cli.modes.quest import page_bounds
from rcq_cli.protocols import Geometry

NAIVE_FORMATS = {
    "naive-tok8v4": 208, "naive-k4v4": 224, "naive-tok4": 144, "naive-k4v2": 176, "naive-k2v2": 112,
}  # fmt: skip
"""Bytes per token and KV head at head dim 128, as tabulated."""
EVICTING = (
    "streaming-llm", "h2o", "h2o-norm", "scissorhands", "scissorhands-decay", "snapkv", "snapkv-avg5",
    "topscore", "tova", "tova-layer",
)  # fmt: skip
KEEPING = ("kivi", "kivi-4", "zipcache", "quest", "quest-group", *NAIVE_FORMATS)


def rows(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(mode, tokens, hq=4, hkv=2, dim=128, dtype=torch.float32, **options):
    cache = LayerCache(
        mode, query_heads=hq, kv_heads=hkv, head_dim=dim, dtype=dtype, backend="reference", **options
    )
    cache.prefill(
        rows(hkv, tokens, dim, seed=1, dtype=dtype),
        rows(hkv, tokens, dim, seed=2, dtype=dtype),
        rows(hq, tokens, dim, seed=3, dtype=dtype),
    )
    return cache


def step(cache, seed):
    g = cache.geometry
    dtype = cache._dtype
    cache.append(
        rows(g.kv_heads, g.head_dim, seed=100 + seed, dtype=dtype),
        rows(g.kv_heads, g.head_dim, seed=200 + seed, dtype=dtype),
    )
    return cache.attend(rows(g.query_heads, g.head_dim, seed=300 + seed, dtype=dtype)).output


# -- the quantiser ------------------------------------------------------------------------------------------


def test_the_worked_examples_of_the_quantiser():
    codes, scale, low = encode(torch.tensor([-1, 0, 0.5, 2]), 2, torch.float32)
    assert (codes.tolist(), scale.item(), low.item()) == ([0, 1, 2, 3], 1.0, -1.0)  # 1.5 rounds to even
    assert decode(codes, scale, low).tolist() == [-1, 0, 1, 2]
    codes, _, _ = encode(torch.tensor([0.0, 1, 2, 15]), 4, torch.float32)
    assert pack(codes, 4).tolist() == [16, 242]
    constant = encode(torch.full((4,), 7.0), 2, torch.float16)
    assert decode(*constant).tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packing_is_undone(bits):
    codes = torch.randint(0, 2**bits, (3, 5, 16), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape[-1] == 16 * bits // 8
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("offset", [0.0, 40.0, 400.0])
def test_no_element_is_off_by_more_than_half_a_step(bits, offset):
    x = (rows(64, 16, seed=5) + offset).double()
    codes, scale, low = encode(x.float(), bits, torch.float32)
    error = (x - decode(codes, scale, low).double()).abs()
    slack = 4 * 2.0**-24 * (offset + 8)
    assert bool((error <= scale.double()[:, None] / 2 + slack).all())
    assert float(error.max() / scale.max()) > 0.3  # and the bound is not idle


@pytest.mark.parametrize("bits", [2, 4])
def test_what_was_decoded_encodes_to_the_same_codes(bits):
    codes, scale, low = encode(rows(50, 32, seed=6), bits, torch.float32)
    again = ((decode(codes, scale, low) - low[:, None]) / scale[:, None]).round()
    assert torch.equal(again.to(torch.uint8), codes)


@pytest.mark.parametrize("value", [1e5, 3e38, 1e-40, 1e-6])
def test_metadata_beyond_float16_saturates_and_stays_finite(value):
    x = rows(8, 16, seed=7) * value
    x = x.clamp(-3e38, 3e38)
    assert bool(torch.isfinite(decode(*encode(x, 4, torch.float16))).all())


def test_channels_are_grouped_over_tokens_and_tokens_over_channels():
    x = torch.arange(32.0).view(1, 4, 8)
    by_channel = CodedRows(1, 8, Layout(8, 4, True, torch.float32), "cpu")
    by_channel.extend(x)
    assert torch.equal(by_channel.low.rows[0, 0], x[0, 0])
    assert by_channel.tokens == 4
    by_token = CodedRows(1, 8, Layout(8, 4, False, torch.float32), "cpu")
    by_token.extend(x)
    assert by_token.low.rows[0].tolist() == [[0, 4], [8, 12], [16, 20], [24, 28]]
    for part in (by_channel, by_token):
        torch.testing.assert_close(part.read(0, 4), x, rtol=1e-5, atol=0.05)


# -- kivi ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "keys", "values"),
    [
        (100, (0, 100), (0, 100)),
        (300, (256, 44), (172, 128)),
        (383, (256, 127), (255, 128)),
        (384, (384, 0), (256, 128)),
    ],
)
@pytest.mark.parametrize("generated", [0, 37])
def test_kivi_encodes_what_the_rule_says(tokens, keys, values, generated):
    """However the tokens came: 37 of them one by one."""
    cache = filled("kivi", tokens - generated)
    for t in range(generated):
        step(cache, t)
    state = cache._state
    assert [(c.tokens, n.shape[1]) for c, n in zip(state.coded, state.native, strict=True)] == [keys, values]
    assert state.engagement().engaged == (tokens > 128 and generated > 0)


def test_kivi_below_its_residual_is_dense():
    cache, dense = filled("kivi", 60), filled("dense", 60)
    for t in range(20):
        assert torch.equal(step(cache, t), step(dense, t))
    record = cache._state.engagement()
    assert (record.engaged, record.reason) == (False, "short_context")


def test_the_step_that_fills_the_residual_still_reads_native_keys():
    cache, dense = filled("kivi", 127), filled("dense", 127)
    assert torch.equal(step(cache, 0), step(dense, 0))  # the 128th token
    assert cache._state.coded[0].tokens == 128
    assert not torch.equal(step(cache, 1), step(dense, 1))


def test_kivi_encodes_nothing_twice():
    cache = filled("kivi", 300, dim=32)
    keys, values = cache._state.coded

    def digest():
        parts = (keys.codes.rows[:, :8], keys.scale.rows[:, :8], values.codes.rows[:, :172])
        return hashlib.sha256(
            b"".join(p.contiguous().view(torch.uint8).numpy().tobytes() for p in parts)
        ).digest()

    before = digest()
    for t in range(300):
        step(cache, t)
        keys, values = cache._state.coded
    assert digest() == before
    assert keys.tokens == 512


@pytest.mark.parametrize(("name", "share"), [("kivi", 96), ("kivi-4", 160)])
def test_kivi_bytes_in_closed_form(name, share):
    cache = filled(name, 300, dtype=torch.bfloat16)
    coded = 2 * (256 + 172) * share // 2  # two KV heads, keys and values apart
    native = 2 * (44 + 128) * 128 * 2
    assert cache.bytes()["device"] == coded + native
    assert cache.bytes()["metadata"] == 2 * (256 + 172) * 16


def test_kivi_refuses_a_residual_that_is_no_multiple():
    with pytest.raises(SpecError, match="multiple"):
        kivi.Options(group=32, residual=100)


# -- naive variants -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAIVE_FORMATS)
def test_naive_bytes_are_those_of_the_table(name):
    cache = filled(name, 320, dtype=torch.float16)
    assert cache.bytes()["device"] == 2 * 320 * NAIVE_FORMATS[name]
    assert cache.bytes()["dense_equivalent"] == 2 * 320 * 512


@pytest.mark.parametrize(("name", "share"), [("naive-k8v4", 288), ("naive-k8v4-g64", 264)])
def test_bytes_of_the_published_format_grow_as_tabulated(name, share):
    less, more = (filled(name, n, dtype=torch.float16).bytes()["device"] for n in (320, 640))
    # annotations (four float16 per block) and the mark of a raw block are not in the table
    assert more - less == 2 * (320 * share + 20 * (8 + 1))


def test_a_block_is_encoded_when_its_last_token_has_attended():
    cache = filled("naive-k4v4", 47)
    state = cache._state
    assert isinstance(state, CodedLayer)
    assert (state.coded[0].tokens, state.native[0].shape[1]) == (32, 15)
    step(cache, 0)
    assert (state.coded[0].tokens, state.native[0].shape[1]) == (48, 0)


def test_a_group_shrinks_to_what_divides_the_head_dim():
    cache = filled("naive-tok4", 10, dim=80, dtype=torch.float16)
    assert cache._state.coded[0].layout.size == math.gcd(64, 80) == 16
    assert cache.bytes()["device"] == 2 * 10 * 2 * (40 + 5 * 4)


def test_coarser_formats_err_more():
    """The order of the table, in the error of the output; naive itself is the finest."""
    names = ("naive", "naive-k8v4", "naive-k8v4-g64", "naive-k4v4", "naive-k4v2", "naive-k2v2")
    dense = filled("dense", 512)
    truth = [step(dense, t).double() for t in range(8)]
    errors = []
    for name in names:
        cache = filled(name, 512)
        outputs = [step(cache, t).double() for t in range(8)]
        errors.append(sum(float((o - e).norm()) for o, e in zip(outputs, truth, strict=True)))
    # 8-bit keys differ little among themselves; fewer bits always show
    assert max(errors[:3]) < errors[3] < errors[4] < errors[5]


# -- zipcache -----------------------------------------------------------------------------------------------


def example(saliency_by_count):
    square = torch.zeros(1, 4, 4)
    square[0, 1, :2] = torch.tensor([0.9, 0.1])
    square[0, 3] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    sums = square.sum(1)
    return sums / torch.tensor([4, 3, 2, 1]) if saliency_by_count else sums


def test_saliency_is_divided_by_the_rows_that_could_see_a_token():
    torch.testing.assert_close(example(True), torch.tensor([[0.25, 0.1, 0.15, 0.4]]))
    segment = zipcache.make_segment(rows(1, 4, 16), rows(1, 4, 16), example(True), 0.6)
    assert segment.mask.tolist() == [[0b1101]]  # token 1 has two bits
    assert [part.tokens for part in segment.keys] == [3, 1]


def test_zipcache_encodes_the_prompt_by_its_probe_rows():
    cache = filled("zipcache", 400, seed=7)
    cache.bytes()
    state = cache._state
    queries, keys = rows(4, 400, 128, seed=3), rows(2, 400, 128, seed=1)
    from rcq_cli.cache.statistics import probe_rows

    sums = torch.zeros(2, 400, dtype=torch.float64)
    for i in probe_rows(0.05, 7, 400).tolist():
        for h in range(4):
            logits = keys[h // 2, : i + 1].double() @ queries[h, i].double() * 128**-0.5
            sums[h // 2, : i + 1] += torch.softmax(logits, -1) / 2
    saliency = sums / torch.arange(400, 0, -1)
    lowest = saliency.argsort(dim=-1)[:, : int(0.4 * 400)]
    bits = (state.segments[0].mask[..., None] >> torch.arange(8) & 1).flatten(1)[:, :400]
    assert torch.equal(bits.gather(1, lowest), torch.zeros_like(lowest, dtype=torch.uint8))
    assert int(bits.sum()) == 2 * 240


def test_the_same_seed_gives_the_same_bytes_and_another_one_others():
    def digest(seed):
        cache = filled("zipcache", 500, seed=seed)
        cache.bytes()
        parts = [p.codes for p in cache._state.segments[0].keys]
        return hashlib.sha256(b"".join(p.contiguous().numpy().tobytes() for p in parts)).digest()

    assert digest(0) == digest(0)
    assert digest(0) != digest(1)


def test_zipcache_bytes_in_closed_form_and_logical_is_physical():
    tokens, d = 500, 128
    cache = filled("zipcache", tokens, dtype=torch.bfloat16)
    fewer = int(0.4 * tokens)
    codes = 2 * ((tokens - fewer) * d // 2 + fewer * d // 4)
    assert codes * 8 / (2 * tokens * d) == pytest.approx(3.2)
    meta = 2 * 2 * 2 * d + tokens * 4 + 2 * d + -(-tokens // 8)
    assert cache.bytes()["device"] == 2 * (codes + meta)
    assert cache.bytes()["metadata"] == 2 * meta
    assert cache.tokens == tokens


def test_a_hundred_new_tokens_are_encoded_together_and_old_codes_untouched():
    cache = filled("zipcache", 200, dim=32)
    step(cache, 0)
    first = cache._state.segments[0]
    for t in range(1, 99):
        step(cache, t)
    assert (len(cache._state.segments), cache._state.native[0].shape[1]) == (1, 99)
    step(cache, 99)
    assert (len(cache._state.segments), cache._state.native[0].shape[1]) == (2, 0)
    assert cache._state.segments[0] is first
    assert [p.tokens for p in cache._state.segments[1].keys] == [60, 40]


def test_tokens_come_back_wherever_they_are_stored():
    """Encoded with eight times the needed precision, a permutation of storage changes no output."""
    keys, values = rows(1, 40, 16, seed=1), rows(1, 40, 16, seed=2)
    segment = zipcache.make_segment(keys, values, rows(1, 40, seed=4).abs(), 0.6)
    bits = (segment.mask[0][:, None] >> torch.arange(8) & 1).flatten()[:40].bool()
    order = torch.cat((bits.nonzero()[:, 0], (~bits).nonzero()[:, 0]))
    back = torch.cat([p.read(0, p.tokens) for p in segment.values], 1)
    error = (back - values[:, order]).abs().amax(-1)
    # four bits err less than two, token by token on average
    assert float(error[0, :24].mean()) < float(error[0, 24:].mean()) < 1.0


# -- quest --------------------------------------------------------------------------------------------------


def test_the_worked_example_of_page_bounds():
    keys = torch.tensor([[[[1.0, 0], [0, 1]], [[1, 1], [-1, 1]]]])
    bounds = page_bounds(torch.tensor([[[2.0, -1]]]), keys.amin(2), keys.amax(2))
    assert bounds.tolist() == [[[2, 1]]]


def test_no_score_exceeds_the_bound_of_its_page():
    for seed in range(200):
        scale = 10.0 ** (seed % 5 - 2)
        keys, query = rows(2, 6, 16, 24, seed=seed) * scale, rows(2, 3, 24, seed=1000 + seed)
        bounds = page_bounds(query, keys.amin(2), keys.amax(2)).double()
        scores = torch.einsum("hrd,hmsd->hrms", query.double(), keys.double()).amax(-1)
        size = torch.einsum("hrd,hmsd->hrms", query.double().abs(), keys.double().abs()).amax(-1)
        assert bool((scores <= bounds + 1e-5 * size).all())


@pytest.mark.parametrize("mode", ["quest", "quest-group"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 200, 208, 300])
def test_quest_reads_the_pages_of_the_highest_bounds(mode, tokens):
    """Against a loop over heads; the newest page is always read."""
    cache = filled(mode, tokens, dim=32, read_tokens=64, dense_layers=2)
    keys, values = rows(2, tokens, 32, seed=1), rows(2, tokens, 32, seed=2)
    keys = torch.cat((keys, rows(2, 32, seed=100)[:, None]), 1).double()
    values = torch.cat((values, rows(2, 32, seed=200)[:, None]), 1).double()
    output, query = step(cache, 0), rows(4, 32, seed=300).double()
    pages = keys.split(16, 1)
    boxes = [(p.amin(1), p.amax(1)) for p in pages]
    bound = torch.stack(
        [torch.stack([torch.maximum(query[h] * lo[h // 2], query[h] * hi[h // 2]).sum() for lo, hi in boxes])
         for h in range(4)]
    )  # fmt: skip
    if mode == "quest-group":
        bound = bound.view(2, 2, -1).amax(1).repeat_interleave(2, 0)
    count = min(max(3, 64 // 16), len(pages))
    for h in range(4):
        best = sorted(range(len(pages) - 1), key=lambda p: -float(bound[h, p]))[: count - 1]
        chosen = [*sorted(best), len(pages) - 1]
        k, v = (torch.cat([x.split(16, 1)[p][h // 2] for p in chosen]) for x in (keys, values))
        expected = torch.softmax(k @ query[h] * 32**-0.5, -1) @ v
        torch.testing.assert_close(output[h].double(), expected, rtol=1e-4, atol=1e-5)


def test_the_first_layers_are_dense_and_do_not_count():
    entry = MODES.load("quest")
    options = entry.Options(read_tokens=48)
    states = [
        entry.open(Geometry(2, 1, 16, "float32", "cpu", 0.25, layer), options, BACKEND) for layer in (0, 1, 2)
    ]
    for state in states:
        state.prefill(rows(1, 200, 16), rows(1, 200, 16, seed=1))
        state.append(rows(1, 16), rows(1, 16))
        state.attend(rows(2, 16, seed=3))
    assert [state.engagement().exempt for state in states] == [True, True, False]
    assert [state.steps_selected for state in states] == [0, 0, 1]
    assert states[2].engagement().engaged


def test_quest_stores_more_than_dense_and_reads_less():
    cache = filled("quest", 1024, dtype=torch.float16, read_tokens=128)
    assert cache.bytes()["device"] == 2 * 1024 * (512 + 32)
    step(cache, 0)
    read = cache._state.engagement().details["read_bytes"]
    heads, pages = 2, 65
    least = heads * (7 * 16 + 1) * 512  # all query heads of a group agree
    most = heads * (15 * 16) * 512
    assert least <= read - heads * pages * 512 <= most


# -- all of them --------------------------------------------------------------------------------------------


def owned(thing, seen):
    """Bytes of every distinct storage reachable from a state."""
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        fresh = storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        return storage.nbytes() if fresh and storage.nbytes() else 0
    if isinstance(thing, dict):
        return sum(owned(value, seen) for value in thing.values())
    if isinstance(thing, list | tuple):
        return sum(owned(value, seen) for value in thing)
    if isinstance(thing, Slab | CodedRows) or type(thing).__module__.startswith("rcq_cli.modes"):
        return sum(owned(value, seen) for value in vars(thing).values()) if hasattr(thing, "__dict__") else 0
    return 0


@pytest.mark.parametrize("mode", [*EVICTING, *KEEPING])
@pytest.mark.parametrize("steps", [0, 1, 33])
def test_the_ledger_is_what_is_allocated(mode, steps):
    cache = filled(mode, 300, dim=32)
    for t in range(steps):
        step(cache, t)
    held = cache.bytes()
    assert held["device"] == owned(cache._state, set())
    assert held["host"] == 0


@pytest.mark.parametrize(
    ("mode", "score"),
    {"streaming-llm": 0, "h2o": 4, "h2o-norm": 4, "tova": 0, "tova-layer": 0, "topscore": 0, "snapkv": 0,
     "scissorhands": 50, "scissorhands-decay": 4}.items(),
)  # fmt: skip
def test_evicting_bytes_in_closed_form(mode, score):
    """Keys, values, an int32 position and the scores of B slots, and the free slot of the next step."""
    cache = filled(mode, 400, dtype=torch.bfloat16, keep_tokens=120)
    room = {"snapkv": 0, "scissorhands": 0}.get(mode, 1)
    assert cache.bytes()["device"] == 2 * ((120 + room) * (512 + 4) + 120 * score)


@pytest.mark.parametrize("mode", EVICTING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_budget_for_everything_is_dense_bit_for_bit(mode, dtype):
    cache, dense = (
        filled(name, 100, dim=32, dtype=dtype, **options)
        for name, options in ((mode, {"keep_tokens": 130}), ("dense", {}))
    )
    for t in range(30):
        assert torch.equal(step(cache, t), step(dense, t))
    record = cache._state.engagement()
    assert (record.engaged, record.reason) == (False, "budget_ge_context")


@pytest.mark.parametrize("mode", ["quest", "quest-group"])
def test_a_budget_for_all_pages_is_dense_bit_for_bit(mode):
    cache, dense = filled(mode, 100, dim=32), filled("dense", 100, dim=32)
    for t in range(20):
        assert torch.equal(step(cache, t), step(dense, t))
    assert cache._state.engagement().reason == "budget_ge_context"


@pytest.mark.parametrize("mode", EVICTING)
@pytest.mark.parametrize("group", [1, 3, 7])
def test_positions_stay_true_distinct_and_ascending(mode, group):
    cache = filled(mode, 120, hq=2 * group, dim=16, keep_tokens=80)
    for t in range(40):
        step(cache, t)
        held = cache._state.positions.rows
        assert bool((held.diff(dim=1) > 0).all())
        assert int(held.max()) == cache.tokens - 1
        assert held.shape == (2, cache._state.held)
    if "snapkv" not in mode:
        assert cache._state.held <= 80


@pytest.mark.parametrize("mode", EVICTING)
def test_attention_sees_the_keys_of_the_positions_it_claims(mode):
    """Float64 attention over the tokens named by `positions` gives the output of the next step."""
    cache = filled(mode, 150, dim=16, keep_tokens=90)
    keys, values = [rows(2, 150, 16, seed=1)], [rows(2, 150, 16, seed=2)]
    for t in range(12):
        keys.append(rows(2, 16, seed=100 + t)[:, None])
        values.append(rows(2, 16, seed=200 + t)[:, None])
        g = cache.geometry
        cache.append(keys[-1][:, 0], values[-1][:, 0])
        held = cache._state.positions.rows.long()
        query = rows(4, 16, seed=300 + t)
        output = cache.attend(query).output.double()
        k, v = (torch.cat(x, 1).double() for x in (keys, values))
        for h in range(4):
            mine = held[h // 2]
            scores = k[h // 2, mine] @ query[h].double() * g.scale
            expected = torch.softmax(scores, -1) @ v[h // 2, mine]
            torch.testing.assert_close(output[h], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [*EVICTING, "zipcache"])
def test_without_queries_the_first_step_is_dense_and_then_judges(mode):
    cache, dense = (
        LayerCache(name, query_heads=4, kv_heads=2, head_dim=32, backend="reference", **options)
        for name, options in ((mode, {} if mode == "zipcache" else {"keep_tokens": 90}), ("dense", {}))
    )
    for each in (cache, dense):
        each.prefill(rows(2, 300, 32, seed=1), rows(2, 300, 32, seed=2))
    outputs = [step(each, 0) for each in (cache, dense)]
    if mode != "streaming-llm":
        assert torch.equal(*outputs)
    assert cache.bytes()["device"] < 0.6 * dense.bytes()["device"]
    step(cache, 1)
    assert cache._state.engagement().engaged


def test_statistics_are_not_collected_for_modes_that_need_none():
    for mode in ("dense", "naive", "certified", "certified-paper", "kivi", "quest", "naive-k2v2"):
        assert not hasattr(MODES.load(mode), "needs")
    assert MODES.load("streaming-llm").needs(None) == type(MODES.load("streaming-llm").needs(None))()
    assert Statistics.__dataclass_params__.frozen
