"""Runs a task that needs no model through the road of every other run."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rcq_cli.protocols import Decoded, EncodedPrompt, Json, Loaded, Mode, ModelFreeTask, Sample


class NoTokenizer:
    """Stands where a tokenizer would; knows no tokens."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    has_chat_template = False
    sha256 = "none"

    def encode(self, text: str) -> tuple[int, ...]:
        """Return no ids."""
        del text
        return ()

    def decode(self, ids: Sequence[int]) -> str:
        """Return no text."""
        del ids
        return ""

    def prompt(
        self, user: str, answer_prefix: str, *, chat: str = "auto", bos: str = "auto"
    ) -> EncodedPrompt:
        """Return the empty prompt."""
        del user, answer_prefix, chat, bos
        return EncodedPrompt((), (), "")


NO_MODEL = Loaded(
    name="none",
    model=None,
    tokenizer=NoTokenizer(),
    fingerprint={"model.id": "none", "model.dtype": "float64"},
    max_positions=0,
    prefill_chunk=0,
)
"""What a task without a model is run on."""


class TaskEngine:
    """Lets a task answer its own samples."""

    backend_name = "none"
    notes: tuple[str, ...] = ()

    def __init__(self, task: ModelFreeTask, options: Any) -> None:
        self.task, self.options = task, options

    def check_modes(self, modes: Sequence[Any]) -> None:
        """Do nothing: there is no layer to open a mode on."""
        del modes

    def prefill(self, ids: Sequence[int], arms: Sequence[Any] = ()) -> None:
        """Do nothing: there is no prompt."""
        del ids, arms

    def decode(
        self, prefill: None, sample: Sample, mode: Mode, options: Any, *, audit: float = 0.0
    ) -> Decoded:
        """Return the task's own answer under `mode`."""
        del prefill, audit
        started = time.perf_counter_ns()
        completion = self.task.answer(sample, self.options, mode, options)
        return Decoded(
            completion=completion,
            step_ns=(),
            prefill_ns=time.perf_counter_ns() - started,
            steps=None,
            bytes=None,
            engagement={"mode": mode.name, "engaged": True, "reason": ""},
            first_logits_sha256=hashlib.sha256(completion.text.encode()).hexdigest(),
        )

    def timed(self, scores: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
        """Return what the task wants timed once per run."""
        return self.task.timed(scores, self.options)

    def describe(self) -> dict[str, Json]:
        """Return the contract fields that the engine decides: none."""
        return {}
