"""Prefill once, decode under any mode: exact control of phases, timing and audits."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rcq_cli.backends import choose_backend
from rcq_cli.cache.statistics import covers, needs_of
from rcq_cli.engine.hook import (
    Hook,
    ManagedLayer,
    attached,
    check_model,
    fork_cache,
    ignore,
    make_cache,
    managed_layers,
)
from rcq_cli.engine.recorder import StepRecorder
from rcq_cli.engine.rotations import rotations
from rcq_cli.engine.scoring import Reference, TargetScores, prompt_nll
from rcq_cli.engine.turns import watching_turns
from rcq_cli.errors import BrokenRun, UnsupportedHere
from rcq_cli.protocols import (
    Completion,
    Decoded,
    Engagement,
    Json,
    LayerBytes,
    LayerState,
    Loaded,
    Mode,
    Needs,
    Sample,
)
from rcq_cli.recas.stages import StageTracker

REFERENCE = "dense"
"""The mode whose predictions the others are compared with."""


@dataclass
class Prefill:
    """The dense prefill of one context, shared by every mode and question that builds on it."""

    tokens: int
    ns: int
    cache: Any
    logits: Tensor
    """float32 `[V]` logits of the last position."""
    needs: tuple[Needs, ...] = ()
    """What was collected of its attention, for the modes that will build on it."""
    opened: dict[tuple[str, Any], list[LayerState]] = field(default_factory=dict)
    """Compressed states by mode and options, kept while further questions may need them."""
    scored: tuple[float, float] | None = None
    """Summed NLL of the prompt in nats and the tokens behind it, where it was asked for."""
    references: dict[tuple[int, ...], Reference] = field(default_factory=dict)
    """The dense model's predictions by targets."""


