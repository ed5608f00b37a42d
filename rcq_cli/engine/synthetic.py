"""One attention layer with the sizes of a known model and tensors made from a formula: no weights needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rcq_cli.backends import choose_backend
from rcq_cli.engine.stepper import LayerStepper
from rcq_cli.modes.dense import DenseLayer
from rcq_cli.protocols import Geometry, Json, Mode, Rotation, Step


@dataclass(frozen=True, slots=True)
class Sizes:
    """Attention of one layer of a model."""

    query_heads: int
    kv_heads: int
    head_dim: int


GEOMETRIES = {
    "llama-3.1-8b": Sizes(32, 8, 128),
    "qwen2.5-7b": Sizes(28, 4, 128),
    "smollm2-135m": Sizes(9, 3, 64),
}
SHARPNESS = (0.6, 0.8, 1.0, 2.0)
"""How much more than its neighbours a head wants its topic, in turn over the heads of a group."""
TOPIC_TOKENS = 256
FED = 64
"""Tokens made beforehand for decoding; they repeat after that."""


class Tensors(NamedTuple):
    """What a layer is fed, after RoPE."""

    keys: Tensor
    """`[Hkv, T + FED, D]`"""
    values: Tensor
    queries: Tensor
    """`[FED, Hq, D]`"""


def topics(sizes: Sizes, tokens: int, dtype: torch.dtype, seed: int = 0) -> Tensors:
    """Return keys in clusters of consecutive tokens, values with a mean each, queries that look for one."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    count = tokens + FED
    topic = torch.arange(count) // TOPIC_TOKENS
    centres = normal(sizes.kv_heads, int(topic[-1]) + 1, sizes.head_dim)
    means = normal(sizes.kv_heads, int(topic[-1]) + 1, sizes.head_dim)
    keys = centres[:, topic] + 0.5 * normal(sizes.kv_heads, count, sizes.head_dim)
    values = means[:, topic] + 0.5 * normal(sizes.kv_heads, count, sizes.head_dim)
    group = sizes.query_heads // sizes.kv_heads
    wanted = torch.randint(centres.shape[1], (FED, sizes.query_heads), generator=draw)
    owner = torch.arange(sizes.query_heads) // group
    sharp = torch.tensor([SHARPNESS[head % group % len(SHARPNESS)] for head in range(sizes.query_heads)])
    queries = centres[owner, wanted] * sharp[:, None] + 0.3 * normal(FED, sizes.query_heads, sizes.head_dim)
    return Tensors(keys.to(dtype), values.to(dtype), queries.to(dtype))


class FastDense(DenseLayer):
    """Dense attention by a given variant; holds what mode `dense` holds."""

    variant: Callable[[Tensor, Tensor, Tensor, float], Tensor]

    def attend(self, query: Tensor) -> Step:
        """Return the variant's attention of `[Hq, D]` queries."""
        return Step(self.variant(query, self.keys.rows, self.values.rows, self.geometry.scale), None)


def grouped_matmul(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Two matrix products with the heads of a group as rows."""
    rows = query.unflatten(0, (keys.shape[0], -1))
    return (torch.softmax(rows @ keys.transpose(1, 2) * scale, -1) @ values).flatten(0, 1)


def grouped_sdpa(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """SDPA with the heads of a group as rows."""
    rows = query.unflatten(0, (keys.shape[0], -1))
    return F.scaled_dot_product_attention(rows[None], keys[None], values[None], scale=scale)[0].flatten(0, 1)


def plain_sdpa(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """SDPA as an unmodified model calls it."""
    gqa = query.shape[0] != keys.shape[0]
    out = F.scaled_dot_product_attention(
        query[None, :, None], keys[None], values[None], scale=scale, enable_gqa=gqa
    )
    return out[0, :, 0]


VARIANTS = {
    "matmul, group as rows": grouped_matmul,
    "sdpa, group as rows": grouped_sdpa,
    "sdpa, enable_gqa": plain_sdpa,
}


@torch.inference_mode()
def fastest_dense(fed: Tensors, tokens: int, scale: float, tries: int = 3) -> str:
    """Return the name of the dense variant that is fastest here on these very tensors."""
    keys, values = fed.keys[:, :tokens], fed.values[:, :tokens]
    best: dict[str, int] = {}
    for turn in range(tries + 1):
        for name, variant in VARIANTS.items():
            began = time.perf_counter_ns()
            variant(fed.queries[0], keys, values, scale)
            spent = time.perf_counter_ns() - began
            if turn:  # the first turn warms
                best[name] = min(best.get(name, spent), spent)
    return min(best, key=lambda name: best[name])


def layer_geometry(name: str, dtype: str, device: str) -> Geometry:
    """Return the geometry of one layer of `name`."""
    sizes = GEOMETRIES[name]
    heads, dim = (sizes.query_heads, sizes.kv_heads), sizes.head_dim
    # nothing drawn here has a position, but a mode that moves keys shall take the time it takes
    rotation = Rotation(tuple(1e4 ** (-2 * i / dim) for i in range(dim // 2)))
    return Geometry(*heads, dim, dtype, device, dim**-0.5, rotation=rotation)


@torch.inference_mode()
def open_layer(
    geometry: Geometry, fed: Tensors, tokens: int, mode: Mode, options: Json, backend: str
) -> tuple[LayerStepper, str]:
    """Return a layer under `mode` that holds `tokens` tokens, and the backend that serves it."""
    chosen = choose_backend(backend, geometry)
    state = mode.open(geometry, options, chosen)
    state.prefill(fed.keys[:, :tokens], fed.values[:, :tokens])
    return LayerStepper(state, fed.keys[:, tokens:], fed.values[:, tokens:], fed.queries), chosen.name


@torch.inference_mode()
def open_dense(geometry: Geometry, fed: Tensors, tokens: int) -> tuple[LayerStepper, str]:
    """Return the fastest dense layer on the same tensors, and which variant it is."""
    name = fastest_dense(fed, tokens, geometry.scale)
    state = FastDense(geometry, None)
    state.variant = VARIANTS[name]
    state.prefill(fed.keys[:, :tokens], fed.values[:, :tokens])
    return LayerStepper(state, fed.keys[:, tokens:], fed.values[:, tokens:], fed.queries), name
