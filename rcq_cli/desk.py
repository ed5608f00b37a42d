"""Where samples are answered: one model, one prompt at a time, under every mode of a batch."""

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rcq_cli.errors import BrokenRun
from rcq_cli.presets import Batch
from rcq_cli.protocols import Decoded, Mode, Sample

NAN_ID = "RCQ-RUN-NAN"
"""Id of the `BrokenRun` an engine raises for logits that are not finite."""


@dataclass(slots=True)
class Desk:
    """Answers samples one by one: those of one context, and the modes of a batch, share one prefill."""

    engine: Any
    batch: Batch
    modes: Sequence[tuple[Mode, Any]]
    """Mode and options of every spec of the batch."""
    prefill_ids: tuple[int, ...] = ()
    prefill: Any = None

    def ahead(self, turns: Iterator[Any]) -> Iterator[Any]:
        """Return the turns as they come: nothing here works ahead."""
        return turns

    def answer(self, number: int, sample: Sample) -> Decoded:
        """Return the answer to `sample` under the mode of spec `number`."""
        spec, engine = self.batch[number], self.engine
        ids = tuple(sample.prompt_ids[: sample.context_len])
        if self.prefill is None or ids != self.prefill_ids:
            self.prefill = None  # let go of the old one before the new one is made
            self.prefill = self._prefilled(sample, ids)
            self.prefill_ids = ids
        if sample.targets and spec.mode_name != "dense" and self._dense_beside(sample):
            engine.add_reference(self.prefill, sample)
        audit = spec.audit if sample.control is None else 0.0
        decoded: Decoded = engine.decode(self.prefill, sample, *self.modes[number], audit=audit)
        return decoded

    def _prefilled(self, sample: Sample, ids: tuple[int, ...]) -> Any:
        if sample.meta.get("pooled"):
            return self.engine.prefill(ids, self.modes, score_prompt=True)
        return self.engine.prefill(ids, self.modes)

    def _dense_beside(self, sample: Sample) -> bool:
        """Say whether predictions are compared with the dense model's: it is in the batch, or asked for.

        A batch is compared whatever was answered before, so that a resumed run has the same rows.
        """
        return sample.meta.get("shadow") == "dense" or any(spec.mode_name == "dense" for spec in self.batch)

    def release(self) -> None:
        """Give back what a sample that ran out of memory held."""
        self.prefill, self.prefill_ids = None, ()
        _release()


def status_of(error: Exception) -> str:
    """Return what a sample's exception means: `nan`, `oom` or `error`."""
    if isinstance(error, BrokenRun):
        return "nan" if error.id == NAN_ID else "error"
    # torch says so in the class on a GPU and in the text on a CPU
    text = f"{type(error).__name__} {error}".lower()
    short = isinstance(error, MemoryError) or "outofmemory" in text or "can't allocate memory" in text
    return "oom" if short else "error"


def _release() -> None:
    """Give back what a sample that ran out of memory held."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
