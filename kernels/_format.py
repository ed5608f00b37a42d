"""How tier 1 is laid out: block and group sizes and the dtype of metadata."""

from dataclasses import dataclass

import torch

from rcq_cli.errors import SpecError

CHECKSUM_FACTOR = -7046029254386353131
"""Multiplies a word's number in checksums; odd, so that a change within one 64-bit word can never cancel."""


@dataclass(frozen=True, slots=True)
class TierFormat:
    """INT8 keys per block and channel, INT4 values per token and group of channels."""

    block: int = 32
    """S, tokens per block."""
    group: int = 16
    """G, channels that share one value scale; divides the head dim."""
    key_meta: str = "float16"
    """Dtype of key scale and offset: float16 or float32."""
    value_meta: str = "two-level"
    """`two-level`: float16 range per token, two bytes per group; `float16`: scale and offset per group."""

    def check(self, head_dim: int) -> None:
        """Raise `SpecError` when this format does not fit `head_dim`."""
        if not 2 <= self.block <= 1024:
            raise SpecError(
                f"block={self.block} is not allowed", fix="allowed: 2 to 1024 tokens", id="RCQ-USE-11"
            )
        if self.group < 2 or head_dim % self.group:
            raise SpecError(
                f"group={self.group} does not divide head dim {head_dim}",
                fix=f"allowed: {', '.join(str(g) for g in range(2, head_dim + 1) if head_dim % g == 0)}",
                id="RCQ-USE-11",
            )
        for name, value, allowed in (
            ("key-meta", self.key_meta, ("float16", "float32")),
            ("value-meta", self.value_meta, ("two-level", "float16")),
        ):
            if value not in allowed:
                raise SpecError(
                    f"{name}={value!r} is not allowed", fix=f"allowed: {', '.join(allowed)}", id="RCQ-USE-11"
                )

    @property
    def key_dtype(self) -> torch.dtype:
        """Return the dtype of key scale and offset."""
        return torch.float16 if self.key_meta == "float16" else torch.float32
