"""Needle in a haystack: one short fact in a long text, asked for by its key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice
from math import ceil
from types import MappingProxyType
from typing import Literal

from rcq_cli.errors import SpecError
from rcq_cli.protocols import Completion, PromptTokenizer, Sample, TaskRequest
from rcq_cli.registry import did_you_mean
from rcq_cli.tasks._fitting import too_small
from rcq_cli.tasks._metrics import bounded, clean, contains
from rcq_cli.tasks._needles import Form, forms
from rcq_cli.tasks._niah_context import Context
from rcq_cli.tasks._words import adjectives, nouns

_MOST_ABSENT = 10
MOST_DEPTHS = 1001


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `niah`."""

    depths: str = "0:100:10"
    """depths of the needle in percent of the haystack, FROM:TO:STEP"""
    forms: str = "all"
    """needle forms, comma list, or all"""
    payload: Literal["digits", "words", "uuid", "mixed"] = "digits"
    """what the value is: 7 digits, two words, a UUID, or each of them in turn"""
    decoys: int | None = None
    """needles of the asked form with other keys, per question; none: 16 for a constructed model, else 0"""
    values: int = 1
    """facts with the same key and other values, all of which the answer is to name (multi-value)"""
    questions: int = 1
    """questions asked of one context; from 2 on the context is compressed before any question is seen"""
    turns: Literal["fresh", "chained"] = "fresh"
    """fresh: each question starts from the context alone; chained: earlier questions and answers stay"""
    gen: int = 48
    """tokens to generate"""
    corpus: str = "builtin"
    """builtin, a packaged corpus, hf:OWNER/NAME, or paths of text files or folders"""
    online: bool = False
    """fetch a corpus that is not on this machine"""
    repeat: bool = True
    """repeat a corpus that is shorter than the context"""
    prefix: bool = True
    """open the answer with the needle sentence up to its value; off for reasoning models"""
    chat: Literal["auto", "on", "off"] = "auto"
    """use the chat template; auto: if there is one"""
    bos: Literal["auto", "always", "never"] = "auto"
    """put a BOS first; auto: as the tokenizer does"""
    strip_think: bool = False
    """remove thinking blocks before scoring"""
    wrong_key: bool = False
    """also ask for keys that were never planted (a control without a gate)"""
    overlength: Literal["refuse", "allow"] = "refuse"
    """allow a context longer than the model was made for"""

    def __post_init__(self) -> None:
        self.depth_grid()
        _require("gen", self.gen, 1, 1 << 20)
        _require("questions", self.questions, 1, len(self.form_list()))
        _require("values", self.values, 1, self._most_needles())
        _require("decoys", self.decoys or 0, 0, self._most_needles() - self.values)

    def depth_grid(self) -> tuple[float, ...]:
        """Return the depths in percent; raise `SpecError` unless 0 <= FROM <= TO <= 100 and STEP > 0."""
        try:
            first, last, step = (float(part) for part in self.depths.split(":"))
        except ValueError:
            first, last, step = 0.0, -1.0, 1.0
        if not (0 <= first <= last <= 100 and step > 0):
            raise _not_allowed("depths", self.depths, "FROM:TO:STEP in percent, e.g. 0:100:10")
        if (last - first) / step >= MOST_DEPTHS:
            raise _not_allowed("depths", self.depths, f"at most {MOST_DEPTHS} depths")
        return tuple(first + i * step for i in range(int((last - first) / step + 1e-9) + 1))

    def form_list(self) -> tuple[Form, ...]:
        """Return the chosen forms in their fixed order; raise `SpecError` for an unknown one."""
        known = {form.name: form for form in forms()}
        chosen = (
            tuple(known) if self.forms == "all" else tuple(part.strip() for part in self.forms.split(","))
        )
        for name in chosen:
            if name not in known:
                hint = did_you_mean(name, tuple(known))
                raise _not_allowed("forms", name, f"all or a comma list of {', '.join(known)}", hint)
        return tuple(form for name, form in known.items() if name in chosen)

    def _most_needles(self) -> int:
        """Return for how many needles a question has words: keys and word values of a sample share none."""
        pairs = min(len(adjectives()), len(nouns())) * 9 // 10
        each = 1 if self.payload in ("digits", "uuid") else 2
        return pairs // (each * self.questions)


def _require(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise _not_allowed(name, value, f"{low} to {high}")


def _not_allowed(name: str, value: object, allowed: str, hint: str = "") -> SpecError:
    return SpecError(f"{name}={value} is not allowed", fix=f"{hint}allowed: {allowed}", id="RCQ-USE-06")


class Niah:
    """The task: needle i has the same form, key and value at every context and under every tokenizer."""

    name = "niah"
    summary = "one fact in a long text, asked for by its key: depth x form grid"
    parts = ("",)
    Options = Options
    generator = "rcq-gen-1"
    prompt_set = "rcq-n1"
    metric = "bounded@1"
    score_key = "accuracy"
    further_metrics = ("contains",)
    higher_is_better = True
    minimum_ctx = 512
    default_samples: Mapping[str, int] = MappingProxyType({"": 22, "smoke": 22, "ci": 110, "release": 550})
    margins: Mapping[str, float] = MappingProxyType({"": 0.15, "smoke": 0.15, "ci": 0.05, "release": 0.02})

    def samples(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield the samples in index order, the questions of one context after each other.

        Raises `SpecError` naming the smallest context if `request.ctx` is too small.
        """
        self._check(request)
        contexts = (Context(request, tokenizer, index) for index in count())
        return islice(chain.from_iterable(context.samples() for context in contexts), request.samples)

    def controls(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield `needle-only` (two per form), `no-needle` (one in ten) and, where asked for, `wrong-key`."""
        self._check(request)
        short = min(2 * len(request.options.form_list()), request.samples)
        full = min(ceil(request.samples / 10), _MOST_ABSENT)
        yield from (Context(request, tokenizer, index).needle_only() for index in range(short))
        yield from (Context(request, tokenizer, index).no_needle() for index in range(full))
        if request.options.wrong_key:
            yield from (Context(request, tokenizer, index).wrong_key() for index in range(full))

    def score(self, sample: Sample, completion: Completion) -> dict[str, float]:
        """Return `accuracy` (the share of values in the answer that nothing touches) and `contains`."""
        text = clean(completion.text, strip_think=bool(sample.meta.get("strip_think")))
        return {"accuracy": bounded(text, sample.references), "contains": contains(text, sample.references)}

    def _check(self, request: TaskRequest) -> None:
        if request.ctx < self.minimum_ctx:
            raise too_small(request.ctx, self.minimum_ctx)


TASK = Niah()
