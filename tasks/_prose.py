"""Procedural prose: a chronicle of an invented harbour district, of any length, without a digit in it.

Paragraph p of book i is a pure function of (i, p): any paragraph can be made without the ones before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from hashlib import sha256
from itertools import count
from typing import NamedTuple, TypeAlias

from rcq_cli.tasks._splitmix import SplitMix64, digest_seed
from rcq_cli.tasks._words import data, lexicon, plural, verbs

VERSION = "prose-1"
BOOKS = 64
BOOK_WORDS = 160_000

_SLOT = re.compile(r"\{([^}]*)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou]|hour|honest)(?!one\b|use)")
_FORMS = {"to": "base", "ed": "past", "en": "participle", "ing": "gerund"}
_LONGEST = 34


class _Filling(NamedTuple):
    """A slot that the topic of the paragraph fills."""

    key: str


class _Choice(NamedTuple):
    """A slot that is filled with one of some words."""

    words: tuple[str, ...]


class _Phrase(NamedTuple):
    """A slot that is filled with one of some patterns."""

    patterns: tuple[_Pattern, ...]
    capital: bool


_Pattern: TypeAlias = tuple[str | _Filling | _Choice | _Phrase, ...]
_Topic: TypeAlias = dict[str, str]


@lru_cache(maxsize=4096)
def paragraph(book: int, index: int) -> tuple[str, ...]:
    """Return the 4 to 9 sentences of one paragraph; `index` may be any number from 0 on.

    Two people and one place are its topic; the first sentence introduces them.
    """
    rng = SplitMix64(digest_seed(f"{VERSION}|{book}|{index}"))
    topic = _topic(rng)
    body = _patterns("body")
    chosen = [rng.choice(_patterns("opening"))]
    chosen += [body[i] for i in rng.sample(len(body), 3 + rng.below(6))]
    return tuple(_sentence(pattern, rng, topic) for pattern in chosen)


def book(index: int) -> Iterator[str]:
    """Yield the paragraphs of book `index` as text, until they hold 160 000 words."""
    words = 0
    for number in count():
        text = " ".join(paragraph(index, number))
        yield text
        words += text.count(" ") + 1
        if words >= BOOK_WORDS:
            return


@cache
def source_sha256() -> str:
    """Return a digest of what the prose is made from: version, lexicon and patterns."""
    return sha256(json.dumps([VERSION, data("lexicon"), data("patterns")]).encode()).hexdigest()


def _topic(rng: SplitMix64) -> _Topic:
    topic = {"P": rng.choice(lexicon("names", "places"))}
    for slot in "AB":
        kind = rng.choice(("women", "men"))
        topic[slot] = rng.choice([name for name in lexicon("names", kind) if name not in topic.values()])
        for case, word in data("patterns")["pronouns"][kind].items():
            topic |= {f"{slot}.{case}": word, f"{slot}.{case.capitalize()}": word.capitalize()}
    return topic


def _sentence(pattern: _Pattern, rng: SplitMix64, topic: _Topic) -> str:
    """Return one sentence of `pattern`; one of more than 34 words is drawn again."""
    while True:
        parts: list[str] = []
        _fill(pattern, rng, topic, parts, set(topic.values()))
        sentence = "".join(parts)
        if sentence.count(" ") < _LONGEST:
            return _ARTICLE.sub(r"\1n ", _capital(sentence))


def _fill(pattern: _Pattern, rng: SplitMix64, topic: _Topic, parts: list[str], used: set[str]) -> None:
    """Append the pieces of one pattern to `parts`; no slot repeats a word the sentence has already used."""
    for piece in pattern:
        if isinstance(piece, str):
            parts.append(piece)
        elif isinstance(piece, _Choice):
            word = rng.choice(piece.words)
            while word in used:
                word = rng.choice(piece.words)
            used.add(word)
            parts.append(word)
        elif isinstance(piece, _Filling):
            parts.append(topic[piece.key])
        else:
            start = len(parts)
            _fill(rng.choice(piece.patterns), rng, topic, parts, used)
            if piece.capital:
                parts[start] = _capital(parts[start])


def _capital(text: str) -> str:
    """Return `text` with its first letter in upper case, behind an opening quote if there is one."""
    return text[:2].upper() + text[2:] if text[0] == '"' else text[0].upper() + text[1:]


@cache
def _patterns(kind: str) -> tuple[_Pattern, ...]:
    return tuple(_parse(pattern) for pattern in data("patterns")[kind])


@cache
def _phrase(kind: str) -> tuple[_Pattern, ...]:
    return tuple(_parse(pattern) for pattern in data("patterns")["phrases"][kind])


def _parse(pattern: str) -> _Pattern:
    pieces = _SLOT.split(pattern)
    return tuple(_slot(piece) if i % 2 else piece for i, piece in enumerate(pieces) if i % 2 or piece)


@cache
def _slot(spec: str) -> _Filling | _Choice | _Phrase:
    """Parse one slot.

    `A`, `A.he`, `P`: topic; `@at`, `^@at`: a phrase, capitalised; `*boat`: an adjective; `sail:ed`: a verb;
    `boat`, `boat+`: a noun, plural; `name`, `place`, `manner`, `often`, `comment`: as they say.
    """
    if spec[0] in "ABP" and spec[1:2] in ("", "."):
        return _Filling(spec)
    if "@" in spec:
        return _Phrase(_phrase(spec.partition("@")[2]), capital=spec[0] == "^")
    return _Choice(_word_list(spec))


def _word_list(spec: str) -> tuple[str, ...]:
    if ":" in spec:
        kind, form = spec.split(":")
        return tuple(getattr(verb, _FORMS[form]) for verb in verbs(kind))
    if spec[0] == "*":
        return lexicon("adjectives", spec[1:])
    if spec == "name":
        return lexicon("names", "women") + lexicon("names", "men")
    if spec == "place":
        return lexicon("names", "places")
    if spec in data("lexicon")["adverbs"]:
        return lexicon("adverbs", spec)
    if spec.endswith("+"):
        return tuple(plural(noun) for noun in lexicon("nouns", spec[:-1]))
    return lexicon("nouns", spec)
