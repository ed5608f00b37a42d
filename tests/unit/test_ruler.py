"""The thirteen parts of `ruler` under tokenizers of very different kinds."""

import hashlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from importlib.resources import files
from itertools import islice
from pathlib import Path

import pytest

from rcq_cli.errors import SpecError
from rcq_cli.protocols import Completion, EncodedPrompt, TaskRequest
from rcq_cli.tasks._fitting import Secant, fit
from rcq_cli.tasks._ruler_lists import Chain, listed_words, strict_total, zipf_count
from rcq_cli.tasks._ruler_notes import SHAPES, note_source
from rcq_cli.tasks._ruler_prompt import lexicon_words
from rcq_cli.tasks._splitmix import SplitMix64
from rcq_cli.tasks._units import Units
from rcq_cli.tasks._words import data
from rcq_cli.tasks.ruler import FAMILIES, TASK, Options

WORD = re.compile(r" ?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]|\s")
GEN = {
    **dict.fromkeys(SHAPES, 128), "vt": 60, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32,
}  # fmt: skip


class Pieces:
    """Tokens are the matches of a pattern, split into pieces of up to `piece` characters."""

    eos_ids = (1,)
    sha256 = "test"
    has_chat_template = False

    def __init__(self, piece=100, bos=False):
        self.piece, self.bos_id = piece, 0 if bos else None
        self.ids = {}
        self.prompts = []

    def _split(self, text):
        for match in WORD.finditer(text):
            for at in range(match.start(), match.end(), self.piece):
                yield at, text[at : min(at + self.piece, match.end())]

    def encode(self, text):
        return tuple(self.ids.setdefault(part, len(self.ids) + 2) for _, part in self._split(text))

    def decode(self, ids):
        texts = {i: part for part, i in self.ids.items()}
        return "".join(texts.get(i, "") for i in ids)

    def prompt(self, user, answer_prefix, *, chat="auto", bos="auto"):
        assert chat == "auto"
        text = user + "\n" + answer_prefix if answer_prefix else user
        starts = [at for at, _ in self._split(text)]
        ids = self.encode(text)
        self.prompts.append(len(ids))
        if self.bos_id is not None and bos != "never":
            ids, starts = (0, *ids), [-1, *starts]
        return EncodedPrompt(ids, tuple(starts), text)


def build(part, ctx=4096, samples=1, seed=0, tokenizer=None, **options):
    request = TaskRequest(part, ctx, samples, seed, Options(**options))
    return list(TASK.samples(request, tokenizer or Pieces()))


def one(part, index=0, **more):
    return build(part, samples=index + 1, **more)[index]


def text_of(part, **more):
    tokenizer = Pieces()
    sample = one(part, tokenizer=tokenizer, **more)
    return sample, tokenizer.decode(sample.prompt_ids)


def score(sample, text):
    return TASK.score(sample, Completion((), text, "length"))


# -- every part ----------------------------------------------------------------------------------------------


def test_the_parts_are_the_thirteen():
    assert set(TASK.parts) == set(GEN)
    assert {part: FAMILIES[part].gen for part in TASK.parts} == GEN


@pytest.mark.parametrize("part", TASK.parts)
@pytest.mark.parametrize("ctx", [1024, 4096, 4097])
@pytest.mark.parametrize("piece", [100, 3])
def test_prompts_fit_and_fill_the_budget(part, ctx, piece):
    tokenizer = Pieces(piece, bos=True)
    sample = one(part, index=1, ctx=ctx, tokenizer=tokenizer)
    budget = ctx - sample.max_new_tokens
    assert sample.max_new_tokens >= GEN[part]
    assert len(sample.prompt_ids) <= budget
    assert sample.prompt_ids.count(0) == 1
    assert sample.prompt_ids[0] == 0
    assert sample.meta["fill"] == len(sample.prompt_ids) / budget >= sample.meta["fill_floor"]
    least = 0.97
    if SHAPES.get(part, SHAPES["niah_single_1"]).haystack == "notes":
        # a note that does not fit is left out whole
        note = f"Register note: the access token of {sample.meta['keys'][0]} is {sample.references[0]}.\n"
        least = 1 - 1.3 * len(tokenizer.encode(note)) / budget
    assert sample.meta["fill"] >= min(least, 0.97)
    assert sample.references
    assert (sample.context_len, sample.stop_ids) == (len(sample.prompt_ids), (1,))


