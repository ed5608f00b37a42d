"""Rendering, encoding and the BOS policy, on small tokenizers made here."""

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from tokenizers.processors import ByteLevel as TrimOffsets
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rcq_cli.errors import SpecError, UnsupportedModel
from rcq_cli.models._tokenizer import ModelTokenizer

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}{% endfor %}<s>assistant "
DATED = "<s>{{ strftime_now('%d %b %Y') }} {{ date_string }}" + TURNS
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]


def bytes_tokenizer(template=None, adds_bos=False):
    """One token per byte, and five special ones."""
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if adds_bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )


def wrap(template=None, adds_bos=False):
    return ModelTokenizer(bytes_tokenizer(template, adds_bos))


def test_a_raw_prompt_joins_the_two_parts_with_a_line_break():
    prompt = wrap().prompt("a question", "The answer is")
    assert prompt.text == "a question\nThe answer is"
    assert wrap().decode(prompt.ids) == prompt.text


@pytest.mark.parametrize(("user", "prefix", "text"), [("a", "", "a"), ("", "b", "b"), ("a", "b", "a\nb")])
def test_an_empty_part_adds_nothing(user, prefix, text):
    assert wrap().prompt(user, prefix).text == text


def test_a_chat_prompt_is_the_template_plus_the_answer_prefix():
    prompt = wrap(TURNS).prompt("hi", "It is")
    assert prompt.text == "<|user|>hi<|end|><|assistant|>It is"
    assert [prompt.ids[0], prompt.ids[3], prompt.ids[4]] == [258, 260, 259]


def test_chat_off_ignores_the_template():
    assert wrap(TURNS).prompt("hi", "It is", chat="off").text == "hi\nIt is"


@pytest.mark.parametrize(
    ("template", "adds_bos", "bos", "count"),
    [
        (None, True, "auto", 1),
        (None, False, "auto", 0),
        (None, False, "always", 1),
        (None, True, "never", 0),
        (TURNS, True, "auto", 1),
        (TURNS, False, "auto", 0),
        (DATED, True, "auto", 1),
        (DATED, False, "auto", 1),
        (DATED, True, "always", 1),
        (DATED, True, "never", 0),
    ],
)
def test_one_bos_at_the_front_or_none(template, adds_bos, bos, count):
    prompt = wrap(template, adds_bos).prompt("hi", "It is", bos=bos)
    assert prompt.ids.count(256) == count
    assert (prompt.ids[0] == 256) == bool(count)


def test_a_bos_added_by_id_has_no_place_in_the_text():
    prompt = wrap(adds_bos=True).prompt("ab", "")
    assert prompt.starts == (-1, 0, 1)


def test_a_bos_that_opens_every_turn_is_not_doubled():
    tokenizer = wrap(MARKED, adds_bos=True)
    prompt = tokenizer.prompt("hi", "It is")
    assert prompt.ids.count(256) == 2
    assert prompt.ids[0] == 256
    assert prompt.ids[1] != 256
    with pytest.raises(SpecError, match="every turn"):
        tokenizer.prompt("hi", "", bos="never")


def test_a_text_with_the_bos_in_it_is_refused_where_it_would_be_one():
    with pytest.raises(SpecError, match="2 BOS tokens instead of 1"):
        wrap(DATED).prompt("see <s> here", "")
    assert wrap(adds_bos=True).prompt("see <s> here", "").ids.count(256) == 1


@pytest.mark.parametrize("day", ["%d %b %Y", "%Y-%m-%d"])
def test_no_date_comes_from_the_clock(day):
    text = wrap("{{ strftime_now('" + day + "') }}|{{ date_string }}|" + TURNS).prompt("hi", "").text
    expected = {"%d %b %Y": "01 Jan 2024", "%Y-%m-%d": "2024-01-01"}[day]
    assert text.startswith(f"{expected}|2024-01-01|")


def test_thinking_is_switched_off():
    template = "{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}" + TURNS
    assert wrap(template).prompt("hi", "").text.startswith("quiet")


def test_starts_say_where_each_token_begins():
    prompt = wrap(TURNS).prompt("h\u00e9!", "x")
    assert prompt.starts == (0, 8, 9, 9, 10, 11, 18, 31)


def test_a_blank_trimmed_from_the_offsets_belongs_to_the_word_after_it():
    words = ["the", "\u0120ferry", "\u0120waits"]
    backend = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], ignore_merges=True))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.post_processor = TrimOffsets(trim_offsets=True)
    prompt = ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)).prompt("the ferry waits", "")
    assert prompt.starts == (0, 3, 9)


def test_encode_adds_nothing_and_decode_leaves_special_tokens_out():
    tokenizer = wrap(adds_bos=True)
    assert len(tokenizer.encode("abc")) == 3
    assert tokenizer.decode([256, *tokenizer.encode("abc"), 257]) == "abc"


def test_truncation_of_the_checkpoint_is_switched_off():
    theirs = bytes_tokenizer()
    theirs.backend_tokenizer.enable_truncation(4)
    assert len(ModelTokenizer(theirs).encode("a" * 50)) == 50


def test_stops_of_the_model_and_the_tokenizer_are_joined():
    assert ModelTokenizer(bytes_tokenizer(), [260, 257]).eos_ids == (257, 260)


def test_digests_tell_tokenizers_apart_and_agree_with_themselves():
    plain, again, bos = wrap(), wrap(), wrap(adds_bos=True)
    assert plain.sha256 == again.sha256
    assert len({plain.sha256, bos.sha256}) == 2
    plain.prompt("a", "b")
    plain.encode("a")
    assert wrap().sha256 == plain.sha256


def test_the_fingerprint_names_where_the_bos_comes_from():
    policies = [
        wrap(t, b).fingerprint()["tokenizer.bos_policy"]
        for t, b in ((None, False), (None, True), (DATED, False))
    ]
    assert policies == ["none", "tokenizer", "template"]
    assert wrap().fingerprint()["tokenizer.chat_template_sha256"] is None
    assert wrap(TURNS).fingerprint()["tokenizer.template_kwargs"]["date_string"] == "2024-01-01"


@pytest.mark.parametrize(
    ("choice", "part"),
    [({"chat": "on"}, "chat=off"), ({"chat": "yes"}, "auto, on, off"), ({"bos": "no"}, "always")],
)
def test_a_choice_that_cannot_be_honoured_is_a_usage_error(choice, part):
    with pytest.raises(SpecError, match=part):
        wrap().prompt("hi", "", **choice)


def test_bos_always_needs_a_bos():
    backend = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    with pytest.raises(SpecError, match="no BOS"):
        ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)).prompt("a", "", bos="always")


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(UnsupportedModel, match="Slow"):
        ModelTokenizer(Slow())
