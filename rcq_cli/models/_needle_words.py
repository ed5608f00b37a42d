"""Tokenizer of the `needle` instrument model: whole words, digit groups, and bytes for everything else."""

import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast

from rcq_cli.models._needle_weights import Lists
from rcq_cli.tasks._words import adjectives, nouns, vocabulary

SPECIAL = ("<pad>", "<bos>", "<eos>")
PATTERN = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]|\s"
"""A word or a sign with its leading space, up to three digits counted from the left, one blank."""
BLANK = "\u0120"
"""How the byte-level alphabet writes a space."""
ROW_MULTIPLE = 64


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
    first, second = (
        [ids[token] for word in words for token in _spellings(word)] for words in (adjectives(), nouns())
    )
    digits = [ids[group] for group in _digit_groups()]
    silent = (*(ids[token] for token in SPECIAL), *range(len(ids), rows))
    return Lists(rows, silent, keys=(first, second), answers=(digits, first, second))


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
    encoded = [_byte_level(form) for form in plain]
    return encoded + [BLANK + form for form in encoded]


def _byte_level(text: str) -> str:
    pieces: list[Any] = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)
