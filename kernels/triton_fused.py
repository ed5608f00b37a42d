"""Fused Triton kernels for CUDA and ROCm: sealing and one certified step, decided on the device.

The kernels stand in `_triton/` and are imported when first used: this file loads without Triton. With
TRITON_INTERPRET=1, set before Python starts, they run on the CPU, slowly, for tests.
"""

import importlib.util
import os
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels.reference import Blocks, Reference
from rcq_cli.protocols import Geometry


class TritonFused(Reference):
    """Fused Triton kernels; the float64 operations of the reference where those do not apply."""

    name: ClassVar[str] = "triton-fused"

    def unsupported(self, geometry: Geometry) -> str | None:
        """Return why these kernels cannot serve `geometry` here, or None."""
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed (pip install 'rcq[gpu]')"
        device = torch.device(geometry.device).type
        if device not in ("cuda", "cpu") or (device == "cpu" and not interpreted()):
            return f"Triton needs a CUDA or ROCm device, the cache is on {geometry.device}"
        if device == "cuda" and interpreted():
            return "TRITON_INTERPRET is set, which runs kernels on the CPU"
        if geometry.head_dim % 16 or geometry.head_dim > 256:
            return f"head dim {geometry.head_dim} is no multiple of 16 up to 256"
        if geometry.dtype not in ("float32", "bfloat16", "float16"):
            return f"it has no kernels for {geometry.dtype}"
        if device == "cuda" and not kernels().core_error(torch.device(geometry.device)) <= 0.5:
            return "sums of this device's tensor cores are less exact than the certificate assumes"
        return None

    def kernels(self) -> Any:
        """Return the module whose launchers the device store and step call."""
        return kernels()

    def quantize_keys(self, keys: Tensor, fmt: TierFormat) -> tuple[Blocks, Tensor]:
        """Encode `[Hkv, M, S, D]` keys to INT8; return the blocks and which `[Hkv, M]` must stay raw."""
        sealed = kernels().encode_keys(keys.contiguous(), fmt)
        return sealed.blocks, sealed.raw

    def quantize_values(self, values: Tensor, fmt: TierFormat) -> tuple[Blocks, Tensor]:
        """Encode `[Hkv, M, S, D]` values to INT4; return the blocks and which `[Hkv, M]` must stay raw."""
        blocks, raw = kernels().encode_values(values.contiguous(), fmt)
        return blocks, raw

    def values(self, blocks: Blocks) -> Tensor:
        """Return the float64 values `[..., S, D]` that the codes stand for: rounded to float16, as read."""
        dim = 2 * blocks["value_codes"].shape[-1]
        groups = blocks["value_marks"].shape[-2] if "value_low" in blocks else blocks["value_scale"].shape[-1]
        return kernels().decode_values(blocks, dim // groups)


def interpreted() -> bool:
    """Return whether Triton runs kernels in Python on the CPU."""
    if not os.environ.get("TRITON_INTERPRET"):
        return False  # the usual case, and importing Triton takes time
    from triton import knobs

    return bool(knobs.runtime.interpret)


@cache
def kernels() -> Any:
    """Return the module of launchers."""
    from rcq_cli.kernels._triton import step

    return step


BACKEND = TritonFused()
