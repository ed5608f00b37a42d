"""Needles: a form (the wording of a fact and of its question), a key and a value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from uuid import UUID

from rcq_cli.tasks._corpora import Corpus
from rcq_cli.tasks._splitmix import SplitMix64
from rcq_cli.tasks._words import adjectives, data, nouns

PAYLOADS = ("digits", "words", "uuid")


@dataclass(frozen=True, slots=True)
class Form:
    """One way to state a fact `key -> value` in a sentence that ends with the value, and to ask for it."""

    name: str
    sentence: str
    question: str

    def fact(self, key: str, value: str) -> str:
        """Return the needle sentence."""
        return self.sentence.format(key=key, value=value)

    def ask(self, key: str) -> str:
        """Return the question whose answer is the value."""
        return self.question.format(key=key)

    def opening(self, key: str) -> str:
        """Return the needle sentence up to its value, without the blank before it."""
        return self.sentence.partition("{value}")[0].format(key=key).rstrip()


@dataclass(frozen=True, slots=True)
class Needle:
    """One fact."""

    form: Form
    key: str
    value: str

    @property
    def sentence(self) -> str:
        """Return the fact as a sentence."""
        return self.form.fact(self.key, self.value)


@cache
def forms() -> tuple[Form, ...]:
    """Return the ten forms in their fixed order."""
    return tuple(Form(**form) for form in data("needles")["forms"])


def payload_kind(payload: str, form: Form) -> str:
    """Return `digits`, `words` or `uuid` for one form; `mixed` goes through them by the form's number."""
    return PAYLOADS[forms().index(form) % len(PAYLOADS)] if payload == "mixed" else payload


class NeedleBag:
    """Draws needles of one sample: no two share a word, no key or value lies in another or in the corpus."""

    def __init__(self, rng: SplitMix64, corpus: Corpus) -> None:
        self._rng = rng
        self._corpus = corpus
        self._texts: list[str] = []
        self._words: set[str] = set()

    def draw(self, form: Form, payload: str) -> Needle:
        """Return a fresh needle of `form` with a value of kind `payload`."""
        value = self._value(payload)
        return Needle(form, self._fresh(self._pairs()), value)

    def another(self, needle: Needle, payload: str) -> Needle:
        """Draw one more fact with the form and the key of `needle`."""
        return Needle(needle.form, needle.key, self._value(payload))

    def _value(self, payload: str) -> str:
        makers = {"digits": self._digits, "words": self._pairs, "uuid": self._uuids}
        return self._fresh(makers[payload]())

    def _fresh(self, candidates: Iterator[str]) -> str:
        for text in candidates:
            if not self._corpus.holds(text) and not any(text in old or old in text for old in self._texts):
                self._texts.append(text)
                self._words.update(text.split("-"))
                return text
        raise AssertionError("the stream of candidates has no end")

    def _digits(self) -> Iterator[str]:
        while True:
            yield str(1_000_000 + self._rng.below(9_000_000))

    def _uuids(self) -> Iterator[str]:
        while True:
            yield str(UUID(int=self._rng.next() << 64 | self._rng.next(), version=4))

    def _pairs(self) -> Iterator[str]:
        while True:
            pair = self._rng.choice(adjectives()), self._rng.choice(nouns())
            if not self._words.intersection(pair):
                yield "-".join(pair)
