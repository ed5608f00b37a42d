"""Metrics against the golden values of the task specification."""

import pytest

from rcq_cli.tasks._metrics import bounded, clean, contains, contains_any


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 1234567.", 1),
        ("It is 1,234,567.", 1),
        ("1 234 567", 1),
        ("1\u2009234\u2009567", 1),
        ("1\u00a0234\u202f567", 1),
        ("1_234_567", 1),
        ("\uff11\uff12\uff13\uff14\uff15\uff16\uff17", 1),
        ("91234567", 0),
        ("1234567890", 0),
        ("x1234567", 0),
        ("123 4567", 0),
        ("", 0),
    ],
)
def test_bounded_finds_the_number_and_nothing_else(text, expected):
    assert bounded(text, ["1234567"]) == expected


@pytest.mark.parametrize(("text", "expected"), [("Amber-Kite!", 1), ("amber kite", 0), ("bamber-kite", 0)])
def test_bounded_finds_words(text, expected):
    assert bounded(text, ["amber-kite"]) == expected


@pytest.mark.parametrize(
    "answer",
    ["1234567", "The locker opens with 1234567", "Sure! **1234567**", "1234567\n1234567", "=> '1,234,567'."],
)
def test_bounded_scores_the_value_however_it_is_worded(answer):
    assert bounded(clean(answer), ["1234567"]) == 1


def test_bounded_gives_the_share_of_references():
    assert bounded("7654321 and 12", ["1234567", "7654321"]) == 0.5


def test_contains_gives_the_share_of_references():
    assert contains("c3 and a1", ["A1", "B2", "C3"]) == pytest.approx(2 / 3)


def test_contains_takes_substrings_unlike_bounded():
    assert (contains("9123", ["12"]), bounded("9123", ["12"])) == (1, 0)


def test_contains_any_is_satisfied_with_one():
    references = ["Denver", "the Broncos"]
    assert (contains_any("denver", references), contains_any("Boston", references)) == (1, 0)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [("  a \n", "a"), ("a\tb\x00c", "a\nb\nc"), ("\x1f\n a\x7f ", "a\x7f"), ("a\n\nb", "a\n\nb")],
)
def test_clean_strips_and_replaces_control_characters(raw, expected):
    assert clean(raw) == expected


def test_thinking_is_removed_only_on_request():
    text = "<think>maybe 7654321</think> 1234567 <think>unfinished"
    assert clean(text, strip_think=True) == "1234567"
    assert clean(text) == text
