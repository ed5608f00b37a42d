"""Which parts of a text later stages came back to, read from token ids and stage boundaries alone.

A token that lies dormant gets the attention of a background token, so no score made of attention history can
tell the two apart; once evicted it can never earn attention again. Ids and stages can: a unit (a sentence or
line) whose rare words return in a stage is linked to it. The definitions are rcq's; the RECAS paper names
stage evidence without defining it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

RECENT_STEPS, LONGER_STEPS = 8, 64
"""Reach of the two mean queries whose angle shows a turn."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Where units and stages end, and what makes a link."""

    unit_tokens: int = 64
    """Longest unit of a text."""
    plain_unit_tokens: int = 16
    """Length of a unit where no text is known."""
    shortest_stage_tokens: int = 32
    longest_stage_tokens: int = 512
    cues: tuple[str, ...] = ()
    """Words that begin a stage where they begin a sentence, lower case."""
    least_link: float = 0.3
    most_links: int = 16
    """Units linked per transition at most."""
    common_share: float = 0.01
    """Share of the most frequent ids that carry no content."""
    turn: float = 0.15
    """1 - cosine of the recent and the longer mean query beyond which a stage ends, on two steps in a row."""


class StageTracker:
    """Units, stages and links of one sequence, token by token.

    `text_of` gives the text of an id; without it units are blocks and stages end by length and by turn of
    the conversation alone. `turn_ends` are the ids that close such a turn. The outcome depends on the ids and
    nothing else: links are evaluated in float64, ties go to the lower unit.
    """

    def __init__(
        self,
        text_of: Callable[[int], str] | None = None,
        rules: Rules | None = None,
        turn_ends: Collection[int] = (),
    ) -> None:
        self.rules = rules or Rules()
        self.text_of = text_of
        self.turn_ends = frozenset(turn_ends)
        self.transitions = 0
        self._unit_of: list[int] = []
        self._stage_of_unit: list[int] = []
        self._ids: list[int] = []
        self._counts: list[int] = []
        self._unit_start = self._stage_start = 0
        self._sentence_ended = True
        self._newlines = 0
        self._turn_ended = False
        self._texts: dict[int, str] = {}
        self._recent: Floats | None = None
        self._longer: Floats | None = None
        self._turned_steps = 0

    @property
    def tokens(self) -> int:
        """Return the tokens read."""
        return len(self._ids)

    def read(self, ids: Sequence[int]) -> None:
        """Take the next tokens of the sequence."""
        for token in ids:
            text = self._text(token)
            if self._opens_stage(text):
                self.close()
            self._ids.append(token)
            if len(self._unit_of) == self._unit_start:
                self._stage_of_unit.append(self.transitions)
                self._counts.append(0)
            self._unit_of.append(len(self._stage_of_unit) - 1)
            self._follow(text)
            self._turn_ended = token in self.turn_ends

    def close(self) -> None:
        """End the present stage, if it holds a token: count a revisit for every unit it came back to.

        The end of a prompt is such an end too: what its last lines ask for must count before the first
        eviction.
        """
        if self.tokens == self._stage_start:
            return
        for unit in self._revisited():
            self._counts[unit] += 1
        self.transitions += 1
        self._stage_start = self._unit_start = self.tokens

    def turn(self, query: Floats) -> None:
        """Take the query of one decode step, `[D]` before RoPE, a mean over heads.

        Where its mean over some 8 steps has turned away from that over some 64 on two steps in a row, the
        stage ends before the next token, unless it is too short.
        """
        if self._recent is None or self._longer is None:
            self._recent = self._longer = query
        self._recent = self._recent + (query - self._recent) / RECENT_STEPS
        self._longer = self._longer + (query - self._longer) / LONGER_STEPS
        size = float(np.linalg.norm(self._recent) * np.linalg.norm(self._longer))
        turned = 1 - float(self._recent @ self._longer / max(size, 1e-300)) > self.rules.turn
        self._turned_steps = self._turned_steps + 1 if turned else 0

    def links(self) -> Floats:
        """Return how many stages came back to each token's unit, `[n]`."""
        return np.asarray(self._counts, dtype=np.float64)[np.asarray(self._unit_of, dtype=np.int64)]

    def units(self) -> Ints:
        """Return the unit of each token, `[n]`, fixed when the token arrived."""
        return np.asarray(self._unit_of, dtype=np.int64)

    def credit(self, tokens: Ints) -> None:
        """Raise the links of these tokens' units to one: something has just needed them."""
        for unit in {self._unit_of[token] for token in tokens.tolist()}:
            self._counts[unit] = max(1, self._counts[unit])

    def fork(self) -> StageTracker:
        """Return an independent copy."""
        twin = StageTracker(self.text_of, replace(self.rules))
        for name, value in vars(self).items():
            setattr(twin, name, list(value) if isinstance(value, list) else value)
        return twin

    # -- boundaries -----------------------------------------------------------------------------------------

    def _text(self, token: int) -> str:
        if self.text_of is None:
            return ""
        if token not in self._texts:
            self._texts[token] = self.text_of(token)
        return self._texts[token]

    def _opens_stage(self, text: str) -> bool:
        """Whether a stage ends before this token: a paragraph, list item, cue, turn or the longest stage."""
        length = self.tokens - self._stage_start
        # a question may be short; in a stage of its own it links what it asks for and nothing else
        if self._turn_ended or length >= self.rules.longest_stage_tokens:
            return True
        if length < self.rules.shortest_stage_tokens:
            return False
        if self._turned_steps >= 2:
            # the new stage is measured against the query it begins with
            self._longer, self._turned_steps = self._recent, 0
            return True
        if self.text_of is None:
            return False
        word = text.strip()
        if self._newlines >= 2:
            return True
        if self._newlines == 1 and (word[:1] in ("-", "*", "#") or word.rstrip(".)").isdigit()):
            return True
        return self._sentence_ended and word.lower() in self.rules.cues

    def _follow(self, text: str) -> None:
        """End the unit after a newline or a sentence, or when it is full."""
        blank = not text.strip()
        self._newlines = text.count("\n") + (self._newlines if blank else 0)
        self._sentence_ended = "\n" in text or text.rstrip().endswith((".", "!", "?"))
        longest = self.rules.unit_tokens if self.text_of else self.rules.plain_unit_tokens
        if self._sentence_ended or self.tokens - self._unit_start >= longest:
            self._unit_start = self.tokens

    # -- links ----------------------------------------------------------------------------------------------

    def _revisited(self) -> Ints:
        words, index = np.unique(np.asarray(self._ids, dtype=np.int64), return_inverse=True)
        allowed = self._content(words, np.bincount(index))
        units = len(self._stage_of_unit)
        # distinct (unit, word) pairs; a unit repeats a word without gaining by it
        pairs = np.unique(np.asarray(self._unit_of, dtype=np.int64) * len(words) + index)
        unit, word = np.divmod(pairs, len(words))
        unit, word = unit[allowed[word]], word[allowed[word]]
        holders = np.bincount(word, minlength=len(words))
        rarity = np.log((1 + units) / (1 + holders))
        stage = np.asarray(self._stage_of_unit, dtype=np.int64)
        here = stage[unit] == self.transitions
        in_stage = np.bincount(word[here], minlength=len(words))
        # a unit of this stage must find its words in another unit of it
        found = in_stage[word] > here
        total = np.bincount(unit, rarity[word], units)
        link = np.bincount(unit, rarity[word] * found, units) / np.maximum(total, 1e-9)
        best = np.argsort(-link, kind="stable")[: self.rules.most_links]
        return best[link[best] >= self.rules.least_link]

    def _content(self, words: Ints, counts: Ints) -> NDArray[np.bool_]:
        """Whether each distinct id carries content: it is neither too frequent nor shorter than 2 letters."""
        allowed = np.ones(len(words), dtype=bool)
        common = np.argsort(-counts, kind="stable")[: int(self.rules.common_share * len(words))]
        allowed[common] = False
        if self.text_of is not None:
            allowed &= np.array([len(self._text(int(word)).strip()) >= 2 for word in words])
        return allowed
