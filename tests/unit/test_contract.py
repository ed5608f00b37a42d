"""Levels, hashes and comparison of contracts."""

import hashlib

import pytest

from rcq_cli import contract
from rcq_cli.contract import LEVELS, Level
from rcq_cli.errors import NotComparable, SpecError
from rcq_cli.spec import canonical, sha256_json

MUST = [name for name, level in LEVELS.items() if level is Level.MUST]
SHOULD = [name for name, level in LEVELS.items() if level is Level.SHOULD]
RECORD = [name for name, level in LEVELS.items() if level is Level.RECORD]
FULL = {name: f"value of {name}" for name in LEVELS} | {"mode.name": "certified", "mode.eps": 0.05}


def test_hash_of_the_printed_vector():
    fields = {"task.ctx": 4096, "model.id": "tiny"}
    assert canonical(fields) == '{"model.id":"tiny","task.ctx":4096}'
    assert contract.short(contract.contract_hash(fields)) == "00fc8886f469"


def test_fields_the_design_names_have_its_levels():
    for name in (
        *("model.id", "model.revision", "model.weights_sha256", "model.config_sha256", "model.dtype"),
        *("model.weight_quantisation", "tokenizer.sha256", "tokenizer.bos_policy", "tokenizer.bos_count"),
        *("tokenizer.chat_template_sha256", "tokenizer.template_kwargs", "task.name", "task.generator"),
        *(
            "task.prompt_set",
            "task.metric",
            "task.corpus_kind",
            "task.corpus_sha256",
            "task.seed",
            "task.ctx",
        ),
        *("task.gen_tokens", "task.sample_ids_sha256", "task.prompts_sha256", "task.questions"),
        *("task.question_visible", "task.shots", "decoding.greedy", "decoding.temperature", "decoding.top_p"),
        *("decoding.stop_ids", "decoding.eos", "decoding.max_new_tokens", "decoding.batch_size"),
        *("pipeline.prefill_mode", "pipeline.prefill_attention", "software.rcq_minor"),
    ):
        assert LEVELS[name] is Level.MUST, name
    for name in (
        *("decoding.prefill_chunk", "pipeline.decode_attention", "software.torch", "software.transformers"),
        *("software.triton", "software.cuda", "software.driver", "software.rcq_commit", "hardware.gpu"),
        *("hardware.gpu_count", "hardware.gpu_memory_bytes", "hardware.cpu", "determinism.tf32"),
    ):
        assert LEVELS[name] is Level.SHOULD, name
    for name in ("model.parameters", "software.rcq_dirty", "software.python", "task.fill_ratio_min"):
        assert LEVELS[name] is Level.RECORD, name


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        LEVELS["model.id"] = Level.RECORD


@pytest.mark.parametrize("name", MUST)
def test_a_changed_must_field_refuses_the_pair_and_is_named_with_both_values(name):
    found = contract.compare_contracts(FULL, FULL | {name: "other"})
    assert found.must == ((name, FULL[name], "other"),)
    assert found.should == ()
    error = found.refusal("dense", "naive")
    assert isinstance(error, NotComparable)
    assert error.exit_code == 5
    assert all(part in str(error) for part in (name, FULL[name], "other"))
    assert contract.contract_hash(FULL) != contract.contract_hash(FULL | {name: "other"})
    assert contract.timing_hash(FULL) == contract.timing_hash(FULL | {name: "other"})


@pytest.mark.parametrize("name", SHOULD)
def test_a_changed_should_field_only_spoils_times(name):
    found = contract.compare_contracts(FULL, FULL | {name: "other"})
    assert found.comparable
    assert not found.timing_comparable
    assert len(found.warnings()) == 1
    assert name in found.warnings()[0]
    assert contract.timing_hash(FULL) != contract.timing_hash(FULL | {name: "other"})
    assert contract.contract_hash(FULL) == contract.contract_hash(FULL | {name: "other"})


@pytest.mark.parametrize("name", [*RECORD, "mode.eps"])
def test_recorded_fields_and_the_mode_never_refuse(name):
    found = contract.compare_contracts(FULL, FULL | {name: "other"})
    assert found.comparable
    assert found.timing_comparable
    assert contract.contract_hash(FULL) == contract.contract_hash(FULL | {name: "other"})


def test_the_mode_has_a_hash_of_its_own():
    block = {"mode.name": "certified", "mode.eps": 0.05}
    assert contract.mode_hash(FULL) == contract.mode_hash(block) == sha256_json(block)
    assert contract.mode_hash(FULL) != contract.mode_hash(FULL | {"mode.eps": 0.1})
    assert contract.mode_hash({"eps": 0.05}) == hashlib.sha256(b'{"eps":0.05}').hexdigest()


def test_every_differing_field_is_named():
    found = contract.compare_contracts(FULL, FULL | {"model.id": "b", "task.ctx": 1, "hardware.cpu": "x"})
    assert [name for name, _, _ in found.must] == ["model.id", "task.ctx"]
    assert [name for name, _, _ in found.should] == ["hardware.cpu"]


def test_a_missing_field_is_an_explicit_null():
    assert contract.complete({"model.id": "tiny"})["task.ctx"] is None
    assert set(contract.complete({})) == set(LEVELS)
    assert contract.compare_contracts(
        {"model.id": "tiny"}, {"model.id": "tiny", "task.seed": None}
    ).comparable
    assert not contract.compare_contracts(
        {"model.id": "tiny"}, {"model.id": "tiny", "task.seed": 0}
    ).comparable


def test_true_is_not_one():
    assert not contract.compare_contracts({"decoding.greedy": True}, {"decoding.greedy": 1}).comparable


def test_a_field_without_a_level_is_an_error_that_names_the_nearest():
    with pytest.raises(SpecError, match=r"model\.revison.*model\.revision"):
        contract.contract_hash({"model.revison": "x"})
    with pytest.raises(SpecError):
        contract.compare_contracts({}, {"model.revison": "x"})
    with pytest.raises(SpecError):
        contract.complete({"colour": 1})
    assert contract.is_must("model.revision")
    assert not contract.is_must("software.torch")


def test_infinity_has_no_hash():
    with pytest.raises(ValueError, match="JSON"):
        contract.contract_hash({"decoding.temperature": float("inf")})
