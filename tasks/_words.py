"""The word lists behind generated text: prose lexicon, needle vocabulary and their inflected forms."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

_WORD = re.compile(r"[A-Za-z]+")
_SLOT = re.compile(r"\{[^}]*\}")
_SIBILANT = ("s", "x", "z", "ch", "sh")
_IRREGULAR = {"calf": "calves", "shelf": "shelves", "wharf": "wharves", "goose": "geese", "mouse": "mice"}


class Verb(NamedTuple):
    """The four forms of a verb that the prose uses."""

    base: str
    past: str
    participle: str
    gerund: str


@cache
def data(name: str) -> Any:
    """Return the parsed file `data/<name>.json`; the caller must not change it."""
    return json.loads((files("rcq_cli.tasks") / "data" / f"{name}.json").read_text("utf-8"))


def has(name: str) -> bool:
    """Return whether `data/<name>.json` exists."""
    return (files("rcq_cli.tasks") / "data" / f"{name}.json").is_file()


def words(lines: list[str]) -> tuple[str, ...]:
    """Return the words of a list that is stored as lines of blank-separated words."""
    return tuple(" ".join(lines).split())


@cache
def lexicon(group: str, kind: str) -> tuple[str, ...]:
    """Return one class of the prose lexicon, e.g. `lexicon("nouns", "boat")`; verbs as their base form."""
    return words(data("lexicon")[group][kind])


@cache
def verbs(kind: str) -> tuple[Verb, ...]:
    """Return one class of verbs with their forms."""
    return tuple(_verb(entry) for line in data("lexicon")["verbs"][kind] for entry in line.split(", "))


def plural(noun: str) -> str:
    """Return the plural of an English noun of the lexicon."""
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if noun.endswith("man"):
        return noun[:-3] + "men"
    if noun.endswith(("knife", "wife")):
        return noun[:-2] + "ves"
    if noun.endswith(_SIBILANT):
        return noun + "es"
    return noun[:-1] + "ies" if _ends_in_consonant_y(noun) else noun + "s"


@cache
def adjectives() -> tuple[str, ...]:
    """Return the first words of needle keys (`amber-kite`): plain lower-case words that no prose contains."""
    return words(data("needles")["adjectives"])


@cache
def nouns() -> tuple[str, ...]:
    """Return the second words of needle keys: plain lower-case words that no prose contains."""
    return words(data("needles")["nouns"])


@cache
def vocabulary() -> tuple[str, ...]:
    """Return every word that prose, needles and prompt wording can produce, sorted and unique.

    Words are runs of ASCII letters; names keep their capital, everything else is lower case.
    """
    found = set(adjectives()) | set(nouns()) | prose_words()
    for name in ("needles", "prompts"):
        if has(name):
            found |= _letters(data(name), skip={"adjectives", "nouns"})
    return tuple(sorted(found))


@cache
def prose_words() -> frozenset[str]:
    """Return every word that generated prose can contain; names capitalised, the rest in lower case."""
    lex = data("lexicon")
    found = {
        word
        for group in ("adjectives", "adverbs", "names")
        for kind in lex[group]
        for word in lexicon(group, kind)
    }
    for kind in lex["nouns"]:
        found |= {form for noun in lexicon("nouns", kind) for form in (noun, plural(noun))}
    for kind in lex["verbs"]:
        found |= {form for verb in verbs(kind) for form in verb}
    return frozenset(found | (_letters(data("patterns"), skip=set()) if has("patterns") else set()))


def _verb(entry: str) -> Verb:
    """Complete `drop dropped` or `carry` to the four forms; a participle equals the past unless given."""
    base, *rest = entry.split()
    past = rest[0] if rest else _regular_past(base)
    participle = rest[1] if len(rest) > 1 else past
    return Verb(base, past, participle, rest[2] if len(rest) > 2 else _gerund(base, past))


def _regular_past(base: str) -> str:
    if base.endswith("e"):
        return base + "d"
    return base[:-1] + "ied" if _ends_in_consonant_y(base) else base + "ed"


def _gerund(base: str, past: str) -> str:
    if past == base + base[-1] + "ed":
        return base + base[-1] + "ing"
    return base[:-1] + "ing" if base.endswith("e") and not base.endswith("ee") else base + "ing"


def _ends_in_consonant_y(word: str) -> bool:
    return word.endswith("y") and word[-2] not in "aeiou"


def _letters(tree: Any, skip: set[str]) -> set[str]:
    """Collect the words of every string value below `tree`, in lower case; keys in `skip` are left out."""
    if isinstance(tree, str):
        return {word.lower() for word in _WORD.findall(_SLOT.sub(" ", tree))}
    if isinstance(tree, dict):
        return set().union(*(_letters(value, skip) for key, value in tree.items() if key not in skip))
    return set().union(*(_letters(value, skip) for value in tree)) if isinstance(tree, list) else set()
