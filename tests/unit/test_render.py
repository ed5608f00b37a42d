"""Tables as text: complete when piped, readable when narrow, honest about colour and encoding."""

import csv
import io
import json
import re

import pytest

from rcq_cli.glyphs import Glyphs, View, glyphs_for, view_of
from rcq_cli.render import (
    bands,
    cell_width,
    paint,
    table_lines,
    to_csv,
    to_json,
    to_json_lines,
    to_markdown,
    to_text,
)
from rcq_cli.table import (
    Cell,
    Column,
    Table,
    binary_bytes,
    decimal,
    duration,
    interval,
    p_value,
    share,
    significant,
    tokens,
    without_empty_columns,
)

WIDE = Table(
    "twelve columns",
    (Column("name"), *(Column(f"column {i}", right=True) for i in range(12))),
    tuple((Cell(f"row {r}"), *(Cell(str(1000 * r + i)) for i in range(12))) for r in range(3)),
    ("a note below",),
)
ANSI = re.compile(r"\x1b\[")


class Stream(io.StringIO):
    """A text stream that says it is a terminal, or not."""

    def __init__(self, tty: bool, encoding: str = "utf-8") -> None:
        super().__init__()
        self._tty, self._encoding = tty, encoding

    def isatty(self) -> bool:
        return self._tty

    @property
    def encoding(self) -> str:
        return self._encoding

    def fileno(self) -> int:
        raise OSError("no file behind it")


def view(width: int | None = None, color: bool = False, encoding: str = "utf-8") -> View:
    return View(width=width, color=color, glyphs=glyphs_for(encoding), terminal=False)


def test_a_piped_table_is_complete_at_any_width():
    text = to_text([WIDE], view())
    for row in WIDE.rows:
        line = next(line for line in text.splitlines() if line.startswith(row[0].text))
        assert line.split() == ["row", row[0].text[-1], *(cell.text for cell in row[1:])]
    assert "\u2026" not in text
    assert "..." not in text


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_terminal_gets_bands_that_fit_and_lose_nothing(width: int):
    lines = list(table_lines(WIDE, view(width)))
    assert max(len(line) for line in lines) <= width
    for row in WIDE.rows:
        shown = [word for line in lines if line.startswith(row[0].text) for word in line.split()[2:]]
        assert shown == [cell.text for cell in row[1:]]


def test_every_column_stands_in_exactly_one_band():
    assert bands([10, 5, 5, 5], 25) == [[(0, 10), (1, 5), (2, 5)], [(0, 10), (3, 5)]]
    assert bands([10, 90, 5], 40) == [[(0, 10), (1, 28)], [(0, 10), (2, 5)]]
    assert bands([10, 5], None) == [[(0, 10), (1, 5)]]


@pytest.mark.parametrize("limit", [20, 40, 60, 80, 120])
def test_no_line_is_wider_than_the_window_and_no_word_is_lost(limit: int):
    words = [f"word{i}" for i in range(40)]
    rows = (
        (Cell("a-name-of-some-length"), Cell("none"), Cell(" ".join(words[:20]))),
        (Cell("b"), Cell("7"), Cell(" ".join(words[20:]))),
    )
    columns = (Column("name"), Column("claim"), Column("summary"))
    table = Table("t", columns, rows, ("/a/path/" + "longer/" * 20,))
    lines = list(table_lines(table, view(limit)))
    assert max(map(len, lines)) <= limit
    assert re.findall(r"word\d+", " ".join(lines)) == words


def test_a_column_too_wide_for_the_window_is_folded_beside_the_others():
    table = Table("", (Column("a"), Column("b")), ((Cell("x"), Cell("one two three four five six seven")),))
    assert list(table_lines(table, view(20)))[2:] == ["x  one two three", "   four five six", "   seven"]


def test_no_colour_no_escape():
    table = Table("t", (Column("a"),), ((Cell("0.91", "heat:0.91"),), (Cell("FAIL", "bad"),)))
    assert not ANSI.search(to_text([table], view()))


def test_colour_changes_no_character():
    table = Table(
        "t", (Column("a"), Column("b")), ((Cell("FAIL", "bad"), Cell("0.91", "heat:0.91")),), ("why",)
    )
    colored = to_text([table], view(color=True))
    assert ANSI.search(colored)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == to_text([table], view())


def test_a_tint_needs_no_truecolor_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLORTERM", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "38;2" not in paint("0.5", "heat:0.5", view(color=True))
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert "48;2;68;1;84" in paint("0.0", "heat:0.0", view(color=True))


@pytest.mark.parametrize(
    ("env", "tty", "flag", "wanted"),
    [
        ({}, True, "auto", True),
        ({}, False, "auto", False),
        ({"TERM": "dumb"}, True, "auto", False),
        ({"NO_COLOR": "1"}, True, "auto", False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, "auto", False),
        ({"FORCE_COLOR": "1"}, False, "auto", True),
        ({"FORCE_COLOR": "0"}, False, "auto", False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False, "auto", True),
        ({"NO_COLOR": "1"}, False, "always", True),
        ({"FORCE_COLOR": "1"}, True, "never", False),
        ({"RCQ_COLOR": "always", "NO_COLOR": "1"}, False, "auto", True),
        ({"RCQ_COLOR": "always"}, True, "never", False),
    ],
)
def test_colour_follows_flag_then_settings_then_terminal(env: dict, tty: bool, flag: str, wanted: bool):
    assert view_of(Stream(tty), color=flag, env=env).color is wanted


