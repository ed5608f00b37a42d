"""Directed rounding, held to an enumeration of float16 and to numpy's `nextafter`."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rcq_cli.kernels._rounding import round_down, round_up, smallest, upper

settings.register_profile("rcq", deadline=None, max_examples=200, derandomize=True)
PROFILE = settings.get_profile("rcq")

# every float16 number in order: the bit patterns of the positive ones are ordered already
POSITIVE = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float64)
ALL_HALVES = np.unique(np.concatenate((-POSITIVE, POSITIVE)))
WIDE = st.floats(allow_nan=False, allow_infinity=False, width=64)
NEAR_HALF = st.floats(-70000, 70000) | st.floats(-1e-4, 1e-4) | st.sampled_from(list(ALL_HALVES[1:-1]))


def next_half(x: float) -> float:
    """Smallest float16 number that is not below x, infinity included, by binary search in the full list."""
    return float(ALL_HALVES[np.searchsorted(ALL_HALVES, x, side="left")])


def up(x: float, dtype: torch.dtype) -> float:
    return float(round_up(torch.tensor([x], dtype=torch.float64), dtype))


def down(x: float, dtype: torch.dtype) -> float:
    return float(round_down(torch.tensor([x], dtype=torch.float64), dtype))


@PROFILE
@given(NEAR_HALF | WIDE)
def test_round_up_to_float16_gives_the_next_number_of_the_format(x):
    assert up(x, torch.float16) == next_half(x)


@PROFILE
@given(NEAR_HALF | WIDE)
def test_round_down_to_float16_mirrors_round_up(x):
    assert down(x, torch.float16) == -next_half(-x)


@PROFILE
@given(WIDE)
def test_round_up_to_float32_is_the_next_number_or_the_smallest_normal_one(x):
    got = up(x, torch.float32)
    assert got >= x
    if 0 < x < 2.0**-149:
        assert got == smallest(torch.float32)
    elif abs(x) < 3.4e38:
        below = float(np.nextafter(np.float32(got), np.float32(-np.inf)))
        assert below < x


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_overflow_gives_infinity_upwards_and_the_largest_number_downwards(dtype):
    assert up(1e300, dtype) == math.inf
    assert down(1e300, dtype) == torch.finfo(dtype).max
    assert up(-1e300, dtype) == -torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_nan_stays_nan_and_zero_stays_zero(dtype):
    assert math.isnan(up(math.nan, dtype))
    assert up(0.0, dtype) == 0.0
    assert up(-0.0, dtype) == 0.0


@PROFILE
@given(st.floats(0, 60000))
def test_upper_leaves_room_for_the_error_of_a_blocked_sum(x):
    stored = float(upper(torch.tensor([x], dtype=torch.float64), torch.float16))
    assert stored >= x * (1 + 2.0**-12)
    assert stored <= next_half(x * (1 + 2.0**-12))


def test_rounding_keeps_the_shape_and_works_on_views():
    x = torch.linspace(-3, 3, 24, dtype=torch.float64).view(2, 3, 4).transpose(0, 2)
    rounded = round_up(x, torch.float16)
    assert rounded.shape == x.shape
    assert rounded.double().flatten().tolist() == [next_half(v) for v in x.flatten().tolist()]