class Engine:
    """One loaded model, ready to answer samples under any mode."""

    def __init__(self, loaded: Loaded, *, backend: str) -> None:
        self.loaded, self.model = loaded, loaded.model
        found = check_model(self.model), _slow_dtype(self.model)
        self.notes = tuple(note for note in found if note is not None)
        """What its user should know before anything is run."""
        config = self.model.config.get_text_config(decoder=True)
        self.hook = Hook(config.num_hidden_layers)
        self.backend_request = backend
        self.backend_name = backend
        self.layers: tuple[int, ...] = tuple(managed_layers(make_cache(self.model, 0)))
        self.unmanaged = config.num_hidden_layers - len(self.layers)
        self.hook.managed = frozenset(self.layers)
        if self.model.device.type != "cpu":
            raise UnsupportedHere(
                f"device {self.model.device} cannot be served",
                why="this version decodes on the CPU",
                fix="--device cpu",
            )

    @torch.inference_mode()
    def prefill(
        self, ids: Sequence[int], modes: Sequence[tuple[Mode, Any]] = (), *, score_prompt: bool = False
    ) -> Prefill:
        """Run the prompt `ids` through the model, nothing compressed; raise `BrokenRun` on NaN logits.

        `modes` are the modes and their options that will build on it: what they need to know of its attention
        is collected on the way, and nothing else. `score_prompt` also sums the NLL of the prompt's tokens.
        """
        needs = self._needs(modes)
        cache = make_cache(self.model, len(ids))
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.model.device)
        self.hook.on_prefilled = ignore
        self.hook.last_row_only = not score_prompt
        self.hook.needs = needs
        nll = 0.0
        started = time.perf_counter_ns()
        with attached(self.model, self.hook):
            for start in range(0, len(ids), self.loaded.prefill_chunk):
                chunk = tokens[:, start : start + self.loaded.prefill_chunk]
                kept = 0 if score_prompt else 1  # 0 means all
                logits = self.model(chunk, cache=cache, use_cache=True, logits_to_keep=kept).logits
                if score_prompt:
                    nll += prompt_nll(logits[0], ids[start + 1 : start + 1 + chunk.shape[1]])
        spent = time.perf_counter_ns() - started - collecting_ns(cache)
        self.hook.needs = ()
        scored = (nll, float(len(ids) - 1)) if score_prompt else None
        return Prefill(len(ids), spent, cache, _checked(logits), needs, scored=scored)

    @torch.inference_mode()
    def check_modes(self, modes: Sequence[tuple[Mode, Any]]) -> None:
        """Raise what a mode raises when it opens on a layer of this model; one token tells the geometry."""
        self._needs(modes)
        self.hook.on_prefilled = ignore
        self.hook.last_row_only, self.hook.needs = True, ()
        cache = make_cache(self.model, 1)
        with attached(self.model, self.hook):
            self.model(torch.zeros((1, 1), dtype=torch.long), cache=cache, use_cache=True)
        for layer in managed_layers(cache).values():
            assert layer.geometry is not None
            for mode, options in modes:
                mode.open(layer.geometry, options, choose_backend(self.backend_request, layer.geometry))

    def _needs(self, modes: Sequence[tuple[Mode, Any]]) -> tuple[Needs, ...]:
        """Return what the modes need to know of a prompt, the rotation of the model's positions at hand."""
        asked = (needs_of(mode, options) for mode, options in modes)
        needs = tuple(need for need in asked if need is not None)
        if any(need.rotation for need in needs) and not self.hook.rotations:
            self.hook.rotations = rotations(self.model)
        return needs

    @torch.inference_mode()
    def decode(
        self, prefill: Prefill, sample: Sample, mode: Mode, options: Any, *, audit: float = 0.0
    ) -> Decoded:
        """Answer `sample` under `mode`, starting from the prefill of its first `context_len` tokens.

        The answer is greedy; of a sample with targets these are fed one by one and scored, also against the
        dense model where `add_reference` was called. `audit` is the share of steps whose true error is
        measured. Raises `BrokenRun` on NaN or infinite logits.
        """
        states, selection_ns = self._states(prefill, sample, mode, options)
        cache = fork_cache(prefill.cache)
        for layer, state in zip(managed_layers(cache).values(), states, strict=True):
            layer.hand_over(state)
        recorder = StepRecorder(self.layers, audit=audit, seed=sample.seed, certifies=mode.certifies)
        self.hook.on_step = recorder.record
        self.hook.last_row_only = False
        steps = _Steps(self.model, cache, recorder, follow_anew(states))
        with attached(self.model, self.hook), watching_turns(self.model, self.layers, steps.stages):
            if sample.targets:
                completion = self._forced(prefill, sample, steps, reference=mode.name == REFERENCE)
            else:
                completion = self._greedy(prefill, sample, steps)
        done = self._decoded(mode, prefill, steps, completion, selection_ns)
        need = needs_of(mode, options)
        if need is None or not need.chooses_by_attention:
            return done
        # such a choice favours the question where that was in the prompt
        aware = sample.context_len >= len(sample.prompt_ids)
        return replace(done, engagement={**done.engagement, "query_aware": aware})

    def add_reference(self, prefill: Prefill, sample: Sample) -> None:
        """Keep the dense model's predictions for the targets of `sample`, unless they are there."""
        if _targets(sample) not in prefill.references:
            from rcq_cli.modes.dense import MODE, Options

            mode: Any = MODE
            self.decode(prefill, sample, mode, Options())

    def _greedy(self, prefill: Prefill, sample: Sample, steps: _Steps) -> Completion:
        """Return the answer of the likeliest token at each step."""
        output: list[int] = []
        stops = {*sample.stop_ids, *self.loaded.tokenizer.eos_ids}
        reason = "length"
        question = sample.prompt_ids[sample.context_len :]
        logits = steps.feed(question) if question else prefill.logits
        while True:
            token = int(logits.argmax())
            output.append(token)
            if token in stops:
                reason = "stop" if token in sample.stop_ids else "eos"
                break
            if len(output) >= sample.max_new_tokens:
                break
            logits = steps.feed([token])
        return Completion(tuple(output), self.loaded.tokenizer.decode(output), reason)

    def _forced(self, prefill: Prefill, sample: Sample, steps: _Steps, *, reference: bool) -> Completion:
        """Feed the targets and return their scores; the dense model's predictions are kept."""
        targets = _targets(sample)
        question = sample.prompt_ids[sample.context_len : len(sample.prompt_ids) - len(targets)]
        dense = None if reference else prefill.references.get(targets)
        scores = TargetScores(targets, reference=dense, keep=reference)
        logits = steps.feed(question) if question else prefill.logits
        for target in targets:
            scores.add(logits)
            # the last one predicts nothing that is scored, but every target takes one step under the mode
            logits = steps.feed([target])
        if reference:
            prefill.references[targets] = scores.as_reference()
        series = scores.series() | ({} if prefill.scored is None else {"prompt_nll": prefill.scored})
        return Completion((), "", "length", series)

    def _states(
        self, prefill: Prefill, sample: Sample, mode: Mode, options: Any
    ) -> tuple[list[LayerState], int]:
        """Compress the prefill under a mode, and say how long that took.

        Further questions on one context fork what the first made. A prefill that was not told of this mode
        is repeated when the mode needs what was not collected.
        """
        shared = sample.context_len < len(sample.prompt_ids) - sample.targets
        key = (mode.name, options)
        if key in prefill.opened:
            return [state.fork() for state in prefill.opened[key]], 0
        need = needs_of(mode, options)
        if need is not None and not covers(prefill.needs, need):
            again = self.prefill(sample.prompt_ids[: sample.context_len], ((mode, options),))
            prefill.cache, prefill.needs = again.cache, again.needs
        started = time.perf_counter_ns()
        stages = self._stages(need, sample)
        states = []
        for layer in managed_layers(prefill.cache).values():
            assert layer.geometry is not None
            backend = choose_backend(self.backend_request, layer.geometry)
            self.backend_name = backend.name
            state = mode.open(layer.geometry, options, backend)
            open_layer(state, layer, need, stages)
            states.append(state)
        spent = time.perf_counter_ns() - started
        if need is not None and need.column_sums:
            spent += collecting_ns(prefill.cache)
        if shared:
            prefill.opened[key] = states
            return [state.fork() for state in states], spent
        return states, spent

    def _stages(self, need: Needs | None, sample: Sample) -> StageTracker | None:
        """Return the stages of the context for a mode that reads token ids, shared by all layers."""
        if need is None or not need.token_ids:
            return None
        tokenizer = self.loaded.tokenizer
        stages = StageTracker(lambda token: tokenizer.decode((token,)), turn_ends=tokenizer.eos_ids)
        stages.read(sample.prompt_ids[: sample.context_len])
        return stages

    def _decoded(
        self, mode: Mode, prefill: Prefill, steps: _Steps, completion: Completion, selection_ns: int
    ) -> Decoded:
        layers = managed_layers(steps.cache).values()
        states = [layer.state for layer in layers if layer.state is not None]
        check_intact(mode, states)
        held = total_bytes([state.bytes() for state in states], steps.cache)
        return Decoded(
            completion=completion,
            step_ns=tuple(steps.ns),
            prefill_ns=prefill.ns,
            steps=steps.recorder.arrays(),
            bytes=held,
            engagement=engagement(mode.name, states, held),
            first_logits_sha256=steps.first,
            selection_ns=selection_ns,
        )

    def describe(self) -> dict[str, Json]:
        """Return the contract fields that the engine decides."""
        return {
            "pipeline.prefill_mode": "dense",
            "pipeline.prefill_attention": "sdpa",
            "pipeline.decode_attention": "sdpa",
            "decoding.prefill_chunk": self.loaded.prefill_chunk,
        }


