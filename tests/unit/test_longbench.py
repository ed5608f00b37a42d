"""LongBench and LongBench v2 on small files of the same form; golden values of every metric."""

import hashlib
import json
import logging
import re
import sys
import zipfile
from importlib.resources import files
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rcq_cli.errors import SpecError, UnsupportedHere
from rcq_cli.protocols import Completion, EncodedPrompt, TaskRequest
from rcq_cli.tasks import longbench, longbench2
from rcq_cli.tasks._answer_metrics import (
    METRICS,
    Answered,
    choice,
    classification,
    code_sim,
    integers,
    lcs,
    qa_f1,
    rouge_l,
)
from rcq_cli.tasks._records import cut_middle, is_text, parse, substitute
from rcq_cli.tasks._words import data

PLAIN = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
CHINESE = {"multifieldqa_zh", "dureader", "vcsum"}


class Words:
    """One token per word or sign, blanks with the word that follows; a chat template on request."""

    bos_id, eos_ids, sha256 = None, (1,), "words"

    def __init__(self, template=False):
        self.has_chat_template = template
        self.ids = {}

    def encode(self, text):
        return tuple(self.ids.setdefault(m[0], len(self.ids) + 2) for m in re.finditer(r"\s?\w+|\W", text))

    def decode(self, ids):
        texts = {number: text for text, number in self.ids.items()}
        return "".join(texts[i] for i in ids)

    def prompt(self, user, answer_prefix, *, chat="auto", bos="auto"):
        assert bos == "auto"
        text = "\n".join(filter(None, (user, answer_prefix)))
        if self.has_chat_template and chat != "off":
            text = f"[user] {user} [end] {answer_prefix}"
        starts = tuple(m.start() for m in re.finditer(r"\s?\w+|\W", text))
        return EncodedPrompt(self.encode(text), starts, text)


def row(number, **changes):
    words = " ".join(f"word{i}" for i in range(200))
    return {
        "input": f"What is {number}? {{context}}",
        "context": f"begin{number} {words} end{number}",
        "answers": [f"answer {number}", "other"],
        "length": 200,
        "dataset": "x",
        "language": "en",
        "all_classes": None,
        "_id": f"id{number}",
    } | changes


def write(folder, name, rows):
    text = "\n".join(json.dumps(entry) for entry in rows)
    (folder / name).write_text(text + "\n")
    return str(folder)


def build(part, folder, ctx=1024, samples=500, tokenizer=None, **options):
    request = TaskRequest(part, ctx, samples, 0, longbench.Options(data=folder, **options))
    return list(longbench.TASK.samples(request, tokenizer or Words()))


def scored(task, sample, text):
    return task.score(sample, Completion((), text, "eos"))


# -- metrics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("The Eiffel Tower", "eiffel tower.", 1),
        ("in Paris, France", "Paris", 0.5),
        ("a cat sat", "the cat sat down", 0.8),
        ("Paris Paris", "Paris", 2 / 3),
        ("U.S.", "US", 1),
        ("twenty-one", "twenty one", 0),
        ("the", "a", 0),
        ("", "Paris", 0),
    ],
)
def test_qa_f1(text, reference, expected):
    assert qa_f1(Answered(text, reference)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("the cat sat on the mat", "the cat lay on the mat", 5 / 6),
        ("a b c d", "d c b a", 0.25),
        ("police killed the gunman", "police kill the gunman", 0.75),
        ("", "x", 0),
    ],
)
def test_rouge_l(text, reference, expected):
    assert rouge_l(Answered(text, reference)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("number of people", 1), ("number", 0), ("number of people or a date", 0.5), ("date", 0), ("", 0)],
)
def test_classification(text, expected):
    classes = ("number", "number of people", "date")
    assert classification(Answered(text, "number of people", classes)) == expected


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("Paragraph 3, not 7", "Paragraph 3", 0.5),
        ("Paragraph 3", "3", 1),
        ("none", "3", 0),
        ("12", "1", 0),
        ("段落7", "段落7", 1),
    ],
)
def test_integers(text, reference, expected):
    assert integers(Answered(text, reference)) == expected


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("return a+b", "return a + b", 0.9090909),
        ("x = 1", "y = 1", 0.8),
        ("", "x", 0),
        ("```python\n# a comment\n// another\n\n  y = 1\nz", "  y = 1", 1),
    ],
)
def test_code_sim(text, reference, expected):
    assert code_sim(Answered(text, reference)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B).", "B"),
        ("the ANSWER is b", "B"),
        ("**The answer is (C)**", "C"),
        ("The answer is (A). No: the answer is (D).", "D"),
        ("The answer is: A", "A"),
        ("B", "B"),
        ("(C).", "C"),
    ],
)
def test_a_stated_letter_is_found(text, letter):
    assert [choice(Answered(text, other)) for other in "ABCD"] == [float(o == letter) for o in "ABCD"]


