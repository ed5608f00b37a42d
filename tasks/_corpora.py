"""Where haystacks and books come from: procedural prose, or text files of the user."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from unicodedata import normalize

from rcq_cli.errors import SpecError
from rcq_cli.tasks import _prose
from rcq_cli.tasks._hub import parquet_texts, snapshot, split_files
from rcq_cli.tasks._packaged import names, packaged_texts, unknown_edition
from rcq_cli.tasks._splitmix import SplitMix64
from rcq_cli.tasks._words import adjectives, nouns

SPLITTER = "split@1"
_FIRST_PARAGRAPHS = 4096
_SUFFIXES = (".txt", ".txt.gz", ".jsonl")
_TITLES = "Mr|Mrs|Ms|Messrs|Dr|St|Rev|Hon|Capt|Col|Gen|Lt|Sgt|Maj|Prof|Esq|Jr|Sr"
_ABBREVIATED = re.compile(rf"\b(?:{_TITLES}|No|Vol|Mt|Co|Ltd|vs|etc|viz|cf|[A-HJ-Za-z])\.$")
_BREAK = re.compile(r"""(?<=[.!?])["'\u201d\u2019)]* +(?=["'\u201c\u2018(]?(\S))""")
_BLANKS = re.compile(r"[^\S\n]+")
_HEADER = re.compile(r"\A.*?^\*\*\* ?START OF TH[^\n]*\*\*\*$", re.DOTALL | re.MULTILINE)
_TRAILER = re.compile(r"^\*\*\* ?END OF TH[^\n]*\*\*\*$.*\Z", re.DOTALL | re.MULTILINE)


class Corpus(Protocol):
    """A source of sentences for haystacks and of books for perplexity."""

    @property
    def name(self) -> str:
        """Return what the user called it."""

    @property
    def kind(self) -> str:
        """Return `procedural` or `local`."""

    @property
    def sha256(self) -> str:
        """Return a digest of the normalised text; of procedural prose one of all it is made from."""

    def sentences(self, rng: SplitMix64, *, repeat: bool = True) -> Iterator[tuple[str, bool]]:
        """Yield sentences from a drawn place on, each with whether the source has begun to repeat itself.

        With `repeat` off a finite source ends when every sentence came once.
        """

    def books(self) -> Iterator[tuple[str, str]]:
        """Yield name and text of each book."""

    def paragraphs(self) -> Iterator[tuple[str, Iterator[str]]]:
        """Yield name and paragraphs of each book; nothing is read before it is asked for."""

    def holds(self, text: str) -> bool:
        """Return whether `text` (lower case) occurs anywhere in the source."""


class Builtin:
    """Procedural prose; no end, no digit, no needle word."""

    name, kind = "builtin", "procedural"

    @property
    def sha256(self) -> str:
        """Return the digest of version, lexicon and patterns."""
        return _prose.source_sha256()

    def sentences(self, rng: SplitMix64, *, repeat: bool = True) -> Iterator[tuple[str, bool]]:  # noqa: ARG002
        """Yield sentences from a drawn paragraph of a drawn book on; none comes twice."""
        book, first = rng.below(_prose.BOOKS), rng.below(_FIRST_PARAGRAPHS)
        seen: set[str] = set()
        for number in count(first):
            for sentence in _prose.paragraph(book, number):
                if sentence not in seen:
                    seen.add(sentence)
                    yield sentence, False

    def books(self) -> Iterator[tuple[str, str]]:
        """Yield the 64 books of 160 000 words each."""
        for index in range(_prose.BOOKS):
            yield f"builtin-{index}", "\n\n".join(_prose.book(index))

    def paragraphs(self) -> Iterator[tuple[str, Iterator[str]]]:
        """Yield the books paragraph by paragraph."""
        return ((f"builtin-{index}", _prose.book(index)) for index in range(_prose.BOOKS))

    def holds(self, text: str) -> bool:
        """Return whether prose could contain `text`: it has no digits and no needle words."""
        parts = re.findall(r"[a-z]+", text)
        return not re.search(r"\d", text) and not any(part in _needle_words() for part in parts)


@dataclass(frozen=True)
class Local:
    """Text files; one file is one book."""

    name: str
    texts: tuple[tuple[str, str], ...]
    """Name and normalised text of each book, in reading order."""
    stripped: tuple[str, ...]
    """Books whose public-domain header or trailer was cut."""
    kind = "local"

    @cached_property
    def sha256(self) -> str:
        """Return the digest of the normalised text."""
        return sha256("\n\n".join(text for _, text in self.texts).encode()).hexdigest()

    @cached_property
    def _sentences(self) -> tuple[str, ...]:
        return tuple(
            s for _, text in self.texts for block in text.split("\n\n") for s in split_sentences(block)
        )

    @cached_property
    def _lower(self) -> str:
        return "\n".join(text.lower() for _, text in self.texts)

    def sentences(self, rng: SplitMix64, *, repeat: bool = True) -> Iterator[tuple[str, bool]]:
        """Yield sentences from a drawn one on, round and round."""
        total = len(self._sentences)
        first = rng.below(total)
        for number in count():
            if number >= total and not repeat:
                return
            yield self._sentences[(first + number) % total], number >= total

    def books(self) -> Iterator[tuple[str, str]]:
        """Yield the files in order."""
        yield from self.texts

    def paragraphs(self) -> Iterator[tuple[str, Iterator[str]]]:
        """Yield the files in order, paragraph by paragraph."""
        return ((name, iter(text.split("\n\n"))) for name, text in self.texts)

    def holds(self, text: str) -> bool:
        """Return whether `text` occurs in any file, case ignored."""
        return text in self._lower


@lru_cache(maxsize=4)
def open_corpus(spec: str, *, online: bool = False) -> Corpus:
    """Return the corpus of a spec: `builtin`, `austen`, `austen:FILE`, `hf:OWNER/NAME`, paths with commas.

    Nothing is fetched unless `online`. Raises `SpecError` for a path that is not there or holds no readable
    text, `UnsupportedHere` for a corpus that this machine cannot provide.
    """
    if spec == "builtin":
        return Builtin()
    name, _, rest = spec.partition(":")
    if name == "hf":
        return _read_hub(spec, rest, online=online)
    if name in names():
        return _read_packaged(name, rest)
    return _read_local(spec)


def corpus_meta(corpus: Corpus, *, repeats: bool) -> dict[str, Any]:
    """Return the fields of a row that tell which text was used."""
    return {
        "corpus": corpus.name,
        "corpus_kind": corpus.kind,
        "corpus_sha256": corpus.sha256,
        "repeats": repeats,
    }


def split_sentences(paragraph: str) -> list[str]:
    """Return the sentences of one paragraph without line breaks (`split@1`).

    A sentence ends after `.!?` and closing quotes before a blank and an upper-case letter or a quote, except
    after a known abbreviation or a single initial.
    """
    sentences, start = [], 0
    for match in _BREAK.finditer(paragraph):
        before, after = paragraph[start : match.start()], match[1]
        if (after.isupper() or after in "\"'\u201c\u2018") and not _ABBREVIATED.search(before):
            end = match.end()
            sentences.append(paragraph[start:end].rstrip())
            start = end
    return [s for s in (*sentences, paragraph[start:].strip()) if s]


def normalise(raw: str) -> str:
    """Return `raw` in NFC with LF, wrapped paragraphs joined to lines and runs of blanks collapsed.

    Paragraphs are separated by one empty line.
    """
    text = normalize("NFC", raw.removeprefix("\ufeff")).replace("\r\n", "\n").replace("\r", "\n")
    blocks = (_BLANKS.sub(" ", block.replace("\n", " ")).strip() for block in re.split(r"\n[^\S\n]*\n", text))
    return "\n\n".join(block for block in blocks if block)


@lru_cache(maxsize=1)
def _needle_words() -> frozenset[str]:
    return frozenset(adjectives()) | frozenset(nouns())


def _read_local(spec: str) -> Local:
    texts, stripped = [], []
    for path in _files(spec):
        for name, raw in _books(path):
            body = _TRAILER.sub("", _HEADER.sub("", raw.replace("\r\n", "\n")))
            if len(body) != len(raw.replace("\r\n", "\n")):
                stripped.append(name)
            if text := normalise(body):
                texts.append((name, text))
    if not texts:
        raise _refused(spec, "holds no text")
    return Local(spec, tuple(texts), tuple(stripped))


def _read_hub(spec: str, name: str, *, online: bool) -> Local:
    folder = snapshot(name, online=online, option=f"corpus={spec}")
    rows = (
        row
        for file in split_files(folder)
        for row in (parquet_texts(file) if file.suffix == ".parquet" else _books(file))
    )
    texts = tuple((f"{title}#{i}", text) for i, (title, raw) in enumerate(rows) if (text := normalise(raw)))
    if not texts:
        raise _refused(spec, "holds no text")
    return Local(spec, texts, ())


def _read_packaged(name: str, file: str) -> Local:
    texts = dict(packaged_texts(name, file))
    title = f"{name} (another edition)" if unknown_edition(name, texts) else name
    return Local(title, tuple((f"{name}/{book}", normalise(raw)) for book, raw in texts.items()), ())


def _files(spec: str) -> list[Path]:
    """Return the files that a comma list of paths names; those of a folder by the bytes of their paths."""
    found = []
    for part in spec.split(","):
        path = Path(part.strip()).expanduser()
        if path.is_dir():
            inside = [file for file in path.rglob("*") if file.is_file() and file.name.endswith(_SUFFIXES)]
            found += sorted(inside, key=lambda file: file.relative_to(path).as_posix().encode())
        elif path.is_file():
            found.append(path)
        else:
            raise _refused(part, "does not exist")
    return found


def _books(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and raw text of each book of one file; a JSONL file holds one book per line."""
    try:
        text = _unpacked(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refused(str(path), f"is not UTF-8: bad byte at offset {error.start}") from error
    if not path.name.removesuffix(".gz").endswith(".jsonl"):
        yield path.name, text
        return
    # not splitlines: JSON strings may hold U+2028 and other line ends of Unicode as they are
    for number, line in enumerate(text.split("\n")):
        if line.strip():
            yield f"{path.name}:{number + 1}", _text_field(path, number + 1, line)


def _unpacked(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.name.endswith(".gz") else data
    except (OSError, EOFError, zlib.error) as error:
        raise _refused(str(path), f"cannot be read: {error}") from error


def _text_field(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _refused(str(path), f"line {number} is not JSON") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise _refused(str(path), f"line {number} has no field 'text' that is a string")
    return str(row["text"])


def _refused(what: str, why: str) -> SpecError:
    return SpecError(
        f"corpus {what!r} {why}",
        fix="allowed: builtin, or paths of .txt, .txt.gz and .jsonl files or of folders with them",
        id="RCQ-USE-21",
    )
