"""The key grid covers what it encodes (|k - k'| <= s / 2); value codes stay within their derived error."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels.reference import BACKEND

HALF, SINGLE = TierFormat(), TierFormat(key_meta="float32")
FORMATS = [pytest.param(HALF, id="float16"), pytest.param(SINGLE, id="float32")]


def blocks_of(x: torch.Tensor) -> torch.Tensor:
    """`[S, D]` rows as one block of one head, `[1, 1, S, D]`."""
    return x.double()[None, None]


def half_step_ratio(keys: torch.Tensor, fmt: TierFormat) -> torch.Tensor:
    """Largest |k - k'| / (s / 2) per channel, NaN where the block is raw."""
    blocks, raw = BACKEND.quantize_keys(keys, fmt)
    residual = (keys - BACKEND.keys(blocks)).abs().amax(2)
    ratio = residual / (blocks["key_scale"].double() / 2)
    return torch.where(raw[..., None], torch.nan, ratio)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("offset", [0, 1, 12, 40, 400])
@pytest.mark.parametrize("spread", [1e-3, 0.05, 1, 8])
def test_every_key_lies_within_half_a_step(fmt, offset, spread):
    gen = torch.Generator().manual_seed(int(offset * 100 + spread * 1000))
    keys = (offset + spread * torch.randn(2, 20, 16, 24, generator=gen)).half().double()
    ratio = half_step_ratio(keys, fmt)
    assert not ratio.isnan().any()
    assert float(ratio.max()) <= 1 + 2.0**-14
    if spread >= 1 and offset <= 12:
        assert float(ratio.max()) > 0.99  # the bound is reached, so it is the bound and not a looser one


def test_without_the_cover_rule_a_rounded_offset_would_break_the_half_step():
    """The published mid-point grid with float16 metadata: what the cover rule is there to prevent."""
    gen = torch.Generator().manual_seed(5)
    keys = (400 + torch.rand(64, 32, generator=gen, dtype=torch.float64)).float().double()
    lo, hi = keys.amin(0), keys.amax(0)
    scale = ((hi - lo) / 255).half().double()
    offset = ((lo + hi) / 2).half().double()
    codes = ((keys - offset) / scale).round().clamp(-128, 127)
    naive = ((keys - codes * scale - offset).abs() / (scale / 2)).max()
    assert float(naive) > 1.5
    assert float(half_step_ratio(blocks_of(keys), HALF).max()) <= 1 + 2.0**-14


ADVERSARIAL = {
    "constant": torch.full((8, 4), 3.7),
    "constant-float32": torch.full((8, 4), 3.7000001907),
    "constant-on-the-grid": torch.full((8, 4), 2.0),
    "one-ulp-apart": torch.tensor([[400.0], [400.25]]).repeat(4, 4),
    "float32-ulp-apart": torch.tensor([[400.0], [400.00003]]).repeat(4, 4),
    "negative-constant": torch.full((8, 4), -41.3),
    "subnormal-halves": torch.arange(32.0).view(8, 4) * 2.0**-24,
    "below-float16": torch.arange(32.0).view(8, 4) * 2.0**-40,
    "float32-subnormal": torch.arange(32.0).view(8, 4) * 2.0**-149,
    "huge-and-tiny": torch.tensor([[1e4, 1e-4, -1e4, 0.0]]).repeat(8, 1) * torch.arange(8.0)[:, None],
}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_channels_stay_within_half_a_step(fmt, name):
    ratio = half_step_ratio(blocks_of(ADVERSARIAL[name]), fmt)
    assert not ratio.isnan().any()
    assert float(ratio.max()) <= 1 + 2.0**-14


def test_the_extremes_of_float16_stay_within_half_a_step_or_are_kept_raw():
    keys = blocks_of(torch.tensor([[65504.0, 1.0], [-65504.0, 2.0], [0.0, 3.0], [123.0, 4.0]]))
    ratio = half_step_ratio(keys, HALF)
    assert bool(ratio.isnan().all()) or float(ratio.max()) <= 1 + 2.0**-14
    assert float(half_step_ratio(keys, SINGLE).max()) <= 1 + 2.0**-14


@pytest.mark.parametrize("size", [1e7, 1e30])
def test_keys_beyond_float16_metadata_are_raw_and_leave_neighbours_alone(size):
    keys = torch.randn(1, 3, 8, 16, generator=torch.Generator().manual_seed(1)).double()
    keys[0, 1] *= size
    blocks, raw = BACKEND.quantize_keys(keys, HALF)
    assert raw.tolist() == [[False, True, False]]
    assert all(bool(torch.isfinite(part.double()).all()) for part in blocks.values())


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    offset=st.floats(-1e4, 1e4),
    spread=st.floats(1e-6, 1e3),
    tokens=st.integers(2, 40),
    meta=st.sampled_from(["float16", "float32"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**20),
)
def test_half_a_step_holds_for_any_offset_and_spread(offset, spread, tokens, meta, dtype, seed):
    noise = torch.randn(1, 2, tokens, 16, generator=torch.Generator().manual_seed(seed))
    keys = (offset + spread * noise).to(dtype).double()
    ratio = half_step_ratio(keys, TierFormat(block=max(tokens, 2), key_meta=meta))
    assert not ratio.isnan().any()
    assert float(ratio.max()) <= 1 + 2.0**-14


