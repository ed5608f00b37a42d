"""Corpora that packages of other people carry: found where they are installed, or read from their files."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rcq_cli.errors import SpecError, UnsupportedHere
from rcq_cli.tasks._lazy_load import read_strings
from rcq_cli.tasks._words import data

_DIGITS = 12
_MAGIC = b"!<arch>\n"
_UNREADABLE = (
    *(KeyError, ValueError, TypeError, EOFError, OSError),
    *(lzma.LZMAError, zlib.error, struct.error, tarfile.TarError),
)
"""What reading a file raises that is cut off, damaged, or something else than its name says."""


def names() -> tuple[str, ...]:
    """Return the corpora that rcq knows how to read."""
    return tuple(data("sources"))


def pulled_file(name: str) -> Path:
    """Return where a pulled corpus lies: below `$RCQ_HOME`, else `~/.cache/rcq`."""
    home = Path(os.environ.get("RCQ_HOME") or "~/.cache/rcq").expanduser()
    return home / "corpora" / str(data("sources")[name]["file"])


def found_at(name: str) -> Path | None:
    """Return where corpus `name` is on this machine: installed, or pulled; None if it is not."""
    place = str(data("sources")[name]["installed"])
    if place.startswith("/"):
        installed: Path | None = Path(place)
    else:
        module = find_spec(place)
        folders = list(module.submodule_search_locations or ()) if module else []
        installed = Path(folders[0]) / "data" if folders else None
    for candidate in (installed, pulled_file(name)):
        if candidate is not None and candidate.exists():
            return candidate
    return None


def packaged_texts(name: str, given: str) -> Iterator[tuple[str, str]]:
    """Yield name and raw text of each book of a packaged corpus; `given` is a file, or empty.

    Raises `UnsupportedHere` for one that is not on this machine, `SpecError` for a file that holds none.
    """
    place = Path(given).expanduser() if given else found_at(name)
    if given and not Path(given).expanduser().exists():
        raise _refused(name, given, "it does not exist")
    if place is None:
        source = data("sources")[name]
        raise UnsupportedHere(
            f"corpus={name} is not on this machine",
            why=f"it comes with the package {source['package']}",
            fix=f"rcq corpora pull {name}, or -T corpus={name}:FILE, or -T corpus=builtin",
            id="RCQ-ENV-20",
        )
    try:
        texts = _READERS[str(data("sources")[name]["reader"])](_members(place))
    except _UNREADABLE as error:
        raise _refused(name, str(place), _why(error)) from error
    yield from texts.items()


def unknown_edition(name: str, texts: dict[str, str]) -> bool:
    """Say whether a book differs from the edition that was measured."""
    known: dict[str, str] = data("sources")[name].get("books", {})
    return any(
        sha256(texts.get(book, "").encode()).hexdigest()[:_DIGITS] != want for book, want in known.items()
    )


def _members(place: Path) -> dict[str, bytes]:
    """Return the files of a folder, of a Debian package or of a tar archive, by their last name."""
    if place.is_dir():
        return {file.name: file.read_bytes() for file in sorted(place.iterdir()) if file.is_file()}
    raw = place.read_bytes()
    if raw.startswith(_MAGIC):
        raw = _data_of_package(raw)
    elif place.suffix == ".jsonl" or place.name.endswith(".txt.gz"):
        return {place.name: raw}
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        entries = [entry for entry in archive.getmembers() if entry.isfile()]
        held = ((entry, archive.extractfile(entry)) for entry in entries)
        return {Path(entry.name).name: stream.read() for entry, stream in held if stream is not None}


def _data_of_package(raw: bytes) -> bytes:
    """Return the unpacked `data.tar` of a Debian package, which is an `ar` archive."""
    at = len(_MAGIC)
    while at + 60 <= len(raw):
        name, size = raw[at : at + 16].decode("ascii").strip().rstrip("/"), int(raw[at + 48 : at + 58])
        body = raw[at + 60 : at + 60 + size]
        if name.startswith("data.tar"):
            unpack: dict[str, Callable[[bytes], bytes]] = {
                "data.tar.xz": lzma.decompress,
                "data.tar.gz": gzip.decompress,
                "data.tar": bytes,
            }
            return unpack[name](body)
        at += 60 + size + size % 2
    raise ValueError("no data.tar in the package")


def _austen(files: dict[str, bytes]) -> dict[str, str]:
    books = read_strings(files["Rdata.rdx"], files["Rdata.rdb"])
    known = data("sources")["austen"]["books"]
    return {name: "\n".join(books[name]) for name in known}


def _verses(files: dict[str, bytes]) -> dict[str, str]:
    """Return the books, one paragraph per chapter."""
    chapters: dict[str, dict[Any, list[str]]] = {}
    for line in files["kjv.jsonl"].decode("utf-8").strip().split("\n"):
        row = json.loads(line)
        chapters.setdefault(str(row["book"]), {}).setdefault(row["chapter"], []).append(row["text"].strip())
    return {
        book: "\n\n".join(" ".join(verses) for verses in held.values()) for book, held in chapters.items()
    }


def _text(files: dict[str, bytes]) -> dict[str, str]:
    return {"jargon": gzip.decompress(files["jargon.txt.gz"]).decode("utf-8", "replace")}


_READERS = {"austen": _austen, "verses": _verses, "text": _text}


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0].rstrip(":")


def _refused(name: str, given: str, why: str) -> SpecError:
    package = data("sources")[name]["package"]
    return SpecError(
        f"corpus={name}:{given} cannot be read", why, f"give the file of the package {package}", "RCQ-USE-21"
    )
