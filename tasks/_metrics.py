"""Metrics with versions; every score lies in [0, 1]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from unicodedata import normalize

_CONTROL = re.compile(r"[\x00-\x1f]")
_THINKING = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL)
# NFKC has turned thin and no-break spaces into plain ones
_GROUP_MARK = re.compile(r"(?<=[0-9])[,_ ](?=[0-9]{3}(?![0-9]))")


def clean(text: str, *, strip_think: bool = False) -> str:
    """Return `text` stripped, each control character as a line break (`clean@1`).

    `strip_think` also removes thinking blocks, an unfinished one to the end.
    """
    if strip_think:
        text = _THINKING.sub("", text)
    return _CONTROL.sub("\n", text.strip()).strip()


def contains(text: str, references: Sequence[str]) -> float:
    """Return the share of references that occur in `text`, case ignored (`contains@1`)."""
    low = text.lower()
    return sum(reference.lower() in low for reference in references) / len(references)


def contains_any(text: str, references: Sequence[str]) -> float:
    """Return 1 if any reference occurs in `text`, case ignored, else 0 (`contains_any@1`)."""
    low = text.lower()
    return float(any(reference.lower() in low for reference in references))


def bounded(text: str, references: Sequence[str]) -> float:
    """Return the share of references that stand in `text`, no digit or letter touching them (`bounded@1`).

    Compared after NFKC and case folding, without the marks between a digit and a full group of three.
    """
    plain = _plain(text)
    return sum(_stands_in(_plain(reference), plain) for reference in references) / len(references)


def _plain(text: str) -> str:
    return _GROUP_MARK.sub("", normalize("NFKC", text).casefold())


def _stands_in(reference: str, text: str) -> bool:
    return re.search(rf"(?<![0-9a-z]){re.escape(reference)}(?![0-9a-z])", text) is not None
