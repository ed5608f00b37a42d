"""`rcq_cli.attach`: plain tokens, plain refusals, and a model that is afterwards what it was before."""

import copy
import json

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GenerationConfig

import rcq_cli
from rcq_cli.backends import BACKENDS
from rcq_cli.errors import BrokenRun, RcqError, SpecError, UnknownEntry, UnsupportedModel

GREEDY = {"do_sample": False, "max_new_tokens": 6}
SMALL = {"block": 8, "eps": 1e-3}


def attach(model, mode, **options):
    """What users call, on the backend that needs no compilation."""
    return rcq_cli.attach(model, mode, **{"backend": "reference", **options})


def tiny(config: str = "LlamaConfig", **changes):
    """A random model whose attention is far from uniform and whose tokens vary."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    } | changes  # fmt: skip
    made = getattr(transformers, config)(**settings)
    return transformers.AutoModelForCausalLM.from_config(made).eval()


FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "phi3": ("Phi3Config", {}),
    "phi": ("PhiConfig", {}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "cohere": ("CohereConfig", {}),
    "stablelm": ("StableLmConfig", {}),
    "stablelm parallel": ("StableLmConfig", {"use_parallel_residual": True, "qk_layernorm": True}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "olmo": ("OlmoConfig", {}),
    "nemotron": ("NemotronConfig", {}),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 8, "tie_word_embeddings": False},
    ),
}


def prompt(tokens: int = 60, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (1, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def llama():
    return tiny()


# -- tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_and_certified_give_the_tokens_of_the_plain_model_over_two_calls(family):
    config, changes = FAMILIES[family]
    model = tiny(config, **changes)
    prompts = (prompt(60), prompt(9, seed=2))
    expected = [model.generate(ids, **GREEDY) for ids in prompts]
    assert len(set(expected[0][0, 60:].tolist())) >= 3
    for mode, options in (("dense", {}), ("certified", SMALL)):
        with attach(model, mode, **options) as session:
            for ids, tokens in zip(prompts, expected, strict=True):
                assert torch.equal(model.generate(ids, **GREEDY), tokens)
        assert session.summary()["calls"] == 2
    assert all(
        torch.equal(model.generate(ids, **GREEDY), tokens)
        for ids, tokens in zip(prompts, expected, strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_gives_the_logits_of_the_plain_model_and_certified_certifies_every_head_step(family):
    config, changes = FAMILIES[family]
    model = tiny(config, **changes)
    settings = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    expected = torch.cat(model.generate(prompt(), **settings).logits)
    for mode, options in (("dense", {}), ("certified", {"block": 8, "eps": 0.05})):
        with attach(model, mode, **options) as session:
            logits = torch.cat(model.generate(prompt(), **settings).logits)
        if mode == "dense":
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        else:
            found = session.summary()["certificates"]
            assert found["certified"] > 0
            assert found["certified"] + found["exact"] == found["head_steps"]


@pytest.mark.parametrize("mode", ["certified", "dense"])
def test_what_a_summary_lacks_has_the_reason_beside_it(llama, mode):
    with attach(llama, mode) as session:
        before = session.summary()
        llama.generate(prompt(), do_sample=False, max_new_tokens=1)
        one = session.summary()
        llama.generate(prompt(), **GREEDY)
    names = ("tokens_per_s", "step_ms_p50", "bytes", "certificates")
    for found in (before, one, session.summary()):
        assert all((found[name] is None) == (f"{name}_status" in found) for name in names)
    assert before["bytes_status"] == "no_calls"
    assert one["tokens_per_s_status"] == one["step_ms_p50_status"] == "no_decode_steps"
    assert one["bytes"]["device"] > 0


def test_a_model_that_caps_its_scores_is_refused_by_that():
    model = tiny("Gemma2Config", head_dim=16)
    model.set_attn_implementation("eager")
    with (
        pytest.raises(UnsupportedModel, match=r"capped scores \(softcap\)") as caught,
        attach(model, "dense"),
    ):
        pass
    assert "Try using" not in str(caught.value)
    assert "supported families: cohere" in str(caught.value)
    assert model.config._attn_implementation == "eager"


def test_guidance_is_refused_by_name(llama):
    with attach(llama, "dense"), pytest.raises(SpecError, match="classifier-free guidance"):
        llama.generate(prompt(), guidance_scale=1.5, **GREEDY)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_keep_their_tokens_under_dense(dtype):
    model = tiny().to(dtype)
    expected = model.generate(prompt(), **GREEDY)
    with attach(model, "dense") as session:
        assert torch.equal(model.generate(prompt(), **GREEDY), expected)
    assert session.summary()["dtype"] == str(dtype).removeprefix("torch.")


def test_a_float64_model_is_certified_by_what_has_no_kernels_of_its_own():
    model = tiny().double()
    expected = model.generate(prompt(), **GREEDY)
    with rcq_cli.attach(model, "certified", eps=0.01) as session:
        assert torch.equal(model.generate(prompt(), **GREEDY), expected)
    assert session.summary()["dtype"] == "float64"
    with pytest.raises(RcqError, match="float64"), attach(model, "certified", backend="cpu"):
        model.generate(prompt(), **GREEDY)


def test_an_unchecked_cache_changes_tokens_so_the_comparison_has_teeth(llama):
    expected = llama.generate(prompt(), do_sample=False, max_new_tokens=40)
    with attach(llama, "naive", block=4, group=16):
        assert not torch.equal(llama.generate(prompt(), do_sample=False, max_new_tokens=40), expected)


@pytest.mark.parametrize("length", [1, 2, 60])
@pytest.mark.parametrize("new", [1, 2, 5])
def test_any_prompt_and_any_number_of_new_tokens_will_do(llama, length, new):
    ids = prompt(length)
    expected = llama.generate(ids, do_sample=False, max_new_tokens=new)
    with attach(llama, "certified", **SMALL):
        assert torch.equal(llama.generate(ids, do_sample=False, max_new_tokens=new), expected)


def test_every_way_of_passing_the_prompt_and_the_settings_works(llama):
    ids, config = prompt(), GenerationConfig(**GREEDY)
    expected = llama.generate(ids, **GREEDY)
    calls = (
        lambda: llama.generate(ids, config),
        lambda: llama.generate(ids, generation_config=config),
        lambda: llama.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY),
        lambda: llama.generate(inputs=ids, **GREEDY),
        lambda: llama.generate(ids, prefill_chunk_size=7, **GREEDY),
        lambda: llama.generate(ids, return_dict_in_generate=True, output_scores=True, **GREEDY).sequences,
    )
    with attach(llama, "certified", **SMALL):
        for call in calls:
            assert torch.equal(call(), expected)
        with torch.inference_mode():
            assert torch.equal(llama.generate(ids, **GREEDY), expected)


def test_sampling_one_sequence_is_allowed_and_follows_the_seed(llama):
    def drawn():
        torch.manual_seed(7)
        return llama.generate(prompt(), do_sample=True, max_new_tokens=10)

    expected = drawn()
    with attach(llama, "certified", **SMALL):
        assert torch.equal(drawn(), expected)


def test_the_fastest_backend_of_this_machine_gives_the_same_tokens(llama):
    expected = llama.generate(prompt(), **GREEDY)
    with rcq_cli.attach(llama, "certified", **SMALL) as session:
        assert torch.equal(llama.generate(prompt(), **GREEDY), expected)
    assert session.summary()["backend"] in BACKENDS.names()


def test_a_model_that_ran_with_eager_attention_returns_to_it(llama):
    llama.set_attn_implementation("eager")
    with attach(llama, "certified", **SMALL):
        llama.generate(prompt(), **GREEDY)
    assert llama.config._attn_implementation == "eager"


# -- refusals -----------------------------------------------------------------------------------------------

REFUSED_MODELS = {
    "GPTNeoX": ("GPTNeoXConfig", {}),
    "Bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "Falcon": ("FalconConfig", {}),
    "Gemma2": ("Gemma2Config", {"head_dim": 16}),
    "Mistral": ("MistralConfig", {"sliding_window": 16}),
}


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_a_model_that_cannot_be_managed_is_refused_by_name_and_left_as_it_was(name):
    config, changes = REFUSED_MODELS[name]
    model = tiny(config, **changes)
    settings = copy.deepcopy(model.config.to_dict())
    with pytest.raises(UnsupportedModel, match=f"unsupported model: {name}.*supported families"):
        attach(model, "certified").__enter__()
    assert model.config.to_dict() == settings
    assert model.config._attn_implementation != "rcq"
    assert "rcq" not in AttentionInterface._global_mapping
    model(prompt(8))


def test_an_encoder_decoder_model_is_refused_by_name():
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config).eval()
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration"):
        attach(model, "dense").__enter__()


def test_a_model_in_training_mode_is_refused_also_when_it_was_accepted_before(llama):
    with attach(llama, "dense"):
        pass
    with pytest.raises(UnsupportedModel, match="training"):
        attach(llama.train(), "dense").__enter__()


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "spoil",
    [lambda m: torch.compile(m, backend="eager"), compiled_in_place, lambda m: m.config, type],
    ids=["wrapped", "compiled", "config", "class"],
)
def test_what_is_no_plain_model_is_refused(llama, spoil):
    with pytest.raises(UnsupportedModel, match="unsupported model"):
        attach(spoil(llama), "dense").__enter__()


def test_a_model_whose_own_logits_are_not_finite_is_told_so(llama):
    with torch.no_grad():
        llama.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(UnsupportedModel, match="not finite, without rcq too") as refusal:
        attach(llama, "certified").__enter__()
    assert "NaN" in refusal.value.why
    assert "float32" in refusal.value.fix


def padded(ids):
    return torch.cat((torch.zeros_like(ids[:, :3]), torch.ones_like(ids[:, 3:])), 1)


CALLS = {
    "beams": lambda m, ids: m.generate(ids, num_beams=2, max_new_tokens=3),
    "beams-config": lambda m, ids: m.generate(ids, GenerationConfig(num_beams=2, max_new_tokens=3)),
    "sequences": lambda m, ids: m.generate(ids, num_return_sequences=2, do_sample=True, max_new_tokens=3),
    "batch": lambda m, ids: m.generate(ids.repeat(2, 1), **GREEDY),
    "padding": lambda m, ids: m.generate(ids, attention_mask=padded(ids), **GREEDY),
    "own-cache": lambda m, ids: m.generate(ids, cache=DynamicCache(config=m.config), **GREEDY),
    "own-cache-old": lambda m, ids: m.generate(ids, past_key_values=DynamicCache(config=m.config), **GREEDY),
    "static-cache": lambda m, ids: m.generate(ids, cache_implementation="static", **GREEDY),
    "no-cache": lambda m, ids: m.generate(ids, use_cache=False, **GREEDY),
    "weights": lambda m, ids: m.generate(ids, output_attentions=True, return_dict_in_generate=True, **GREEDY),
    "lookup": lambda m, ids: m.generate(ids, prompt_lookup_num_tokens=3, **GREEDY),
    "assistant": lambda m, ids: m.generate(ids, assistant_model=m, **GREEDY),
    "embeddings": lambda m, ids: m.generate(inputs_embeds=m.get_input_embeddings()(ids), **GREEDY),
    "one-dimension": lambda m, ids: m.generate(ids[0], **GREEDY),
    "empty": lambda m, ids: m.generate(ids[:, :0], **GREEDY),
    "nothing": lambda m, _: m.generate(**GREEDY),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_a_managed_cache_cannot_serve_is_refused_and_the_next_one_works(llama, name):
    ids = prompt(20)
    expected = llama.generate(ids, **GREEDY)
    with attach(llama, "certified", **SMALL) as session:
        with pytest.raises(SpecError):
            CALLS[name](llama, ids)
        assert session.summary()["calls"] == 0
        assert torch.equal(llama.generate(ids, **GREEDY), expected)


def test_a_forward_call_of_the_user_raises_while_attached_and_works_afterwards(llama):
    ids = prompt(12)
    with attach(llama, "certified"):
        for extra in ({}, {"use_cache": False}, {"cache": DynamicCache(config=llama.config)}):
            with pytest.raises(UnsupportedModel, match="no cache of rcq"):
                llama(ids, **extra)
    llama(ids)


@pytest.mark.parametrize("mode", ["dense", "certified", "streaming-llm"])
def test_a_cache_that_outlives_its_call_is_refused_instead_of_read_as_an_empty_one(llama, mode):
    def use(answer):
        with pytest.raises(SpecError, match="a generate call that has ended"):
            llama(answer.sequences[:, -1:], cache=answer.past_key_values)

    with attach(llama, mode) as session:
        answer = llama.generate(prompt(20), return_dict_in_generate=True, **GREEDY)
        use(answer)
        assert session.summary()["calls"] == 1
    use(answer)
    with pytest.raises(SpecError, match="a generate call that has ended"):
        llama.generate(answer.sequences, cache=answer.past_key_values, **GREEDY)


@pytest.mark.parametrize("same", [True, False])
def test_blocks_do_not_nest_and_the_outer_one_goes_on(llama, same):
    ids = prompt(20)
    expected = llama.generate(ids, **GREEDY)
    other = llama if same else tiny("Qwen2Config")
    with attach(llama, "certified", **SMALL) as session:
        with pytest.raises(SpecError, match="attached already"):
            attach(other, "dense").__enter__()
        assert torch.equal(llama.generate(ids, **GREEDY), expected)
        assert session.summary()["certificates"]["head_steps"] == 5 * 2 * 4


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"mode": "no-such-mode"}, UnknownEntry),
        ({"mode": "certified", "epz": 0.1}, SpecError),
        ({"mode": "certified", "eps": -1}, SpecError),
        ({"mode": "dense", "eps": 0.1}, SpecError),
        ({"mode": "dense", "backend": "no-such-backend"}, UnknownEntry),
    ],
)
def test_names_and_options_are_checked_before_the_model_is_touched(llama, arguments, error):
    mode = arguments.pop("mode")
    with pytest.raises(error):
        attach(llama, mode, **arguments).__enter__()
    assert "generate" not in vars(llama)


def test_every_error_of_attach_is_one_of_ours_and_has_an_exit_code():
    for error in (SpecError, UnknownEntry, UnsupportedModel, BrokenRun):
        assert issubclass(error, RcqError)
    assert (SpecError.exit_code, UnsupportedModel.exit_code, BrokenRun.exit_code) == (2, 2, 6)


# -- what is left -------------------------------------------------------------------------------------------


def everything_of(model):
    return (
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
        copy.deepcopy(model.config.to_dict()),
        model.config._attn_implementation,
        copy.deepcopy(model.generation_config.to_dict()),
        sorted(vars(model)),
        len(model._forward_hooks),
        len(model._forward_pre_hooks),
        model.generate.__func__,
    )


def test_the_model_its_config_and_the_registries_are_as_before(llama):
    before, logits = everything_of(llama), llama(prompt(8)).logits
    with attach(llama, "certified"):
        llama.generate(prompt(), **GREEDY)
    assert everything_of(llama) == before
    assert torch.equal(llama(prompt(8)).logits, logits)


def test_the_same_holds_after_an_error_in_the_block(llama):
    before = everything_of(llama)

    def fail():
        with attach(llama, "certified"):
            llama.generate(prompt(), **GREEDY)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert everything_of(llama) == before


class Breaking:
    """A streamer that fails after some tokens."""

    def __init__(self):
        self.left = 3

    def put(self, value):
        self.left -= len(value) > 0
        if self.left < 0:
            raise RuntimeError("on purpose")

    def end(self):
        pass


def test_a_call_that_broke_off_keeps_its_certificates_and_the_next_one_works(llama):
    expected = llama.generate(prompt(), **GREEDY)
    with attach(llama, "certified", **SMALL) as session:
        with pytest.raises(RuntimeError, match="on purpose"):
            llama.generate(prompt(), streamer=Breaking(), **GREEDY)
        assert torch.equal(llama.generate(prompt(), **GREEDY), expected)
        assert session.summary()["calls"] == 2
    steps = session.steps()
    assert steps.column("sample_id").unique().to_pylist() == ["call/0", "call/1"]
    assert (steps.num_rows - 5 * 2 * 4) % 8 == 0


def test_a_step_that_broke_off_in_the_second_layer_is_left_out(llama, monkeypatch):
    from rcq_cli.modes.certified import CertifiedLayer

    honest, calls = CertifiedLayer.attend, []

    def attend(self, query):
        calls.append(self)
        if len(calls) == 6:
            raise BrokenRun("on purpose")
        return honest(self, query)

    monkeypatch.setattr(CertifiedLayer, "attend", attend)
    before = everything_of(llama)

    def fail():
        with attach(llama, "certified", **SMALL) as session:
            sessions.append(session)
            llama.generate(prompt(), **GREEDY)

    sessions = []
    with pytest.raises(BrokenRun, match="on purpose"):
        fail()
    assert everything_of(llama) == before
    assert sessions[0].summary()["certificates"]["head_steps"] == 2 * 2 * 4


# -- the session --------------------------------------------------------------------------------------------


def test_summary_and_steps_stay_readable_and_add_up(llama):
    with attach(llama, "certified", eps=0.05, block=8) as session:
        assert session.summary()["certificates"] is None
        assert session.steps() is None
        llama.generate(prompt(), **GREEDY)
        llama.generate(prompt(30, seed=3), **GREEDY)
        inside = session.summary()["certificates"]
    summary = json.loads(json.dumps(session.summary(), allow_nan=False))
    found = summary["certificates"]
    assert found == json.loads(json.dumps(inside))
    assert found["head_steps"] == 2 * 5 * 2 * 4 == found["certified"] + found["exact"]
    assert sum(found["rungs"].values()) == found["head_steps"]
    assert found["rungs"]["3"] + found["rungs"]["4"] == found["exact"]
    assert found["violations"] == found["audited"] == 0
    assert 0 < found["rel_bound_p50"] <= found["rel_bound_p95"] <= 0.05
    assert set(summary["bytes"]) == {
        "device", "host", "metadata", "scratch", "dense_equivalent", "device_ratio"
    }  # fmt: skip
    # the larger of the two caches: 65 tokens (the last one is never fed back), two layers and heads, 16-bit
    assert summary["bytes"]["dense_equivalent"] == 2 * 2 * 2 * 65 * 16 * 2
    assert session.steps().num_rows == found["head_steps"]


def test_dense_has_no_certificates_and_shows_the_ratio_of_its_dtype(llama):
    with attach(llama, "dense") as session:
        llama.generate(prompt(), **GREEDY)
    summary = session.summary()
    assert summary["certificates"] is None
    assert session.steps() is None
    assert summary["bytes"]["device_ratio"] == 2.0
