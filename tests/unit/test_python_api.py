"""Whatever is handed to the Python API, what it refuses is an error of rcq that says what came."""

import pytest
import torch
import transformers

import rcq_cli

GOOD = {"query_heads": 4, "kv_heads": 2, "head_dim": 32, "backend": "reference"}
JUNK = [None, True, False, -1, 1.5, float("nan"), 10**400, "", "nope", b"x", [], {}, object(), torch.zeros(3)]
ALLOWED = {("scale", None), ("scale", -1), ("scale", 1.5)}


def layer(mode="certified", **changes):
    return rcq_cli.LayerCache(mode, **{**GOOD, **changes})


@pytest.mark.parametrize("value", JUNK, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize(
    "name", ["mode", "query_heads", "kv_heads", "head_dim", "dtype", "device", "backend", "scale", "eps"]
)
def test_an_argument_of_layer_cache_that_is_not_allowed_is_refused_by_name(name, value):
    if isinstance(value, int | float | None) and (name, value) in ALLOWED:
        layer(**{name: value})
        return
    with pytest.raises(rcq_cli.RcqError) as caught:
        layer(**{name: value})
    assert name in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("value", JUNK, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("name", ["mode", "backend"])
def test_a_mode_or_backend_of_attach_that_is_no_name_is_refused(name, value, model):
    given = {"mode": "certified", name: value}
    with pytest.raises(rcq_cli.SpecError, match=name), rcq_cli.attach(model, **given):
        pass


def test_large_numbers_are_shown_by_their_size():
    with pytest.raises(rcq_cli.SpecError, match="query_heads=an integer of 33220 bits is not allowed"):
        layer(query_heads=10**10_000)


def test_a_sparse_tensor_is_refused_like_any_other_wrong_form():
    cache, wanted = layer("certified"), torch.zeros(GOOD["kv_heads"], GOOD["head_dim"])
    with pytest.raises(rcq_cli.SpecError, match="sparse"):
        cache.append(wanted.to_sparse(), wanted)
