"""streaming-llm-pos: by hand, against a stock model, and where positions cannot be changed."""

import functools

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import rcq_cli
from rcq_cli import LayerCache
from rcq_cli.engine.rotations import rotations
from rcq_cli.errors import SpecError, UnsupportedModel
from rcq_cli.protocols import Rotation

FREQUENCIES = tuple(10.0 ** (-i / 4) for i in range(8))
HALVES, NEIGHBOURS = Rotation(FREQUENCIES), Rotation(FREQUENCIES, interleaved=True)
PARTIAL = Rotation(FREQUENCIES[:3])
WHOLE = [HALVES, NEIGHBOURS, PARTIAL]


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def at(x, position, rotation):
    """`[..., 16]` as complex numbers, one per pair, each turned by its angle."""
    pairs = len(rotation.frequencies)
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if rotation.interleaved:
        numbers = torch.complex(turned[..., ::2].contiguous(), turned[..., 1::2].contiguous())
    else:
        numbers = torch.complex(turned[..., :pairs].contiguous(), turned[..., pairs:].contiguous())
    angles = position * torch.tensor(rotation.frequencies, dtype=torch.float64)
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)
    parts = torch.view_as_real(numbers)
    joined = parts.flatten(-2) if rotation.interleaved else torch.cat((numbers.real, numbers.imag), -1)
    return torch.cat((joined, rest), -1)


def fed(rotation, keys, values, prompt, steps, mode="streaming-llm-pos", **options):
    """A cache that saw `steps` tokens after a prompt, each key turned for its true position."""
    cache = LayerCache(
        mode, query_heads=2, kv_heads=1, head_dim=16, backend="reference", rotation=rotation, **options
    )
    true = torch.stack([at(keys[:, t], t, rotation) for t in range(prompt + steps)], 1).float()
    cache.prefill(true[:, :prompt], values[:, :prompt].float())
    for t in range(prompt, prompt + steps):
        cache.append(true[:, t], values[:, t].float())
    return cache


def attention(query, keys, values):
    return torch.softmax(query @ keys.transpose(0, 1) * 16**-0.5, -1) @ values


# -- by hand ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", WHOLE)
def test_the_example_of_the_definition(rotation):
    """Two sinks, a window of three: after token 10 five slots at positions 0 to 4, the query at 4."""
    keys, values, query = rows(1, 11, 16, seed=1), rows(1, 11, 16, seed=2), 3 * rows(2, 16, seed=3)
    cache = fed(rotation, keys, values, 10, 1, start=2, recent=3)
    kept = [0, 1, 8, 9, 10]
    assert cache._state.positions.rows[0].tolist() == kept
    assert cache.tokens == 11
    placed = torch.stack([at(keys[0, t], slot, rotation) for slot, t in enumerate(kept)])
    expected = attention(at(query, 4, rotation), placed, values[0, kept])
    found = cache.attend(at(query, 10, rotation).float()).output
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    # at true positions the output is another one
    other = fed(rotation, keys, values, 10, 1, mode="streaming-llm", start=2, recent=3)
    away = (other.attend(at(query, 10, rotation).float()).output.double() - expected).abs().max()
    assert away > 1e-3


@pytest.mark.parametrize("rotation", WHOLE)
def test_no_rounding_piles_up(rotation):
    """After 3,000 evictions the sinks are as exact as after one."""
    tokens = 3010
    keys, values, query = rows(1, tokens, 16, seed=1), rows(1, tokens, 16, seed=2), rows(2, 16, seed=3)
    cache = fed(rotation, keys, values, 10, 3000, start=4, recent=5)
    kept = [0, 1, 2, 3, *range(tokens - 5, tokens)]
    placed = torch.stack([at(keys[0, t], slot, rotation) for slot, t in enumerate(kept)])
    expected = attention(at(query, 8, rotation), placed, values[0, kept])
    found = cache.attend(at(query, tokens - 1, rotation).float()).output
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_while_nothing_is_evicted_it_is_dense():
    keys, values = rows(1, 60, 16, seed=1), rows(1, 60, 16, seed=2)
    mine, dense = (fed(HALVES, keys, values, 50, 10, mode=mode) for mode in ("streaming-llm-pos", "dense"))
    query = rows(2, 16, seed=3).float()
    assert torch.equal(mine.attend(query).output, dense.attend(query).output)
    assert mine._state.engagement().reason == "budget_ge_context"


