"""One decode step at a time with forced tokens, so that two modes can take turns on the same model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from rcq_cli.engine import ledger
from rcq_cli.engine.clock import StepClock
from rcq_cli.engine.decoder import Engine, Prefill
from rcq_cli.engine.hook import attached, fork_cache, ignore, managed_layers
from rcq_cli.phases import listening, phase
from rcq_cli.protocols import LayerState, Mode, Sample, Step


class Stepper(Protocol):
    """One arm of a measurement."""

    @property
    def states(self) -> Sequence[LayerState]:
        """Return the managed layers."""

    def step(self, clock: StepClock | None = None) -> int:
        """Decode one token and return the nanoseconds it took; `clock` hears its phases."""

    @property
    def tokens(self) -> int:
        """Return the tokens in the cache."""

    def ready(self) -> Any:
        """Return the context in which steps may be taken."""

    def reads(self) -> Mapping[str, int] | None:
        """Return the bytes the last step read, by phase; None where nobody counts them."""


class ModelStepper:
    """A whole model under one mode; the tokens it is fed do not depend on what it answers."""

    def __init__(
        self,
        engine: Engine,
        prefill: Prefill,
        sample: Sample,
        mode: Mode,
        options: Any,
        forced: Sequence[int],
    ) -> None:
        self.engine, self.forced = engine, forced
        self.states: Sequence[LayerState] = engine._states(prefill, sample, mode, options)[0]
        self.cache = fork_cache(prefill.cache)
        for layer, state in zip(managed_layers(self.cache).values(), self.states, strict=True):
            layer.hand_over(state)
        self.count = 0
        self.last: list[tuple[LayerState, Step]] = []

    @property
    def tokens(self) -> int:
        """Return the tokens in the cache."""
        return max(state.tokens for state in self.states)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Attach the model; arms of one engine may take turns inside."""
        hook = self.engine.hook
        hook.last_row_only = False
        with torch.inference_mode(), attached(self.engine.model, hook):
            yield
        hook.on_step = ignore

    def step(self, clock: StepClock | None = None) -> int:
        """Feed the next forced token."""
        model, last = self.engine.model, self.last
        last.clear()
        self.engine.hook.on_step = lambda _index, state, _query, step: last.append((state, step))
        token = torch.tensor([[self.forced[self.count % len(self.forced)]]], device=model.device)
        self.count += 1

        def forward() -> None:
            with phase("model"):
                logits = model(token, cache=self.cache, use_cache=True, logits_to_keep=1).logits
                int(logits[0, -1].argmax())

        return timed(forward, clock)

    def reads(self) -> Mapping[str, int] | None:
        """Return the bytes the last step read: every layer's, and the weights."""
        found = summed(self.last)
        weights = ledger.weights_read(self.engine.model)
        if found is None or weights is None:
            return found
        return {**found, "model": weights}


class LayerStepper:
    """One attention layer without a model, on tensors given beforehand."""

    def __init__(self, state: LayerState, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self.states: Sequence[LayerState] = [state]
        self.fed = keys, values, queries
        self.count = 0
        self.last: list[tuple[LayerState, Step]] = []

    @property
    def tokens(self) -> int:
        """Return the tokens in the cache."""
        return self.states[0].tokens

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Leave autograd out."""
        with torch.inference_mode():
            yield

    def step(self, clock: StepClock | None = None) -> int:
        """Append the next token and attend with its query."""
        keys, values, queries = self.fed
        at, state = self.count % keys.shape[1], self.states[0]
        self.count += 1
        found: list[Step] = []

        def attend() -> None:
            with phase("append"):
                state.append(keys[:, at], values[:, at])
            with phase("attend"):
                found.append(state.attend(queries[at]))

        spent = timed(attend, clock)
        self.last = [(state, found[0])]
        return spent

    def reads(self) -> Mapping[str, int] | None:
        """Return the bytes the last step read."""
        return summed(self.last)


def timed(action: Any, clock: StepClock | None) -> int:
    """Return the nanoseconds of `action`; phases are heard only with a clock."""
    if clock is None:
        began = time.perf_counter_ns()
        action()
        return time.perf_counter_ns() - began
    with listening(clock):
        began = time.perf_counter_ns()
        clock.begin()
        action()
        clock.end()
        return time.perf_counter_ns() - began


def summed(steps: Sequence[tuple[LayerState, Step]]) -> dict[str, int] | None:
    """Add up what the layers of one step read and wrote; None as soon as one layer is not counted."""
    total: dict[str, int] = {}
    for state, step in steps:
        found = ledger.traffic(state, step)
        if found is None:
            return None
        written = ledger.appended(state)
        for name, count in {**found, **({} if written is None else {"append": written})}.items():
            total[name] = total.get(name, 0) + count
    return total