@pytest.mark.parametrize("group", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("meta", ["two-level", "float16"])
@pytest.mark.parametrize("offset", [0.0, 40.0])
def test_a_value_is_within_half_a_code_of_its_group_plus_the_rounding_of_metadata(group, meta, offset):
    gen = torch.Generator().manual_seed(group)
    v = (offset + torch.randn(2, 5, 16, 64, generator=gen)).half().double()
    blocks, raw = BACKEND.quantize_values(v, TierFormat(group=group, value_meta=meta))
    grouped = v.unflatten(-1, (-1, group))
    width = grouped.amax(-1) - grouped.amin(-1)
    if meta == "two-level":
        # marks lie at most one step outside the group on either side, low at most one float16 spacing below
        spacing = v.abs().amax(-1) * 2.0**-10
        step = ((v.amax(-1) - v.amin(-1) + spacing) / 255) * (1 + 2.0**-9)
        allowed = (width + 2 * step[..., None]) / 30
    else:
        # offset rounds by half a float16 spacing; the top code may miss the maximum by that much
        allowed = (width / 30) * (1 + 2.0**-9) + grouped.abs().amax(-1) * 2.0**-10
    error = (v - BACKEND.values(blocks)).unflatten(-1, (-1, group)).abs().amax(-1)
    assert not raw.any()
    assert bool((error <= allowed * (1 + 1e-6) + 2.0**-24).all())
    if group >= 8:
        assert bool((error > allowed / 2).any())  # close enough for a wrong step to show


def test_two_level_scales_never_clip():
    """The extremes of every group decode to within half a step: clipping would leave them further away."""
    v = torch.zeros(1, 1, 4, 32, dtype=torch.float64)
    v[..., 0], v[..., 16:] = 100.0, torch.linspace(-3, 3, 16, dtype=torch.float64)
    blocks, _ = BACKEND.quantize_values(v, TierFormat())
    got = BACKEND.values(blocks)
    assert float((got - v)[..., 16:].abs().max()) <= (6 + 2 * 103.1 / 255) / 30
    assert float((got - v)[..., :16].abs().max()) <= (100 + 2 * 103.1 / 255) / 30


@pytest.mark.parametrize("meta", ["two-level", "float16"])
def test_constant_and_zero_values_are_kept_to_within_the_metadata(meta):
    fmt = TierFormat(value_meta=meta)
    zero = torch.zeros(1, 1, 4, 32, dtype=torch.float64)
    assert float(BACKEND.values(BACKEND.quantize_values(zero, fmt)[0]).abs().max()) == 0
    constant = zero + 1.5
    assert float((BACKEND.values(BACKEND.quantize_values(constant, fmt)[0]) - 1.5).abs().max()) < 2.0**-20


@pytest.mark.parametrize("meta", ["two-level", "float16"])
def test_values_beyond_float16_are_raw(meta):
    v = torch.ones(1, 2, 4, 32, dtype=torch.float64)
    v[0, 1, 2, 3] = 1e9
    blocks, raw = BACKEND.quantize_values(v, TierFormat(value_meta=meta))
    assert raw.tolist() == [[False, True]]
    assert bool(torch.isfinite(BACKEND.values(blocks)).all())


def test_int8_and_int4_take_one_byte_and_half_a_byte_per_element():
    x = torch.randn(1, 2, 32, 64, generator=torch.Generator().manual_seed(0)).double()
    key_codes = BACKEND.quantize_keys(x, HALF)[0]["key_codes"]
    value_codes = BACKEND.quantize_values(x, HALF)[0]["value_codes"]
    assert key_codes.nbytes == x.numel()
    assert value_codes.nbytes * 2 == x.numel()


def test_codes_of_an_untouched_block_do_not_depend_on_its_neighbours():
    x = torch.randn(1, 6, 16, 32, generator=torch.Generator().manual_seed(2)).double()
    whole = BACKEND.quantize_keys(x, HALF)[0] | BACKEND.quantize_values(x, HALF)[0]
    for i in range(6):
        part = x[:, i : i + 1]
        alone = BACKEND.quantize_keys(part, HALF)[0] | BACKEND.quantize_values(part, HALF)[0]
        assert all(np.array_equal(alone[n].numpy(), whole[n][:, i : i + 1].numpy()) for n in whole)
