"""The single contact with transformers: one attention function, one mask function, one cache layer.

A layer's keys and values reach the attention function through the dictionary that models pass to
`cache.update` and then on to attention. A model that does not pass it on is refused, never run with
attention over one token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rcq_cli.cache.statistics import Collector, Statistics
from rcq_cli.errors import SpecError, UnsupportedModel
from rcq_cli.phases import phase
from rcq_cli.protocols import Geometry, LayerState, Needs, Rotation, Step

NAME = "rcq"
FAMILIES = (
    "cohere", "cohere2", "gemma", "gemma3", "gemma3_text", "glm", "gpt2", "granite", "llama", "mistral",
    "mixtral", "nemotron", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "qwen3_next",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
_REFUSED = "unsupported model:"
_EXTRAS = {"softcap": "capped scores", "s_aux": "attention sinks", "position_bias": "a bias by position"}
"""What some models give their attention function beside queries, keys and values, by the argument's name."""
_PROBE_TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3}


class ManagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One full-attention layer whose cache rcq keeps.

    Until `prompt_tokens` tokens were seen, keys and values are collected uncompressed in a buffer that grows
    by doubling; from then on every token goes to `state`, which a mode has opened.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False  # a compressed cache cannot be cut back, so speculative decoding must refuse it

    def __init__(self, prompt_tokens: int) -> None:
        super().__init__()
        self.keys: Any = None
        self.values: Any = None
        self.prompt_tokens = prompt_tokens
        self.seen = 0
        self.geometry: Geometry | None = None
        self.state: LayerState | None = None
        self.collector: Collector | None = None
        self.closed = False
        """The call it was made for has ended."""

    @property
    def prefilling(self) -> bool:
        """Return whether no mode has taken over yet."""
        return self.state is None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffer on the first update."""
        self.device = key_states.device
        room = max(self.prompt_tokens, key_states.shape[-2])
        self.keys, self.values = (
            t.new_empty(*t.shape[:2], room, t.shape[-1]) for t in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **rest: Any,
    ) -> tuple[Tensor, Tensor]:
        """Collect the keys and values of a prefill chunk, or hand those of a decode step on to attention.

        Raises `SpecError` where the call that it was made for has ended: stock attention would see the new
        token alone.
        """
        del args, rest
        if self.closed:
            raise SpecError(
                "this cache belongs to a generate call that has ended",
                why="rcq_cli.attach keeps a cache for one call",
                fix="give the model the whole text again, inside the block or after it",
                id="RCQ-USE-34",
            )
        if kwargs is not None:
            kwargs["rcq_layer"] = self
        start, self.seen = self.seen, self.seen + key_states.shape[-2]
        if not self.prefilling:
            return key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.seen > self.keys.shape[-2]:
            self.keys, self.values = (
                torch.cat((t, t.new_empty(*t.shape[:2], self.seen, t.shape[-1])), -2)
                for t in (self.keys, self.values)
            )
        self.keys[..., start : self.seen, :], self.values[..., start : self.seen, :] = (
            key_states,
            value_states,
        )
        return self.keys[..., : self.seen, :], self.values[..., : self.seen, :]

    def collected(self) -> tuple[Tensor, Tensor]:
        """Return the prefilled `[Hkv, T, D]` keys and values."""
        return self.keys[0, :, : self.seen], self.values[0, :, : self.seen]

    def observe(self, needs: tuple[Needs, ...], query: Tensor, key: Tensor) -> None:
        """Collect what modes need of a prefill chunk: its `[Hq, L, D]` queries and all keys so far."""
        assert self.geometry is not None
        if self.collector is None:
            self.collector = Collector(needs, self.prompt_tokens, self.geometry.scale)
        self.collector.add(query, key)

    def statistics(self) -> Statistics | None:
        """Return what was collected of the prompt, None when no mode asked."""
        return None if self.collector is None else self.collector.result()

    def hand_over(self, state: LayerState) -> None:
        """Let a mode keep the cache from now on; the buffer is dropped."""
        self.state, self.keys, self.values, self.collector = state, None, None, None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a mask would cover, and where they start."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Return the logical length, whatever is held."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1: no maximum."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = self.state = self.geometry = self.collector = None
        self.seen, self.is_initialized = 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuse: beams would have to reorder the originals on the host too."""
        del beam_idx
        raise SpecError("beam search is not supported with a managed cache", fix="use num_beams=1")


def ignore(*args: object) -> None:
    """Do nothing with what happened at a layer."""
    del args