class _Steps:
    """The forward calls of one sample after its prefill: timed, certificates recorded."""

    def __init__(
        self, model: Any, cache: Any, recorder: StepRecorder, stages: StageTracker | None = None
    ) -> None:
        self.model, self.cache, self.recorder, self.stages = model, cache, recorder, stages
        self.ns: list[int] = []
        """Of calls with one token; auditing left out."""
        self.first = ""
        """Digest of the first logits."""

    def feed(self, ids: Sequence[int]) -> Tensor:
        """Return the float32 `[V]` logits after `ids`."""
        self.recorder.begin(len(ids))
        tokens = torch.tensor([list(ids)], device=self.model.device)
        started = time.perf_counter_ns()
        if self.stages is not None:
            self.stages.read(ids)
        raw = self.model(tokens, cache=self.cache, use_cache=True, logits_to_keep=1).logits
        spent = time.perf_counter_ns() - started - self.recorder.audit_ns
        logits = _checked(raw)
        if len(ids) == 1:
            self.ns.append(spent)
        self.first = self.first or hashlib.sha256(logits.numpy().tobytes()).hexdigest()
        return logits


def _slow_dtype(model: Any) -> str | None:
    """Return a note where torch has to emulate the model's dtype, for lack of instructions."""
    known = torch.cpu.get_capabilities()
    if model.device.type != "cpu" or model.dtype == torch.float32 or known.get("architecture") != "x86_64":
        return None
    needed = ("avx_ne_convert", "avx512_bw" if model.dtype == torch.bfloat16 else "avx512_fp16")
    if any(known.get(name) for name in needed):
        return None
    name = str(model.dtype).removeprefix("torch.")
    return f"{name} is emulated on this processor: prefill is several times slower than with --dtype float32"


