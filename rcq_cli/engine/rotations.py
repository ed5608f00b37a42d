"""Which rotary positions the layers of a model use, found by watching the model.

Its frequencies are buffers of the model; which of them a layer uses and how it pairs channels no interface
tells. So the model reads one token many times over: without other positions in it every layer then sees the
same hidden state everywhere, and keys of a layer differ by their rotation alone. What explains them is the
rotation; a layer that nothing explains is refused, never guessed at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.rotary import moved
from rcq_cli.engine.hook import Hook, attached, make_cache, managed_layers
from rcq_cli.errors import UnsupportedModel
from rcq_cli.protocols import Rotation

_STATIC = {"default", "linear", "yarn", "llama3", "proportional"}
"""Kinds of frequencies that do not depend on the length of the text."""
_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}


@torch.inference_mode()
def rotations(model: Any) -> dict[int, Rotation]:
    """Return the rotation of each managed layer of `model` by index; raise `UnsupportedModel` without one."""
    candidates = list(_candidates(model))
    tolerance = _TOLERANCE.get(model.dtype, 3e-2)
    found = {}
    for index, keys in _keys_of_one_token(model).items():
        errors = [_error(keys, candidate) for candidate in candidates]
        best = min(range(len(errors)), key=errors.__getitem__)
        if not errors[best] < tolerance:
            reason = "its positions are of another kind, or layers below it pass positions on"
            raise _refused(model, f"no rotation of the model explains the keys of layer {index}: {reason}")
        found[index] = candidates[best]
    return found


def _candidates(model: Any) -> Iterator[Rotation]:
    """Yield no rotation at all, and those that buffers of the model allow."""
    yield Rotation(())
    seen = set()
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        if names:
            _check_kinds(model, getattr(module, "rope_type", "default"))
        for name in names:
            frequencies = tuple(getattr(module, name).double().flatten().tolist())
            if frequencies not in seen:
                seen.add(frequencies)
                yield Rotation(frequencies)
                yield Rotation(frequencies, interleaved=True)


def _check_kinds(model: Any, kinds: Any) -> None:
    """Refuse frequencies that change with the length of the text: keys of different ages would disagree."""
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if kind not in _STATIC:
            raise _refused(model, f"its rotary positions are of kind {kind!r}, which changes with the length")


def _keys_of_one_token(model: Any) -> dict[int, Tensor]:
    """Return the keys `[Hkv, T, D]` of each managed layer for a text of one token, repeated."""
    config = model.config.get_text_config(decoder=True)
    hook, cache = Hook(config.num_hidden_layers), make_cache(model, _TOKENS + 1)
    hook.managed = frozenset(managed_layers(cache))
    sizes = model.get_input_embeddings().weight.norm(dim=-1)
    # a padding token is all zeros, which look the same however they are turned
    ids = torch.full((1, _TOKENS), int(sizes.argmax()), device=model.device)
    with attached(model, hook):
        model(ids, cache=cache, use_cache=True)
    return {index: layer.collected()[0] for index, layer in managed_layers(cache).items()}


def _error(keys: Tensor, candidate: Rotation) -> float:
    """Return how far `[Hkv, T, D]` keys are from the first one turned to their positions, relative to it."""
    if 2 * len(candidate.frequencies) > keys.shape[-1]:
        return float("inf")
    first = keys[:, :1].double()
    expected = moved(first.expand(keys.shape), candidate, torch.arange(keys.shape[1]))
    return float((keys.double() - expected).norm(dim=-1).amax() / first.norm(dim=-1).amax())


def _refused(model: Any, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"keys of {type(model).__name__} cannot be moved to other positions",
        why=reason,
        fix="use streaming-llm, which keeps true positions",
        id="RCQ-USE-33",
    )
