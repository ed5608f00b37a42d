"""`attach`: a mode keeps the cache of somebody's own model for the length of a block."""

from __future__ import annotations

import functools
import gzip
import json
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rcq_cli.backends import BACKENDS, choose_backend
from rcq_cli.cache.statistics import needs_of
from rcq_cli.engine.decoder import check_intact, open_layer, total_bytes
from rcq_cli.engine.hook import (
    Hook,
    ManagedLayer,
    attached,
    check_kind,
    check_model,
    is_attached,
    make_cache,
    managed_layers,
)
from rcq_cli.engine.recorder import StepRecorder
from rcq_cli.engine.rotations import rotations
from rcq_cli.errors import SpecError
from rcq_cli.protocols import LayerBytes, Mode
from rcq_cli.readings import known
from rcq_cli.recas.stages import StageTracker

_checked: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
_REFUSED = (
    ("num_beams", lambda v: v not in (None, 1), "beam search", "use num_beams=1"),
    (
        "num_return_sequences",
        lambda v: v not in (None, 1),
        "several sequences",
        "call generate once per sequence",
    ),
    ("assistant_model", lambda v: v is not None, "assisted decoding", "leave assistant_model out"),
    ("prompt_lookup_num_tokens", lambda v: v is not None, "prompt lookup decoding", "leave it out"),
    ("guidance_scale", lambda v: v not in (None, 1), "classifier-free guidance", "leave guidance_scale out"),
    ("cache", lambda v: v is not None, "a cache of your own", "rcq gives each call its cache"),
    ("past_key_values", lambda v: v is not None, "a cache of your own", "rcq gives each call its cache"),
    ("cache_implementation", lambda v: v is not None, "cache_implementation", "leave it out"),
    ("use_cache", lambda v: v is False, "use_cache=False", "leave it out"),
    ("output_attentions", bool, "output_attentions", "leave it out"),
)


class Session:
    """What an attached model did, readable during the block and after it."""

    def __init__(self, mode: Mode, options: Any, backend: str, note: str | None) -> None:
        self.mode, self.options, self.backend, self.note = mode, options, backend, note
        self.calls = 0
        self.backend_name = backend
        self._records: list[Mapping[str, Any]] = []
        self._bytes: LayerBytes | None = None
        self._step_ns: list[int] = []
        self._model, self._dtype = "", ""
        self._open: _Call | None = None

    def summary(self) -> dict[str, Any]:
        """Return the cell of all calls so far as in the JSON contract, without the fields of a task.

        A null has the reason beside it, in `<name>_status`.
        """
        from rcq_cli.records import step_speed
        from rcq_cli.steps import certificate_summary

        self._close()
        held = None
        if self._bytes is not None:
            held = {name: getattr(self._bytes, name) for name in LayerBytes.__dataclass_fields__}
            held["device_ratio"] = held["device"] / held["dense_equivalent"]
        found = certificate_summary(self._records)
        certificates = found and {name: value for name, value in found.items() if name != "unbounded"}
        uncertified = "no_decode_steps" if self.mode.certifies else "not_applicable"
        return {
            "mode": self.mode.name,
            "model": self._model,
            "dtype": self._dtype,
            "backend": self.backend_name,
            "calls": self.calls,
            **step_speed(self._step_ns),
            **known("bytes", held, "no_calls"),
            **known("certificates", certificates, uncertified),
            "status": "complete",
        }

    def steps(self) -> Any:
        """Return the certificates of all calls as a pyarrow table, a row per step, layer and query head.

        None when no step was certified. `sample_id` is `call/0`, `call/1`, ...
        """
        from rcq_cli.steps import table

        self._close()
        return table(self._records)

    def _close(self) -> None:
        """Take over what the last call recorded."""
        call, self._open = self._open, None
        if call is None:
            return
        from rcq_cli.files import SCHEMA
        from rcq_cli.steps import encode

        arrays = call.recorder.arrays()
        if arrays is not None:
            name = f"call/{call.number}"
            self._records.append(json.loads(gzip.decompress(encode(name, name, arrays, SCHEMA))))
        held = call.bytes()
        if held is not None and (self._bytes is None or held.device >= self._bytes.device):
            self._bytes = held