@pytest.mark.parametrize("text", ["", "B or C", "Because it rained", "The answer is Because", "E"])
def test_no_letter_is_wrong(text):
    assert not any(choice(Answered(text, letter)) for letter in "ABCD")


@given(st.text("abcd", max_size=12), st.text("abcd", max_size=12))
def test_lcs_equals_the_table(one, other):
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    assert lcs(one, other) == table[-1][-1]


def test_segmented_metrics_split_where_jieba_does(monkeypatch):
    fake = type(sys)("jieba")
    fake.cut = lambda text, HMM: iter(text.replace("，", "|，|").split("|"))  # noqa: ARG005
    monkeypatch.setitem(sys.modules, "jieba", fake)
    answer = Answered("北京|上海，天津", "上海|北京")
    assert METRICS["qa_f1_segmented"](answer) == pytest.approx(0.8)
    assert METRICS["rouge_l_segmented"](answer) == pytest.approx(0.4)
    assert logging.getLogger("jieba").level == logging.WARNING


def test_the_metric_of_the_package_counts_each_word_once():
    pytest.importorskip("rouge", reason="the optional package rouge is not installed")
    score = METRICS["rouge_l_pkg"]
    # the package's sets: {the cat on mat} of {the cat sat on mat} and {the cat lay on mat}, so 4/5 both ways
    assert score(Answered("the cat sat on the mat", "the cat lay on the mat")) == pytest.approx(0.8)
    assert score(Answered("", "the cat")) == score(Answered("...", "the cat")) == 0
    long = " ".join(f"w{i}" for i in range(1200))
    assert score(Answered(long, long)) == pytest.approx(1)


def test_the_package_is_used_where_it_is_asked_for_and_named_in_the_score(tmp_path, monkeypatch):
    class Rouge:
        def __init__(self, metrics):
            assert metrics == ["rouge-l"]

        def get_scores(self, text, reference):
            return [{"rouge-l": {"f": 0.25 if (text, reference) == ("a b", "gold 1") else 0.0}}]

    fake = type(sys)("rouge")
    fake.Rouge = Rouge
    monkeypatch.setitem(sys.modules, "rouge", fake)
    folder = write(tmp_path, "gov_report.jsonl", [row(1, answers=["gold 1"])])
    sample = build("gov_report", folder, rouge="package")[0]
    found = scored(longbench.TASK, sample, "a b")
    assert (found["score"], found["rouge_l_pkg"]) == (0.25, 0.25)
    assert "rouge_l_pkg" not in scored(longbench.TASK, build("gov_report", folder)[0], "a b")


