import hashlib
import json

import pytest

from rcq_cli.errors import SpecError
from rcq_cli.spec import MOST_SAMPLES, RunSpec, canonical, sha256_json


def spec(**changes):
    values = {"model": "needle", "task": "niah", "mode": "certified:eps=0.02", "ctx": 4096, "samples": 22}
    return RunSpec(**values | changes)


def test_canonical_json_sorts_keys_and_leaves_no_blanks():
    text = canonical({"task.ctx": 4096, "model.id": "tiny"})
    assert text == '{"model.id":"tiny","task.ctx":4096}'
    assert sha256_json({"task.ctx": 4096, "model.id": "tiny"})[:12] == "00fc8886f469"


def test_nan_is_no_json():
    with pytest.raises(ValueError, match="Out of range"):
        canonical({"x": float("nan")})


def test_digest_is_the_sha256_of_everything_but_the_origins():
    made = spec(origins={"ctx": "flag"})
    record = {k: v for k, v in made.to_json().items() if k != "origins"}
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    assert made.digest() == hashlib.sha256(text.encode()).hexdigest()


def test_origins_do_not_make_another_run():
    assert spec(origins={"ctx": "flag"}).digest() == spec(origins={"ctx": "preset"}).digest()
    assert spec(origins={"ctx": "flag"}) == spec()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m"},
        {"task": "ruler/vt"},
        {"mode": "dense"},
        {"ctx": 8192},
        {"samples": 5},
        {"seed": 1},
        {"backend": "cpu"},
        {"device": "cpu"},
        {"dtype": "float16"},
        {"audit": 0.5},
        {"controls": False},
        {"keep_prompts": True},
        {"preset": "ci"},
        {"shard": "1/2"},
        {"task_options": {"decoys": 4}},
        {"mode_options": {"eps": 0.1}},
    ],
)
def test_every_field_makes_another_digest(change):
    assert spec(**change).digest() != spec().digest()


def test_a_whole_number_of_audit_is_the_same_request():
    assert spec(audit=1).digest() == spec(audit=1.0).digest()


def test_a_spec_survives_json():
    made = spec(task_options={"decoys": 4}, origins={"ctx": "flag"}, shard="2/3", ctx=None)
    assert RunSpec.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_an_unknown_field_is_refused_with_a_near_match():
    with pytest.raises(SpecError, match="did you mean 'samples'"):
        RunSpec.from_json(spec().to_json() | {"sample": 3})


def test_a_missing_field_is_named():
    record = spec().to_json()
    del record["seed"]
    with pytest.raises(SpecError, match="'seed' is missing"):
        RunSpec.from_json(record)


@pytest.mark.parametrize(
    ("name", "value"), [("samples", "5"), ("samples", True), ("ctx", 1.5), ("controls", 1)]
)
def test_a_field_of_another_type_is_refused(name, value):
    with pytest.raises(SpecError, match=name):
        RunSpec.from_json(spec().to_json() | {name: value})


@pytest.mark.parametrize(
    "change",
    [
        {"ctx": 0},
        {"samples": 0},
        {"seed": -1},
        {"audit": 1.1},
        {"audit": float("nan")},
        {"dtype": "int8"},
        {"shard": "3/2"},
        {"shard": "0/2"},
        {"shard": "x"},
        {"model": ""},
    ],
)
def test_values_that_are_not_allowed_are_refused(change):
    with pytest.raises(SpecError, match=next(iter(change))):
        spec(**change)


def test_names_are_split_from_labels():
    made = spec(task="ruler/vt")
    assert (made.task_name, made.part, made.mode_name) == ("ruler", "vt", "certified")


def test_shards_cover_every_sample_once():
    taken = [index for number in (1, 2, 3) for index in range(10) if spec(shard=f"{number}/3").takes(index)]
    assert sorted(taken) == list(range(10))


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("shard", [None, "1/1", "1/3", "2/3", "3/3", "5/5"])
def test_the_samples_of_a_shard_are_those_it_takes(samples, shard):
    own = spec(samples=samples, shard=shard)
    assert own.taken == sum(own.takes(index) for index in range(samples))


def test_samples_are_counted_without_listing_them():
    assert spec(samples=MOST_SAMPLES, shard="2/2").taken == MOST_SAMPLES // 2
