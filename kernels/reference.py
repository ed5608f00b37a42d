"""Every operation in plain torch and float64: the oracle that other backends are held to.

Quantised blocks are dictionaries of named tensors with leading dimensions [Hkv, M]; the names and shapes are
this backend's own layout and nothing outside looks into them. Formats: arXiv:2605.20868 sections 3.1 and
3.2, with the end-point key grid and its cover rule, and with two-level value metadata.
"""

from math import isfinite
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels._rounding import round_down, round_up, smallest
from rcq_cli.protocols import Geometry

Blocks = dict[str, Tensor]


class Reference:
    """Plain torch in float64 on any device."""

    name: ClassVar[str] = "reference"
    roundoff: ClassVar[float] = 2.0**-53
    """Unit roundoff of every product, sum and exponential below."""
    underflow: ClassVar[float] = 2.0**-1022
    """Weights below this may be flushed to zero."""

    def unsupported(self, geometry: Geometry) -> str | None:
        """Return None: plain torch runs everywhere."""
        del geometry
        return None

    def finite(self, numbers: Tensor) -> bool:
        """Return whether no number is NaN or infinite."""
        # a sum shows both, and costs an eighth of a look at every number; it may also overflow
        return isfinite(numbers.sum().item()) or bool(torch.isfinite(numbers).all())

    # -- quantisation ---------------------------------------------------------------------------------------

    def quantize_keys(self, keys: Tensor, fmt: TierFormat) -> tuple[Blocks, Tensor]:
        """Encode `[Hkv, M, S, D]` float64 keys to INT8; return the blocks and which `[Hkv, M]` must stay raw.

        code = clamp(rint((k - z) / s), -128, 127), k' = code * s + z, with z = lo + 128 * (hi - lo) / 255
        and s rounded up so that the grid covers [lo, hi]: |k - k'| <= s / 2 per element. A block where that
        fails, or whose metadata overflows, is raw.
        """
        lo, hi = keys.amin(2), keys.amax(2)
        ideal = (hi - lo) / 255
        offset = (lo + 128 * ideal).to(fmt.key_dtype)
        z = offset.double()
        cover = torch.maximum(torch.maximum(ideal, (hi - z) / 127.5), (z - lo) / 128.5)
        scale = round_up(cover.clamp_min(smallest(fmt.key_dtype)), fmt.key_dtype)
        for _ in range(5):
            codes = _key_codes(keys, scale.double(), z)
            residual = (keys - _key_values(codes, scale.double(), z)).abs().amax(2)
            missed = residual > scale.double() / 2 * (1 + 2.0**-14)
            if not missed.any():
                break
            # a tie that rounding decided the other way: one step wider covers it
            scale = torch.where(missed, round_up(scale.double() * (1 + 2.0**-23), fmt.key_dtype), scale)
        raw = (missed | ~torch.isfinite(scale) | ~torch.isfinite(offset)).any(-1)
        keep = ~raw[..., None]
        blocks = {
            "key_codes": codes.to(torch.int8),
            "key_scale": torch.where(keep, scale, torch.zeros_like(scale)),
            "key_offset": torch.where(keep, offset, torch.zeros_like(offset)),
        }
        return blocks, raw

    def quantize_values(self, values: Tensor, fmt: TierFormat) -> tuple[Blocks, Tensor]:
        """Encode `[Hkv, M, S, D]` float64 values to INT4 per token and group of G channels, low nibble first.

        Two-level metadata: low = min_c v rounded down and step = (max_c v - low) / 255 rounded up per token,
        and per group the marks a, b with [low + a * step, low + b * step] covering the group; v' = code * s
        + z with z = low + a * step, s = (b - a) * step / 15. No half-step bound is claimed: what follows
        uses the residual.
        """
        grouped = values.unflatten(-1, (-1, fmt.group))
        lo, hi = grouped.amin(-1), grouped.amax(-1)
        meta: Blocks
        if fmt.value_meta == "two-level":
            low = round_down(values.amin(-1), torch.float16)
            step = round_up(((values.amax(-1) - low.double()) / 255).clamp_min(2.0**-24), torch.float16)
            base, unit = low.double()[..., None], step.double()[..., None]
            a = ((lo - base) / unit).floor().clamp(0, 255)
            b = ((hi - base) / unit).ceil().clamp(0, 255)
            meta = {
                "value_low": low,
                "value_step": step,
                "value_marks": torch.stack((a, b), -1).nan_to_num(0).to(torch.uint8),
            }
        else:
            scale = round_up(((hi - lo) / 15).clamp_min(2.0**-24), torch.float16)
            meta = {"value_scale": scale, "value_offset": lo.to(torch.float16)}
        floats = [m for name, m in meta.items() if name != "value_marks"]
        raw = ~torch.stack([torch.isfinite(m).flatten(2).all(-1) for m in floats]).all(0)
        meta = {name: torch.where(_widen(raw, m), torch.zeros_like(m), m) for name, m in meta.items()}
        s, z = _value_scale(meta)
        codes = ((grouped - z[..., None]) / s[..., None]).round().nan_to_num(0).clamp(0, 15)
        codes = torch.where(s[..., None] > 0, codes, torch.zeros_like(codes)).flatten(-2).to(torch.uint8)
        return {"value_codes": codes[..., 0::2] | codes[..., 1::2] << 4, **meta}, raw

    def keys(self, blocks: Blocks) -> Tensor:
        """Return the float64 keys `[..., S, D]` that the codes stand for."""
        return _key_values(blocks["key_codes"], blocks["key_scale"].double(), blocks["key_offset"].double())

    def values(self, blocks: Blocks) -> Tensor:
        """Return the float64 values `[..., S, D]` that the codes stand for."""
        packed = blocks["value_codes"]
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).double()
        s, z = _value_scale(blocks)
        codes = codes.unflatten(-1, (s.shape[-1], -1))
        return (codes * s[..., None] + z[..., None]).flatten(-2)

    def key_magnitude(self, blocks: Blocks) -> Tensor:
        """Return max_t || s * |code_t| + |z| ||_2 per block: the absolute summands of a score."""
        size = blocks["key_scale"].double()[..., None, :] * blocks["key_codes"].double().abs()
        return (size + blocks["key_offset"].double().abs()[..., None, :]).norm(dim=-1).amax(-1)

    # -- attention ------------------------------------------------------------------------------------------

    def score_blocks(self, query: Tensor, blocks: Blocks) -> Tensor:
        """Return q . k' of `[Hkv, R, D]` float64 queries with every token: `[Hkv, R, M, S]`, not scaled."""
        codes, scale, offset = blocks["key_codes"], blocks["key_scale"], blocks["key_offset"]
        out = query.new_empty(codes.shape[0], query.shape[1], codes.shape[1], codes.shape[2])
        for part in _chunks(codes):
            folded = query[:, :, None] * scale[:, None, part].double()
            dots = codes[:, part].double() @ folded.permute(0, 2, 3, 1)
            constant = torch.einsum("hrd,hmd->hrm", query, offset[:, part].double())
            out[:, :, part] = dots.permute(0, 3, 1, 2) + constant[..., None]
        return out

    def half_steps(self, query: Tensor, blocks: Blocks) -> Tensor:
        """Return D0 without its scale: 0.5 * sum_c |q_c| s_bc per head and block, `[Hkv, R, M]`."""
        return 0.5 * torch.einsum("hrd,hmd->hrm", query.abs(), blocks["key_scale"].double())

    def dense(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return torch's attention of one `[Hq, D]` query on `[Hkv, T, D]` keys and values, in their dtype.

        The very call that an unmodified model makes for one token, so that mode `dense` and the last rung
        agree with it bit for bit.
        """
        heads, dim = query.shape
        group = heads // keys.shape[0]
        if group > 1 and dim > 256:
            packed = F.scaled_dot_product_attention(
                query.view(1, -1, group, dim), keys[None], values[None], scale=scale, is_causal=False
            )
            return packed.reshape(heads, dim)
        out = F.scaled_dot_product_attention(
            query[None, :, None], keys[None], values[None], scale=scale, is_causal=False, enable_gqa=group > 1
        )
        return out[0, :, 0]


def _key_codes(keys: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    codes = ((keys - offset[..., None, :]) / scale[..., None, :]).round()
    return codes.nan_to_num(0).clamp(-128, 127)


def _key_values(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return codes.double() * scale[..., None, :] + offset[..., None, :]


def _value_scale(meta: Blocks) -> tuple[Tensor, Tensor]:
    """Scale and offset per token and group, `[..., S, D / G]`."""
    if "value_scale" in meta:
        return meta["value_scale"].double(), meta["value_offset"].double()
    low, step = meta["value_low"].double()[..., None], meta["value_step"].double()[..., None]
    a, b = meta["value_marks"].double().unbind(-1)
    return (b - a) * step / 15, low + a * step


def _widen(flags: Tensor, like: Tensor) -> Tensor:
    return flags.reshape(flags.shape + (1,) * (like.ndim - flags.ndim))


def _chunks(codes: Tensor) -> list[slice]:
    """Return runs of blocks whose float64 copy stays near 16 MiB: no step holds a dequantised cache."""
    per_block = codes.shape[0] * codes[0, 0].numel() if codes.shape[1] else 1
    size = max(1, 2**21 // per_block)
    return [slice(i, i + size) for i in range(0, codes.shape[1], size)]


BACKEND = Reference()