def test_without_the_package_only_summaries_scored_by_it_end(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge", None)
    folder = write(tmp_path, "gov_report.jsonl", [row(1)])
    with pytest.raises(UnsupportedHere, match="pip install rouge"):
        build("gov_report", folder, rouge="package")
    assert build("gov_report", folder)
    assert build("qasper", write(tmp_path, "qasper.jsonl", [row(1)]), rouge="package")


# -- cutting -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(30, 260), st.integers(0, 300))
def test_the_middle_is_cut_and_the_rest_kept(budget, length):
    tokenizer = Words()
    context = " ".join(f"w{i}" for i in range(length))

    def encode(text):
        return tokenizer.prompt(f"Head.\n\n{text}\n\nTail?", "Answer:")

    cut = cut_middle(encode, context, budget, 10)
    assert len(cut.prompt.ids) <= budget
    assert cut.truncated == (len(encode(context).ids) > budget)
    assert cut.prompt.text.startswith("Head.\n\n")
    assert cut.prompt.text.endswith("\n\nTail?\nAnswer:")
    if cut.truncated:
        assert len(cut.prompt.ids) >= budget - 2
        kept = [int(number) for number in re.findall(r"w(\d+)", cut.prompt.text)]
        head = next(i for i, (a, b) in enumerate(pairwise(kept)) if b != a + 1) + 1
        assert kept == [*range(head), *range(length - len(kept) + head, length)]
        assert abs(head - (len(kept) - head)) <= 2  # the words beside the seam may differ in length


def test_a_question_longer_than_the_budget_is_refused():
    tokenizer = Words()
    with pytest.raises(SpecError, match=r"context of 114 tokens"):
        cut_middle(lambda text: tokenizer.prompt(text + " q" * 100, "", chat="off"), "a b c d", 50, 14)


def test_braces_of_the_data_stay():
    values = {"context": "{input} {x}", "input": "{context}"}
    assert substitute("{context}|{input}|{other}", values) == "{input} {x}|{context}|{other}"


# -- the 21 parts --------------------------------------------------------------------------------------------


def test_there_are_21_parts_and_those_that_need_a_package_come_first():
    parts = longbench.TASK.parts
    assert len(parts) == 21
    assert set(parts[:3]) == CHINESE
    metrics = {part: entry["metric"] for part, entry in data("longbench")["parts"].items()}
    assert {p for p, m in metrics.items() if m.endswith("segmented")} == CHINESE
    assert {p for p, e in data("longbench")["parts"].items() if e.get("plain")} == PLAIN
    assert all("{context}" in entry["template"] for entry in data("longbench")["parts"].values())


@pytest.mark.parametrize("part", [part for part in longbench.TASK.parts if part not in CHINESE])
def test_a_reference_scores_one_and_silence_nothing(part, tmp_path):
    answers = {"classification": ["date"], "para_id": ["Paragraph 7"], "count": ["12"]}
    metric = data("longbench")["parts"][part]["metric"]
    entry = row(1, answers=answers.get(metric, ["red boats", "x"]), all_classes=["date", "place"])
    folder = write(tmp_path, f"{part}.jsonl", [entry])
    (sample,) = build(part, folder, ctx=2048)
    assert scored(longbench.TASK, sample, sample.references[0])["score"] == 1
    assert scored(longbench.TASK, sample, "")["score"] == 0
    assert len(sample.prompt_ids) + sample.max_new_tokens <= 2048


def test_records_come_in_a_drawn_order_that_a_shorter_run_shares(tmp_path):
    folder = write(tmp_path, "qasper.jsonl", [row(i) for i in range(30)])
    samples = build("qasper", folder)
    assert sorted(s.meta["record"] for s in samples) == sorted(f"id{i}" for i in range(30))
    assert [s.meta["record"] for s in samples] != [f"id{i}" for i in range(30)]
    assert build("qasper", folder, samples=7) == samples[:7]
    assert len({s.cluster for s in samples}) == 30


def test_a_long_context_loses_its_middle_and_the_row_says_so(tmp_path):
    folder = write(tmp_path, "qasper.jsonl", [row(1, context="one " * 3000, length=3000), row(2)])
    tokenizer = Words()
    by_record = {s.meta["record"]: s for s in build("qasper", folder, tokenizer=tokenizer)}
    assert by_record["id1"].meta["truncated"]
    assert not by_record["id2"].meta["truncated"]
    assert 1020 - 128 <= len(by_record["id1"].prompt_ids) <= 1024 - 128
    text = tokenizer.decode(by_record["id1"].prompt_ids)
    assert text.endswith("Question: What is 1? {context}\nAnswer:")


def test_solved_examples_and_code_go_without_chat_template(tmp_path):
    for part in ("trec", "qasper"):
        folder = write(tmp_path, f"{part}.jsonl", [row(1)])
        tokenizer = Words(template=True)
        (sample,) = build(part, folder, tokenizer=tokenizer)
        assert tokenizer.decode(sample.prompt_ids).startswith("[user]") == (part == "qasper")


def test_only_the_first_line_counts_where_examples_were_given(tmp_path):
    folder = write(tmp_path, "trec.jsonl", [row(1, answers=["date"], all_classes=["date", "place"])])
    (sample,) = build("trec", folder)
    assert scored(longbench.TASK, sample, "\n\ndate\nplace")["score"] == 1
    folder = write(tmp_path, "hotpotqa.jsonl", [row(1, answers=["red boats"])])
    (sample,) = build("hotpotqa", folder)
    assert scored(longbench.TASK, sample, "red boats\nand more")["score"] == pytest.approx(2 / 3)


def test_the_best_reference_counts_and_lengths_are_told_apart(tmp_path):
    folder = write(tmp_path, "qasper_e.jsonl", [row(1, answers=["no", "red boats"], length=5000)])
    (sample,) = build("qasper", folder, extended=True)
    assert scored(longbench.TASK, sample, "red boats") == {"score": 1, "qa_f1": 1, "score_4_8k": 1}
    assert [longbench.bucket(n) for n in (0, 3999, 4000, 7999, 8000)] == [
        *("0_4k", "0_4k", "4_8k", "4_8k", "8k_up")
    ]
    with pytest.raises(SpecError, match="has no extended set"):
        build("narrativeqa", folder, extended=True)


def test_templates_of_the_user_are_used_and_told(tmp_path):
    folder = write(tmp_path, "qasper.jsonl", [row(1)])
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"qasper": "Mine: {context} ?? {input}"}))
    tokenizer = Words()
    (sample,) = build("qasper", folder, prompts=str(file), tokenizer=tokenizer)
    assert tokenizer.decode(sample.prompt_ids).startswith("Mine: begin1 ")
    assert sample.meta["corpus_sha256"] != build("qasper", folder)[0].meta["corpus_sha256"]
    file.write_text(json.dumps({"qasper": "no slot"}))
    with pytest.raises(SpecError, match=r"no text with \{context\}"):
        build("qasper", folder, prompts=str(file))