def test_without_sinks_only_distances_of_recent_tokens_are_left():
    keys, values, query = rows(1, 40, 16, seed=1), rows(1, 40, 16, seed=2), rows(2, 16, seed=3).float()
    found = [
        fed(HALVES, keys, values, 30, 10, mode=mode, start=0, recent=8).attend(query).output
        for mode in ("streaming-llm-pos", "streaming-llm")
    ]
    assert torch.equal(*found)


def test_forks_go_their_own_ways():
    keys, values, query = rows(1, 60, 16, seed=1), rows(1, 60, 16, seed=2), rows(2, 16, seed=3)
    state = fed(HALVES, keys, values, 30, 5, start=2, recent=6)._state
    twin = state.fork()
    for t in range(35, 50):
        twin.append(at(keys[:, t], t, HALVES).float(), values[:, t].float())
    alone = fed(HALVES, keys, values, 30, 5, start=2, recent=6)
    now = at(query, 34, HALVES).float()
    assert torch.equal(state.attend(now).output, alone.attend(now).output)
    later = at(query, 49, HALVES).float()
    longer = fed(HALVES, keys, values, 30, 20, start=2, recent=6)
    assert torch.equal(twin.attend(later).output, longer.attend(later).output)


def test_a_layer_that_was_not_told_the_rotation_says_so_when_it_matters():
    cache = LayerCache(
        "streaming-llm-pos", query_heads=2, kv_heads=1, head_dim=16, backend="reference", start=2, recent=6
    )
    cache.prefill(rows(1, 8, 16).float(), rows(1, 8, 16).float())
    cache.attend(rows(2, 16).float())
    cache.append(rows(1, 16).float(), rows(1, 16).float())
    with pytest.raises(SpecError, match=r"not told how positions turn them[\s\S]*streaming-llm"):
        cache.attend(rows(2, 16).float())


# -- in a model ---------------------------------------------------------------------------------------------

SCALINGS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def model_of(name, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON, **more)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@functools.cache
def llama(scaling):
    rope = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", **SCALINGS[scaling]}}
    return model_of("Llama", **rope)


