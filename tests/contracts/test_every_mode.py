"""What every mode owes, whatever it does inside: a new file in `rcq_cli/modes/` is tested here unasked."""

import contextlib
import dataclasses
import functools

import pytest
import torch
import transformers

import rcq_cli
from rcq_cli.api import MODES, LayerCache
from rcq_cli.engine.decoder import Engine, engagement
from rcq_cli.engine.hook import managed_layers
from rcq_cli.errors import SpecError
from rcq_cli.options import describe, parse_options
from rcq_cli.protocols import Certificate, Engagement, LayerBytes, Loaded, Sample

LABELS = {"reference", "none", "reported", "calibrated", "certified"}
FIELDS = {"device", "host", "metadata", "scratch", "dense_equivalent"}
every_mode = pytest.mark.parametrize("mode", MODES.names())


def make(mode, hq=4, hkv=2, dim=32, dtype=torch.float32, backend="reference", **more) -> LayerCache:
    return LayerCache(mode, query_heads=hq, kv_heads=hkv, head_dim=dim, dtype=dtype, backend=backend, **more)


def rows(*shape, seed=0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(mode, tokens=150, hq=4, hkv=2, dim=32, dtype=torch.float32, seed=0) -> LayerCache:
    cache = make(mode, hq, hkv, dim, dtype)
    keys, values = (rows(hkv, tokens, dim, seed=seed + i, dtype=dtype) for i in (1, 2))
    cache.prefill(keys, values, rows(hq, tokens, dim, seed=seed + 3, dtype=dtype))
    return cache


def query(hq=4, dim=32, dtype=torch.float32, seed=9) -> torch.Tensor:
    return rows(hq, dim, seed=seed, dtype=dtype)


@every_mode
def test_its_name_label_and_options_are_what_help_texts_need(mode):
    entry = MODES.load(mode)
    assert entry.name == mode
    assert entry.label in LABELS
    assert entry.certifies in (True, False)
    assert entry.certifies or entry.label != "certified"
    assert 10 < len(entry.summary) < 140
    assert entry.summary.isascii()
    assert "\n" not in entry.summary
    assert dataclasses.is_dataclass(entry.Options)
    assert all(option.help and option.help.isascii() for option in describe(entry.Options))
    with pytest.raises(SpecError):
        make(mode, no_such_option=1)


@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (3, 1), (8, 1), (14, 2), (6, 6)])
def test_it_decodes_every_dtype_and_grouping(mode, dtype, heads):
    hq, hkv = heads
    cache = filled(mode, 70, hq, hkv, dtype=dtype)
    for t in range(3):
        cache.append(rows(hkv, 32, seed=20 + t, dtype=dtype), rows(hkv, 32, seed=30 + t, dtype=dtype))
        step = cache.attend(query(hq, dtype=dtype, seed=40 + t))
        assert step.output.shape == (hq, 32)
        assert step.output.dtype == dtype
        assert bool(torch.isfinite(step.output).all())
    assert cache.tokens == 73


@every_mode
@pytest.mark.parametrize("dim", [16, 80, 256])
def test_it_takes_any_head_dim_divisible_by_sixteen(mode, dim):
    assert filled(mode, 40, dim=dim).attend(query(dim=dim)).output.shape == (4, dim)


@every_mode
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_it_takes_any_number_of_tokens_from_one(mode, backend):
    """Up to one more than a block, of which there is none at first."""
    for tokens in range(1, 34):
        cache = make(mode, backend=backend)
        cache.prefill(rows(2, tokens, 32, seed=1), rows(2, tokens, 32, seed=2))
        step = cache.attend(query())
        assert bool(torch.isfinite(step.output).all()), tokens
        assert cache.tokens == tokens
        if step.certificate is not None:
            error = (step.output.double() - cache._state.exact(query())).norm(dim=-1)
            assert bool((error <= step.certificate.total_bound).all()), tokens


@every_mode
def test_a_single_token_is_its_own_output(mode):
    """Softmax over one token gives that token, whatever the mode."""
    cache, value = make(mode), rows(2, 32, seed=5)
    cache.append(rows(2, 32, seed=4), value)
    torch.testing.assert_close(cache.attend(query()).output, value.repeat_interleave(2, 0))