@pytest.mark.parametrize(
    ("env", "tty", "width"),
    [
        ({}, False, None),
        ({"COLUMNS": "100"}, False, 100),
        ({"RCQ_WIDTH": "60", "COLUMNS": "100"}, False, 60),
        ({"COLUMNS": "72"}, True, 72),
        ({}, True, 80),
        ({"RCQ_WIDTH": "wide"}, False, None),
    ],
)
def test_width_is_natural_in_a_pipe(env: dict, tty: bool, width: int | None):
    assert view_of(Stream(tty), env=env).width == width


def test_a_dumb_terminal_gets_no_live_display():
    assert not view_of(Stream(True), env={"TERM": "dumb"}).terminal
    assert view_of(Stream(True), env={}).terminal


@pytest.mark.parametrize("encoding", ["utf-8", "cp949", "ascii", "latin-1", "no-such-codec"])
def test_every_glyph_can_be_written(encoding: str):
    glyphs = glyphs_for(encoding)
    codec = "ascii" if encoding == "no-such-codec" else encoding
    "".join(getattr(glyphs, name) for name in Glyphs.__dataclass_fields__).encode(codec)
    to_text([WIDE], view(encoding=encoding)).encode(codec)


def test_cp949_keeps_the_rule_that_it_knows():
    assert glyphs_for("cp949").line == "\u2500"
    assert glyphs_for("ascii").line == "-"
    assert glyphs_for("utf-8", ascii_only=True) == Glyphs()


def test_wide_characters_take_two_columns():
    assert cell_width("model") == 5
    assert cell_width("\u6a21\u578b") == 4
    assert cell_width("e\u0301") == 1
    table = Table(
        "", (Column("m"), Column("n")), ((Cell("\u6a21\u578b"), Cell("1")), (Cell("abcd"), Cell("2")))
    )
    rows = list(table_lines(table, view()))[2:]
    assert [cell_width(row) for row in rows] == [7, 7]


def test_markdown_escapes_bars_and_keeps_notes():
    table = Table("t", (Column("a"), Column("b", right=True)), ((Cell("x|y"), Cell("1")),), ("why",))
    assert to_markdown([table]) == "### t\n\n| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n\n- why\n"


def test_csv_flattens_nested_objects_and_intervals():
    records = [{"a": 1, "ci": [0.1, 0.9], "bytes": {"device": 5}, "none": None}, {"a": 2, "extra": "x,y"}]
    rows = list(csv.DictReader(io.StringIO(to_csv(records))))
    assert rows[0] == {
        "a": "1",
        "ci.low": "0.1",
        "ci.high": "0.9",
        "bytes.device": "5",
        "none": "",
        "extra": "",
    }
    assert rows[1]["extra"] == "x,y"


def test_json_is_ascii_and_refuses_nan():
    assert json.loads(to_json({"name": "\u6a21"})) == {"name": "\u6a21"}
    assert to_json({"name": "\u6a21"}).isascii()
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"x": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json_lines([{"x": float("inf")}])


def test_json_lines_are_one_object_each():
    assert [json.loads(line) for line in to_json_lines([{"a": 1}, {"a": 2}]).splitlines()] == [
        {"a": 1},
        {"a": 2},
    ]


def test_empty_columns_go_with_a_line_that_says_so():
    table = Table("", (Column("a"), Column("host"), Column("b")), ((Cell("1"), Cell("-"), Cell("2")),))
    kept = without_empty_columns(table, "not measured")
    assert [column.title for column in kept.columns] == ["a", "b"]
    assert kept.notes == ("not shown: host: not measured",)


def test_a_ragged_table_is_a_defect():
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table("t", (Column("a"), Column("b")), ((Cell("1"),),))


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (tokens(65536), "64k"),
        (tokens(1 << 20), "1m"),
        (tokens(1000), "1000"),
        (tokens(None), "-"),
        (binary_bytes(0), "0 B"),
        (binary_bytes(1023), "1023 B"),
        (binary_bytes(1024), "1.00 KiB"),
        (binary_bytes(1835008), "1.75 MiB"),
        (binary_bytes(40 * 2**30), "40.0 GiB"),
        (binary_bytes(None), "-"),
        (share(0.4541), "45.4%"),
        (share(1.0), "100%"),
        (share(0.0), "0%"),
        (share(0.99999), ">99.9%"),
        (share(0.00001), "<0.1%"),
        (p_value(0.0414), "0.041"),
        (p_value(9.3132257e-10), "9.3e-10"),
        (decimal(-0.0001, sign=True), "+0.000"),
        (decimal(-0.31, sign=True), "-0.310"),
        (decimal(12345.6), "1.23e4"),
        (interval([-0.40626, -0.2278], sign=True), "[-0.406, -0.228]"),
        (interval(None), ""),
        (interval([None, 1.0]), ""),
        (significant(float("nan")), "-"),
        (significant(0.9999884, 4), "0.999988"),
        (significant(1 - 1e-12), "0.999999999999"),
        (significant(0.9987), "0.999"),
        (significant(1.0), "1"),
        (duration(298), "04:58"),
        (duration(3600), "01:00:00"),
    ],
)
def test_numbers_are_written_as_promised(shown: str, wanted: str):
    assert shown == wanted
