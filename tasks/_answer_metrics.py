"""Metrics of answers in words, with versions; every score lies in [0, 1]."""

from __future__ import annotations

import logging
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from rcq_cli.errors import UnsupportedHere

Splitter = Callable[[str], list[str]]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
_INTEGER = re.compile(r"\d+")
_LETTER = re.compile(r"\(?([A-D])\)?\.?", re.IGNORECASE)
_STATED = re.compile(r"answer is:?\s*\(?([A-D])\b", re.IGNORECASE)
_WORD = re.compile(r"\w+")


class Answered(NamedTuple):
    """A cleaned answer and what belongs to its question."""

    text: str
    reference: str
    classes: tuple[str, ...] = ()


def qa_words(text: str) -> list[str]:
    """Return lower-case words without ASCII punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_ASCII_PUNCTUATION)).split()


def rouge_words(text: str) -> list[str]:
    """Return lower-case runs of letters, digits and underscores."""
    return _WORD.findall(text.lower())


def segmented(text: str) -> list[str]:
    """Return the words of Chinese text, lower-case, without punctuation; `UnsupportedHere` without jieba."""
    jieba = require_jieba()
    return [word for part in jieba.cut(text.lower(), HMM=False) for word in _WORD.findall(part)]


def require_jieba() -> Any:
    """Return the package that segments Chinese text; raise `UnsupportedHere` when it is not installed."""
    try:
        import jieba
    except ImportError as error:
        raise UnsupportedHere(
            "a metric on Chinese text needs the package jieba",
            why="whole sentences would count as single words without it",
            fix="pip install jieba, or name the parts to run: --task longbench/qasper,longbench/trec",
            id="RCQ-ENV-21",
        ) from error
    # it logs the loading of its dictionary to stderr, four lines of no use to anyone
    logging.getLogger("jieba").setLevel(logging.WARNING)
    return jieba


def require_rouge() -> Any:
    """Return the package behind `rouge_l@pkg`; raise `UnsupportedHere` when it is not installed."""
    try:
        import rouge
    except ImportError as error:
        raise UnsupportedHere(
            "the metric rouge_l@pkg needs the package rouge",
            why=str(error),
            fix="pip install rouge, or leave -T rouge=package out: rouge_l@1 needs no package",
            id="RCQ-ENV-21",
        ) from error
    return rouge


def f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    """Return the F1 of two bags of words, 0 without a common one."""
    same = (Counter(found) & Counter(wanted)).total()
    return 2 * same / (len(found) + len(wanted)) if same else 0.0


def lcs_f1(found: Sequence[Hashable], wanted: Sequence[Hashable]) -> float:
    """Return 2 LCS / (|found| + |wanted|), 0 where either is empty."""
    return 2 * lcs(found, wanted) / (len(found) + len(wanted)) if found and wanted else 0.0


def lcs(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return the length of the longest common subsequence (bit-parallel; H. Hyyro, 2004)."""
    places: dict[Hashable, int] = {}
    for i, item in enumerate(one):
        places[item] = places.get(item, 0) | 1 << i
    full = row = (1 << len(one)) - 1
    for item in other:
        match = row & places.get(item, 0)
        row = ((row + match) | (row - match)) & full
    return len(one) - row.bit_count()


def qa_f1(answer: Answered) -> float:
    """Return the F1 over words (`qa_f1@1`)."""
    return f1(qa_words(answer.text), qa_words(answer.reference))


def rouge_l(answer: Answered) -> float:
    """Return the F1 over the longest common subsequence of words (`rouge_l@1`)."""
    return lcs_f1(rouge_words(answer.text), rouge_words(answer.reference))


def rouge_l_pkg(answer: Answered) -> float:
    """Return the sentence-level union F of the package `rouge` (`rouge_l@pkg`), 0 where a text has no words.

    The package ends a sentence at every full stop.
    """
    return _packaged_rouge(answer.text, answer.reference)


def rouge_l_pkg_segmented(answer: Answered) -> float:
    """Return `rouge_l_pkg` over segmented words."""
    return _packaged_rouge(*(" ".join(segmented(text)) for text in (answer.text, answer.reference)))


def _packaged_rouge(text: str, reference: str) -> float:
    scorer = require_rouge().Rouge(metrics=["rouge-l"])
    if not all(any(sentence.split() for sentence in each.split(".")) for each in (text, reference)):
        return 0.0
    # the package walks the table of a long text by recursion, one call a word
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 2 * (len(text.split()) + len(reference.split())))
    try:
        return float(scorer.get_scores(text, reference)[0]["rouge-l"]["f"])
    finally:
        sys.setrecursionlimit(before)


def qa_f1_segmented(answer: Answered) -> float:
    """Return `qa_f1` over segmented words."""
    return f1(segmented(answer.text), segmented(answer.reference))


def rouge_l_segmented(answer: Answered) -> float:
    """Return `rouge_l` over segmented words."""
    return lcs_f1(segmented(answer.text), segmented(answer.reference))


def classification(answer: Answered) -> float:
    """Return 1 / number of class names in the text if the right one is among them (`classification@1`).

    Names that are part of the right name do not count.
    """
    gold = answer.reference
    named = [name for name in answer.classes if name in answer.text and (name == gold or name not in gold)]
    return 1 / len(named) if gold in named else 0.0


def integers(answer: Answered) -> float:
    """Return the share of the integers in the text that are the right one (`para_id@1`, `count@1`)."""
    found = [int(number) for number in _INTEGER.findall(answer.text)]
    wanted = _INTEGER.search(answer.reference)
    return found.count(int(wanted[0])) / len(found) if found and wanted else 0.0


def code_sim(answer: Answered) -> float:
    """Return the similarity 2 LCS / total of characters of the first line of code (`code_sim@1`)."""
    lines = (line for line in answer.text.split("\n") if line.strip())
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return lcs_f1(line, answer.reference)


def choice(answer: Answered) -> float:
    """Return 1 if the letter last stated as the answer is the right one (`choice@1`); no letter is wrong."""
    text = answer.text.replace("*", "")
    stated = _STATED.findall(text)
    alone = _LETTER.fullmatch(text.strip())
    letter = stated[-1] if stated else alone[1] if alone else ""
    return float(letter.upper() == answer.reference)


METRICS: Mapping[str, Callable[[Answered], float]] = MappingProxyType(
    {
        "qa_f1": qa_f1,
        "qa_f1_segmented": qa_f1_segmented,
        "rouge_l": rouge_l,
        "rouge_l_segmented": rouge_l_segmented,
        "rouge_l_pkg": rouge_l_pkg,
        "rouge_l_pkg_segmented": rouge_l_pkg_segmented,
        "classification": classification,
        "para_id": integers,
        "count": integers,
        "code_sim": code_sim,
        "choice": choice,
    }
)
"""Every metric by its name without the version, which is 1."""