@every_mode
def test_equal_values_give_that_value_whatever_is_kept_or_rounded(mode):
    """Every output is an average of values: 1.5 is kept by every format, up to metadata in float16.

    zipcache divides by a square root per channel, which float16 holds to 2^-11 only.
    """
    cache = make(mode)
    cache.prefill(rows(2, 200, 32, seed=1), torch.full((2, 200, 32), 1.5), rows(4, 200, 32, seed=3))
    output = cache.attend(query()).output
    torch.testing.assert_close(output, torch.full_like(output, 1.5), rtol=0, atol=1.5 * 2.0**-10)


@every_mode
@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-30, 1e6])
def test_any_finite_scale_will_do(mode, scale):
    cache = make(mode, scale=scale)
    cache.prefill(rows(2, 90, 32, seed=1), rows(2, 90, 32, seed=2), rows(4, 90, 32, seed=3))
    assert bool(torch.isfinite(cache.attend(query()).output).all())


@every_mode
@pytest.mark.parametrize("order", ["prefill-append", "append-only", "prefill-twice", "attend-between"])
def test_tokens_may_arrive_in_any_way(mode, order):
    keys, values, queries = rows(2, 80, 32, seed=1), rows(2, 80, 32, seed=2), rows(4, 80, 32, seed=3)
    cache, first = make(mode), {"append-only": 0}.get(order, 50)
    if first:
        cache.prefill(keys[:, :first], values[:, :first], queries[:, :first])
    if order == "prefill-twice":
        cache.prefill(keys[:, first:70], values[:, first:70], queries[:, first:70])
        first = 70
    for t in range(first, 80):
        cache.append(keys[:, t], values[:, t])
        if order == "attend-between":
            cache.attend(queries[:, t])
    assert cache.tokens == 80
    assert bool(torch.isfinite(cache.attend(query()).output).all())


@every_mode
def test_the_same_calls_give_the_same_results(mode):
    first, second = filled(mode), filled(mode)
    for t in range(5):
        key, value = rows(2, 32, seed=50 + t), rows(2, 32, seed=60 + t)
        first.append(key, value)
        second.append(key, value)
        q = query(seed=70 + t)
        assert torch.equal(first.attend(q).output, second.attend(q).output)
    assert first.bytes() == second.bytes()


@every_mode
def test_a_second_prompt_does_not_depend_on_the_first(mode):
    filled(mode, seed=100).attend(query())
    after = filled(mode).attend(query()).output
    assert torch.equal(after, filled(mode).attend(query()).output)


@every_mode
@pytest.mark.parametrize("grow_first", [0, 1])
def test_a_fork_and_its_origin_do_not_touch_each_other(mode, grow_first):
    cache, alone = filled(mode), [filled(mode), filled(mode)]
    for each in (cache, *alone):
        each.bytes()  # the prompt ends here; forks are made before the first step
    sides = [cache._state, cache._state.fork()]
    for t in range(12):
        for i in (grow_first, 1 - grow_first):
            key, value = rows(2, 32, seed=1000 * i + t), rows(2, 32, seed=2000 + 1000 * i + t)
            for state in (sides[i], alone[i]._state):
                state.append(key, value)
                state.attend(query(seed=t))
    for side, other in zip(sides, alone, strict=True):
        assert torch.equal(side.attend(query()).output, other.attend(query()).output)
        assert side.tokens == other.tokens == 162


@every_mode
def test_its_bytes_add_up(mode):
    cache = filled(mode, 300)
    cache.attend(query())
    held = cache.bytes()
    assert set(held) == FIELDS
    assert all(isinstance(count, int) and count >= 0 for count in held.values())
    assert held["dense_equivalent"] == 2 * 2 * 300 * 32 * 2
    assert held["metadata"] <= held["device"]
    assert held["device"] > 0
    assert isinstance(cache._state.bytes(), LayerBytes)


@every_mode
def test_its_certificate_is_whole_or_absent(mode):
    certificate = filled(mode).attend(query()).certificate
    entry = MODES.load(mode)
    assert (certificate is not None) == entry.certifies
    if certificate is None:
        return
    assert isinstance(certificate, Certificate)
    parts = (
        certificate.key_bound
        + certificate.value_bound
        + certificate.dropped_bound
        + certificate.rounding_bound
    )
    for tensor in (certificate.total_bound, certificate.output_norm, parts):
        assert tensor.shape == (4,)
        assert tensor.dtype == torch.float64
        assert bool((tensor >= 0).all())
    torch.testing.assert_close(certificate.total_bound, parts, rtol=1e-12, atol=0)
    assert certificate.exact.dtype == torch.bool
    assert bool(((certificate.rung >= 0) & (certificate.rung <= 4)).all())


