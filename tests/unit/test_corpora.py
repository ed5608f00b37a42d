"""Local text as a source of haystacks and books."""

import gzip
import hashlib
import json
from itertools import islice

import pytest

from rcq_cli.errors import SpecError, UnsupportedHere
from rcq_cli.tasks._corpora import normalise, open_corpus, split_sentences
from rcq_cli.tasks._splitmix import SplitMix64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One came. Two left! Did three? Yes.", ["One came.", "Two left!", "Did three?", "Yes."]),
        ("Mr. Ash met Dr. Pell. They spoke.", ["Mr. Ash met Dr. Pell.", "They spoke."]),
        ("J. R. Ash wrote it. So be it.", ["J. R. Ash wrote it.", "So be it."]),
        ('"Go." He went. "Now?" she asked.', ['"Go."', "He went.", '"Now?" she asked.']),
        ('He said "stop." "Why?" She did.', ['He said "stop."', '"Why?"', "She did."]),
        ("It cost 3.50 in all. fine", ["It cost 3.50 in all. fine"]),
        ("So did I. He left.", ["So did I.", "He left."]),
        ("", []),
    ],
)
def test_sentences_end_where_the_rule_says(text, expected):
    assert split_sentences(text) == expected


def test_normalising_joins_wrapped_lines_and_composes_letters():
    raw = "\ufeffA wrapped\r\nline  with\tblanks.\r\n\r\n \nCafe\u0301 next.\n"
    assert normalise(raw) == "A wrapped line with blanks.\n\nCaf\u00e9 next."


def test_a_folder_is_read_in_the_byte_order_of_its_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "z.txt").write_text("Third one.")
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": "First one."}) + "\n\n" + json.dumps({"text": "Next."})
    )
    (tmp_path / "b-c.txt.gz").write_bytes(gzip.compress(b"Second one."))
    (tmp_path / "notes.md").write_text("ignored")
    books = list(open_corpus(str(tmp_path)).books())
    assert books == [
        ("a.jsonl:1", "First one."),
        ("a.jsonl:3", "Next."),
        ("b-c.txt.gz", "Second one."),
        ("z.txt", "Third one."),
    ]


def test_the_digest_is_over_the_normalised_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"One\r\nline.\r\n\r\nTwo.")
    assert open_corpus(str(tmp_path / "a.txt")).sha256 == hashlib.sha256(b"One line.\n\nTwo.").hexdigest()


def test_headers_are_cut_at_recognised_markers_only(tmp_path):
    text = "Legal.\n*** START OF THE TEXT ***\n\nThe story.\n\n*** END OF THE TEXT ***\nMore legal."
    (tmp_path / "marked.txt").write_text(text)
    (tmp_path / "plain.txt").write_text("*** A row of stars *** stays.")
    corpus = open_corpus(str(tmp_path))
    assert list(corpus.books()) == [
        ("marked.txt", "The story."),
        ("plain.txt", "*** A row of stars *** stays."),
    ]
    assert corpus.stripped == ("marked.txt",)


def test_a_short_source_repeats_itself_and_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("One. Two. Three.")
    corpus = open_corpus(str(tmp_path / "a.txt"))
    drawn = list(islice(corpus.sentences(SplitMix64(5)), 7))
    assert [again for _, again in drawn] == [False] * 3 + [True] * 4
    assert drawn[0][0] == drawn[3][0] == drawn[6][0]
    assert sorted(s for s, _ in corpus.sentences(SplitMix64(5), repeat=False)) == ["One.", "Three.", "Two."]


def test_bad_utf8_names_file_and_offset(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"fine \xff")
    with pytest.raises(SpecError, match=r"bad\.txt.*offset 5"):
        open_corpus(str(tmp_path / "bad.txt"))


@pytest.mark.parametrize("line", ["{", "[1]", '{"body": "x"}', '{"text": 3}', "[" * 100_000])
def test_bad_jsonl_names_the_line(tmp_path, line):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(SpecError, match="line 2"):
        open_corpus(str(tmp_path / "bad.jsonl"))


def test_a_line_of_jsonl_ends_at_lf_alone(tmp_path):
    text = "One.\u2028Two.\x85Three."
    lines = json.dumps({"text": text}, ensure_ascii=False) + "\r\n" + json.dumps({"text": "Four."})
    (tmp_path / "a.jsonl").write_text(lines, newline="")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    plain, packed = (list(open_corpus(str(tmp_path / name)).books()) for name in ("a.jsonl", "a.jsonl.gz"))
    assert [body for _, body in plain] == [body for _, body in packed]
    assert len(plain) == 2
    assert plain[1] == ("a.jsonl:2", "Four.")


@pytest.mark.parametrize("raw", [b"no gzip", gzip.compress(b"text " * 99)[:20], b"\x1f\x8b\x08" + b"\0" * 99])
def test_a_damaged_gzip_file_is_a_usage_error(tmp_path, raw):
    (tmp_path / "bad.txt.gz").write_bytes(raw)
    with pytest.raises(SpecError, match=r"bad\.txt\.gz.*cannot be read"):
        open_corpus(str(tmp_path / "bad.txt.gz"))


def test_a_path_that_is_not_there_is_a_usage_error(tmp_path):
    with pytest.raises(SpecError, match=r"nowhere.*does not exist"):
        open_corpus(str(tmp_path / "nowhere"))


def test_an_empty_folder_is_a_usage_error(tmp_path):
    with pytest.raises(SpecError, match="holds no text"):
        open_corpus(str(tmp_path))


@pytest.mark.parametrize("name", ["austen", "kjv", "jargon"])
def test_a_packaged_corpus_that_is_not_here_names_what_helps(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RCQ_HOME", str(tmp_path))
    open_corpus.cache_clear()
    with pytest.raises(UnsupportedHere, match=rf"rcq corpora pull {name}.*corpus=builtin"):
        open_corpus(name)


@pytest.mark.parametrize(
    ("text", "expected"), [("1234567", False), ("amber-kite", False), ("the", True), ("harbour", True)]
)
def test_builtin_knows_what_it_cannot_hold(text, expected):
    assert open_corpus("builtin").holds(text) is expected