@torch.no_grad()
def stock_logits(model, prompt, steps, start, recent):
    """Logits of greedy steps of the unmodified model, its cache cut by hand and positions counted anew."""
    before = [[] for _ in model.model.layers]  # keys before they are turned
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda _m, _i, out, kept=kept: kept.append(out[0]))
        for layer, kept in zip(model.model.layers, before, strict=True)
    ]
    whole = DynamicCache(config=model.config)
    logits = [model(prompt, cache=whole, use_cache=True).logits[0, -1]]
    held = [layer.values[0] for layer in whole.layers]  # [Hkv, T, D]
    for _ in range(steps):
        token = logits[-1].argmax()[None, None]
        seen = held[0].shape[1]
        first, last = torch.arange(start), torch.arange(seen + 1 - recent, seen)
        kept = torch.cat((first, last)) if seen + 1 > start + recent else torch.arange(seen)
        positions = torch.arange(len(kept))[None]
        cache = DynamicCache(config=model.config)
        for i in range(len(held)):
            raw = torch.cat(before[i])[kept].unflatten(1, (held[i].shape[0], -1)).transpose(0, 1)[None]
            cos, sin = model.model.rotary_emb(raw, positions)
            cache.update(apply_rotary_pos_emb(raw, raw, cos, sin)[1], held[i][None, :, kept], i)
        place = torch.tensor([[len(kept)]])
        logits.append(model(token, cache=cache, position_ids=place, use_cache=True).logits[0, -1])
        held = [torch.cat((h, c.values[0, :, -1:]), 1) for h, c in zip(held, cache.layers, strict=True)]
    for hook in hooks:
        hook.remove()
    return torch.stack(logits)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_stock_model_with_a_cache_cut_by_hand_says_the_same(scaling):
    model = llama(scaling)
    prompt = torch.randint(1, 97, (1, 60), generator=torch.Generator().manual_seed(1))
    expected = stock_logits(model, prompt, 12, start=3, recent=20)
    with rcq_cli.attach(model, "streaming-llm-pos", backend="reference", start=3, recent=20):
        found = model.generate(
            prompt, max_new_tokens=13, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    mine = torch.cat(found.logits)
    torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)
    with rcq_cli.attach(model, "streaming-llm", backend="reference", start=3, recent=20):
        found = model.generate(
            prompt, max_new_tokens=13, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    assert (torch.cat(found.logits)[1] - expected[1]).abs().max() > 0.05  # true positions are another mode


def channels(model):
    return {index: 2 * len(found.frequencies) for index, found in rotations(model).items()}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_those_of_the_model(scaling):
    model = llama(scaling)
    expected = tuple(model.model.rotary_emb.inv_freq.double().tolist())
    assert rotations(model) == {index: Rotation(expected) for index in range(3)}


def test_pairs_are_found_by_watching():
    assert all(found.interleaved for found in rotations(model_of("Cohere")).values())
    glm = rotations(model_of("Glm", head_dim=16, partial_rotary_factor=0.5))
    assert [(2 * len(found.frequencies), found.interleaved) for found in glm.values()] == [(8, True)] * 3
    assert channels(model_of("Phi", partial_rotary_factor=0.5)) == dict.fromkeys(range(3), 8)


def test_layers_without_positions_have_nothing_to_turn():
    model = model_of("SmolLM3", no_rope_layers=[1, 0, 1])
    assert channels(model) == {0: 16, 1: 0, 2: 16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_are_recognised(dtype):
    model = model_of("Llama").to(dtype)
    assert channels(model) == dict.fromkeys(range(3), 16)


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("GPT2", {"n_embd": 64, "n_head": 4, "n_layer": 2}, "no rotation of the model explains"),
        ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}, "no rotation of the model explains"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            "'dynamic', which changes with the length",
        ),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 64,
                }
            },
            "'longrope', which changes with the length",
        ),
    ],
)
def test_other_positions_are_refused(name, more, reason):
    model = model_of(name, **more)
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        rotations(model)
    assert "streaming-llm" in str(refusal.value.fix)
    with pytest.raises(UnsupportedModel), rcq_cli.attach(model, "streaming-llm-pos"):
        pass


def test_a_pairing_that_is_not_that_of_the_buffers_is_refused(monkeypatch):
    """Half the angle in secret: the frequencies of the model no longer explain its keys."""
    model = model_of("Llama")
    turn = type(model.model.rotary_emb).forward
    monkeypatch.setattr(
        type(model.model.rotary_emb), "forward", lambda self, x, position_ids: turn(self, x, position_ids / 2)
    )
    with pytest.raises(UnsupportedModel, match="layer 0"):
        rotations(model)


def test_a_padding_token_of_zeros_hides_no_rotation():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, pad_token_id=3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert not model.get_input_embeddings().weight[3].any()
    assert [len(found.frequencies) for found in rotations(model).values()] == [8, 8]


@pytest.mark.parametrize(
    "rotation", ["x", Rotation((1.0,) * 9), Rotation((float("nan"),) * 8), Rotation((float("inf"),))]
)
def test_a_rotation_that_cannot_be_is_refused_when_the_cache_is_made(rotation):
    with pytest.raises(SpecError, match="rotation"):
        LayerCache("dense", query_heads=2, kv_heads=1, head_dim=16, rotation=rotation)
