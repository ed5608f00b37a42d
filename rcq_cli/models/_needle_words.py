"""Tokenizer of the `needle` instrument model: whole words, digit groups, and bytes for everything else."""

import re
import string
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rcq_cli.models._needle_weights import Lists
from rcq_cli.tasks._words import adjectives, nouns, vocabulary

SPECIAL = ("<pad>", "<bos>", "<eos>")
PATTERN = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]|\s"
"""A word or a sign with its leading space, up to three digits counted from the left, one blank."""
BLANK = "\u0120"
"""How the byte-level alphabet writes a space."""
ROW_MULTIPLE = 64
SIGNS = frozenset({"", "\u0120", "\u010a", "\u0109", "\u010d", *string.punctuation})
"""Blanks (as the byte-level alphabet writes space, line break, tab and return) and punctuation."""


def build_tokenizer(words: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer whose whole words are `words`, all that rcq's own prompts use when None.

    Any text comes back unchanged from encoding and decoding; a word not listed falls back to its bytes.
    """
    backend = Tokenizer(
        BPE(vocab=_token_ids(vocabulary() if words is None else words), merges=[], ignore_merges=True)
    )
    backend.pre_tokenizer = Sequence(
        [Split(Regex(PATTERN), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = ByteLevelDecoder()
    pad, bos, eos = SPECIAL
    backend.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, SPECIAL.index(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def token_lists(tokenizer: PreTrainedTokenizerFast) -> Lists:
    """Return which tokens are key words, which are answers, and the rows the embedding needs."""
    ids = tokenizer.get_vocab()
    rows = -(-len(ids) // ROW_MULTIPLE) * ROW_MULTIPLE
    stems = list(range(rows))
    for token, number in ids.items():
        stems[number] = ids.get(_stem(token), number)
    keys = adjectives(), nouns()
    stemmed = [[ids[word] for word in words] for words in keys]
    spelled = [[ids[form] for word in words for form in _spellings(word)] for words in keys]
    digits = [ids[group] for group in _digit_groups()]
    silent = (*(ids[token] for token in SPECIAL), *range(len(ids), rows))
    return Lists(rows, silent, stems, keys=stemmed, answers=(digits, *spelled))


def _token_ids(words: Iterable[str]) -> dict[str, int]:
    # letters only: the split pattern cuts a word at any other sign
    plain = sorted({part for word in words for part in re.findall(r"[^\W\d_]+", word)})
    spelled = (token for word in plain for token in _spellings(word))
    alphabet = sorted(ByteLevel.alphabet())
    tokens = dict.fromkeys((*SPECIAL, *alphabet, *_digit_groups(), *spelled))
    return {token: number for number, token in enumerate(tokens)}


def _digit_groups() -> list[str]:
    return [f"{number:0{width}}" for width in (1, 2, 3) for number in range(10**width)]


def _spellings(word: str) -> list[str]:
    """Return the ways a word may stand in a text, byte-level: word and Word, alone and after a space."""
    plain = dict.fromkeys((word, word.capitalize(), word.lower()))
    encoded = [form if form.isascii() else _byte_level(form) for form in plain]
    return encoded + [BLANK + form for form in encoded]


def _stem(token: str) -> str:
    """Return the token that stands for `token` where contexts are compared.

    A needle may open a paragraph or follow a question, and its answer prefix opens a line: neither the
    spelling of a word nor the sign or blank before it may decide which needle matches.
    """
    word = token.removeprefix(BLANK)
    # letters outside ASCII are bytes in this alphabet, and have no lower case
    return "." if word in SIGNS else word.lower() if word.isascii() else word


def _byte_level(text: str) -> str:
    pieces: list[Any] = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)
