"""Original keys and values everywhere, through the attention call of an unmodified model: the reference."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.slab import Slab
from rcq_cli.certify.exact import as_groups, exact_attention
from rcq_cli.protocols import Engagement, Geometry, LayerBytes, Step


@dataclass(frozen=True, slots=True)
class Options:
    """Mode `dense` has no options."""


class DenseLayer:
    """One layer under `dense`."""

    def __init__(self, geometry: Geometry, backend: Any) -> None:
        self.geometry, self.backend = geometry, backend
        dtype = getattr(torch, geometry.dtype)
        self.keys, self.values = (
            Slab(geometry.kv_heads, (geometry.head_dim,), dtype, geometry.device) for _ in "kv"
        )
        self.steps = 0

    @property
    def tokens(self) -> int:
        """Return the tokens seen."""
        return self.keys.length

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Add `[Hkv, T, D]` keys and values."""
        self.keys.extend(keys)
        self.values.extend(values)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the `[Hkv, D]` key and value of one token."""
        self.prefill(key[:, None], value[:, None])

    def attend(self, query: Tensor) -> Step:
        """Return torch's attention of `[Hq, D]` queries."""
        self.steps += 1
        return Step(self.backend.dense(query, self.keys.rows, self.values.rows, self.geometry.scale), None)

    def exact(self, query: Tensor) -> Tensor:
        """Return float64 attention, `[Hq, D]`."""
        groups = as_groups(query, self.geometry.kv_heads)
        return exact_attention(groups, self.keys.rows, self.values.rows, self.geometry.scale).output.flatten(
            0, 1
        )

    def fork(self) -> "DenseLayer":
        """Return an independent copy."""
        twin = DenseLayer(self.geometry, self.backend)
        twin.keys, twin.values = self.keys.fork(), self.values.fork()
        return twin

    def bytes(self) -> LayerBytes:
        """Return the bytes of the tokens held: the reference carries no slack of our growth rule."""
        g = self.geometry
        held = self.keys.rows.nbytes + self.values.rows.nbytes
        return LayerBytes(held, 0, 0, 0, 2 * g.kv_heads * self.tokens * g.head_dim * 2)

    def engagement(self) -> Engagement:
        """Return the calls that went through the engine."""
        return Engagement(
            self.steps, self.steps, 0, 0, self.steps > 0, "" if self.steps else "no_decode_steps"
        )


class Dense:
    """The reference."""

    name = "dense"
    summary = "keys and values in the model's own dtype; the reference every mode is judged against"
    label = "reference"
    certifies = False
    Options = Options

    def open(self, geometry: Geometry, options: Any, backend: Any) -> DenseLayer:
        """Make the empty cache of one layer."""
        del options
        return DenseLayer(geometry, backend)


MODE = Dense()
