"""Question files of the user for `ruler`: SQuAD 2.0 and HotpotQA (distractor setting)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from rcq_cli.errors import SpecError
from rcq_cli.tasks._splitmix import SplitMix64, seed


class Question(NamedTuple):
    """One question of a file; documents are numbers of the file's documents."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...]
    """Documents of the same article or of the same distractor set."""
    cluster: str


@dataclass(frozen=True)
class Questions:
    """Everything of one file."""

    source: str
    sha256: str
    documents: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class FileCase:
    """Question `index` of a file, in the order that the seed draws."""

    file: Questions
    asked: Question
    seed: int

    @property
    def question(self) -> str:
        """Return the question."""
        return self.asked.text

    @property
    def answers(self) -> tuple[str, ...]:
        """Return every reference of the file."""
        return self.asked.answers

    @property
    def gold(self) -> tuple[str, ...]:
        """Return the documents that answer."""
        return tuple(self.file.documents[i] for i in self.asked.gold)

    @property
    def cluster(self) -> str:
        """Return the article."""
        return self.asked.cluster

    @property
    def source(self) -> str:
        """Return `squad` or `hotpot`."""
        return self.file.source

    @property
    def sha256(self) -> str:
        """Return the digest of the file."""
        return self.file.sha256

    def others(self) -> Iterator[tuple[str, bool]]:
        """Yield the near documents, then all others in a drawn order, then everything again."""
        rng = SplitMix64(self.seed)
        near, rest = (
            list(self.asked.near),
            [i for i in range(len(self.file.documents)) if i not in {*self.asked.gold, *self.asked.near}],
        )
        rng.shuffle(near)
        rng.shuffle(rest)
        for turn in count():
            for i in (*near, *rest):
                yield self.file.documents[i], turn > 0
            if not near and not rest:
                return


def squad(path: str, base: int, index: int) -> FileCase:
    """Return question `index` of a SQuAD 2.0 file; only questions with an answer are asked.

    Raises `SpecError` for a file that is not there or has another form.
    """
    return _case(_squad(path), base, index, "qa_1")


def hotpot(path: str, base: int, index: int) -> FileCase:
    """Return question `index` of a HotpotQA distractor file, like `squad`."""
    return _case(_hotpot(path), base, index, "qa_2")


def _case(file: Questions, base: int, index: int, part: str) -> FileCase:
    order = list(range(len(file.questions)))
    SplitMix64(seed(base, f"ruler.{part}", 0, "questions")).shuffle(order)
    asked = file.questions[order[index % len(order)]]
    return FileCase(file, asked, seed(base, f"ruler.{part}", index, "haystack"))


@lru_cache(maxsize=2)
def _squad(path: str) -> Questions:
    raw, tree = _read(path, "squad")
    documents: list[str] = []
    questions: list[Question] = []
    try:
        for article in tree["data"]:
            first = len(documents)
            documents += [f"{article['title']}\n{entry['context']}" for entry in article["paragraphs"]]
            here = range(first, len(documents))
            for i, entry in zip(here, article["paragraphs"], strict=True):
                near = tuple(j for j in here if j != i)
                questions += [
                    Question(
                        _text(q["question"]),
                        _distinct(_text(a["text"]) for a in q["answers"]),
                        (i,),
                        near,
                        _text(article["title"]),
                    )
                    for q in entry["qas"]
                    if q["answers"] and not q.get("is_impossible", False)
                ]
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(path, "squad", f"it is no SQuAD 2.0 file ({type(error).__name__}: {error})") from error
    return _checked(path, "squad", raw, documents, questions)


@lru_cache(maxsize=2)
def _hotpot(path: str) -> Questions:
    raw, tree = _read(path, "hotpot")
    numbers: dict[str, int] = {}
    questions = []
    try:
        for entry in tree:
            texts = {title: f"{title}\n{''.join(sentences).strip()}" for title, sentences in entry["context"]}
            own = {title: numbers.setdefault(text, len(numbers)) for title, text in texts.items()}
            titles = list(dict.fromkeys(title for title, _ in entry["supporting_facts"] if title in own))
            near = tuple(number for title, number in own.items() if title not in titles)
            gold = tuple(own[title] for title in titles)
            asked, answer = _text(entry["question"]), _text(entry["answer"])
            questions.append(Question(asked, (answer,), gold, near, titles[0]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise _refused(path, "hotpot", f"it is no HotpotQA file ({type(error).__name__}: {error})") from error
    return _checked(path, "hotpot", raw, list(numbers), questions)


def _read(path: str, option: str) -> tuple[bytes, Any]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise _refused(path, option, "there is no such file")
    raw = file.read_bytes()
    try:
        return raw, json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _refused(path, option, f"it is no JSON ({error})") from error


def _checked(
    path: str, option: str, raw: bytes, documents: Sequence[str], questions: Sequence[Question]
) -> Questions:
    if not questions:
        raise _refused(path, option, "it holds no question with an answer")
    return Questions(option, sha256(raw).hexdigest(), tuple(documents), tuple(questions))


def _text(value: Any) -> str:
    """Return a text that says something: an empty answer would be found in every other."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r:.40} is no text")
    return value


def _distinct(texts: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _refused(path: str, option: str, why: str) -> SpecError:
    kind = {"squad": "the SQuAD 2.0 dev file", "hotpot": "the HotpotQA dev distractor file"}[option]
    return SpecError(
        f"{option}={path} cannot be used", why, f"give {kind}, or leave {option} out", "RCQ-USE-21"
    )