@pytest.mark.parametrize("part", TASK.parts)
def test_a_perfect_answer_scores_one_and_an_empty_one_nothing(part):
    sample = one(part)
    answer = sample.references[:1] if part.startswith("qa") else sample.references
    assert score(sample, " " + ", ".join(answer))["accuracy"] == 1
    assert score(sample, "")["accuracy"] == 0


def controls(part, ctx=4096, samples=1, tokenizer=None):
    return list(TASK.controls(TaskRequest(part, ctx, samples, 0, Options()), tokenizer or Pieces()))


@pytest.mark.parametrize("part", [*SHAPES, "vt"])
@pytest.mark.parametrize("ctx", [1024, 4096])
def test_a_control_asks_the_same_of_a_text_without_the_answer(part, ctx):
    tokenizer = Pieces()
    (control,) = controls(part, ctx=ctx, tokenizer=tokenizer)
    sample, whole = one(part, ctx=ctx), text_of(part, ctx=ctx)[1]
    text = tokenizer.decode(control.prompt_ids)
    assert (control.control, sample.control) == ("no-needle", None)
    assert control.sample_id != sample.sample_id
    assert control.references == sample.references
    assert not any(reference in text for reference in control.references)
    assert all(reference in whole for reference in sample.references)
    # head, question and opening of the answer stay, and the text still fills the budget
    assert text.rpartition("\n\n")[2] == whole.rpartition("\n\n")[2]
    assert control.meta["fill"] >= control.meta["fill_floor"] - 0.01
    assert score(control, ", ".join(control.references))["accuracy"] == 1


def test_one_in_ten_samples_has_a_control_and_ten_at_most():
    counts = {samples: len(controls("niah_single_1", 1024, samples)) for samples in (1, 10, 11, 500)}
    assert counts == {1: 1, 10: 1, 11: 2, 500: 10}
    assert not any(controls(part, samples=50) for part in ("cwe", "fwe", "qa_1", "qa_2"))


@pytest.mark.parametrize("part", TASK.parts)
def test_sample_i_is_the_same_whatever_is_asked(part):
    assert build(part, ctx=1024, samples=2) == build(part, ctx=1024, samples=3)[:2]


@pytest.mark.parametrize("part", TASK.parts)
def test_what_is_asked_is_the_same_at_every_context_and_under_every_tokenizer(part):
    first = one(part, index=1, ctx=1024)
    assert first.references == one(part, index=1, ctx=4096, tokenizer=Pieces(4)).references
    assert first.references != one(part, ctx=1024).references
    assert first.references != one(part, index=1, ctx=1024, seed=1).references


@pytest.mark.parametrize("part", TASK.parts)
def test_at_most_five_prompts_are_built_beyond_the_smallest(part):
    tokenizer = Pieces()
    one(part, ctx=8192, tokenizer=tokenizer)
    # the smallest prompt is a fraction of the full one
    assert sum(length > 4096 for length in tokenizer.prompts) <= 5
    assert len(tokenizer.prompts) <= 6


def test_only_the_samples_asked_for_are_built():
    tokenizer = Pieces()
    request = TaskRequest("vt", 4096, 1000, 0, Options())
    list(islice(TASK.samples(request, tokenizer), 2))
    assert len(tokenizer.prompts) <= 2 * 6


