"""The other list tasks of `ruler`: variable tracing, common words, frequent words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, count, islice, repeat
from typing import Any, NamedTuple

from rcq_cli.errors import SpecError
from rcq_cli.protocols import PromptTokenizer, TaskRequest
from rcq_cli.tasks._ruler_notes import spread
from rcq_cli.tasks._ruler_prompt import SHORT_CTX, Part, lexicon_words, stems
from rcq_cli.tasks._splitmix import SplitMix64
from rcq_cli.tasks._units import Units

_VARIABLES = 5
_EXAMPLE_SHARE = 4
"""A solved example takes at most this part of the budget."""
_EXAMPLE_TOKENS = 500
_COMMON = 10
_ENTRY_TOKENS = 6
_ZETA_2 = 1.644934
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Chain(NamedTuple):
    """Names that hold one number, in the order in which they get it."""

    names: tuple[str, ...]
    number: str

    def lines(self, wording: str) -> list[str]:
        """Return one assignment per name."""
        values = (self.number, *self.names)
        return [
            wording.format(name=name, value=value) for name, value in zip(self.names, values, strict=False)
        ]


class Tracing(Part):
    """`vt`: a number handed from name to name, among lines of noise."""

    gen = 60
    removable = True

    def __init__(self, part: str, request: TaskRequest, tokenizer: PromptTokenizer, index: int) -> None:
        super().__init__(part, request, tokenizer, index)
        drawn = chains(self.rng("needle"), letters=5)
        self.chains = list(islice(drawn, self.options.chains))
        self.references = self.chains[0].names
        self.question = self.wording["vt_question"].format(number=self.chains[0].number)
        self.opening = self.wording["vt_opening"].format(number=self.chains[0].number)
        self.filler = Units(repeat((self.wording["noise"], False)))
        self.fewest = self.filler.words_of(_VARIABLES * len(self.chains))

    def unit_tokens(self) -> tuple[float, int]:
        """Return the tokens of an average and of the longest word of noise."""
        noise = self.wording["noise"]
        return self.cost(noise + "\n") / len(noise.split()), max(self.cost(" " + w) for w in noise.split())

    def render(self, units: int) -> str:
        """Return head, solved example, lines, question."""
        rng = self.layout()
        body = _traced(self.chains[self.absent :], self.filler.first(units), rng, self.wording["let"])
        return "\n\n".join((self.wording["vt_head"], *self.example, body, self.question))

    def planted(self) -> Iterable[tuple[str, int]]:
        """Yield the number: in its line, in the question and in the opening of the answer."""
        return ((self.chains[0].number, 2 + self.options.prefix - self.absent),)

    @cached_property
    def example(self) -> list[str]:
        """Return a solved example and what leads over, or nothing where the budget is too small for one."""
        rng = self.rng("shots")
        shot = next(chains(rng, letters=3, avoid=self.chains))
        lines = shot.lines(self.wording["let"])
        solved = [
            self.wording["vt_question"].format(number=shot.number),
            self.wording["vt_opening"].format(number=shot.number) + " " + ", ".join(shot.names),
        ]
        fixed = self.cost("\n".join((self.wording["example"], *lines, *solved, self.wording["task"])))
        room = min(self.budget // _EXAMPLE_SHARE, _EXAMPLE_TOKENS + fixed) - fixed
        noise = room // self.cost(self.wording["noise"] + "\n")
        if noise < 1:
            return []
        body = _traced([shot], [self.wording["noise"]] * noise, rng, self.wording["let"])
        return [self.wording["example"], body, "\n".join(solved), self.wording["task"]]


def _traced(drawn: Sequence[Chain], noise: list[str], rng: SplitMix64, wording: str) -> str:
    """Return the lines of noise with every chain in its order; chains interleave."""
    turns = [i for i in range(len(drawn)) for _ in range(_VARIABLES)]
    rng.shuffle(turns)
    lines = [iter(one.lines(wording)) for one in drawn]
    inserts = [next(lines[i]) for i in turns]
    gaps = len(noise) + 1
    # a short example has fewer gaps than lines
    places = [place % gaps for place in rng.sample(max(gaps, len(inserts)), len(inserts))]
    return "\n".join(spread(noise, inserts, places))


def chains(rng: SplitMix64, *, letters: int, avoid: Iterable[Chain] = ()) -> Iterator[Chain]:
    """Yield chains without end; names and numbers are distinct, no name is a word of the lexicon."""
    words = {word.upper() for word in lexicon_words()}
    spent = {text for one in avoid for text in (*one.names, one.number)}

    def fresh(texts: Iterator[str]) -> str:
        text = next(t for t in texts if t not in spent and t not in words)
        spent.add(text)
        return text

    names = ("".join(rng.choice(_LETTERS) for _ in range(letters)) for _ in count())
    numbers = (str(10_000 + rng.below(90_000)) for _ in count())
    while True:
        yield Chain(tuple(fresh(names) for _ in range(_VARIABLES)), fresh(numbers))


class Sizes(NamedTuple):
    """How many words a list has, and how often the common ones and the others come."""

    words: int
    common: int
    other: int


_SHOTS = (Sizes(40, 10, 3), Sizes(20, 3, 1), Sizes(14, 2, 1))
"""Examples of `cwe`, the largest first; the last resort is none."""


class CommonWords(Part):
    """`cwe`: ten words that come more often than all others of a numbered list."""

    gen = 120

    def __init__(self, part: str, request: TaskRequest, tokenizer: PromptTokenizer, index: int) -> None:
        super().__init__(part, request, tokenizer, index)
        self._source = listed_words(self.rng("needle"))
        self._words: list[str] = []
        self.references = tuple(self._first(_COMMON))
        self.opening = self.wording["cwe_opening"]
        self.question = self.wording["cwe_question"]
        self.times = (6, 1) if request.ctx < SHORT_CTX else (30, 3)
        self.fewest = _COMMON + 1

    def unit_tokens(self) -> tuple[float, int]:
        """Return the tokens of the entries that one more word adds: average and largest."""
        likely = max(400, self.budget // (_ENTRY_TOKENS * self.times[1]))
        # invented words come last and cost more, as do larger numbers
        sampled = self._first(likely)[_COMMON :: likely // 200]
        number = likely * self.times[1] // 2
        costs = [self.times[1] * self.cost(f"{number}. {word} ") for word in sampled]
        return sum(costs) / len(costs), max(costs)

    def render(self, units: int) -> str:
        """Return head, solved example, list, question."""
        body = _numbered(self._first(units), *self.times, self.layout())
        return "\n\n".join((self.wording["cwe_head"], *self.example, body, self.question))

    def meta(self, units: int) -> dict[str, Any]:
        """Return the entries of the list."""
        return {"entries": _COMMON * self.times[0] + (units - _COMMON) * self.times[1]}

    @cached_property
    def example(self) -> list[str]:
        """Return the largest solved example that takes a quarter of the budget at most, or nothing."""
        for sizes in _SHOTS[self.request.ctx < SHORT_CTX :]:
            rng = self.rng("shots")
            words = list(islice((w for w in listed_words(rng) if w not in self.references), sizes.words))
            body = _numbered(words, sizes.common, sizes.other, rng)
            solved = "\n".join((self.question, self.opening + " " + ", ".join(words[:_COMMON])))
            parts = [self.wording["example"], body, solved, self.wording["task"]]
            if self.cost("\n\n".join(parts)) <= self.budget // _EXAMPLE_SHARE:
                return parts
        return []

    def _first(self, words: int) -> list[str]:
        self._words += islice(self._source, max(words - len(self._words), 0))
        return self._words[:words]


def _numbered(words: Sequence[str], common: int, other: int, rng: SplitMix64) -> str:
    """Return the list in one line: the first ten words `common` times each, the rest `other` times."""
    entries = [word for word in words[:_COMMON] for _ in range(common)]
    entries += [word for word in words[_COMMON:] for _ in range(other)]
    rng.shuffle(entries)
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))


def listed_words(rng: SplitMix64) -> Iterator[str]:
    """Yield distinct words: those of the lexicon, then invented ones; none contains one of the first ten."""
    known = list(lexicon_words())
    rng.shuffle(known)
    first: list[str] = []
    for word in chain(known, stems(rng, (2, 3, 3, 3))):
        if any(word in other or other in word for other in first):
            continue
        if len(first) < _COMMON:
            first.append(word)
        yield word


class FrequentWords(Part):
    """`fwe`: the three most frequent of many invented words, the dots left aside."""

    gen = 50

    def __init__(self, part: str, request: TaskRequest, tokenizer: PromptTokenizer, index: int) -> None:
        super().__init__(part, request, tokenizer, index)
        source = stems(self.rng("needle"), (3,))
        first = ["...", *islice(source, 3)]
        self.references = tuple(first[1:])
        self.opening = self.wording["fwe_opening"]
        self.words = [*first, *islice(source, max(10, self.budget // 50) - len(first))]
        self.fewest = strict_total(1)

    def unit_tokens(self) -> tuple[float, int]:
        """Return the tokens of a word of the text: average and largest."""
        costs = [self.cost(" " + word) for word in self.words[:100]]
        # more than half of all words are dots
        return 0.6 * costs[0] + 0.4 * sum(costs) / len(costs), max(costs)

    def render(self, units: int) -> str:
        """Return head, text, question."""
        text = [
            word
            for rank, word in enumerate(self.words, 1)
            for _ in range(zipf_count(strict_total(units), rank))
        ]
        self.layout().shuffle(text)
        return "\n\n".join((self.wording["fwe_head"], " ".join(text), self.wording["fwe_question"]))


def zipf_count(total: int, rank: int) -> int:
    """Return how often the word of a rank comes: floor(total * rank^-2 / zeta(2))."""
    return int(total / (rank * rank * _ZETA_2))


def strict_total(total: int) -> int:
    """Return the first number from `total` on with which the fourth word comes more often than the fifth."""
    while zipf_count(total, 4) <= zipf_count(total, 5):
        total += 1
    return total


def check_chains(chains: int) -> None:
    """Raise `SpecError` for a number of chains that `vt` cannot have."""
    if not 1 <= chains <= 100:
        raise SpecError(f"chains={chains} is not allowed", fix="allowed: 1 to 100", id="RCQ-USE-06")