class _Call:
    """One `generate` call: its cache, and the certificates recorded while it runs."""

    def __init__(self, session: Session, model: Any, prompt_tokens: int) -> None:
        self.number = session.calls
        session.calls += 1
        self.session = session
        self.cache = make_cache(model, prompt_tokens)
        self.layers = tuple(managed_layers(self.cache))
        certifies = session.mode.certifies
        self.recorder = StepRecorder(self.layers, audit=0.0, seed=self.number, certifies=certifies)
        self.need = needs_of(session.mode, session.options)
        # the model alone does not know the text of its ids: units are blocks, links still follow the ids
        self.stages = StageTracker() if self.need is not None and self.need.token_ids else None
        self.started = 0

    def on_prefilled(self, layer: ManagedLayer) -> None:
        """Compress a layer whose prompt is complete."""
        assert layer.geometry is not None
        backend = choose_backend(self.session.backend, layer.geometry)
        self.session.backend_name, self.session._dtype = backend.name, layer.geometry.dtype
        state = self.session.mode.open(layer.geometry, self.session.options, backend)
        open_layer(state, layer, self.need, self.stages)
        layer.hand_over(state)

    def before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """Start the clock of one forward call."""
        del module
        ids = kwargs.get("input_ids", args[0] if args else None)
        self.recorder.begin(1 if ids is None else ids.shape[1])
        if self.stages is not None and ids is not None:
            self.stages.read(ids[0].tolist())
        self.started = time.perf_counter_ns()

    def after_forward(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Stop it, for single-token steps after the prefill."""
        del module, args, kwargs, output
        if not any(layer.prefilling for layer in managed_layers(self.cache).values()) and self.decoded:
            self.session._step_ns.append(time.perf_counter_ns() - self.started)
        self.decoded = True

    decoded = False

    def bytes(self) -> LayerBytes | None:
        """Return the ledger of this call's cache, None before its prompt was complete."""
        states = [layer.state for layer in managed_layers(self.cache).values() if layer.state is not None]
        return total_bytes([state.bytes() for state in states], self.cache) if states else None


@contextmanager
def attach_session(model: Any, mode: Mode, options: Any, backend: str) -> Iterator[Session]:
    """Yield a `Session` while `mode` keeps the cache of `model`; see `rcq_cli.attach`."""
    if is_attached():
        # the registries of transformers are global, so not even two different models may be nested
        raise SpecError("a model is attached already", fix="leave the first block before entering another")
    if backend != "auto":
        BACKENDS.resolve(backend)
    check_kind(model)
    if model not in _checked:
        _checked[model] = check_model(model)
        if _checked[model]:
            warnings.warn(str(_checked[model]), stacklevel=4)
    elif model.training:
        check_model(model)
    session = Session(mode, options, backend, _checked[model])
    session._model = getattr(model.config, "name_or_path", "") or type(model).__name__
    hook = Hook(model.config.get_text_config(decoder=True).num_hidden_layers)
    hook.managed = frozenset(managed_layers(make_cache(model, 0)))
    need = needs_of(mode, options)
    hook.needs = () if need is None else (need,)
    if need is not None and need.rotation:
        hook.rotations = rotations(model)
    original = model.generate

    @functools.wraps(original)
    def generate(inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        kwargs["generation_config"] = generation_config
        ids = _prompt(inputs, kwargs, model)
        session._close()
        call = session._open = _Call(session, model, ids.shape[1])
        hook.on_prefilled = call.on_prefilled
        hook.on_step = call.recorder.record
        hooks = (
            model.register_forward_pre_hook(call.before_forward, with_kwargs=True),
            model.register_forward_hook(call.after_forward, with_kwargs=True),
        )
        try:
            answer = original(ids, cache=call.cache, **kwargs)
            layers = managed_layers(call.cache).values()
            check_intact(mode, [layer.state for layer in layers if layer.state is not None])
            return answer
        finally:
            for handle in hooks:
                handle.remove()
            for layer in managed_layers(call.cache).values():
                layer.closed = True

    with attached(model, hook):
        model.generate = generate
        try:
            yield session
        finally:
            del model.generate
            session._close()


def _prompt(inputs: Any, kwargs: dict[str, Any], model: Any) -> torch.Tensor:
    """Return the `[1, T]` prompt of a `generate` call; raise `SpecError` for what cannot be managed."""
    ids = kwargs.pop("input_ids", None) if inputs is None else inputs
    if ids is None or not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise SpecError("generate needs input_ids of shape [1, tokens]", fix="model.generate(input_ids)")
    if ids.shape[0] != 1:
        raise SpecError(f"batch of {ids.shape[0]} sequences", fix="call generate once per sequence")
    if ids.shape[1] == 0:
        raise SpecError("an empty prompt", fix="give at least one token")
    config = kwargs.get("generation_config") or model.generation_config
    for name, refuse, what, fix in _REFUSED:
        if refuse(kwargs.get(name, getattr(config, name, None))):
            raise SpecError(f"{what} is not supported while rcq is attached", fix=fix, id="RCQ-USE-32")
    mask = kwargs.get("attention_mask")
    if mask is not None and not bool((mask != 0).all()):
        raise SpecError(
            "padding is not supported while rcq is attached", fix="give one sequence without padding"
        )
    return ids