def test_a_zip_file_is_read_like_a_folder(tmp_path):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/qasper.jsonl", json.dumps(row(1)))
    assert build("qasper", str(tmp_path))[0].meta["record"] == "id1"


def test_missing_data_end_with_the_flag_that_helps(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UnsupportedHere, match=r"-T data=DIR") as caught:
        build("qasper", None)
    assert caught.value.exit_code == 7
    with pytest.raises(SpecError, match=r"data=nowhere is no folder"):
        build("qasper", "nowhere")
    with pytest.raises(SpecError, match=r"holds no qasper.jsonl.*it holds trec.jsonl"):
        build("qasper", write(tmp_path, "trec.jsonl", [row(1)]))


def test_without_jieba_only_the_segmented_parts_end(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    folder = write(tmp_path, "vcsum.jsonl", [row(1)])
    with pytest.raises(UnsupportedHere, match="pip install jieba"):
        build("vcsum", folder)
    assert build("lsht", write(tmp_path, "lsht.jsonl", [row(1)]))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", r"line 1 is not JSON"),
        ('{"input": "x"}', r"line 1 has no field 'context'"),
        ("[1]", r"record 1 is no JSON object"),
        ("", r"holds no record"),
    ],
)
def test_bad_records_are_named(text, match):
    with pytest.raises(SpecError, match=match):
        parse(text.encode(), "file.jsonl", dict.fromkeys(("input", "context"), is_text))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("answers", "bare text"),
        ("answers", []),
        ("answers", None),
        ("length", "long"),
        ("context", None),
        ("input", 3),
        ("all_classes", "abc"),
    ],
)
def test_a_field_that_holds_something_else_is_named(tmp_path, field, value):
    data = write(tmp_path, "qasper.jsonl", [row(1), row(2, **{field: value})])
    with pytest.raises(SpecError, match=rf"qasper.jsonl, line 2: field '{field}' cannot be "):
        build("qasper", data)


