"""The retrieval family of `ruler`: register notes in ferry noise, in prose, or among nothing but notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice, repeat
from typing import Any, Literal, NamedTuple
from uuid import UUID

from rcq_cli.protocols import PromptTokenizer, TaskRequest
from rcq_cli.tasks._corpora import Corpus, corpus_meta, open_corpus
from rcq_cli.tasks._ruler_prompt import Part
from rcq_cli.tasks._splitmix import SplitMix64
from rcq_cli.tasks._units import Units
from rcq_cli.tasks._words import adjectives, nouns

_STEPS = 40
_SAMPLE_WORDS = 1500
_FEWEST_TEXTS = 2
_BINS = 10


class Shape(NamedTuple):
    """One row of the table: what surrounds the notes, what they say, how many there are."""

    haystack: Literal["noise", "prose", "notes"]
    key: Literal["word", "uuid"] = "word"
    value: Literal["number", "uuid"] = "number"
    keys: int = 1
    values: int = 1
    """Notes per key."""
    asked: int = 1
    """Keys asked for."""


SHAPES = {
    "niah_single_1": Shape("noise"),
    "niah_single_2": Shape("prose"),
    "niah_single_3": Shape("prose", value="uuid"),
    "niah_multikey_1": Shape("prose", keys=4),
    "niah_multikey_2": Shape("notes"),
    "niah_multikey_3": Shape("notes", key="uuid", value="uuid"),
    "niah_multivalue": Shape("prose", values=4),
    "niah_multiquery": Shape("prose", keys=4, asked=4),
}


class Note(NamedTuple):
    """A key and a value registered for it."""

    key: str
    value: str


class Notes(Part):
    """One prompt of the retrieval family."""

    gen = 128
    removable = True

    def __init__(self, part: str, request: TaskRequest, tokenizer: PromptTokenizer, index: int) -> None:
        super().__init__(part, request, tokenizer, index)
        self.shape = SHAPES[part]
        self.kind = self.wording["kinds"][self.shape.value]
        source = note_source(self.shape, self.rng("needle"), self.corpus)
        self.source = _Listed(source)
        self.notes = self.source.first(self.shape.keys * self.shape.values)
        asked = self.notes[: self.shape.asked * self.shape.values]
        self.references = tuple(note.value for note in asked)
        form = "one" if len(asked) == 1 else "several"
        keys = _listed(list(dict.fromkeys(note.key for note in asked)))
        self.question = self.wording[f"notes_{form}"].format(kind=self.kind, keys=keys)
        self.opening = self.wording[f"notes_{form}_opening"].format(kind=self.kind, keys=keys)
        alone = self.shape.haystack == "notes"
        self.fewest = _FEWEST_TEXTS if alone else self.filler.words_of(_FEWEST_TEXTS)

    @cached_property
    def filler(self) -> Units:
        """Return the text around the notes."""
        if self.shape.haystack == "noise":
            return Units(repeat((self.wording["noise"], False)))
        return Units(self.corpus.sentences(self.rng("haystack"), repeat=self.options.repeat))

    @cached_property
    def corpus(self) -> Corpus:
        """Return the source of the prose."""
        return open_corpus(self.options.corpus, online=self.options.online)

    def maximum(self) -> int | None:
        """Return the words of a corpus that is not to be repeated, if they may not fill the budget."""
        if self.shape.haystack != "prose" or self.options.repeat:
            return None
        return self.filler.exhausted_at(self.budget)

    def unit_tokens(self) -> tuple[float, int]:
        """Return the tokens of an average word (or note), and of the longest one near the start."""
        if self.shape.haystack == "notes":
            costs = [self.cost(self._sentence(note) + "\n") for note in self.source.first(32)]
            return sum(costs) / len(costs), max(costs)
        text = self._joint(self.filler.first(min(self.budget, max(_SAMPLE_WORDS, self.budget // 32))))
        rate = self.cost(text) / len(text.split())
        return rate, max(self.cost(" " + word) for word in set(text.split()))

    def render(self, units: int) -> str:
        """Return head, text with the notes in it, question."""
        texts = self._among_notes(units) if self.shape.haystack == "notes" else self._in_filler(units)
        head = self.wording["notes_head"].format(kind=self.kind)
        return "\n\n".join((head, self._joint(texts), self.question))

    def planted(self) -> Iterable[tuple[str, int]]:
        """Yield every value asked for: once in the text, not at all in a control."""
        return ((value, int(not self.absent)) for value in self.references)

    def meta(self, units: int) -> dict[str, Any]:
        """Return keys, and the corpus where there is one."""
        found: dict[str, Any] = {"keys": list(dict.fromkeys(note.key for note in self.notes))}
        if self.shape.haystack != "prose":
            return found
        return found | corpus_meta(self.corpus, repeats=self.filler.repeats(units))

    def _sentence(self, note: Note) -> str:
        text: str = self.wording["note"].format(kind=self.kind, key=note.key, value=note.value)
        return text

    def _joint(self, texts: list[str]) -> str:
        return (" " if self.shape.haystack == "prose" else "\n").join(texts)

    def _among_notes(self, units: int) -> list[str]:
        """Return notes only, the one asked for in a tenth of the text that the index fixes."""
        asked, *others = self.source.first(units + self.absent)
        texts = [self._sentence(note) for note in others]
        if self.absent:
            return texts
        place = (self.index % _BINS + self.layout().next() / 2**64) / _BINS
        texts.insert(int(place * units), self._sentence(asked))
        return texts

    def _in_filler(self, units: int) -> list[str]:
        """Return the filler with the notes at drawn places, in a drawn order."""
        texts, rng = self.filler.first(units), self.layout()
        planted = self.notes[len(self.references) :] if self.absent else self.notes
        notes = [self._sentence(note) for note in planted]
        rng.shuffle(notes)
        gaps = len(texts) + 1
        if self.shape.haystack == "prose":
            places = [step * gaps // _STEPS for step in rng.sample(_STEPS, len(notes))]
        else:
            places = rng.sample(gaps, len(notes))
        return spread(texts, notes, places)


def spread(texts: list[str], inserts: list[str], places: list[int]) -> list[str]:
    """Return `texts` with `inserts` in their order at the places, counted in texts before each."""
    found: list[str] = []
    start = 0
    for insert, place in zip(inserts, sorted(places), strict=True):
        found += [*texts[start:place], insert]
        start = place
    return found + texts[start:]


def note_source(shape: Shape, rng: SplitMix64, corpus: Corpus) -> Iterator[Note]:
    """Yield notes without end: a key with all its values, then the next.

    Keys and values are distinct, and none lies in the corpus; no later key contains or is part of one of the
    first, and where few keys are planted none share a word.
    """
    few = shape.haystack != "notes"
    guarded: list[str] = []
    spent: set[str] = set()
    keys = uuids(rng) if shape.key == "uuid" else _pairs(rng, distinct_words=few)
    values = uuids(rng) if shape.value == "uuid" else numbers(rng)
    while True:
        key = next(k for k in keys if k not in spent and not any(k in g or g in k for g in guarded))
        if few and corpus.holds(key):
            continue
        spent.add(key)
        if len(guarded) < shape.keys:
            guarded.append(key)
        for _ in range(shape.values):
            value = next(v for v in values if v not in spent and not (few and corpus.holds(v)))
            spent.add(value)
            yield Note(key, value)


def numbers(rng: SplitMix64) -> Iterator[str]:
    """Yield numbers of seven digits."""
    while True:
        yield str(1_000_000 + rng.below(9_000_000))


def uuids(rng: SplitMix64) -> Iterator[str]:
    """Yield version-4 UUIDs."""
    while True:
        yield str(UUID(int=rng.next() << 64 | rng.next(), version=4))


def _pairs(rng: SplitMix64, *, distinct_words: bool) -> Iterator[str]:
    taken: set[str] = set()
    while True:
        pair = rng.choice(adjectives()), rng.choice(nouns())
        if not taken.intersection(pair):
            if distinct_words:
                taken.update(pair)
            yield "-".join(pair)


def _listed(texts: list[str]) -> str:
    """Return `a`, or `a, b and c`."""
    return ", ".join(texts[:-1]) + " and " + texts[-1] if len(texts) > 1 else texts[0]


class _Listed:
    """An endless source, kept as far as it was read."""

    def __init__(self, source: Iterator[Note]) -> None:
        self._source = source
        self._read: list[Note] = []

    def first(self, count: int) -> list[Note]:
        self._read += islice(self._source, max(count - len(self._read), 0))
        return self._read[:count]
