"""Filler text of one sample: sentences and their cost in tokens, cut to a length, needles put in."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from rcq_cli.errors import BrokenRun
from rcq_cli.protocols import EncodedPrompt, PromptTokenizer

_RATE_SENTENCES = 40
_MARGIN = 1.02


class Insert(NamedTuple):
    """A sentence to put between others."""

    text: str
    tokens: int
    """Its cost as a fragment, blank included."""
    place: float
    """Where in the text, 0 before the first and 1 after the last sentence."""


class Body(NamedTuple):
    """The haystack with everything in it, as running text."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """First character and end of each needle in `text`."""


class Haystack:
    """Sentences in a fixed order, pulled from their source when they are needed.

    The unit is the word: `cut(n)` is a prefix of `cut(n + 1)` but for the full stop of a cut sentence.
    """

    def __init__(self, source: Iterable[tuple[str, bool]], tokenizer: PromptTokenizer) -> None:
        self._source: Iterator[tuple[str, bool]] = iter(source)
        self._tokenizer = tokenizer
        self._sentences: list[str] = []
        self._repeats_from: int | None = None
        self._words = [0]  # words before sentence i, one entry more than sentences
        self._tokens = [0]  # tokens before sentence i, for those whose cost is known
        self._costs: dict[str, int] = {}

    def words_of(self, sentences: int) -> int:
        """Return how many words the first sentences hold (all of them, if the source has fewer)."""
        while len(self._sentences) < sentences and self._pull():
            pass
        return self._words[min(sentences, len(self._sentences))]

    def exhausted_at(self, words: int) -> int | None:
        """Return the words of the whole source if it has fewer than `words`, else None."""
        while self._words[-1] < words and self._pull():
            pass
        return None if self._words[-1] >= words else self._words[-1]

    def repeats(self, words: int) -> bool:
        """Return whether the first `words` words hold a sentence that the source had given before."""
        return self._repeats_from is not None and words > self._words[self._repeats_from]

    def measure(self, tokens: int, encode: Callable[[str], EncodedPrompt]) -> None:
        """Learn the cost of enough sentences for `tokens` tokens from one encoding of their running text."""
        sample = " ".join(self._first(_RATE_SENTENCES))
        rate = max(len(self._tokenizer.encode(sample)), 1) / (sample.count(" ") + 1)
        while self._tokens[-1] < tokens:
            missing = _MARGIN * (tokens - self._tokens[-1]) / rate
            if self.exhausted_at(self._words[len(self._tokens) - 1] + int(missing) + 64) is not None:
                self._read_costs(encode)
                return
            self._read_costs(encode)

    def cost(self, words: int) -> int:
        """Return about how many tokens the first `words` words take."""
        sentence, inside = self._locate(words)
        self._know(sentence + 1)
        parts = self._sentences[sentence].split()[:inside] if inside else []
        # a cut sentence gets a full stop of its own
        return self._tokens[sentence] + sum(map(self._word_cost, parts)) + bool(parts)

    def advance(self, words: int, tokens: int) -> int:
        """Return about how many words take `tokens` tokens more than the first `words` words do."""
        target = self.cost(words) + tokens
        while self._tokens[-1] <= target and self._know(len(self._tokens)):
            pass
        sentence = max(bisect_right(self._tokens, target) - 1, 0)
        if sentence >= len(self._sentences):
            return self._words[-1]
        spent, found = self._tokens[sentence] + 1, self._words[sentence]
        for word in self._sentences[sentence].split():
            spent += self._word_cost(word)
            if spent > target:
                break
            found += 1
        return found

    def largest_word(self) -> int:
        """Return the tokens of the longest word near the start, the unit of the filling."""
        return max(
            self._word_cost(word) for sentence in self._first(_RATE_SENTENCES) for word in sentence.split()
        )

    def cut(self, words: int) -> tuple[list[str], list[int]]:
        """Return the first `words` words as sentences, the last one cut short, and the tokens of each."""
        sentence, inside = self._locate(words)
        self._know(sentence)
        texts = self._sentences[:sentence]
        costs = [
            after - before
            for before, after in zip(self._tokens, self._tokens[1 : sentence + 1], strict=False)
        ]
        if inside:
            texts = [*texts, _cut_short(self._sentences[sentence], inside)]
            costs.append(self.cost(words) - self._tokens[sentence])
        return texts, costs

    def _pull(self) -> bool:
        item = next(self._source, None)
        if item is None:
            return False
        sentence, again = item
        if again and self._repeats_from is None:
            self._repeats_from = len(self._sentences)
        self._sentences.append(sentence)
        self._words.append(self._words[-1] + len(sentence.split()))
        return True

    def _first(self, sentences: int) -> list[str]:
        self.words_of(sentences)
        return self._sentences[:sentences]

    def _locate(self, words: int) -> tuple[int, int]:
        """Return how many whole sentences the first `words` words hold, and how many words of the next."""
        self.exhausted_at(words)
        sentence = bisect_right(self._words, words) - 1
        return sentence, words - self._words[sentence]

    def _know(self, sentences: int) -> bool:
        """Estimate costs not measured by encoding each sentence alone; return whether there are so many."""
        self.words_of(sentences)
        for sentence in self._sentences[len(self._tokens) - 1 : sentences]:
            self._tokens.append(self._tokens[-1] + self._fragment_cost(sentence))
        return len(self._tokens) > sentences

    def _read_costs(self, encode: Callable[[str], EncodedPrompt]) -> None:
        text = " ".join(self._sentences)
        prompt = encode(text)
        start = find(prompt, text)
        first, end = token_at(prompt, start), start - 1
        self._tokens = [0]
        for sentence in self._sentences:
            # the blank after a sentence belongs to the next one
            end += len(sentence) + 1
            self._tokens.append(token_at(prompt, end) - first)

    def _fragment_cost(self, text: str) -> int:
        return len(self._tokenizer.encode(" " + text))

    def _word_cost(self, word: str) -> int:
        if word not in self._costs:
            self._costs[word] = self._fragment_cost(word)
        return self._costs[word]


def insert(
    sentences: Sequence[str], costs: Sequence[int], decoys: Sequence[Insert], needles: Sequence[Insert]
) -> Body:
    """Put decoys, then needles between sentences and return the running text.

    A decoy goes to a place by the count of sentences. A needle goes where the tokens before it come nearest
    to `place` of all tokens, the decoys among them; of two equally near gaps the first.
    """
    gap = [int(decoy.place * (len(sentences) + 1)) for decoy in decoys]
    order = sorted(range(len(decoys)), key=gap.__getitem__)
    merged, weights = list(sentences), list(costs)
    for i in reversed(order):
        merged.insert(gap[i], decoys[i].text)
        weights.insert(gap[i], decoys[i].tokens)
    before = [0]
    for weight in weights:
        before.append(before[-1] + weight)
    gaps = [_nearest(before, needle.place * before[-1]) for needle in needles]
    return _join(merged, gaps, [needle.text for needle in needles])


def find(prompt: EncodedPrompt, text: str) -> int:
    """Return the character at which `text` starts in the rendered prompt; raise `BrokenRun` without it."""
    position = prompt.text.find(text)
    if position < 0:
        raise BrokenRun(
            "the chat template changed the text of the prompt", fix="use -T chat=off", id="RCQ-RUN-20"
        )
    return position


def token_at(prompt: EncodedPrompt, character: int) -> int:
    """Return the index of the first token that starts at `character` or later."""
    return bisect_left(prompt.starts, character)


def _nearest(before: Sequence[int], target: float) -> int:
    after = bisect_left(before, target)
    if after == 0 or after == len(before):
        return min(after, len(before) - 1)
    return after if before[after] - target < target - before[after - 1] else after - 1


def _join(sentences: Sequence[str], gaps: Sequence[int], needles: Sequence[str]) -> Body:
    """Join everything with single blanks; needles of one gap keep their order."""
    spans: list[tuple[int, int]] = [(0, 0)] * len(needles)
    parts: list[str] = []
    position = 0
    by_gap: dict[int, list[int]] = {}
    for i, gap in enumerate(gaps):
        by_gap.setdefault(gap, []).append(i)
    for gap in range(len(sentences) + 1):
        for i in by_gap.get(gap, ()):
            spans[i] = (position, position + len(needles[i]))
            parts.append(needles[i])
            position += len(needles[i]) + 1
        if gap < len(sentences):
            parts.append(sentences[gap])
            position += len(sentences[gap]) + 1
    return Body(" ".join(parts), tuple(spans))


def _cut_short(sentence: str, words: int) -> str:
    """Return the first words of `sentence` as a sentence: full stop, quotation closed."""
    text = " ".join(sentence.split()[:words]).rstrip(',;:.!?"') + "."
    return text + '"' if text.count('"') % 2 else text