@pytest.mark.parametrize("raw", [b"PK no zip", b""])
def test_a_damaged_zip_file_is_named(tmp_path, raw):
    (tmp_path / "data.zip").write_bytes(raw)
    with pytest.raises(SpecError, match=r"data\.zip cannot be read"):
        build("qasper", str(tmp_path))


# -- four choices --------------------------------------------------------------------------------------------


def question(number):
    letters = {f"choice_{letter}": f"{letter} of {number}" for letter in "ABCD"}
    return letters | {
        "_id": f"q{number}",
        "question": "Which?",
        "answer": "ABCD"[number % 4],
        "context": f"text {number} " + "more " * 50,
        "difficulty": ("easy", "hard")[number % 2],
        "length": ("short", "medium", "long")[number % 3],
        "domain": "d",
    }


def test_choices_stand_in_the_prompt_and_are_scored(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps([question(i) for i in range(8)]))
    request = TaskRequest("", 1024, 503, 0, longbench2.Options(data=str(tmp_path)))
    samples = list(longbench2.TASK.samples(request, tokenizer := Words()))
    assert len(samples) == 8
    for sample in samples:
        number = sample.meta["record"][1:]
        text = tokenizer.decode(sample.prompt_ids)
        assert all(f"\n{letter}) {letter} of {number}" in text for letter in "ABCD")
        found = scored(longbench2.TASK, sample, f"The answer is ({sample.references[0]}).")
        assert found["accuracy"] == found[f"accuracy_{sample.meta['difficulty']}"] == 1
        assert set(found) == {"accuracy", *(f"accuracy_{sample.meta[k]}" for k in ("difficulty", "length"))}
        assert scored(longbench2.TASK, sample, "I do not know")["accuracy"] == 0


def test_reasons_come_first_where_they_are_asked_for(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps([question(0)]))
    given = {"data": str(tmp_path)}
    tokenizer, kinds = Words(), ({}, {"cot": True}, {"cot": True, "gen": 300})
    found = []
    for options in kinds:
        request = TaskRequest("", 2048, 1, 0, longbench2.Options(**given, **options))
        found += longbench2.TASK.samples(request, tokenizer)
    assert [sample.max_new_tokens for sample in found] == [128, 1152, 300]
    assert ["step by step" in tokenizer.decode(sample.prompt_ids) for sample in found] == [False, True, True]
    right, wrong = found[1].references[0], "B" if found[1].references[0] == "A" else "A"
    told = f"At first sight the answer is ({wrong}), but no. The answer is ({right})."
    assert scored(longbench2.TASK, found[1], told)["accuracy"] == 1


def test_choices_without_data_end_with_the_flag_that_helps(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    request = TaskRequest("", 1024, 1, 0, longbench2.Options())
    with pytest.raises(UnsupportedHere, match=r"-T data=DIR"):
        list(longbench2.TASK.samples(request, Words()))


def test_the_wording_carries_its_version():
    raw = (files("rcq_cli.tasks") / "data" / "longbench.json").read_bytes()
    assert data("longbench")["version"] == longbench.TASK.prompt_set == "rcq-lb1"
    assert data("longbench")["choices"]["version"] == longbench2.TASK.prompt_set == "rcq-lb2"
    # a changed wording is another prompt set: give it a new version, then its digest
    assert hashlib.sha256(raw).hexdigest()[:16] == "403d2b7e1bddae3b"
