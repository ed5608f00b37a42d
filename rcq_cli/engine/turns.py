"""Watches the queries of one layer while decoding, for stages that end where the query turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from rcq_cli.recas.stages import StageTracker


def query_projection(model: Any, layers: tuple[int, ...]) -> Any | None:
    """Return the module that makes the queries, before RoPE, of the middle one of `layers`; None without one.

    Models that project queries, keys and values in one matrix have none: their stages end by text and length.
    """
    middle = layers[len(layers) // 2]
    for module in model.modules():
        if getattr(module, "layer_idx", None) == middle and hasattr(module, "q_proj"):
            return module.q_proj
    return None


@contextmanager
def watching_turns(model: Any, layers: tuple[int, ...], stages: StageTracker | None) -> Iterator[None]:
    """Tell `stages` the query of every token the model is fed, a mean over heads; nothing without stages."""
    projection = None if stages is None else query_projection(model, layers)
    if stages is None or projection is None:
        yield
        return
    heads = model.config.get_text_config(decoder=True).num_attention_heads

    def tell(module: Any, args: Any, output: Tensor) -> None:
        del module, args
        for query in output[0].detach().double().unflatten(-1, (heads, -1)).mean(1).cpu().numpy():
            stages.turn(query)

    handle = projection.register_forward_hook(tell)
    try:
        yield
    finally:
        handle.remove()
