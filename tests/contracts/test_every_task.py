"""What every task owes, whatever it asks: a new file in `tasks/` is tested here unasked."""

import dataclasses
import json
import math
import subprocess
import sys
from functools import cache
from itertools import islice

import pytest

from rcq_cli.errors import SpecError
from rcq_cli.options import describe, options_dict, parse_options
from rcq_cli.presets import TASKS
from rcq_cli.protocols import Completion, TaskRequest
from rcq_cli.tasks._words import data
from tests.unit.test_longbench import question, row
from tests.unit.test_niah import TOKENIZERS

PLACES = [(name, part) for name in TASKS.names() for part in TASKS.load(name).parts]
WITH_MODEL = [place for place in PLACES if TASKS.load(place[0]).minimum_ctx]
TEXT = [place for place in WITH_MODEL if place[0] != "ppl"]
KINDS = ("word with bos", "chat, template prints the bos", "pieces of three")
ANSWERS = {"classification": ["date"], "para_id": ["Paragraph 7"], "count": ["12"]}
every_task = pytest.mark.parametrize("name", TASKS.names())
every_part = pytest.mark.parametrize(("name", "part"), WITH_MODEL)
every_text_part = pytest.mark.parametrize(("name", "part"), TEXT)


@pytest.fixture(scope="module", autouse=True)
def jieba():
    """A stand-in that takes every sign for a word; what it splits is not tested here."""
    patch = pytest.MonkeyPatch()
    fake = type(sys)("jieba")
    fake.cut = lambda text, HMM: iter(text)  # noqa: ARG005
    patch.setitem(sys.modules, "jieba", fake)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data in the form of those that no task may bring along."""
    place = tmp_path_factory.mktemp("data")
    for part, entry in data("longbench")["parts"].items():
        answers = ANSWERS.get(entry["metric"], ["red boats", "other"])
        rows = [row(i, answers=answers, all_classes=["date", "place"]) for i in range(6)]
        (place / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (place / "data.json").write_text(json.dumps([question(i) for i in range(6)]))
    return str(place)


def request(task, part, folder, ctx=1024, samples=3, seed=0, **options):
    names = {field.name for field in dataclasses.fields(task.Options)}
    given = {"data": folder} if "data" in names else {}
    return TaskRequest(part, ctx, samples, seed, task.Options(**given, **options))


@cache
def built(name, part, folder, ctx=1024, samples=3, kind=KINDS[0]):
    task = TASKS.load(name)
    return tuple(task.samples(request(task, part, folder, ctx, samples), TOKENIZERS[kind]()))


def scores(task, sample, text):
    # scoring again from stored rows has no prompt
    return task.score(dataclasses.replace(sample, prompt_ids=()), Completion((), text, "eos"))


# -- what help texts and comparisons need --------------------------------------------------------------------


@every_task
def test_its_name_options_and_defaults_are_complete(name):
    task = TASKS.load(name)
    assert task.name == name
    assert 10 < len(task.summary) < 140
    assert task.summary.isascii()
    assert all(part == part.strip() and "," not in part for part in task.parts)
    assert all(version.partition("@")[2].isdecimal() for version in task.metric.split(","))
    assert {"", "smoke", "ci", "release"} <= set(task.default_samples)
    assert {"", "smoke", "ci", "release"} <= set(task.margins)
    assert all(0 < margin < 1 for margin in task.margins.values())
    assert task.generator
    assert task.prompt_set
    assert all(option.help and option.help.isascii() for option in describe(task.Options))
    with pytest.raises(SpecError):
        parse_options(task.Options, {"no_such_option": "1"}, f"option of task {name}")


@every_task
def test_its_options_survive_a_spec(name):
    task = TASKS.load(name)
    written = json.loads(json.dumps(options_dict(task.Options())))
    assert parse_options(task.Options, written, f"option of task {name}") == task.Options()


# -- samples -------------------------------------------------------------------------------------------------


@every_part
@pytest.mark.parametrize(("ctx", "kind"), [(1024, KINDS[0]), (4096, KINDS[1]), (4097, KINDS[2])])
def test_a_sample_fits_its_context(name, part, folder, ctx, kind):
    tokenizer = TOKENIZERS[kind]()
    for sample in built(name, part, folder, ctx, 2, kind):
        whole = sample.targets or sample.max_new_tokens
        assert len(sample.prompt_ids) - sample.targets + whole <= ctx
        assert 0 < sample.context_len <= len(sample.prompt_ids)
        assert sample.prompt_ids.count(0) == (tokenizer.bos_id == 0)
        assert sample.prompt_ids[0] == 0 or tokenizer.bos_id is None
        assert sample.meta.get("fill", 1) >= sample.meta.get("fill_floor", 0)
        assert sample.control is None
        assert json.loads(json.dumps(dict(sample.meta))) == dict(sample.meta)
        assert isinstance(sample.cluster, str)
        assert bool(sample.references) != bool(sample.targets)
        assert sample.meta["corpus_sha256"] if "corpus_kind" in sample.meta else name == "ruler"


@every_part
def test_its_samples_are_numbered_and_have_names_of_their_own(name, part, folder):
    samples = built(name, part, folder, samples=5)
    assert [sample.index for sample in samples] == list(range(len(samples)))
    assert len({sample.sample_id for sample in samples}) == len(samples) == 5
    assert all(sample.sample_id.startswith("/".join(filter(None, (name, part)))) for sample in samples)
    assert all(sample.sample_id.endswith(f"/1024/{sample.index}") for sample in samples)


@every_part
def test_sample_i_does_not_depend_on_how_many_are_asked_for(name, part, folder):
    assert built(name, part, folder, samples=2) == built(name, part, folder, samples=5)[:2]


@every_part
def test_prompts_are_built_when_they_are_asked_for(name, part, folder):
    task, tokenizer = TASKS.load(name), TOKENIZERS[KINDS[0]]()
    assert len(list(islice(task.samples(request(task, part, folder, samples=10**6), tokenizer), 1))) == 1
    assert tokenizer.prompts <= 12


@every_part
def test_a_context_below_its_minimum_is_refused(name, part, folder):
    task = TASKS.load(name)
    with pytest.raises(SpecError, match=rf"ctx {task.minimum_ctx // 4} is too small"):
        next(iter(task.samples(request(task, part, folder, task.minimum_ctx // 4), TOKENIZERS[KINDS[0]]())))


@every_part
def test_controls_say_that_they_are_some(name, part, folder):
    task = TASKS.load(name)
    for sample in task.controls(request(task, part, folder), TOKENIZERS[KINDS[0]]()):
        assert sample.control
        assert sample.control in sample.sample_id.split("/")


def test_two_processes_build_the_same_samples(folder):
    script = (
        "import sys\nfrom hashlib import sha256\nfrom tests.contracts.test_every_task import *\n"
        "fake = type(sys)('jieba')\nsys.modules['jieba'] = fake\n"
        f"found = [built(name, part, {folder!r}, 1024, 1) for name, part in WITH_MODEL]\n"
        "print(sha256(repr(found).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PATH": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


# -- scores --------------------------------------------------------------------------------------------------


@every_text_part
def test_a_perfect_answer_scores_one_and_an_empty_one_nothing(name, part, folder):
    task = TASKS.load(name)
    for sample in built(name, part, folder, ctx=2048):
        perfect = [
            scores(task, sample, text) for text in (", ".join(sample.references), sample.references[0])
        ]
        assert max(found[task.score_key] for found in perfect) == 1
        assert scores(task, sample, "")[task.score_key] == 0
        assert scores(task, sample, "\n \x00\n")[task.score_key] == 0
        assert all(0 <= value <= 1 for found in perfect for value in found.values())


@every_text_part
def test_it_scores_only_the_metrics_it_names(name, part, folder):
    task = TASKS.load(name)
    for sample in built(name, part, folder, ctx=2048):
        found = scores(task, sample, "text")
        assert task.score_key in found
        assert task.further_metrics is None or set(found) <= {task.score_key, *task.further_metrics}


@every_text_part
def test_the_prompt_handed_back_is_no_answer(name, part, folder):
    """An echo must not score: the text that was asked about is not part of what is scored."""
    task, tokenizer = TASKS.load(name), TOKENIZERS[KINDS[0]]()
    (sample,) = task.samples(request(task, part, folder, samples=1), tokenizer)
    tail = tokenizer.decode(sample.prompt_ids[-12:])
    assert scores(task, sample, tail)[task.score_key] < 1


def test_less_loss_is_a_better_perplexity(folder):
    (sample,) = built("ppl", "", folder, samples=1)
    task = TASKS.load("ppl")
    found = [
        task.score(sample, Completion((), "", "length", {"nll": (loss,) * sample.targets}))
        for loss in (1.0, 2.0)
    ]
    assert found[0][task.score_key] < found[1][task.score_key]
    assert not task.higher_is_better
    assert all(math.isfinite(value) for scores in found for value in scores.values())