@every_mode
def test_a_bound_it_certifies_is_never_below_the_true_error(mode):
    entry = MODES.load(mode)
    if not entry.certifies:
        pytest.skip(f"{mode} certifies nothing")
    keys, values = rows(2, 260, 32, seed=1), rows(2, 260, 32, seed=2)
    for sharp in (0.3, 1.0, 5.0, 40.0):
        cache = make(mode)
        cache.prefill(keys, values, rows(4, 260, 32, seed=3))
        q = sharp * query()
        step = cache.attend(q)
        scores = torch.einsum("hd,htd->ht", q.double(), keys.double().repeat_interleave(2, 0)) * 32**-0.5
        truth = torch.einsum("ht,htd->hd", torch.softmax(scores, -1), values.double().repeat_interleave(2, 0))
        error = (step.output.double() - truth).norm(dim=-1)
        assert bool((error <= step.certificate.total_bound + 1e-13).all())
        torch.testing.assert_close(cache._state.exact(q), truth, rtol=1e-11, atol=1e-12)


@every_mode
def test_what_it_cannot_audit_it_says(mode):
    """`exact` is float64 attention on everything that was seen; a mode that lost some says so."""
    cache, q = filled(mode), query()
    may_refuse = not MODES.load(mode).certifies and mode != "dense"
    with contextlib.nullcontext() if not may_refuse else contextlib.suppress(SpecError):
        exact = cache._state.exact(q)
        keys, values = (rows(2, 150, 32, seed=i).double().repeat_interleave(2, 0) for i in (1, 2))
        scores = torch.einsum("hd,htd->ht", q.double(), keys) * 32**-0.5
        truth = torch.einsum("ht,htd->hd", torch.softmax(scores, -1), values)
        torch.testing.assert_close(exact, truth, rtol=1e-11, atol=1e-12)


@every_mode
def test_it_counts_its_steps_and_gives_a_reason_when_it_did_nothing(mode):
    reasons = {"short_context", "budget_ge_context", "no_decode_steps", "inactive"}
    idle, short, busy = filled(mode), filled(mode, 2), filled(mode, 400)
    short.attend(query())
    for t in range(3):
        busy.append(rows(2, 32, seed=t), rows(2, 32, seed=90 + t))
        busy.attend(query(seed=t))
    for cache, steps in ((idle, 0), (short, 1), (busy, 3)):
        record = cache._state.engagement()
        assert isinstance(record, Engagement)
        assert record.steps == steps
        assert 0 <= record.steps_acted <= record.steps
        assert (record.reason == "") == record.engaged
        assert record.engaged or record.reason in reasons
    assert not idle._state.engagement().engaged


def wrong_calls(cache):
    nan = torch.full((2, 4, 32), float("nan"))
    good = rows(2, 4, 32)
    return [
        lambda: cache.prefill(nan, good),
        lambda: cache.prefill(good, nan),
        lambda: cache.prefill(good, good * float("inf")),
        lambda: cache.prefill(good, good[:, :3]),
        lambda: cache.prefill(good[:1], good[:1]),
        lambda: cache.prefill(good[..., :16], good[..., :16]),
        lambda: cache.prefill(good.half(), good.half()),
        lambda: cache.prefill(good, good.double()),
        lambda: cache.prefill(good[:, :0], good[:, :0]),
        lambda: cache.prefill(good.numpy(), good.numpy()),
        lambda: cache.prefill(good, good, good),
        lambda: cache.append(good, good),
        lambda: cache.append(good[:, 0], good[:, 0, :16]),
        lambda: cache.append(good[:, 0], nan[:, 0]),
        lambda: cache.attend(good[:, 0]),
        lambda: cache.attend(torch.full((4, 32), float("nan"))),
        lambda: cache.attend(rows(4, 32).half()),
        lambda: cache.attend(None),
        lambda: cache.append(good[:, 0].to("meta"), good[:, 0].to("meta")),
    ]


@every_mode
def test_rejected_calls_raise_our_error_and_store_nothing(mode):
    cache, twin = filled(mode, 60), filled(mode, 60)
    for call in wrong_calls(cache):
        with pytest.raises(SpecError):
            call()
        assert cache.tokens == 60
    assert torch.equal(cache.attend(query()).output, twin.attend(query()).output)
    assert cache.bytes() == twin.bytes()