def test_two_processes_build_the_same_prompts():
    script = (
        "from tests.unit.test_ruler import *; import hashlib\n"
        "print(hashlib.sha256(repr([build(p, ctx=1024) for p in TASK.parts]).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


@pytest.mark.parametrize("part", TASK.parts)
def test_a_context_too_small_ends_at_once_and_names_the_smallest(part):
    for ctx in range(64, 1024, 320):
        began = time.process_time()
        with pytest.raises(SpecError, match=r"ctx \d+ is too small.*--ctx 1024"):
            build(part, ctx=ctx)
        assert time.process_time() - began < 1


def test_a_tokenizer_of_characters_gets_the_smallest_context_named():
    with pytest.raises(SpecError, match=r"ctx 1024 is too small.*needs a context of (\d+) tokens") as caught:
        one("qa_2", ctx=1024, tokenizer=Pieces(1))
    smallest = int(re.search(r"context of (\d+)", str(caught.value))[1])
    assert one("qa_2", ctx=smallest, tokenizer=Pieces(1)).meta["fill"] == 1
    with pytest.raises(SpecError):
        one("qa_2", ctx=smallest - 1, tokenizer=Pieces(1))


def test_the_answer_length_grows_with_the_references():
    # ten words of at least four letters, letter by letter, with commas and blanks
    sample = one("cwe", ctx=8192, tokenizer=Pieces(1))
    gold = ", ".join(sample.references)
    assert sample.max_new_tokens == max(120, -(-13 * (len(gold) + 1) // 10) + 8)
    assert one("cwe", gen=200).max_new_tokens == 200


def test_without_prefix_the_prompt_ends_with_the_question():
    _, text = text_of("niah_single_1", prefix=False)
    assert text.endswith("?")
    assert text_of("niah_single_1")[1].endswith(" is")


# -- notes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", SHAPES)
def test_every_value_stands_once_and_the_question_names_its_key(part):
    shape = SHAPES[part]
    sample, text = text_of(part)
    assert len(sample.references) == shape.asked * shape.values
    body, question = text.rsplit("\n\n", 1)
    for value in sample.references:
        assert body.count(value) == 1
        key = re.search(rf"of (\S+) is {value}\.", body)[1]
        assert key in question
    notes = re.findall(r"Register note: the access (number|token) of (\S+) is (\S+)\.", body)
    assert len({value for _, _, value in notes}) == len(notes)
    assert {kind for kind, _, _ in notes} == {"token" if shape.value == "uuid" else "number"}
    if shape.haystack != "notes":
        assert len(notes) == shape.keys * shape.values
        assert len({key for _, key, _ in notes}) == shape.keys


def test_notes_among_notes_share_no_key():
    notes = list(islice(note_source(SHAPES["niah_multikey_2"], SplitMix64(5), None), 20_000))
    assert len({note.key for note in notes}) == len({note.value for note in notes}) == 20_000
    assert sum(notes[0].key in note.key for note in notes) == 1


def test_the_note_asked_for_goes_through_the_tenths():
    places = []
    for sample in build("niah_multikey_2", ctx=2048, samples=10, tokenizer=(tokenizer := Pieces())):
        text = tokenizer.decode(sample.prompt_ids)
        values = re.findall(r" is (\d{7})\.", text)
        places.append(10 * values.index(sample.references[0]) // len(values))
    assert places == list(range(10))


def test_prose_places_cover_the_text():
    tenths = set()
    for sample in build("niah_single_2", ctx=1024, samples=40, tokenizer=(tokenizer := Pieces())):
        text = tokenizer.decode(sample.prompt_ids)
        tenths.add(10 * text.index(sample.references[0]) // len(text))
    assert tenths >= set(range(1, 9))


# -- lists ---------------------------------------------------------------------------------------------------


def test_every_name_holds_the_number_in_the_end():
    sample, text = text_of("vt", chains=3)
    body, question = text.rsplit("Now the real one.", 1)[1].rsplit("\n\n", 1)
    held = {}
    for name, value in re.findall(r"Let ([A-Z]{5}) be (\w+)\.", body):
        held[name] = held.get(value, value)
    number = re.search(r"\d{5}", question)[0]
    assert len(held) == 15
    assert {name for name, value in held.items() if value == number} == set(sample.references)
    assert len(set(held.values())) == 3


def test_the_lines_of_a_chain_pass_the_number_on():
    lines = Chain(("AB", "CD", "EF"), "123").lines("{name}={value}")
    assert lines == ["AB=123", "CD=AB", "EF=CD"]


@pytest.mark.parametrize(("ctx", "common", "other"), [(1024, 6, 1), (4096, 30, 3)])
def test_the_ten_common_words_come_far_more_often(ctx, common, other):
    sample, text = text_of("cwe", ctx=ctx)
    body = text.rsplit("Now the real one.", 1)[-1]
    entries = re.findall(r"(\d+)\. (\w+)", body)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    counts = Counter(word for _, word in entries)
    assert {word for word, times in counts.items() if times == common} == set(sample.references)
    assert set(counts.values()) == {common, other}
    assert sample.meta["entries"] == len(entries) == 10 * common + (sample.meta["units"] - 10) * other


@pytest.mark.parametrize("part", ["vt", "cwe"])
@pytest.mark.parametrize("ctx", [1024, 2048, 32768])
def test_a_solved_example_takes_a_quarter_at_most(part, ctx):
    tokenizer = Pieces(2)
    sample, text = one(part, ctx=ctx, tokenizer=tokenizer), None
    text = tokenizer.decode(sample.prompt_ids)
    if "solved example" not in text:
        assert ctx == 1024
        return
    example = text[text.index("Here is a solved") : text.index("Now the real one.")]
    assert len(tokenizer.encode(example)) <= (ctx - sample.max_new_tokens) / 4
    assert not set(sample.references) & set(re.findall(r"\w+", example))


def test_words_for_lists_never_run_out():
    words = list(islice(listed_words(SplitMix64(3)), 60_000))
    assert len(set(words)) == 60_000
    assert not any(first in word for first in words[:10] for word in words[10:])
    assert set(words[:500]) <= set(lexicon_words())


def test_counts_of_ranks_follow_the_zeta_law():
    assert [zipf_count(2000, rank) for rank in range(1, 7)] == [1215, 303, 135, 75, 48, 33]
    assert [zipf_count(60_000, rank) for rank in range(1, 7)] == [36475, 9118, 4052, 2279, 1459, 1013]
    for total in range(1, 300):
        assert zipf_count(strict_total(total), 4) > zipf_count(strict_total(total), 5)


def test_the_three_frequent_words_are_the_references():
    sample, text = text_of("fwe", ctx=8192)
    counts = Counter(re.findall(r"\b[a-z]{6}\b", text.split("\n\n")[1]))
    assert [word for word, _ in counts.most_common(3)] == list(sample.references)
    third, fourth = (times for _, times in counts.most_common(4)[2:])
    assert third > fourth


# -- questions on documents ----------------------------------------------------------------------------------


def test_the_answer_stands_in_the_gold_documents_only():
    for part in ("qa_1", "qa_2"):
        places = set()
        for sample in build(part, ctx=4096, samples=12, tokenizer=(tokenizer := Pieces())):
            text = tokenizer.decode(sample.prompt_ids)
            documents = re.split(r"\n\n(?=\[\d+\] )", text.split("\n\nUse only")[0])[1:]
            assert [int(re.match(r"\[(\d+)\]", d)[1]) for d in documents] == list(
                range(1, len(documents) + 1)
            )
            holding = [i for i, d in enumerate(documents) if sample.references[0] in d]
            assert len(holding) == 1
            assert sample.references[0] not in text.rsplit("Question:", 1)[1]
            gold = sample.meta["gold_place"]
            assert (holding == [gold]) == (part == "qa_1")
            places.add(10 * gold // len(documents))
            lengths = [len(d.partition("\n")[2].split()) for d in documents]
            # one filler document may be cut
            assert sum(not 80 <= length <= 160 for length in lengths) <= 1
        assert len(places) >= 8


def test_two_hops_hide_the_entity_between():
    for sample in build("qa_2", ctx=2048, samples=12, tokenizer=(tokenizer := Pieces())):
        text = tokenizer.decode(sample.prompt_ids)
        documents = re.split(r"\n\n(?=\[\d+\] )", text.split("\n\nUse only")[0])[1:]
        final = next(d for d in documents if sample.references[0] in d)
        bridge = re.match(r"\[\d+\] (.*)", final)[1]
        assert bridge not in sample.meta["question"]
        linking = [d for d in documents if bridge in d and d is not final]
        assert len(linking) == 1
        assert re.match(r"\[\d+\] (.*)", linking[0])[1] in sample.meta["question"]


def _squad(tmp_path):
    def paragraph(article, number):
        ask = {"question": f"What is {article}{number}?", "answers": [{"text": f"ans{article}{number}"}] * 2}
        never = {"question": "Never?", "answers": [], "is_impossible": True}
        return {
            "context": f"Here ans{article}{number} stands. " + "filler words go on " * 20,
            "qas": [ask, never],
        }

    tree = {"data": [{"title": a, "paragraphs": [paragraph(a, n) for n in range(4)]} for a in "ABC"]}
    file = tmp_path / "squad.json"
    file.write_text(json.dumps(tree))
    return str(file)


def test_a_squad_file_gives_gold_then_its_article_then_the_rest(tmp_path):
    tokenizer = Pieces()
    samples = build("qa_1", ctx=1024, samples=12, squad=_squad(tmp_path), repeat=False, tokenizer=tokenizer)
    assert len({sample.references for sample in samples}) == 12
    assert {sample.cluster for sample in samples} == set("ABC")
    for sample in samples:
        text = tokenizer.decode(sample.prompt_ids)
        assert text.count(f"Here {sample.references[0]} stands") == 1
        assert text.count(f"] {sample.cluster}\n") == 4
        assert (sample.meta["qa_source"], sample.meta["repeats"]) == ("squad", False)
    # a file of three articles is repeated only where that is allowed
    assert one("qa_1", ctx=8192, squad=_squad(tmp_path)).meta["repeats"]
    short = one("qa_1", ctx=8192, squad=_squad(tmp_path), repeat=False)
    assert short.meta["fill"] < short.meta["fill_floor"]


@pytest.mark.parametrize(
    ("part", "old", "new"),
    [
        ("qa_1", '"text": "ansA0"', '"text": 7'),
        ("qa_1", '"text": "ansA0"', '"text": " "'),
        ("qa_1", '"What is A0?"', "7"),
        ("qa_2", '"yes"', "7"),
    ],
)
def test_a_question_file_with_something_else_than_text_is_a_usage_error(tmp_path, part, old, new):
    file = Path(_squad(tmp_path))
    if part == "qa_2":
        texts = {"supporting_facts": [["T", 0]], "context": [["T", ["A."]]]}
        file.write_text(json.dumps([{"question": "Q?", "answer": "yes", **texts}]))
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(SpecError, match="is no text"):
        build(part, ctx=1024, **{"squad" if part == "qa_1" else "hotpot": str(file)})


def test_a_question_file_nested_without_end_is_a_usage_error(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(SpecError, match="no JSON"):
        build("qa_1", ctx=1024, squad=str(tmp_path / "deep.json"))


def test_a_hotpot_file_gives_both_documents(tmp_path):
    entries = [
        {
            "question": f"Question {i}?",
            "answer": f"answer{i}",
            "supporting_facts": [[f"T{i}a", 0], [f"T{i}b", 0], [f"T{i}a", 1]],
            "context": [
                [f"T{i}{c}", [f"Text {i}{c}. ", f"more {'answer' + str(i) if c == 'b' else ''}. "]]
                for c in "abcd"
            ],
        }
        for i in range(6)
    ]
    file = tmp_path / "hotpot.json"
    file.write_text(json.dumps(entries))
    tokenizer = Pieces()
    for sample in build("qa_2", ctx=1024, samples=6, hotpot=str(file), tokenizer=tokenizer):
        text = tokenizer.decode(sample.prompt_ids)
        number = sample.references[0].removeprefix("answer")
        assert sample.cluster == f"T{number}a"
        assert text.count(f"] T{number}a\n") >= 1
        assert sample.references[0] in text


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"squad": "missing.json"}, r"squad=missing.json.*no such file"),
        ({"squad": "README.md"}, r"no JSON"),
        ({"squad": "tasks/data/ruler.json"}, r"no SQuAD 2.0 file"),
    ],
)
def test_a_bad_question_file_is_a_usage_error(options, match, tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("no json")
    (tmp_path / "tasks/data").mkdir(parents=True)
    (tmp_path / "tasks/data/ruler.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=match) as caught:
        build("qa_1", **options)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("options", [{"chains": 0}, {"chains": 101}, {"gen": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(SpecError, match="is not allowed"):
        Options(**options)


# -- helpers -------------------------------------------------------------------------------------------------


def test_units_are_cut_at_a_word():
    units = Units(iter([("One two three.", False), ("Title\nFour, five.", False), ("One two three.", True)]))
    assert units.first(4) == ["One two three.", "Title."]
    assert units.first(5) == ["One two three.", "Title\nFour."]
    assert (units.exhausted_at(9), units.exhausted_at(10)) == (None, 9)
    assert (units.repeats(6), units.repeats(7)) == (False, True)
    assert units.words_of(2) == 6


@pytest.mark.parametrize("cost", [1, 7, 31])
def test_the_secant_finds_the_budget_in_a_few_steps(cost):
    def length(n):
        # the first units are dearer than the rest
        return 100 + cost * n + 3 * min(n, 50)

    budget = 1_000_000
    fitted = fit(
        length,
        int,
        budget,
        minimum=1,
        advance=Secant(budget, 1.3 * cost).advance,
        most=5,
        slack=budget // 2048,
    )
    assert budget - budget // 2048 <= fitted.prompt <= budget
    assert fitted.probes <= 6


def test_the_wording_carries_its_version():
    folder = files("rcq_cli.tasks") / "data"
    digests = {
        name: hashlib.sha256((folder / f"{name}.json").read_bytes()).hexdigest()[:16]
        for name in ("prompts", "ruler")
    }
    assert data("prompts")["ruler"]["version"] == data("ruler")["version"] == TASK.prompt_set == "rcq-r1"
    # a changed wording is another prompt set: give it a new version, then its digest
    assert digests == {"prompts": "cf5797ee3f58ae42", "ruler": "ea9970882f4de6ce"}
