"""The contact with transformers: prefill in chunks, positions, masks, hybrid models, nothing left behind."""

import copy

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

from rcq_cli.api import MODES
from rcq_cli.engine.decoder import Engine
from rcq_cli.engine.hook import Hook, ManagedLayer, attached, fork_cache, make_cache, managed_layers
from rcq_cli.errors import BrokenRun, SpecError, UnsupportedModel
from rcq_cli.protocols import Loaded, Sample


def tiny(config: str = "LlamaConfig", seed: int = 0, **changes):
    """A random model whose attention is far from uniform."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    } | changes  # fmt: skip
    made = getattr(transformers, config)(**settings)
    return transformers.AutoModelForCausalLM.from_config(made).eval()


def gemma3(seed: int = 2):
    return tiny(
        "Gemma3TextConfig",
        seed,
        num_hidden_layers=6,
        head_dim=32,
        sliding_window=8,
        tie_word_embeddings=False,
    )


class Words:
    """The least a tokenizer can be."""

    eos_ids = ()

    def decode(self, ids):
        return " ".join(map(str, ids))


def engine(model, chunk=4096, backend="reference") -> Engine:
    loaded = Loaded("tiny", model, Words(), {}, 512, chunk)
    return Engine(loaded, backend=backend)


def prompt(tokens: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist())


def sample(ids, context=None, new=8, sample_id="a") -> Sample:
    return Sample(sample_id, 0, "c", tuple(ids), context or len(ids), (), new, (), 0)


def answer(engine, ids, mode="dense", context=None, new=8, **options):
    entry = MODES.load(mode)
    done = engine.prefill(ids[: context or len(ids)])
    return engine.decode(done, sample(ids, context, new), entry, entry.Options(**options))


def plain_tokens(model, ids, new):
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return tuple(out[0, len(ids) :].tolist())


# -- prefill ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [50, 49, 25, 7, 1])
@pytest.mark.parametrize("make", [tiny, gemma3])
def test_a_prefill_in_chunks_gives_the_logits_of_a_single_one(make, chunk):
    model, ids = make(), prompt(50)
    whole = model(torch.tensor([ids]), use_cache=False).logits[0, -1].detach()
    got = engine(model, chunk).prefill(ids)
    torch.testing.assert_close(got.logits, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("mode", ["dense", "certified", "naive"])
def test_every_chunking_gives_the_same_states_and_tokens(mode):
    model, ids = tiny(), prompt(61)
    options = {} if mode == "dense" else {"block": 8}
    answers = [answer(engine(model, chunk), ids, mode, **options) for chunk in (4096, 7, 1)]
    assert len({a.completion.output_ids for a in answers}) == 1
    assert len({(a.bytes.host, a.bytes.dense_equivalent) for a in answers}) == 1


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_a_prompt_of_a_single_token_is_a_prefill_too(tokens):
    model, ids = tiny(), prompt(tokens)
    assert answer(engine(model), ids).completion.output_ids == plain_tokens(model, ids, 8)


@pytest.mark.parametrize("make", [tiny, gemma3])
@pytest.mark.parametrize("mode", ["dense", "certified"])
def test_the_decode_loop_gives_the_tokens_of_generate(make, mode):
    model, ids = make(), prompt(70)
    options = {"eps": 1e-3, "block": 8} if mode == "certified" else {}
    got = answer(engine(model, 32), ids, mode, new=12, **options).completion.output_ids
    assert got == plain_tokens(model, ids, 12)
    assert len(set(got)) > 3  # a model that repeats itself would agree with anything


def test_logits_are_asked_for_the_last_position_only():
    model, shapes = tiny(), []
    model.register_forward_hook(lambda *call: shapes.append(tuple(call[-1].logits.shape)))
    answer(engine(model, 16), prompt(40))
    assert set(shapes[-11:]) == {(1, 1, 97)}


# -- positions, masks and questions -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["dense", "certified"])
@pytest.mark.parametrize("make", [tiny, gemma3])
def test_a_question_after_the_prefill_sees_what_a_single_prefill_sees(make, mode):
    """A multi-token query behind a compressed context: position, mask offset and order."""
    model, ids = make(), prompt(60)
    options = {"eps": 1e-3, "block": 8} if mode == "certified" else {}
    split = answer(engine(model), ids, mode, context=53, **options)
    assert split.completion.output_ids == plain_tokens(model, ids, 8)


def test_positions_are_logical_whatever_is_held():
    model, ids = tiny(), torch.tensor([prompt(20)])
    cache, hook = make_cache(model, 20), Hook(2)
    entry = MODES.load("dense")

    def take_over(layer):
        from rcq_cli.kernels.reference import BACKEND

        state = entry.open(layer.geometry, entry.Options(), BACKEND)
        state.prefill(*layer.collected())
        layer.hand_over(state)

    hook.on_prefilled = take_over
    with torch.inference_mode(), attached(model, hook):
        model(ids, cache=cache, use_cache=True)
        assert cache.get_seq_length() == 20
        implicit = model(ids[:, :1], cache=cache, use_cache=True).logits
        assert cache.get_seq_length() == 21
    longer = torch.cat((ids, ids[:, :1]), 1)
    expected = model(longer, use_cache=False).logits[:, -1:].detach()
    torch.testing.assert_close(implicit, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_three_tokens_at_once_equal_three_single_ones():
    model, ids = tiny(), prompt(40)
    model_engine, entry = engine(model), MODES.load("certified")
    logits = []
    for context in (37, 40):
        done = model_engine.prefill(ids[:context])
        made = model_engine.decode(done, sample(ids, context), entry, entry.Options(eps=1e-4, block=8))
        logits.append(made.completion.output_ids)
    assert logits[0] == logits[1]


# -- one cache per sample -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "instructions", "told"),
    [
        (torch.bfloat16, {}, True),
        (torch.bfloat16, {"avx512_bw": True}, False),
        (torch.float16, {"avx512_bw": True}, True),
        (torch.float16, {"avx_ne_convert": True}, False),
        (torch.float32, {}, False),
    ],
)
def test_a_dtype_that_the_processor_lacks_is_told_before_anything_runs(
    monkeypatch, dtype, instructions, told
):
    known = {"architecture": "x86_64", "avx2": True, **instructions}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    notes = engine(tiny().to(dtype)).notes
    assert any("is emulated on this processor" in note for note in notes) == told


def test_two_samples_give_the_same_answers_in_either_order():
    model = tiny()
    made = engine(model)
    one, two = prompt(40, 1), prompt(45, 2)
    first = [answer(made, ids, "certified", block=8).completion.output_ids for ids in (one, two)]
    second = [answer(made, ids, "certified", block=8).completion.output_ids for ids in (two, one)]
    assert first == second[::-1]


@pytest.mark.parametrize("mode", ["dense", "certified", "naive"])
def test_one_prefill_serves_several_modes_and_questions(mode):
    model, ids = gemma3(), prompt(50)
    made, entry = engine(model), MODES.load(mode)
    options = entry.Options(**({} if mode == "dense" else {"block": 8}))
    shared = made.prefill(ids[:40])
    questions = [ids, ids[:40] + prompt(6, 9), ids]
    together = [made.decode(shared, sample(q, 40), entry, options).completion.output_ids for q in questions]
    apart = [
        made.decode(made.prefill(q[:40]), sample(q, 40), entry, options).completion.output_ids
        for q in questions
    ]
    assert together == apart
    assert together[0] == together[2] != together[1]


def test_forking_leaves_stock_layers_of_the_origin_alone():
    model, ids = gemma3(), torch.tensor([prompt(30)])
    cache = make_cache(model, 30)
    hook = Hook(6)
    with torch.inference_mode(), attached(model, hook):
        model(ids, cache=cache, use_cache=True)
    stock = [i for i in range(6) if i not in managed_layers(cache)]
    before = [cache.layers[i].keys.clone() for i in stock]
    twin = fork_cache(cache)
    for i in stock:
        twin.layers[i].update(torch.ones(1, 2, 3, 32), torch.ones(1, 2, 3, 32))
    assert all(torch.equal(cache.layers[i].keys, kept) for i, kept in zip(stock, before, strict=True))


# -- hybrid models ------------------------------------------------------------------------------------------


def test_only_full_attention_layers_of_a_hybrid_model_are_managed():
    model = gemma3()
    kinds = [type(layer).__name__ for layer in make_cache(model, 4).layers]
    assert [i for i, kind in enumerate(kinds) if kind == "ManagedLayer"] == [5]
    assert set(kinds[:5]) == {"DynamicSlidingWindowLayer"}
    made = answer(engine(model), prompt(60), "certified", block=8)
    assert made.engagement["managed_layers"] == 1
    assert made.steps.layers == (5,)
    # five windows of eight tokens at most, and one full layer: bytes of the sliding layers stay small
    assert made.bytes.dense_equivalent < 6 * 67 * 2 * 2 * 32 * 2


# -- nothing left behind ------------------------------------------------------------------------------------


def globals_of_transformers():
    registries = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    return [dict(registry) for registry in registries]


def test_registries_and_config_are_restored_after_an_error_and_the_model_runs():
    model, ids = tiny(), torch.tensor([prompt(10)])
    before, config = globals_of_transformers(), copy.deepcopy(model.config.to_dict())
    expected = model(ids).logits
    seen = []

    def fail():
        with attached(model, Hook(2)):
            seen.append(model.config._attn_implementation)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert seen == ["rcq"]
    assert globals_of_transformers() == before
    assert not any("rcq" in registry for registry in before)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, expected)


def test_a_stock_cache_is_unaffected_by_importing_rcq():
    layers = DynamicCache(config=tiny().config).layers
    assert [type(layer) for layer in layers] == [DynamicLayer, DynamicLayer]


def test_a_managed_layer_refuses_what_a_compressed_cache_cannot_do():
    layer = ManagedLayer(4)
    assert not layer.is_croppable
    assert not layer.is_compileable
    assert layer.get_max_length() == -1
    with pytest.raises(SpecError, match="beam"):
        layer.reorder_cache(torch.tensor([0]))


def test_a_layer_that_was_reset_starts_from_nothing():
    layer, rows = ManagedLayer(6), torch.randn(1, 2, 6, 4)
    layer.update(rows, rows)
    layer.reset()
    assert (layer.seen, layer.prefilling, layer.get_mask_sizes(3)) == (0, True, (3, 0))
    keys, _ = layer.update(rows[:, :, :2], rows[:, :, :2])
    assert torch.equal(keys, rows[:, :, :2])


def test_a_forward_call_without_the_cache_of_rcq_raises_while_managed():
    model, ids = tiny(), torch.tensor([prompt(10)])
    hook = Hook(2)
    hook.managed = frozenset({0, 1})
    with attached(model, hook):
        for extra in ({}, {"use_cache": False}, {"cache": DynamicCache(config=model.config)}):
            with pytest.raises(UnsupportedModel, match="no cache of rcq"):
                model(ids, **extra)


def test_attention_extras_that_no_mode_implements_are_refused():
    hook, layer = Hook(1), ManagedLayer(1)
    layer.state = object()
    q = torch.zeros(1, 1, 1, 16)
    with pytest.raises(UnsupportedModel, match="s_aux"):
        hook.attention(torch.nn.Module(), q, q, q, None, rcq_layer=layer, s_aux=torch.zeros(1))


def test_logits_that_are_not_finite_end_the_sample():
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    loaded = Loaded("tiny", model, Words(), {}, 512, 64)
    made = Engine.__new__(Engine)
    made.loaded, made.model, made.hook = loaded, model, Hook(2)
    with pytest.raises(BrokenRun, match="NaN"):
        made.prefill(prompt(12))


# -- what a decode records ----------------------------------------------------------------------------------


def test_every_step_layer_and_head_has_one_row_and_audits_find_no_violation():
    model, ids = tiny(), prompt(90)
    made, entry = engine(model), MODES.load("certified")
    out = made.decode(
        made.prefill(ids), sample(ids, new=10), entry, entry.Options(block=8, eps=0.05), audit=1.0
    )
    steps = out.steps
    assert steps.total_bound.shape == (9, 2, 4)
    assert not steps.violated.any()
    assert (steps.true_error <= steps.total_bound).all()
    assert (steps.true_error > 0).any()
    assert steps.blocks[0].tolist() == [91 // 8, 91 // 8]
    assert out.engagement["engaged"]
    assert len(out.step_ns) == 9


def test_an_audit_of_nothing_leaves_the_true_error_unknown():
    model, ids = tiny(), prompt(40)
    made, entry = engine(model), MODES.load("certified")
    steps = made.decode(made.prefill(ids), sample(ids), entry, entry.Options(block=8)).steps
    assert bool(torch.tensor(steps.true_error).isnan().all())
    assert not steps.violated.any()


def test_a_violation_is_counted_when_the_output_is_not_what_was_certified(monkeypatch):
    """The audit itself is tested: a wrong output under a small bound must be found."""
    from rcq_cli.certify.ladder import CertifiedStep

    honest = CertifiedStep.run

    def shifted(self):
        step = honest(self)
        wrong = step.output + 10 * step.certificate.total_bound[:, None].float() + 1e-3
        return type(step)(wrong, step.certificate)

    monkeypatch.setattr(CertifiedStep, "run", shifted)
    model, ids = tiny(), prompt(40)
    made, entry = engine(model), MODES.load("certified")
    out = made.decode(made.prefill(ids), sample(ids), entry, entry.Options(block=8), audit=1.0)
    assert out.steps.violated.all()
