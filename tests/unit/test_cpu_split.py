"""The split of a bound over buckets, against every split of the sorted blocks in plain NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from rcq_cli.kernels._cpu_bounds import best_split, split_near, spread
from rcq_cli.kernels._cpu_score import MARGIN
from rcq_cli.kernels._cpu_state import TABLES, Line
from rcq_cli.kernels._cpu_vector import ahead, doubles_at, floats_at

ROOM = MARGIN**2 * (1 + 2.0**-40)
"""The margin stands inside the root and around the sum."""


@njit
def line_of(rows: int, width: int) -> Line:
    """Return rows cost, energy, move `[3, width]` at that address as a line."""
    cost = floats_at(rows)
    energy, move = ahead(cost, width), ahead(cost, 2 * width)
    return Line(cost, cost, cost, cost, cost, cost, cost, move, energy, cost, cost, cost, cost, cost)


@njit
def near(rows: int, width: int, place: float, spectrum: float, away: float) -> float:
    """Return the smallest split at about `place`."""
    return split_near(line_of(rows, width), width, place, spectrum, away)


@njit
def place_of(rows: int, width: int, table: int, spectrum: float, away: float) -> float:
    """Return where the split over buckets is smallest."""
    line = line_of(rows, width)
    return best_split(doubles_at(table), spread(line, width, doubles_at(table)), spectrum, away).near


@njit
def split(rows: int, width: int, table: int, spectrum: float, away: float) -> float:
    """Return the smallest split over buckets of rows cost, energy, move `[3, width]` at that address."""
    line = line_of(rows, width)
    return best_split(doubles_at(table), spread(line, width, doubles_at(table)), spectrum, away).bound


def by_buckets(rows: np.ndarray, spectrum: float, away: float) -> float:
    table = np.full(TABLES, np.nan)
    return split(rows.ctypes.data, rows.shape[1], table.ctypes.data, spectrum, away)


def all_splits(rows: np.ndarray, spectrum: float, away: float) -> np.ndarray:
    """Return the bound of every split, blocks of the highest cost first: `[width + 1]`."""
    cost, energy, move = rows[:, np.argsort(-rows[0], kind="stable")].astype(np.float64)
    before = np.concatenate(([0.0], cost.cumsum()))
    left = [np.concatenate((x[::-1].cumsum()[::-1], [0.0])) for x in (energy, move)]
    return before + np.sqrt(spectrum * left[0]) + away * left[1]


@pytest.mark.parametrize("width", [16, 144, 2048])
@pytest.mark.parametrize("seed", range(12))
def test_the_best_split_lies_between_that_of_the_sorted_blocks_and_the_two_pure_ones(width, seed):
    draw = np.random.default_rng([width, seed])
    rows = np.exp(draw.normal(0, [0.3, 4, 12][seed % 3], (3, width))).astype(np.float32)
    rows[:, draw.random(width) < 0.3 * (seed % 2)] = 0
    spectrum, away = float(np.exp(draw.normal(0, 4))), [0.0, 0.1, 30.0][seed // 4]
    found, every = by_buckets(rows, spectrum, away), all_splits(rows, spectrum, away)
    assert every.min() <= found * (1 + 2.0**-40)
    assert found <= min(every[0], every[-1]) * ROOM + 1e-12
    # a bucket spans an eighth of an octave; what one holds is on one side as a whole
    assert found <= every.min() * 2


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0, 2.0**20, width=32), min_size=16, max_size=16),
    st.lists(st.floats(0, 2.0**20, width=32), min_size=16, max_size=16),
    st.floats(0, 1e6),
    st.floats(0, 1e3),
)
def test_no_split_is_ever_below_the_best_of_the_sorted_blocks(cost, energy, spectrum, away):
    rows = np.array([cost, energy, cost[::-1]], np.float32)
    found, every = by_buckets(rows, spectrum, away), all_splits(rows, spectrum, away)
    assert every.min() <= found * (1 + 2.0**-40)
    assert found <= min(every[0], every[-1]) * ROOM + 1e-6


@pytest.mark.parametrize("width", [16, 144, 2048])
@pytest.mark.parametrize("seed", range(12))
def test_a_split_where_it_was_best_is_as_good_without_buckets_and_anywhere_else_sound(width, seed):
    draw = np.random.default_rng([width, seed, 1])
    rows = np.exp(draw.normal(0, [0.3, 4, 12][seed % 3], (3, width))).astype(np.float32)
    rows[:, draw.random(width) < 0.3 * (seed % 2)] = 0
    spectrum, away = float(np.exp(draw.normal(0, 4))), [0.0, 0.1, 30.0][seed // 4]
    table = np.full(TABLES, np.nan)
    where, address = (rows.ctypes.data, width), table.ctypes.data
    every, found = all_splits(rows, spectrum, away), by_buckets(rows, spectrum, away)
    place = place_of(*where, address, spectrum, away)
    assert near(*where, place, spectrum, away) <= found * ROOM
    for place in (0.0, 1e-30, *np.exp(draw.normal(0, 9, 9)), 1e30, np.inf, np.nan):
        split = near(*where, place, spectrum, away)
        assert every.min() <= split * (1 + 2.0**-40)
        assert split <= every[-1] * ROOM


def test_nan_counts_as_infinite():
    """Infinity times nothing left of energy or move: a bound that nobody knows is none."""
    assert by_buckets(np.ones((3, 16), np.float32), np.inf, np.inf) == np.inf
    full = np.full((3, 16), np.inf, np.float32)
    assert by_buckets(full, 1.0, 0.0) == np.inf
    assert near(full.ctypes.data, 16, 1.0, 1.0, 0.0) == np.inf
    assert near(full.ctypes.data, 16, np.inf, np.nan, np.nan) == np.inf
