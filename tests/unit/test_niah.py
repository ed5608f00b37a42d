"""The niah task under tokenizers of very different kinds."""

import hashlib
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from importlib.resources import files
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rcq_cli.errors import SpecError, UnsupportedHere, UnsupportedModel
from rcq_cli.options import describe, parse_options
from rcq_cli.protocols import Completion, EncodedPrompt, TaskRequest
from rcq_cli.tasks._needles import forms
from rcq_cli.tasks.niah import TASK, Options

WORD = re.compile(r" ?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]|\s")


class PatternTokenizer:
    """Tokens are the matches of a pattern, each split further into pieces of up to `piece` characters."""

    eos_ids = (1,)
    sha256 = "test"

    def __init__(self, pattern=WORD, piece=100, bos=False, template=False, prints_bos=False):
        self._pattern, self._piece = pattern, piece
        self._ids, self._texts = {}, {}
        self._adds_bos, self._prints_bos = bos, prints_bos
        self.bos_id = 0 if bos or prints_bos else None
        self.has_chat_template = template
        self.prompts = 0

    def _split(self, text):
        for match in self._pattern.finditer(text):
            for at in range(match.start(), match.end(), self._piece):
                yield at, text[at : min(at + self._piece, match.end())]

    def _id(self, part):
        if part not in self._ids:
            self._ids[part] = len(self._ids) + 2
            self._texts[self._ids[part]] = part
        return self._ids[part]

    def encode(self, text):
        return tuple(self._id(part) for _, part in self._split(text))

    def decode(self, ids):
        return "".join(self._texts.get(i, "") for i in ids)

    def prompt(self, user, answer_prefix, *, chat="auto", bos="auto"):
        self.prompts += 1
        text = user + "\n" + answer_prefix
        if self.has_chat_template and chat != "off":
            text = f"[user] {user} [end]\n[assistant] {answer_prefix}"
        parts = [(at, self._id(part)) for at, part in self._split(text)]
        if bos == "always" or (bos == "auto" and (self._adds_bos or self._prints_bos)):
            parts.insert(0, (-1, 0))
        return EncodedPrompt(tuple(i for _, i in parts), tuple(at for at, _ in parts), text)


class BlankChangingTokenizer(PatternTokenizer):
    """Decoding puts blanks between words of its own accord, as some vocabularies do."""

    def decode(self, ids):
        return re.sub(r" +", "  ", super().decode(ids))


TOKENIZERS = {
    "word": PatternTokenizer,
    "word with bos": lambda: PatternTokenizer(bos=True),
    "byte": lambda: PatternTokenizer(re.compile(r"(?s).")),
    "pieces of three": lambda: PatternTokenizer(piece=3, bos=True),
    "chat, template prints the bos": lambda: PatternTokenizer(template=True, prints_bos=True, bos=True),
    "fuses periods": lambda: PatternTokenizer(re.compile(r"\.? ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]|\s")),
    "changes blanks": BlankChangingTokenizer,
}


def request(ctx=1024, samples=1, seed=0, **options):
    return TaskRequest("", ctx, samples, seed, Options(**options))


def build(tokenizer=None, **kwargs):
    return list(TASK.samples(request(**kwargs), tokenizer or PatternTokenizer()))


def answer(text):
    return Completion((), text, "length")