def _targets(sample: Sample) -> tuple[int, ...]:
    return tuple(sample.prompt_ids[len(sample.prompt_ids) - sample.targets :])


def follow_anew(states: Sequence[LayerState]) -> StageTracker | None:
    """Give the layers of one sample stages of its own, and return them; None for a mode without stages."""
    stages: StageTracker | None = getattr(states[0], "stages", None)
    if stages is None:
        return None
    twin = stages.fork()
    for state in states:
        state.follow(twin)  # type: ignore[attr-defined]  # there because the state has stages
    return twin


def open_layer(
    state: LayerState, layer: ManagedLayer, need: Needs | None, stages: StageTracker | None = None
) -> None:
    """Give a new state the prompt of `layer`, and what was seen of its attention to a mode that asks."""
    if stages is not None:
        state.follow(stages)  # type: ignore[attr-defined]  # there because the mode needs token ids
    state.prefill(*layer.collected())
    if need is not None:
        state.end_prefill(layer.statistics())  # type: ignore[attr-defined]  # there because the mode has needs


def check_intact(mode: Mode, states: Iterable[LayerState]) -> None:
    """Raise `BrokenRun` when the store of a mode that certifies has changed since it was written."""
    for state in states if mode.certifies else ():
        state.check_intact()  # type: ignore[attr-defined]  # there because the mode certifies


def collecting_ns(cache: Any) -> int:
    """Return how long statistics took during a prefill: modes pay for it, not the prefill."""
    layers = managed_layers(cache).values()
    return sum(layer.collector.ns for layer in layers if layer.collector is not None)


def total_bytes(layers: Sequence[LayerBytes], cache: Any) -> LayerBytes:
    """Sum the ledgers; stock layers count in device and, as 16-bit elements, in dense alike."""
    stock = [layer for layer in cache.layers if not isinstance(layer, ManagedLayer)]
    tensors = [t for layer in stock for t in vars(layer).values() if isinstance(t, Tensor) and t.ndim > 1]
    held = sum(t.nbytes for t in tensors)
    dense = sum(2 * t.numel() for t in tensors)
    return LayerBytes(
        device=sum(layer.device for layer in layers) + held,
        host=sum(layer.host for layer in layers),
        metadata=sum(layer.metadata for layer in layers),
        # layers run one after the other and share their scratch
        scratch=max((layer.scratch for layer in layers), default=0),
        dense_equivalent=sum(layer.dense_equivalent for layer in layers) + dense,
    )


def engagement(mode: str, states: Sequence[LayerState], held: LayerBytes) -> dict[str, Json]:
    """Return the record that proves, from counters, that a mode acted in every managed layer."""
    everything = [state.engagement() for state in states]
    records = [record for record in everything if not record.exempt] or everything
    reasons = [record.reason for record in records if not record.engaged]
    return {
        "mode": mode,
        "logical": max(state.tokens for state in states),
        "evicted": sum(record.evicted_tokens for record in records),
        "coded_elems": sum(record.coded_elems for record in records),
        "steps": max(record.steps for record in records),
        "steps_acted": min(record.steps_acted for record in records),
        "layers_acted": sum(record.engaged for record in records),
        "managed_layers": len(everything),
        "dev_bytes": held.device,
        "host_bytes": held.host,
        "bytes_vs_dense": held.device / held.dense_equivalent,
        "engaged": not reasons,
        "reason": reasons[0] if reasons else "",
        **_details(everything),
    }


def _details(records: Sequence[Engagement]) -> dict[str, Json]:
    """Merge the counters that a mode keeps for itself over layers."""
    merged: dict[str, Json] = {}
    for record in records:
        for name, value in record.details.items():
            seen = merged.get(name, value if name.endswith("_max") else 0)
            merged[name] = max(seen, value) if name.endswith("_max") else seen + value
    return merged


def _checked(logits: Tensor) -> Tensor:
    """Return the float32 logits of the last position; NaN and infinity end the sample."""
    last = logits[0, -1].float().cpu()
    if not bool(torch.isfinite(last).all()):
        raise BrokenRun(
            "the model returned NaN or infinite logits",
            why=f"{int((~torch.isfinite(last)).sum())} of {len(last)} logits are not finite",
            fix="try --dtype float32",
            id="RCQ-RUN-NAN",
        )
    return last