class Hook:
    """The attention and mask function of one attached model, and what happens at each managed layer.

    `managed` are the layer indices whose cache must reach the attention function. `on_prefilled` is called
    with a layer once its prompt is complete, `on_step` with (layer index, state, query, step) after each
    decode step. With `last_row_only` the last layer computes its output for the final prompt position alone,
    which is all that a caller asking for the last logits reads. `needs` is what the modes of this prefill
    want to know of its attention: the queries of every row arrive here in any case, so statistics of the
    last layer do not depend on that shortcut. `rotations` are those of the layers, where a mode asked.
    """

    def __init__(self, layers: int) -> None:
        self.last_layer = layers - 1
        self.managed: frozenset[int] = frozenset()
        self.last_row_only = False
        self.needs: tuple[Needs, ...] = ()
        self.rotations: Mapping[int, Rotation] = {}
        self.on_prefilled: Callable[[ManagedLayer], None] = ignore
        self.on_step: Callable[[int, LayerState, Tensor, Step], None] = ignore

    def attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        rcq_layer: ManagedLayer | None = None,
        **rest: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return `[B, T, Hq, D]` attention of `[B, Hq, T, D]` queries; a managed layer asks its mode."""
        index = getattr(module, "layer_idx", None)
        if rcq_layer is None:
            if index in self.managed:
                raise UnsupportedModel(
                    f"layer {index}: no cache of rcq reached the attention function",
                    why="a forward call without cache, or with one of its own, cannot run while rcq is "
                    "attached; or this architecture does not hand its cache to attention",
                    fix="use generate(), or leave the block before calling the model yourself",
                    id="RCQ-USE-31",
                )
            return _stock(module, query, key, value, attention_mask, dropout, scaling, rest)
        if rcq_layer.prefilling:
            return self._prefill(module, query, key, value, dropout, scaling, rcq_layer, rest)
        return self._decode(module, query, key, value, rcq_layer, rest), None

    def _prefill(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout: float,
        scaling: float | None,
        layer: ManagedLayer,
        rest: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        if query.shape[0] != 1:
            raise SpecError(f"batch of {query.shape[0]} sequences", fix="rcq manages one sequence at a time")
        index: Any = module.layer_idx
        layer.geometry = _geometry(query, key, scaling, index, self.rotations.get(index))
        if self.needs:
            layer.observe(self.needs, query[0], key[0])
        done = layer.seen >= layer.prompt_tokens
        if self.last_row_only and module.layer_idx == self.last_layer:
            output = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
            if done:
                row = query[:, :, -1:]
                output[:, -1:] = _stock(module, row, key, value, None, dropout, scaling, rest)[0]
        else:
            mask = _causal(query.shape[2], key.shape[2], query.device)
            output = _stock(module, query, key, value, mask, dropout, scaling, rest)[0]
        if done:
            self.on_prefilled(layer)
        return output, None

    def _decode(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: ManagedLayer,
        rest: dict[str, Any],
    ) -> Tensor:
        _refuse_extras(rest)
        assert layer.state is not None
        rows = []
        for t in range(query.shape[2]):
            with phase("append"):
                layer.state.append(key[0, :, t], value[0, :, t])
            with phase("attend"):
                step = layer.state.attend(query[0, :, t])
            self.on_step(module.layer_idx, layer.state, query[0, :, t], step)
            rows.append(step.output)
        return torch.stack(rows)[None]

    def mask(self, *args: Any, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
        """Return no mask for full attention (managed layers make their own), else the stock one.

        A full mask would be quadratic in the context although most chunks of a prefill never need it.
        """
        if local_size is None:
            return None
        mask: Tensor | None = sdpa_mask(*args, local_size=local_size, **kwargs)
        return mask


@contextmanager
def attached(model: Any, hook: Hook) -> Iterator[None]:
    """Run `model` with `hook` as its attention; afterwards model, config and registries are as before."""
    pairs = ((AttentionInterface, hook.attention), (AttentionMaskInterface, hook.mask))
    saved = [registry._global_mapping.get(NAME) for registry, _ in pairs]
    before = model.config._attn_implementation
    for registry, function in pairs:
        registry.register(NAME, function)
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise refused(model, "it does not use the attention interface of transformers")
        yield
    finally:
        model.set_attn_implementation(before)  # first the model, then the registries it looks names up in
        for (registry, _), old in zip(pairs, saved, strict=True):
            registry._global_mapping.pop(NAME, None)
            if old is not None:
                registry._global_mapping[NAME] = old


def is_attached() -> bool:
    """Return whether some model runs with the attention of rcq now."""
    return NAME in AttentionInterface._global_mapping


def make_cache(model: Any, prompt_tokens: int) -> Any:
    """Return a transformers cache whose full-attention layers are managed and whose others are stock."""
    stock = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return Cache(
        layers=[ManagedLayer(prompt_tokens) if type(layer) is DynamicLayer else layer for layer in stock]
    )


def fork_cache(cache: Any) -> Any:
    """Return a cache that can be decoded on without changing `cache`; managed layers come back empty.

    Stock attention layers replace their tensors on update, so a shallow copy is independent; others are
    copied.
    """
    layers: list[Any] = []
    twin: Any
    for layer in cache.layers:
        if isinstance(layer, ManagedLayer):
            twin = ManagedLayer(layer.prompt_tokens)
            twin.seen, twin.geometry = layer.seen, layer.geometry
        else:
            twin = copy.copy(layer) if isinstance(layer, DynamicLayer) else copy.deepcopy(layer)
        layers.append(twin)
    return Cache(layers=layers)


def managed_layers(cache: Any) -> dict[int, ManagedLayer]:
    """Return the managed layers by index."""
    return {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, ManagedLayer)}


def check_kind(model: Any) -> None:
    """Refuse what is no plain model of transformers: other objects, wrappers and compiled models."""
    if not isinstance(model, PreTrainedModel):
        raise refused(model, "not a PreTrainedModel of transformers; give the model inside a wrapper")
    if model._compiled_call_impl is not None:
        raise refused(model, "it is compiled; give the model before torch.compile")


def check_model(model: Any) -> str | None:
    """Refuse a model that rcq cannot manage; return a note for one outside the tested families.

    A short prefill and two decode steps through the hook must give the logits of the stock path: it catches
    attention sinks, soft caps and position biases that would otherwise be dropped without an error.
    """
    check_kind(model)
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise refused(model, "encoder-decoder model")
    if model.training:
        raise refused(model, "it is in training mode; call model.eval()")
    try:
        managed = managed_layers(make_cache(model, 0))
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise refused(model, f"{type(error).__name__}: {error}") from error
    if not managed:
        raise refused(model, "no full-attention layer to manage")
    error_ratio = _probe(model)
    allowed = _PROBE_TOLERANCE.get(model.dtype, 5e-2)
    if not error_ratio < allowed:  # NaN is refused too
        raise refused(model, f"logits through the hook differ from the stock path by {error_ratio:.1e}")
    if config.model_type in FAMILIES:
        return None
    return f"{type(model).__name__} is not among the tested families; its probe passed with {error_ratio:.1e}"


@torch.inference_mode()
def _probe(model: Any) -> float:
    """Return the relative logit error of prefill plus two dense decode steps through the hook."""
    from rcq_cli.kernels.reference import BACKEND
    from rcq_cli.modes.dense import DenseLayer

    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(3, 12, device=model.device) % vocabulary)[None]
    hook = Hook(model.config.get_text_config(decoder=True).num_hidden_layers)

    def take_over(layer: ManagedLayer) -> None:
        assert layer.geometry is not None
        state = DenseLayer(layer.geometry, BACKEND)
        state.prefill(*layer.collected())
        layer.hand_over(state)

    hook.on_prefilled = take_over
    try:
        expected = _probed(model, ids, DynamicCache(config=model.config.get_text_config(decoder=True)))
        cache = make_cache(model, 7)
        hook.managed = frozenset(managed_layers(cache))
        with attached(model, hook):
            got = _probed(model, ids, cache)
    except UnsupportedModel as error:
        raise error if error.what.startswith(_REFUSED) else refused(model, error.what) from error
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, ImportError) as error:
        raise refused(
            model, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    if not bool(torch.isfinite(expected).all()):
        raise UnsupportedModel(
            f"{_REFUSED} {type(model).__name__} gives logits that are not finite, without rcq too",
            why=f"its weights hold NaN or infinity, or {str(model.dtype).removeprefix('torch.')} overflows",
            fix="look at the weight files, or try --dtype float32",
            id="RCQ-USE-30",
        )
    return float((got - expected).abs().max() / expected.abs().max())


def _probed(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Return the float32 logits after the last three of `ids`: a prefill and two steps with `cache`.

    Both paths take the same steps, for in 16 bits one call over all ids may differ from them by a third.
    """
    logits = [model(ids[:, :7], cache=cache, use_cache=True).logits[:, -1:]]
    logits += [model(ids[:, t : t + 1], cache=cache, use_cache=True).logits for t in (7, 8)]
    return torch.cat(logits, 1).float()