@every_mode
def test_attention_over_nothing_is_refused_and_the_cache_stays_usable(mode):
    cache = make(mode)
    with pytest.raises(SpecError, match="empty"):
        cache.attend(query())
    cache.append(rows(2, 32), rows(2, 32))
    assert cache.tokens == 1


@every_mode
def test_tensors_of_the_caller_are_neither_changed_nor_kept(mode):
    keys, values, q = rows(2, 80, 32, seed=1), rows(2, 80, 32, seed=2), query()
    copies = [t.clone() for t in (keys, values, q)]
    cache, twin = make(mode), make(mode)
    for held in (cache, twin):
        held.prefill(keys.clone() if held is twin else keys, values.clone() if held is twin else values)
    cache.append(keys[:, 0], values[:, 0])
    twin.append(keys[:, 0].clone(), values[:, 0].clone())
    assert all(torch.equal(t, c) for t, c in zip((keys, values, q), copies, strict=True))
    keys.zero_()
    values.zero_()
    assert torch.equal(cache.attend(q).output, twin.attend(q).output)
    assert torch.equal(q, copies[2])


@every_mode
def test_tensors_that_need_gradients_and_strided_views_are_taken(mode):
    keys = rows(80, 2, 32, seed=1).requires_grad_()
    values = rows(2, 32, 80, seed=2).requires_grad_()
    cache, twin = make(mode), make(mode)
    cache.prefill(keys.transpose(0, 1), values.transpose(1, 2))
    twin.prefill(keys.detach().transpose(0, 1).contiguous(), values.detach().transpose(1, 2).contiguous())
    output = cache.attend(query().requires_grad_()).output
    assert not output.requires_grad
    assert torch.equal(output, twin.attend(query()).output)


# -- selection and storage, whatever the mode does ----------------------------------------------------------


@every_mode
@pytest.mark.parametrize("cut", [7, 64, 299])
def test_a_prompt_in_chunks_is_the_prompt_at_once(mode, cut):
    keys, values, queries = rows(2, 300, 32, seed=1), rows(2, 300, 32, seed=2), rows(4, 300, 32, seed=3)
    whole, parts = make(mode), make(mode)
    whole.prefill(keys, values, queries)
    for first in range(0, 300, cut):
        span = slice(first, first + cut)
        parts.prefill(keys[:, span], values[:, span], queries[:, span])
    for t in range(3):
        outputs = []
        for cache in (whole, parts):
            cache.append(rows(2, 32, seed=40 + t), rows(2, 32, seed=50 + t))
            outputs.append(cache.attend(query(seed=60 + t)).output)
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


@every_mode
def test_permuting_kv_heads_permutes_the_result(mode):
    if mode == "tova-layer":
        pytest.skip("its heads decide together")
    if MODES.load(mode).certifies:
        pytest.skip("corruption is looked for in blocks drawn per head")
    keys, values, queries = rows(3, 200, 32, seed=1), rows(3, 200, 32, seed=2), rows(6, 200, 32, seed=3)
    order = [2, 0, 1]
    wide = [2 * h + r for h in order for r in range(2)]
    plain, turned = make(mode, 6, 3), make(mode, 6, 3)
    plain.prefill(keys, values, queries)
    turned.prefill(keys[order], values[order], queries[wide])
    for t in range(3):
        key, value, q = rows(3, 32, seed=40 + t), rows(3, 32, seed=50 + t), rows(6, 32, seed=60 + t)
        plain.append(key, value)
        turned.append(key[order], value[order])
        torch.testing.assert_close(plain.attend(q).output[wide], turned.attend(q[wide]).output)


@every_mode
@pytest.mark.parametrize("case", ["constant channel", "equal keys", "outlier channel", "equal everything"])
def test_degenerate_tokens_give_finite_outputs_within_the_range_of_values(mode, case):
    keys, values = rows(2, 230, 32, seed=1), rows(2, 230, 32, seed=2)
    if case == "constant channel":
        keys[..., 3] = 7.0
        values[..., 5] = -2.0
    elif case == "outlier channel":
        keys[..., 0] *= 100
        values[..., 1] *= 100
    else:
        keys[:] = keys[:, :1]
        if case == "equal everything":
            values[:] = values[:, :1]
    cache = make(mode)
    cache.prefill(keys, values, rows(4, 230, 32, seed=3))
    for t in range(3):
        cache.append(keys[:, t], values[:, t])
        output = cache.attend(query(seed=t)).output.view(2, 2, 32)
        assert bool(torch.isfinite(output).all())
        # an average lies between the extremes; two-bit codes miss a value by a sixth of its token's range
        low, high = values.amin(1)[:, None], values.amax(1)[:, None]
        slack = (values.amax(-1) - values.amin(-1)).amax() / 6 + 0.02 * values.abs().amax()
        assert bool((output >= low - slack).all())
        assert bool((output <= high + slack).all())


