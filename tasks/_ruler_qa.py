"""Questions on documents (`qa_1`, `qa_2` of `ruler`): an invented register, or files of the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, Protocol

from rcq_cli.protocols import PromptTokenizer, TaskRequest
from rcq_cli.tasks import _prose
from rcq_cli.tasks._ruler_files import hotpot, squad
from rcq_cli.tasks._ruler_prompt import SHORT_CTX, Part, stems
from rcq_cli.tasks._splitmix import SplitMix64
from rcq_cli.tasks._units import Units
from rcq_cli.tasks._words import data, lexicon

_BINS = 10
_RIVALS = 3
_SAMPLE_WORDS = 1500
_FIRST_PARAGRAPHS = 4096


class Case(Protocol):
    """A question and the documents it is asked of."""

    @property
    def question(self) -> str:
        """Return the question."""

    @property
    def answers(self) -> tuple[str, ...]:
        """Return the texts that answer it, each by itself."""

    @property
    def gold(self) -> tuple[str, ...]:
        """Return the documents (title, line break, text) that hold the answer."""

    @property
    def cluster(self) -> str:
        """Return what the question shares with others."""

    @property
    def source(self) -> str:
        """Return `synthetic`, `squad` or `hotpot`."""

    @property
    def sha256(self) -> str:
        """Return the digest of what the documents are made from."""

    def others(self) -> Iterator[tuple[str, bool]]:
        """Yield further documents, the hardest first, each with whether the source repeats itself."""


class Documents(Part):
    """One prompt of the family."""

    gen = 32
    floor_base = 0.95
    any_reference = True
    hops: int

    def __init__(self, part: str, request: TaskRequest, tokenizer: PromptTokenizer, index: int) -> None:
        super().__init__(part, request, tokenizer, index)
        self.case = self._case()
        self.references = self.case.answers
        self.opening = self.wording["qa_opening"]
        self.units = Units(self._texts())
        # what decides an answer is never cut
        self.fewest = self.units.words_of(len(self.case.gold))

    def _case(self) -> Case:
        raise NotImplementedError

    def _texts(self) -> Iterator[tuple[str, bool]]:
        yield from ((text, False) for text in self.case.gold)
        for text, again in self.case.others():
            if again and not self.options.repeat:
                return
            yield text, again

    @property
    def cluster(self) -> str:
        """Return the relation or the article asked about."""
        return self.case.cluster

    def maximum(self) -> int | None:
        """Return the words of all documents if they may not fill the budget."""
        return None if self.options.repeat else self.units.exhausted_at(self.budget)

    def unit_tokens(self) -> tuple[float, int]:
        """Return the tokens of an average word, and of the longest with the head of a document."""
        texts = self.units.first(max(_SAMPLE_WORDS, self.budget // 32))
        count = sum(len(text.split()) for text in texts)
        text = _numbered(texts)
        words = set(text.split())
        head = self.cost("\n\n[99] ")
        return self.cost(text) / count, head + max(self.cost(" " + word) for word in words)

    def render(self, units: int) -> str:
        """Return instruction, documents, instruction, question."""
        texts = self._ordered(self.units.first(units))
        listed = _numbered(texts)
        question = self.wording["qa_question"].format(question=self.case.question)
        return "\n\n".join((self.wording["qa_instruction"], listed, self.wording["qa_instruction"], question))

    def planted(self) -> Iterable[tuple[str, int]]:
        """Yield the answer of the register: it stands in one document only."""
        return ((self.case.answers[0], 1),) if self.case.source == "synthetic" else ()

    def meta(self, units: int) -> dict[str, Any]:
        """Return where the documents come from."""
        return {
            "qa_source": self.case.source,
            "question": self.case.question,
            "corpus_kind": "procedural" if self.case.source == "synthetic" else "local",
            "corpus_sha256": self.case.sha256,
            "repeats": self.units.repeats(units),
            "gold_place": self._places(len(self.units.first(units)))[0],
        }

    def _ordered(self, texts: list[str]) -> list[str]:
        """Return the documents in a drawn order, the first gold one in a tenth that the index fixes."""
        gold, others = texts[: len(self.case.gold)], texts[len(self.case.gold) :]
        rng = self.rng(f"layout/{self.request.ctx}/order")
        rng.shuffle(others)
        for text, place in sorted(zip(gold, self._places(len(texts)), strict=True), key=lambda item: item[1]):
            others.insert(place, text)
        return others

    def _places(self, total: int) -> list[int]:
        """Return the distinct final positions of the gold documents among `total`."""
        rng = self.layout()
        first = min(int((self.index % _BINS + rng.next() / 2**64) / _BINS * total), total - 1)
        free = [place for place in range(total) if place != first]
        return [first, *(free[i] for i in rng.sample(len(free), len(self.case.gold) - 1))]


def _numbered(texts: list[str]) -> str:
    return "\n\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1))


class OneHop(Documents):
    """`qa_1`: one document answers."""

    def _case(self) -> Case:
        if self.options.squad is not None:
            return squad(self.options.squad, self.request.seed, self.index)
        return Register(self, hops=1)


class TwoHops(Documents):
    """`qa_2`: the answer needs two documents."""

    def _case(self) -> Case:
        if self.options.hotpot is not None:
            return hotpot(self.options.hotpot, self.request.seed, self.index)
        return Register(self, hops=2)


class Relation(NamedTuple):
    """A kind of fact, and how it is stated and asked for."""

    name: str
    subject: str
    object: str
    fact: str
    question: str
    phrase: str
    """The object, told by its subject."""


class Register:
    """An invented register: people, ships, towns and workshops with one stated fact each."""

    source = "synthetic"

    def __init__(self, prompt: Part, hops: int) -> None:
        rng = prompt.rng("needle")
        known = relations()
        self._rng = rng
        self._short = prompt.request.ctx < SHORT_CTX
        self._filler = _Filler(prompt.rng("haystack"))
        self._stems = stems(rng, (3,))
        self._path = [known[prompt.index % len(known)]]
        if hops > 1:
            fitting = [r for r in known if r.subject == self._path[0].object and r is not self._path[0]]
            self._path.append(rng.choice(fitting))
        self.stems = [next(self._stems).capitalize() for _ in range(hops + 1)]
        kinds = [self._path[0].subject, *(relation.object for relation in self._path)]
        self._entities = [self._named(kind, stem) for kind, stem in zip(kinds, self.stems, strict=True)]

    @property
    def question(self) -> str:
        """Return the question; of two hops the entity between them is only described."""
        asked = self._entities[0]
        for relation in self._path[:-1]:
            asked = relation.phrase.format(s=asked)
        return self._path[-1].question.format(s=asked)

    @property
    def answers(self) -> tuple[str, ...]:
        """Return the name of the last entity."""
        return (self._entities[-1],)

    @property
    def cluster(self) -> str:
        """Return the relations that the question goes along."""
        return ">".join(relation.name for relation in self._path)

    @property
    def sha256(self) -> str:
        """Return the digest of the prose between the facts."""
        return _prose.source_sha256()

    @cached_property
    def gold(self) -> tuple[str, ...]:
        """Return one document per hop."""
        return tuple(
            self._document(r, s, o)
            for r, s, o in zip(self._path, self._entities, self._entities[1:], strict=False)
        )

    def others(self) -> Iterator[tuple[str, bool]]:
        """Yield rivals of each hop (same relation; same name, other relation), then any documents."""
        for _ in range(_RIVALS):
            for relation, stem in zip(self._path, self.stems, strict=False):
                yield self._fact(relation), False
                yield self._namesake(relation, stem), False
        known = relations()
        while True:
            yield self._fact(self._rng.choice(known)), False

    def _fact(self, relation: Relation, subject: str | None = None) -> str:
        """Return a document on a fact with fresh names."""
        subject = subject or self._named(relation.subject, self._fresh())
        return self._document(relation, subject, self._named(relation.object, self._fresh()))

    def _namesake(self, relation: Relation, stem: str) -> str:
        """Return a document on an entity of another kind that shares the name `stem`."""
        other = self._rng.choice([r for r in relations() if r.subject != relation.subject])
        return self._fact(other, self._named(other.subject, stem))

    def _fresh(self) -> str:
        return next(stem.capitalize() for stem in self._stems)

    def _named(self, kind: str, stem: str) -> str:
        first = self._rng.choice(lexicon("names", "women") + lexicon("names", "men"))
        return str(self._rng.choice(data("ruler")["entities"][kind]).format(first=first, stem=stem))

    def _document(self, relation: Relation, subject: str, object: str) -> str:
        """Return title and text: the fact among sentences of prose, 80 to 160 words, or half as many."""
        half = 2 if self._short else 1
        sentences = [relation.fact.format(s=subject, o=object)]
        length, wanted = len(sentences[0].split()), (80 + self._rng.below(61)) // half
        while length < wanted:
            sentence = self._filler.next()
            if length + len(sentence.split()) <= 160 // half:
                sentences.append(sentence)
                length += len(sentence.split())
        fact, filler = sentences[0], sentences[1:]
        filler.insert(self._rng.below(len(filler) + 1), fact)
        return f"{subject}\n{' '.join(filler)}"


def relations() -> tuple[Relation, ...]:
    """Return the twelve relations in their fixed order."""
    return tuple(Relation(**relation) for relation in data("ruler")["relations"])


class _Filler:
    """Sentences of the built-in prose from a drawn paragraph on."""

    def __init__(self, rng: SplitMix64) -> None:
        book, first = rng.below(_prose.BOOKS), rng.below(_FIRST_PARAGRAPHS)
        self._sentences = (s for number in count(first) for s in _prose.paragraph(book, number))

    def next(self) -> str:
        """Return the next sentence."""
        return next(self._sentences)
