"""Filler of a prompt in a fixed order (lines, sentences, documents), cut to a number of words."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice

_WORD = re.compile(r"\S+")


class Units:
    """Texts pulled from their source when they are needed, each with whether the source repeats itself.

    `first(n)` is a prefix of `first(n + 1)` but for the end of a text cut short.
    """

    def __init__(self, source: Iterable[tuple[str, bool]]) -> None:
        self._source: Iterator[tuple[str, bool]] = iter(source)
        self._texts: list[str] = []
        self._words = [0]  # words before text i, one entry more than texts
        self._repeats_from: int | None = None

    def words_of(self, texts: int) -> int:
        """Return how many words the first texts hold (all of them, if the source has fewer)."""
        while len(self._texts) < texts and self._pull():
            pass
        return self._words[min(texts, len(self._texts))]

    def exhausted_at(self, words: int) -> int | None:
        """Return the words of the whole source if it has fewer than `words`, else None."""
        while self._words[-1] < words and self._pull():
            pass
        return None if self._words[-1] >= words else self._words[-1]

    def repeats(self, words: int) -> bool:
        """Return whether the first `words` words hold a text that the source had given before."""
        return self._repeats_from is not None and words > self._words[self._repeats_from]

    def first(self, words: int) -> list[str]:
        """Return the first `words` words as texts, the last one cut short."""
        self.exhausted_at(words)
        whole = bisect_right(self._words, words) - 1
        inside = words - self._words[whole]
        cut = [cut_short(self._texts[whole], inside)] if inside and whole < len(self._texts) else []
        return self._texts[:whole] + cut

    def _pull(self) -> bool:
        text, again = next(self._source, ("", False))
        if not text:
            return False
        if again and self._repeats_from is None:
            self._repeats_from = len(self._texts)
        self._texts.append(text)
        self._words.append(self._words[-1] + len(text.split()))
        return True


def cut_short(text: str, words: int) -> str:
    """Return the first words of `text` with a full stop and closed quotation marks."""
    last = next(islice(_WORD.finditer(text), words - 1, None))
    short = text[: last.end()].rstrip(',;:.!?"') + "."
    return short + '"' if short.count('"') % 2 else short