@every_mode
def test_it_draws_nothing_from_the_global_generator(mode):
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        cache = filled(mode, 260)
        state = torch.get_rng_state()
        results.append(cache.attend(query()).output)
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*results)


# -- in a model ---------------------------------------------------------------------------------------------

SMALL = {
    "quest": {"read_tokens": 64},
    "quest-group": {"read_tokens": 64},
    "snapkv-avg5": {"keep_tokens": 100},
    "streaming-llm": {"recent": 96},
    "streaming-llm-pos": {"recent": 96},
}
"""Options with which a mode has something to do at 400 tokens."""


class Silent:
    """As much of a tokenizer as the engine asks for."""

    eos_ids = ()

    def decode(self, ids):
        return " ".join(map(str, ids))


@functools.cache
def small_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.3, eos_token_id=None,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@functools.cache
def engine():
    return Engine(Loaded("small", small_model(), Silent(), {}, 1024, 128), backend="reference")


def ids(seed, count=400):
    return torch.randint(1, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def answer(mode, prompt, context_len=None, steps=4):
    entry = MODES.load(mode)
    options = parse_options(entry.Options, SMALL.get(mode, {}), "option")
    sample = Sample("s", 0, "c", tuple(prompt), context_len or len(prompt), (), steps, (), 0)
    prefill = engine().prefill(prompt[:context_len], [(entry, options)])
    return engine().decode(prefill, sample, entry, options)


@every_mode
def test_it_is_engaged_on_every_sample_and_again_on_the_first(mode):
    done = [answer(mode, ids(seed)) for seed in (1, 2, 3, 1)]
    for decoded in done:
        assert decoded.engagement["engaged"], decoded.engagement
        assert decoded.engagement["reason"] == ""
        assert decoded.engagement["steps"] == 3
        assert decoded.engagement["logical"] == 403
        assert decoded.selection_ns > 0
    assert done[0].completion == done[3].completion
    assert done[0].bytes == done[3].bytes


@every_mode
def test_the_first_token_is_that_of_dense(mode):
    for seed in (4, 5):
        mine, dense = answer(mode, ids(seed)), answer("dense", ids(seed))
        assert mine.completion.output_ids[0] == dense.completion.output_ids[0]


@every_mode
def test_a_second_question_on_one_context_is_engaged_too(mode):
    entry = MODES.load(mode)
    options = parse_options(entry.Options, SMALL.get(mode, {}), "option")
    context = ids(6)
    prefill = engine().prefill(context, [(entry, options)])
    for question in ([5, 6, 7], [8, 9], [5, 6, 7]):
        sample = Sample("s", 0, "c", (*context, *question), 400, (), 4, (), 0)
        decoded = engine().decode(prefill, sample, entry, options)
        assert decoded.engagement["engaged"], decoded.engagement
        assert decoded.engagement["steps"] == len(question) + 3


@every_mode
def test_two_generate_calls_are_two_samples(mode):
    model = small_model()
    options = SMALL.get(mode, {})
    tokens = torch.tensor([ids(7)])
    with rcq_cli.attach(model, mode, backend="reference", **options) as session:
        first = model.generate(tokens, max_new_tokens=4, do_sample=False)
        records = [_record(session)]
        second = model.generate(tokens, max_new_tokens=4, do_sample=False)
        records.append(_record(session))
    assert torch.equal(first, second)
    for record in records:
        assert record["engaged"], record
    assert records[0] == records[1]


def _record(session):
    states = [layer.state for layer in managed_layers(session._open.cache).values()]
    return engagement(session.mode.name, states, session._open.bytes())


@every_mode
def test_a_prompt_shorter_than_a_block_is_answered(mode):
    model, prompt = small_model(), torch.tensor([ids(9, 5)])
    with rcq_cli.attach(model, mode):
        answered = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert answered.shape == (1, 9)


@every_mode
def test_padding_is_refused(mode):
    model = small_model()
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, 0] = 0
    with (
        rcq_cli.attach(model, mode, backend="reference"),
        pytest.raises(SpecError, match="padding"),
    ):
        model.generate(torch.tensor([ids(8, 40)]), attention_mask=mask, max_new_tokens=2)