def refused(model: Any, reason: str) -> UnsupportedModel:
    """Return the error for a model that cannot be managed."""
    return UnsupportedModel(
        f"{_REFUSED} {type(model).__name__} ({reason})",
        fix=f"supported families: {', '.join(FAMILIES)}",
        id="RCQ-USE-30",
    )


def _geometry(
    query: Tensor, key: Tensor, scaling: float | None, layer: Any, rotation: Rotation | None
) -> Geometry:
    dim = query.shape[-1]
    dtype = str(key.dtype).removeprefix("torch.")
    scale = dim**-0.5 if scaling is None else float(scaling)
    return Geometry(query.shape[1], key.shape[1], dim, dtype, str(key.device), scale, layer, rotation)


def _causal(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Mask of a chunk over all keys so far; None where torch's own causal flag, or none at all, does it."""
    if queries == 1 or queries == keys:
        return None
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return mask.tril(keys - queries)[None, None]


def _stock(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    rest: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    _refuse_extras(rest)
    result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **rest
    )
    return result


def _refuse_extras(rest: dict[str, Any]) -> None:
    """Refuse arguments that change attention and that no mode implements."""
    for name, what in _EXTRAS.items():
        if rest.get(name) is not None:
            raise UnsupportedModel(
                f"its attention has {what} ({name}), which no mode computes", id="RCQ-USE-30"
            )
