"""`--device split`: a model spread by transformers' device_map answers as one that is not."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rcq_cli.errors import UnsupportedHere
from rcq_cli.models import _loading, folder
from tests.faults.foreign import _tiny

IDS = torch.tensor([[1, 5, 7, 2, 9]])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return _tiny(str(tmp_path_factory.mktemp("split")))


def test_a_model_that_is_spread_gives_the_same_logits(place):
    pytest.importorskip("accelerate")
    whole, spread = (
        folder.load_folder(place, "tiny", revision=None, device=d, dtype="float32") for d in ("cpu", "split")
    )
    with torch.inference_mode():
        assert torch.equal(whole.model(IDS).logits, spread.model(IDS).logits)
    assert whole.fingerprint == spread.fingerprint


def test_a_layer_that_lies_on_disk_gives_the_same_logits(place, tmp_path, monkeypatch):
    """What does not fit into memory is read when its layer runs."""
    pytest.importorskip("accelerate")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    torch.manual_seed(0)
    two = LlamaForCausalLM(config).eval()
    two.save_pretrained(tmp_path / "two")
    for file in place.glob("tokenizer*"):
        (tmp_path / "two" / file.name).write_bytes(file.read_bytes())
    last = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    spread = {"device_map": last | {"model.layers.1": "disk", "model.rotary_emb": "cpu"}}
    monkeypatch.setattr(_loading, "_placement", lambda _: spread | {"offload_folder": str(tmp_path / "disk")})
    made, _ = _loading.load_pretrained(str(tmp_path / "two"), "two", "split", "float32")
    assert made.hf_device_map["model.layers.1"] == "disk"
    with torch.inference_mode():
        assert torch.allclose(made(IDS).logits, two(IDS).logits, atol=1e-6)


def test_without_accelerate_the_command_is_named(place, monkeypatch):
    monkeypatch.setattr(_loading, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedHere, match="pip install accelerate"):
        folder.load_folder(place, "tiny", revision=None, device="split", dtype="float32")
