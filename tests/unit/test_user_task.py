"""Tasks that are files of the user: what is read, what is refused, and a whole run of each kind."""

import json
import re
from pathlib import Path

import pytest
import yaml

from rcq_cli.errors import SpecError, UnknownEntry
from rcq_cli.presets import TASKS, Flags, resolve
from rcq_cli.protocols import Completion, TaskRequest
from rcq_cli.spec import RunSpec
from rcq_cli.store import RunReader
from rcq_cli.task_files import name_on_command_line
from tests.unit.stub_bench import Engine, Tokenizer, execute, loaded
from tests.unit.test_longbench import Words

BASE = {
    "task": "capitals",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "data.jsonl"}},
    "doc_to_text": "{{passage}}\n\nCapital of {{ country }}?",
    "doc_to_target": "answers",
    "generation_kwargs": {"max_gen_toks": 16, "until": ["\n"]},
    "metric_list": [{"metric": "exact_match", "ignore_case": True}, {"metric": "qa_f1"}],
    "rcq": {"context": "passage", "cluster": "country"},
}


def record(number, **changes):
    return {
        "passage": f"fact {number} " * 20,
        "country": f"Land{number % 2}",
        "answers": [f"City{number}", "Town"],
    } | changes


@pytest.fixture
def make(tmp_path):
    def write(rows=None, **changes):
        rows = [record(i) for i in range(6)] if rows is None else rows
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        file = tmp_path / "mine.yaml"
        file.write_text(yaml.safe_dump({k: v for k, v in (BASE | changes).items() if v is not None}))
        return TASKS.load(str(file))

    return write


def build(task, ctx=256, samples=100, tokenizer=None, **options):
    request = TaskRequest("", ctx, samples, 0, task.Options(**options))
    return list(task.samples(request, tokenizer or Words()))


def scored(task, sample, text):
    return task.score(sample, Completion((), text, "eos"))


# -- yaml ----------------------------------------------------------------------------------------------------


def test_fields_fill_the_prompt_and_the_references(make):
    task, tokenizer = make(description="Hello. "), Words()
    samples = build(task, tokenizer=tokenizer)
    assert len(samples) == 6
    for sample in samples:
        text = tokenizer.decode(sample.prompt_ids)
        number = sample.references[0].removeprefix("City")
        assert text == "Hello. " + f"fact {number} " * 20 + f"\n\nCapital of Land{int(number) % 2}?"
        assert sample.cluster == f"Land{int(number) % 2}"
        assert sample.references == (f"City{number}", "Town")
        assert sample.max_new_tokens == 16
    assert build(task, samples=2, tokenizer=tokenizer) == build(task, samples=100, tokenizer=tokenizer)[:2]


def test_the_answer_ends_where_until_says_and_metrics_keep_their_order(make):
    task = make()
    sample = build(task)[0]
    assert (task.score_key, task.further_metrics) == ("exact_match", ("qa_f1",))
    assert list(scored(task, sample, "town\nand more")) == ["exact_match", "qa_f1"]
    assert scored(task, sample, " TOWN \nand more")["exact_match"] == 1
    assert scored(task, sample, "the town")["exact_match"] == 0
    assert scored(task, sample, "the town")["qa_f1"] == 1
    assert scored(task, sample, "")["exact_match"] == 0


def test_a_target_may_be_a_template_or_a_number(make):
    rows = [record(1, year=1999)]
    assert build(make(rows, doc_to_target="in {{year}}"))[0].references == ("in 1999",)
    assert build(make(rows, doc_to_target="{{year}}"))[0].references == ("1999",)
    assert build(make(rows, doc_to_target="{{answers}}"))[0].references == ("City1", "Town")


def test_a_text_may_be_a_field(make):
    tokenizer = Words()
    sample = build(make(doc_to_text="country", rcq={"opening": "It is"}), tokenizer=tokenizer)[0]
    assert re.fullmatch(r"Land\d\nIt is", tokenizer.decode(sample.prompt_ids))


def test_a_context_is_cut_where_the_file_allows_it(make):
    rows = [record(1, passage="one " * 500)]
    (sample,) = build(make(rows))
    assert sample.meta["truncated"]
    assert len(sample.prompt_ids) <= 256 - 16
    with pytest.raises(SpecError, match=r"needs a context of \d+ tokens.*which field may be cut"):
        build(make(rows, rcq={}))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"doc_to_text": "{% if a %}x{% endif %}"}, r"holds more than \{\{field\}\}: '\{% if a"),
        ({"doc_to_text": "{{ a.b }}"}, r"holds more than"),
        ({"doc_to_text": "{{ a | upper }}"}, r"holds more than"),
        ({"doc_to_text": None}, r"field 'doc_to_text' is missing"),
        ({"metric_list": [{"metric": "exact_macht"}]}, r"did you mean 'exact_match'"),
        ({"metric_list": [{"metric": "qa_f1", "aggregation": "median"}]}, r"aggregation must be mean"),
        ({"metric_list": "qa_f1"}, r"no list of tables"),
        ({"output_type": "multiple_choice"}, r"allowed: generate_until"),
        ({"num_fewshot": 5}, r"num_fewshot must be 0"),
        ({"generation_kwargs": {"do_sample": True}}, r"answers greedily"),
        ({"generation_kwargs": {"top_k": 1}}, r"unknown field of generation_kwargs 'top_k'"),
        ({"doc_to_txt": "x"}, r"unknown field 'doc_to_txt'; did you mean 'doc_to_text'"),
        ({"rcq": {"contxt": "x"}}, r"did you mean 'context'"),
    ],
)
def test_what_rcq_cannot_do_is_refused(make, changes, match):
    with pytest.raises(SpecError, match=match) as caught:
        make(**changes)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dataset_kwargs": {"data_files": "gone.jsonl"}}, r"gone.jsonl' does not exist"),
        ({"dataset_kwargs": None}, r"names no data file"),
        ({"dataset_path": "squad"}, r"local JSON files only"),
        (
            {"doc_to_text": "{{nothing}}"},
            r"data.jsonl, line 1: no field 'nothing'; there are passage, country, answers",
        ),
        ({"rcq": {"cluster": "nothing"}}, r"no field 'nothing'"),
    ],
)
def test_bad_data_are_named(make, changes, match):
    with pytest.raises(SpecError, match=match):
        build(make(**changes))


