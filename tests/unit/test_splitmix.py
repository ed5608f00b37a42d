"""Random numbers: the published vectors of SplitMix64 and of the seeds, and the shape of what is drawn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rcq_cli.tasks._splitmix import SplitMix64, seed


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (0, [16294208416658607535, 7960286522194355700, 487617019471545679]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]),
    ],
)
def test_splitmix_gives_the_published_numbers(start, expected):
    rng = SplitMix64(start)
    assert [rng.next() for _ in expected] == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, "niah", 0, "needle"), 4423613682979774667),
        ((0, "niah", 1, "needle"), 3654159561402268358),
        ((0, "niah", 0, "haystack"), 5240329910296746512),
        ((0, "niah", 0, "layout/65536"), 5208316650866217063),
        ((7, "ruler.vt", 0, "needle"), 9978686160493489262),
    ],
)
def test_seeds_give_the_published_numbers(arguments, expected):
    assert seed(*arguments) == expected


def test_seven_digit_values_of_the_first_needle_stream():
    rng = SplitMix64(seed(0, "niah", 0, "needle"))
    assert [1_000_000 + rng.below(9_000_000) for _ in range(3)] == [7803482, 4834823, 9447547]


def test_below_gives_the_published_digits():
    rng = SplitMix64(42)
    assert [rng.below(10) for _ in range(8)] == [3, 1, 8, 4, 0, 2, 5, 8]


def test_shuffle_gives_the_published_order():
    items = list(range(10))
    SplitMix64(42).shuffle(items)
    assert items == [0, 9, 5, 8, 6, 4, 7, 2, 1, 3]


def test_sample_gives_the_published_choice():
    assert SplitMix64(42).sample(40, 4) == [13, 2, 6, 1]


def test_below_rejects_what_would_bias_it(monkeypatch):
    # 3 * 2**63 would fit once and a half: the upper quarter must be drawn again
    draws = iter([2**64 - 1, 3 * 2**62, 5])
    monkeypatch.setattr(SplitMix64, "next", lambda _: next(draws))
    assert SplitMix64(0).below(3 * 2**62) == 5


@given(st.integers(0, 2**64 - 1), st.integers(1, 60), st.data())
def test_sample_is_distinct_and_in_range(start, n, data):
    k = data.draw(st.integers(0, n))
    drawn = SplitMix64(start).sample(n, k)
    assert len(set(drawn)) == k
    assert all(0 <= value < n for value in drawn)