def text_of(tokenizer, sample):
    return PatternTokenizer.decode(tokenizer, sample.prompt_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("ctx", [1024, 4096, 4097])
def test_prompts_fit_fill_and_hold_what_was_planned(name, ctx):
    tokenizer = TOKENIZERS[name]()
    for sample in build(tokenizer, ctx=ctx, samples=3, decoys=3):
        ids, text = sample.prompt_ids, text_of(tokenizer, sample)
        budget = ctx - 48
        assert len(ids) <= budget
        assert sample.meta["fill"] == len(ids) / budget >= sample.meta["fill_floor"] >= 0.8
        assert [i for i, token in enumerate(ids) if token == 0] == ([0] if tokenizer.bos_id == 0 else [])
        assert text.count(sample.references[0]) == 1
        assert text.count(sample.meta["key"]) == 3
        assert sample.context_len == len(ids)
        assert (sample.max_new_tokens, sample.stop_ids) == (48, (1,))


def test_a_tokenizer_that_loses_digits_is_named_and_not_the_task():
    tokenizer = PatternTokenizer()
    tokenizer.decode = lambda ids: re.sub(r"\d", "?", PatternTokenizer.decode(tokenizer, ids))
    with pytest.raises(
        UnsupportedModel, match=r"tokenizer of the model.*0 times in what its ids decode to"
    ) as caught:
        build(tokenizer, ctx=1024)
    assert (caught.value.id, caught.value.exit_code) == ("RCQ-MOD-04", 2)


def test_one_more_word_would_not_fit():
    # the invariant of fitting, seen from outside: at the smallest ctx of a prompt nothing is left over
    tokenizer = PatternTokenizer()
    sizes = [len(build(tokenizer, ctx=ctx)[0].prompt_ids) for ctx in range(1024, 1034)]
    assert all(ctx - 48 - size <= 1 for ctx, size in zip(range(1024, 1034), sizes, strict=True))


@settings(deadline=None, max_examples=12)
@given(
    piece=st.integers(1, 9),
    bos=st.booleans(),
    template=st.booleans(),
    ctx=st.sampled_from([2048, 4096, 4097]),
    index=st.integers(0, 6),
    payload=st.sampled_from(["digits", "words", "uuid", "mixed"]),
    decoys=st.integers(0, 5),
)
def test_any_tokenizer_any_option(piece, bos, template, ctx, index, payload, decoys):
    tokenizer = PatternTokenizer(piece=piece, bos=bos, template=template)
    sample = build(tokenizer, ctx=ctx, samples=index + 1, payload=payload, decoys=decoys)[index]
    assert len(sample.prompt_ids) <= ctx - 48
    assert sample.meta["fill"] >= sample.meta["fill_floor"]
    assert text_of(tokenizer, sample).count(sample.references[0]) == 1
    assert TASK.score(sample, answer(f" {sample.references[0]}.")) == {"accuracy": 1, "contains": 1}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_achieved_depth_is_the_nominal_one(name):
    tokenizer = TOKENIZERS[name]()
    for sample in build(tokenizer, ctx=4096, samples=11, decoys=2):
        text = text_of(tokenizer, sample)
        body = text[text.index("follows it.") + 13 : text.rindex("Reply with") - 2]
        body = body[: body.rindex("\n\n")]
        needle = next(f for f in forms() if f.name == sample.meta["form"]).fact(
            sample.meta["key"], sample.references[0]
        )
        before, after = body.split(needle)
        # measured here in tokens of the text alone; a sentence has at most 34 words
        parts = len(tokenizer.encode(before)), len(tokenizer.encode(after))
        depth = 100 * parts[0] / sum(parts)
        sentence = 100 * max(len(tokenizer.encode(s)) for s in re.split(r"(?<=[.?]) ", body)) / sum(parts)
        assert abs(depth - sample.meta["depth"]) <= sentence + 1
        assert abs(sample.meta["achieved_depth"] - depth) <= 0.2


def test_depth_0_is_before_and_100_after_all_text():
    tokenizer = PatternTokenizer()
    first, last = build(tokenizer, samples=11, decoys=4)[0::10]
    assert text_of(tokenizer, first).split("\n\n")[1].startswith(f"The locker of {first.meta['key']}")
    assert text_of(tokenizer, last).split("\n\n")[1].endswith(f"{last.references[0]}.")


def test_the_prompt_reads_as_specified():
    tokenizer = PatternTokenizer()
    sample = build(tokenizer)[0]
    instruction, _, end = text_of(tokenizer, sample).split("\n\n")
    key = sample.meta["key"]
    assert instruction == "Read the chronicle below. A question about one detail follows it."
    assert end == (
        f"What opens the locker of {key}? Reply with the value only.\nThe locker of {key} opens with"
    )
    assert sample.references == ("7803482",)


def test_prefix_off_ends_with_the_question():
    tokenizer = PatternTokenizer()
    sample = build(tokenizer, prefix=False, gen=100)[0]
    assert text_of(tokenizer, sample).endswith("Reply with the value only.\n")
    assert 1024 - 100 - len(sample.prompt_ids) <= 1


@pytest.mark.parametrize("form", forms(), ids=lambda form: form.name)
def test_forms_can_be_copied_and_not_read_off_the_question(form):
    key, value = "amber-kite", "1234567"
    fact, opening, question = form.fact(key, value), form.opening(key), form.ask(key)
    assert fact == f"{opening} {value}."
    assert len(opening.split(key)[1].split()) <= 2
    asked, before = WORD.findall(" " + question), WORD.findall(" " + opening)[-4:]
    assert all(asked[i : i + 4] != before for i in range(len(asked)))
    assert key in question


def test_there_are_ten_forms():
    assert len({form.name for form in forms()}) == 10


def test_22_samples_cover_all_depths_and_forms_and_110_all_pairs():
    samples = build(samples=110, ctx=512)
    pairs = [(sample.meta["depth"], sample.meta["form"]) for sample in samples]
    assert len(set(pairs)) == 110
    assert set(Counter(depth for depth, _ in pairs[:22]).values()) == {2}
    assert set(Counter(form for _, form in pairs[:22]).values()) == {2, 3}
    assert len({sample.sample_id for sample in samples}) == 110


def test_a_grid_with_a_common_factor_still_covers_all_pairs():
    samples = build(samples=100, ctx=512, depths="0:90:10")
    assert gcd(10, 10) != 1
    assert len({(sample.meta["depth"], sample.meta["form"]) for sample in samples}) == 100


def test_a_sample_does_not_depend_on_how_many_are_asked_for():
    assert build(samples=5, ctx=512) == build(samples=50, ctx=512)[:5]


def test_samples_are_built_one_at_a_time():
    tokenizer = PatternTokenizer()
    stream = TASK.samples(request(samples=10**9), tokenizer)
    next(stream)
    assert tokenizer.prompts <= 8


def test_a_needle_is_the_same_at_every_context_under_every_tokenizer_and_option():
    def needles(tokenizer, **options):
        return [
            (s.meta["form"], s.meta["key"], s.references[0]) for s in build(tokenizer, samples=4, **options)
        ]

    expected = needles(PatternTokenizer(), ctx=1024)
    assert expected == needles(PatternTokenizer(piece=2, bos=True), ctx=4096)
    assert expected == needles(PatternTokenizer(template=True), ctx=2000, decoys=6)
    assert expected != needles(PatternTokenizer(), ctx=1024, seed=1)


def test_another_process_with_another_hash_seed_builds_the_same_ids():
    code = (
        "import sys; sys.path.insert(0, 'tests/unit'); from test_niah import build; import hashlib; "
        "print(hashlib.sha256(repr(build(samples=2, decoys=3, payload='uuid')).encode()).hexdigest())"
    )
    root = files("rcq_cli").joinpath("..").resolve()
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=root,
            env={"PYTHONHASHSEED": hash_seed, "HOME": str(root)},
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_samples_do_not_share_their_beginning():
    tokenizer = PatternTokenizer()
    starts = {text_of(tokenizer, s).split("\n\n")[1][-300:] for s in build(tokenizer, samples=22)}
    assert len(starts) == 22


@pytest.mark.parametrize(
    ("payload", "pattern"),
    [
        ("digits", r"[1-9]\d{6}"),
        ("words", r"[a-z]+-[a-z]+"),
        ("uuid", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"),
    ],
)
def test_payloads(payload, pattern):
    values = [sample.references[0] for sample in build(samples=10, payload=payload)]
    assert all(re.fullmatch(pattern, value) for value in values)
    assert len(set(values)) == 10


def test_mixed_payloads_follow_the_form():
    samples = build(samples=10, payload="mixed")
    names = [form.name for form in forms()]
    assert [s.meta["payload"] for s in samples] == [
        ("digits", "words", "uuid")[names.index(s.meta["form"]) % 3] for s in samples
    ]


def test_decoys_have_the_asked_form_other_keys_and_other_values():
    tokenizer = PatternTokenizer()
    sample = build(tokenizer, ctx=4096, decoys=16)[0]
    facts = re.findall(r"The locker of ([a-z]+)-([a-z]+) opens with (\d+)\.", text_of(tokenizer, sample))
    assert len(facts) == 17
    assert len({word for first, second, _ in facts for word in (first, second)}) == 34
    assert len({value for _, _, value in facts}) == 17
    assert sample.meta["decoys"] == 16


def test_several_values_of_one_key_are_all_planted_and_all_asked_for():
    tokenizer = PatternTokenizer()
    sample = build(tokenizer, ctx=4096, values=4, decoys=3)[0]
    text = text_of(tokenizer, sample)
    key, facts = sample.meta["key"], re.findall(r"The locker of ([a-z-]+) opens with (\d+)\.", text)
    mine = [value for name, value in facts if name == key]
    assert len(facts) == 4 + 3
    assert sorted(mine) == sorted(sample.references)
    assert len(set(mine)) == 4
    assert "Name all 4 values." in text
    places = [text.index(value) / len(text) for value in sample.references]
    # a fourth of the eleven depths apart: 0, 20, 50 and 80 %
    assert places == pytest.approx([0, 0.2, 0.5, 0.8], abs=0.05)


def test_more_values_leave_the_first_fact_of_each_question_as_it_was():
    plain = build(PatternTokenizer(), ctx=4096, samples=4, questions=2)
    several = build(PatternTokenizer(), ctx=4096, samples=4, questions=2, values=2)
    for one, more in zip(plain, several, strict=True):
        assert more.meta["key"] == one.meta["key"]
        assert more.references[:1] == one.references
        assert len(more.references) == 2


def test_an_answer_with_half_of_the_values_is_half_right():
    sample = build(PatternTokenizer(), ctx=4096, values=2)[0]
    first, second = sample.references
    score = {text: TASK.score(sample, Completion((), text, "stop"))["accuracy"] for text in (first, second)}
    assert score == {first: 0.5, second: 0.5}
    assert TASK.score(sample, Completion((), f"{second} and {first}", "stop"))["accuracy"] == 1


@pytest.mark.parametrize("values", [0, 10**6])
def test_impossible_numbers_of_values_are_refused(values):
    with pytest.raises(SpecError, match=f"values={values} is not allowed"):
        Options(values=values)


def test_controls_of_several_values_plant_all_or_none():
    tokenizer = PatternTokenizer()
    wanted = request(samples=10, values=2, wrong_key=True)
    counts = {"needle-only": set(), "no-needle": set(), "wrong-key": set()}
    for sample in TASK.controls(wanted, tokenizer):
        text = text_of(tokenizer, sample)
        counts[sample.control].add(sum(value in text for value in sample.references))
    # whether the model is fit at all is asked with one value
    assert counts == {"needle-only": {1}, "no-needle": {0}, "wrong-key": {2}}


def test_more_values_than_fit_into_an_answer_are_refused():
    with pytest.raises(SpecError, match="gen=8 is too small for values=4"):
        build(PatternTokenizer(), ctx=4096, values=4, gen=8)


def test_decoys_are_spread_over_the_text():
    tokenizer = PatternTokenizer()
    text = text_of(tokenizer, build(tokenizer, ctx=16384, decoys=40)[0])
    places = [match.start() / len(text) for match in re.finditer(r"The locker of", text)][:-1]
    assert {int(4 * place) for place in places} == {0, 1, 2, 3}


def test_several_questions_share_their_context():
    tokenizer = PatternTokenizer(bos=True)
    group = build(tokenizer, ctx=2048, samples=8, questions=4, decoys=2)
    for samples in (group[:4], group[4:]):
        length = samples[0].context_len
        assert {sample.context_len for sample in samples} == {length}
        assert len({sample.prompt_ids[:length] for sample in samples}) == 1
        assert len({sample.meta["form"] for sample in samples}) == 4
        assert len({sample.meta["depth"] for sample in samples}) == 4
        assert [sample.meta["question"] for sample in samples] == [0, 1, 2, 3]
        assert max(len(sample.prompt_ids) for sample in samples) >= 2048 - 49
        for sample in samples:
            context = tokenizer.decode(sample.prompt_ids[:length])
            assert sample.references[0] in context
            assert context.count(sample.meta["key"]) == 1
            assert not sample.meta["question_visible"]
            assert (
                tokenizer.decode(sample.prompt_ids[length:])
                .lstrip()
                .startswith(next(f for f in forms() if f.name == sample.meta["form"]).ask(sample.meta["key"]))
            )
    assert [sample.sample_id for sample in group[:2]] == ["niah/2048/0/q0", "niah/2048/0/q1"]
    assert [sample.cluster for sample in group] == ["context-0"] * 4 + ["context-1"] * 4


def test_the_last_context_may_be_asked_in_part():
    assert [sample.sample_id for sample in build(samples=3, questions=2)][-1] == "niah/1024/1/q0"


def test_question_0_of_a_shared_context_is_the_question_of_a_single_one():
    alone, shared = build(samples=1)[0], build(samples=1, questions=4)[0]
    assert (alone.meta["key"], alone.references) == (shared.meta["key"], shared.references)


@pytest.mark.parametrize("template", [False, True])
def test_chained_turns_leave_room_for_all_questions_and_answers(template):
    tokenizer = PatternTokenizer(template=template)
    samples = build(tokenizer, ctx=2048, samples=4, questions=4, turns="chained")
    used = samples[0].context_len + sum(len(s.prompt_ids) - s.context_len + 48 for s in samples)
    assert 2048 - 2 <= used <= 2048


@pytest.mark.parametrize("turns", ["fresh", "chained"])
@pytest.mark.parametrize("name", ["word", "byte"])
def test_every_question_of_a_shared_context_passes_the_fill_gate(name, turns):
    for sample in build(TOKENIZERS[name](), ctx=4096, samples=10, questions=10, turns=turns):
        share = len(sample.prompt_ids) / (4096 - 48)
        assert sample.meta["fill"] == share >= sample.meta["fill_floor"]


def test_a_perfect_answer_scores_1_and_an_empty_one_0():
    for sample in build(samples=4, payload="mixed"):
        value = sample.references[0]
        for text in (value, f" {value}.", f"It is {value}!\n\nReally."):
            assert TASK.score(sample, answer(text)) == {"accuracy": 1, "contains": 1}
        assert TASK.score(sample, answer("")) == {"accuracy": 0, "contains": 0}


def test_a_longer_number_is_no_hit():
    sample = build()[0]
    assert TASK.score(sample, answer(sample.references[0] + "0")) == {"accuracy": 0, "contains": 1}


def test_thinking_is_stripped_when_asked_for():
    kept, stripped = build()[0], build(strip_think=True)[0]
    text = f"<think>{kept.references[0]}</think> none"
    assert (TASK.score(kept, answer(text))["accuracy"], TASK.score(stripped, answer(text))["accuracy"]) == (
        1,
        0,
    )


class Reader:
    """A perfect model: it copies what followed the opening of the answer in the text before."""

    def __init__(self, window=None):
        self.window = window

    def __call__(self, tokenizer, sample):
        text = text_of(tokenizer, sample)
        opening = text.rsplit("\n", 1)[1].removeprefix("[assistant] ")
        seen = text[: -len(opening)]
        seen = seen if self.window is None else seen[-self.window :]
        found = re.search(re.escape(opening) + r" (\S+)\.", seen)
        return answer(found[1] if found else "")


def test_a_perfect_reader_scores_1_and_0_without_the_needle():
    tokenizer, read = PatternTokenizer(template=True), Reader()
    wanted = request(samples=22, decoys=2)
    scores = [TASK.score(s, read(tokenizer, s))["accuracy"] for s in TASK.samples(wanted, tokenizer)]
    controls = list(TASK.controls(wanted, tokenizer))
    hits = {
        name: {TASK.score(s, read(tokenizer, s))["accuracy"] for s in controls if s.control == name}
        for name in ("needle-only", "no-needle")
    }
    assert set(scores) == {1}
    assert hits == {"needle-only": {1}, "no-needle": {0}}


def test_a_reader_that_sees_only_the_end_fails_by_depth():
    tokenizer, read = PatternTokenizer(), Reader(window=4000)
    by_depth = {
        s.meta["depth"]: TASK.score(s, read(tokenizer, s))["accuracy"]
        for s in TASK.samples(request(ctx=4096, samples=11), tokenizer)
    }
    assert by_depth[0] == by_depth[50] == 0
    assert by_depth[90] == by_depth[100] == 1


def test_controls_are_counted_as_specified_and_never_cost_more_than_the_samples():
    def counted(samples, **options):
        return Counter(
            s.control for s in TASK.controls(request(samples=samples, **options), PatternTokenizer())
        )

    assert counted(22) == {"needle-only": 20, "no-needle": 3}
    assert counted(5) == {"needle-only": 5, "no-needle": 1}
    assert counted(550) == {"needle-only": 20, "no-needle": 10}
    assert counted(22, wrong_key=True)["wrong-key"] == 3


def test_controls_ask_for_the_same_needle():
    tokenizer = PatternTokenizer()
    wanted = request(samples=10, decoys=3, wrong_key=True)
    samples = list(TASK.samples(wanted, tokenizer))
    controls = list(TASK.controls(wanted, tokenizer))
    ids = [sample.sample_id for sample in samples + controls]
    assert len(set(ids)) == len(ids)
    for control in controls:
        twin, text = samples[control.index], text_of(tokenizer, control)
        assert control.references == twin.references
        planted = control.control != "no-needle"
        assert text.count(twin.references[0]) == planted
        if control.control == "needle-only":
            assert len(control.prompt_ids) < 200
            assert control.meta["fill_floor"] is None
            assert text.rsplit("\n\n", 1)[1] == text_of(tokenizer, twin).rsplit("\n\n", 1)[1]
        else:
            assert control.meta["fill"] >= control.meta["fill_floor"]
        if control.control == "wrong-key":
            assert text.count(twin.meta["key"]) == 1
            assert text.rsplit("\n\n", 1)[1] != text_of(tokenizer, twin).rsplit("\n\n", 1)[1]


def test_controls_of_shared_contexts_hide_the_question_too():
    for control in TASK.controls(request(samples=4, questions=2), PatternTokenizer()):
        assert 0 < control.context_len < len(control.prompt_ids)


def test_a_local_corpus_is_repeated_and_says_so(tmp_path):
    (tmp_path / "short.txt").write_text(
        "The tide went out. Nobody saw it go. The boats lay on their sides. " * 9
    )
    sample = build(corpus=str(tmp_path), ctx=4096)[0]
    assert sample.meta["repeats"]
    assert sample.meta["corpus_kind"] == "local"
    assert sample.meta["fill"] >= sample.meta["fill_floor"]


def test_without_repetition_a_short_corpus_falls_below_the_fill_floor(tmp_path):
    (tmp_path / "short.txt").write_text("The tide went out. Nobody saw it go. " * 120)
    sample = build(corpus=str(tmp_path), ctx=4096, repeat=False)[0]
    assert not sample.meta["repeats"]
    assert sample.meta["fill"] < sample.meta["fill_floor"]


def test_a_key_that_the_corpus_holds_is_drawn_again(tmp_path):
    tokenizer = PatternTokenizer()
    key, value = build(tokenizer)[0].meta["key"], build(tokenizer)[0].references[0]
    (tmp_path / "spoiled.txt").write_text(f"The {key} cost {value}. Nobody bought it. " * 200)
    sample = build(tokenizer, corpus=str(tmp_path))[0]
    assert sample.meta["key"] != key
    assert sample.references != (value,)


def test_a_context_below_512_is_refused_with_the_minimum():
    with pytest.raises(SpecError, match=r"ctx 511 .*512"):
        build(ctx=511)


def test_a_context_too_small_for_the_tokenizer_names_one_that_works():
    start = time.process_time()
    with pytest.raises(SpecError, match=r"ctx 512 is too small") as caught:
        build(TOKENIZERS["byte"](), ctx=512, decoys=16)
    assert time.process_time() - start < 1
    minimum = int(re.search(r"--ctx (\d+)", str(caught.value))[1])
    assert minimum > 512
    assert len(build(TOKENIZERS["byte"](), ctx=minimum, decoys=16)) == 1
    with pytest.raises(SpecError, match="too small"):
        build(TOKENIZERS["byte"](), ctx=minimum - 1, decoys=16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forms": "loker"}, "did you mean 'locker'"),
        ({"depths": "0:110:10"}, "FROM:TO:STEP"),
        ({"depths": "0:100"}, "FROM:TO:STEP"),
        ({"depths": "0:100:0"}, "FROM:TO:STEP"),
        ({"questions": "11"}, "1 to 10"),
        ({"questions": "3", "forms": "gate,badge"}, "1 to 2"),
        ({"decoys": "9999"}, "0 to"),
        ({"gen": "0"}, "1 to"),
        ({"payload": "letters"}, "digits"),
    ],
)
def test_options_that_are_not_allowed_are_refused(options, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        parse_options(Options, options, "option of task niah")


def test_options_come_from_texts_and_every_one_is_documented():
    text = {
        "decoys": "none",
        "prefix": "off",
        "depths": "0:90:10",
        "forms": "gate, badge",
        "turns": "chained",
    }
    options = parse_options(Options, text, "option of task niah")
    assert (options.decoys, options.prefix, len(options.depth_grid())) == (None, False, 10)
    assert [form.name for form in options.form_list()] == ["gate", "badge"]
    assert all(info.help for info in describe(Options))
    assert replace(options, decoys=16).decoys == 16


def test_the_largest_allowed_number_of_decoys_can_be_drawn():
    most = Options()._most_needles() - 1
    sample = build(ctx=16384, decoys=most, samples=1)[0]
    assert sample.meta["decoys"] == most


def test_a_packaged_corpus_is_refused_by_name():
    with pytest.raises(UnsupportedHere, match="austen"):
        build(corpus="austen")


def test_a_64k_prompt_takes_few_encodings_and_little_time():
    tokenizer = PatternTokenizer()
    start = time.process_time()
    sample = build(tokenizer, ctx=65536, decoys=16)[0]
    assert time.process_time() - start < 4
    assert sample.meta["fill"] > 0.9999
    assert tokenizer.prompts <= 8


def test_the_wording_is_pinned_to_its_version():
    raw = files("rcq_cli.tasks").joinpath("data/needles.json").read_bytes()
    assert (TASK.prompt_set, hashlib.sha256(raw).hexdigest()[:16]) == ("rcq-n1", "33f278c311a5ef5c")