def test_code_in_yaml_is_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("task: x\ndoc_to_text: !function utils.text\n")
    with pytest.raises(SpecError, match=r"!function.*runs no code.*\.py file"):
        TASKS.load(str(file))
    file.write_text("task: [")
    with pytest.raises(SpecError, match=r"no task that rcq can run"):
        TASKS.load(str(file))


def test_a_file_that_is_not_there_is_a_usage_error():
    with pytest.raises(UnknownEntry, match=r"'./gone.yaml' does not exist"):
        TASKS.load("./gone.yaml")


# -- python --------------------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path):
    """The example of the documentation, word by word."""
    text = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    file = tmp_path / "copy_words.py"
    file.write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    name_on_command_line(str(file))
    return str(file)


def test_the_documented_file_is_a_task(example):
    task, tokenizer = TASKS.load(example), Words()
    (first, *_) = build(task, samples=3, tokenizer=tokenizer)
    assert tokenizer.decode(first.prompt_ids) == "Repeat: word0"
    assert scored(task, first, "word0") == {"accuracy": 1}
    assert (task.name, task.parts, task.minimum_ctx, task.default_samples[""]) == (
        "copy_words",
        ("",),
        64,
        20,
    )
    assert list(task.controls(None, None)) == []
    assert task.generator.startswith("file:")


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("x = 1", r"it has no TASK"),
        ("TASK = object()", r"has no samples, score, Options"),
        ("import nothing_of_this_name", r"ModuleNotFoundError: No module named"),
        ("def f(:", r"SyntaxError"),
        ("1 / 0 if False else undefined", r"NameError"),
    ],
)
def test_a_file_without_a_task_says_what_is_missing(tmp_path, code, match):
    file = tmp_path / "mine.py"
    file.write_text(code)
    name_on_command_line(str(file))
    with pytest.raises(SpecError, match=match):
        TASKS.load(str(file))


# -- on the command line -------------------------------------------------------------------------------------


def test_a_plan_takes_files_and_their_options(make, tmp_path):
    make()
    plan = resolve(
        "eval",
        Flags(tasks=(str(tmp_path / "mine.yaml"),), ctx=("1k",), modes=("dense",), task_options=("gen=5",)),
    )
    (spec,) = plan.batches[0]
    assert spec.task == spec.task_name == str(tmp_path / "mine.yaml")
    assert (spec.part, spec.task_title, spec.cell_task(""), spec.samples) == ("", "mine", "mine", 6)
    assert spec.task_options["gen"] == 5
    with pytest.raises(SpecError, match="'depths' is no option of task"):
        resolve("eval", Flags(tasks=(str(tmp_path / "mine.yaml"),), task_options=("depths=1",)))


def test_names_of_cells_hold_no_path():
    spec = RunSpec(model="m", task="/a/b.c/mine.py", mode="dense", ctx=64, samples=1)
    assert (spec.task_title, spec.cell_task("x")) == ("mine", "mine/x")
    spec = RunSpec(model="m", task="ruler/vt", mode="dense", ctx=64, samples=1)
    assert (spec.task_name, spec.part, spec.cell_task("vt")) == ("ruler", "vt", "ruler/vt")


def test_a_run_of_a_file_has_a_cell_of_its_name(example, tmp_path, monkeypatch):
    def prompt(self, user, prefix, *, chat="auto", bos="auto"):  # noqa: ARG001
        return Words.prompt(Words(), user, prefix)

    monkeypatch.setattr(Tokenizer, "prompt", prompt, raising=False)
    from rcq_cli.modes.dense import MODE

    def behave(_mode, _sample):
        return "right"

    spec = RunSpec(model="stub", task=example, mode="dense", ctx=64, samples=3)
    assert MODE.name == "dense"
    (folder,) = execute(tmp_path / "out", Engine(behave), (spec,), model=loaded())
    reader = RunReader(folder)
    assert [(c["task"], c["n"], c["score"]) for c in reader.cells()] == [("copy_words", 3, 1.0)]
    assert reader.contract["task.name"] == "copy_words"
    assert "copy_words-dense" in folder.name
