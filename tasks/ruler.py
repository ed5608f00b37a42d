"""Thirteen synthetic long-context tasks after RULER (arXiv:2404.06654); wording and data of this project."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType
from typing import Literal

from rcq_cli.errors import SpecError
from rcq_cli.protocols import Completion, PromptTokenizer, Sample, TaskRequest
from rcq_cli.tasks._fitting import too_small
from rcq_cli.tasks._metrics import bounded, clean, contains, contains_any
from rcq_cli.tasks._ruler_lists import CommonWords, FrequentWords, Tracing, check_chains
from rcq_cli.tasks._ruler_notes import SHAPES, Notes
from rcq_cli.tasks._ruler_prompt import Part
from rcq_cli.tasks._ruler_qa import OneHop, TwoHops

FAMILIES: Mapping[str, type[Part]] = MappingProxyType(
    {
        **dict.fromkeys(SHAPES, Notes),
        "vt": Tracing,
        "cwe": CommonWords,
        "fwe": FrequentWords,
        "qa_1": OneHop,
        "qa_2": TwoHops,
    }
)
_MOST_ABSENT = 10


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `ruler`."""

    gen: int | None = None
    """tokens to generate; none: those of each part, more where the expected answer is longer"""
    chains: int = 1
    """chains of names in vt; those after the first are distractors"""
    squad: str | None = None
    """SQuAD 2.0 file for qa_1; none: synthetic documents"""
    hotpot: str | None = None
    """HotpotQA distractor file for qa_2; none: synthetic documents"""
    corpus: str = "builtin"
    """text around the notes: builtin, a packaged corpus, hf:OWNER/NAME, or paths of text files or folders"""
    online: bool = False
    """fetch a corpus that is not on this machine"""
    repeat: bool = True
    """repeat a corpus or documents that are shorter than the context"""
    prefix: bool = True
    """open the answer; off for reasoning models"""
    chat: Literal["auto", "on", "off"] = "auto"
    """use the chat template; auto: if there is one"""
    bos: Literal["auto", "always", "never"] = "auto"
    """put a BOS first; auto: as the tokenizer does"""
    strip_think: bool = False
    """remove thinking blocks before scoring"""
    overlength: Literal["refuse", "allow"] = "refuse"
    """allow a context longer than the model was made for"""

    def __post_init__(self) -> None:
        check_chains(self.chains)
        if self.gen is not None and not 1 <= self.gen <= 1 << 20:
            raise SpecError(f"gen={self.gen} is not allowed", fix=f"allowed: 1 to {1 << 20}", id="RCQ-USE-06")


class Ruler:
    """The task: what is planted in sample i is the same at every context and under every tokenizer."""

    name = "ruler"
    summary = "13 synthetic tasks: retrieval, tracing, counting, questions on documents"
    parts = tuple(FAMILIES)
    Options = Options
    generator = "rcq-gen-1"
    prompt_set = "rcq-r1"
    metric = "contains@1,contains_any@1"
    score_key = "accuracy"
    further_metrics = ("bounded",)
    higher_is_better = True
    minimum_ctx = 1024
    default_samples: Mapping[str, int] = MappingProxyType({"": 5, "smoke": 5, "ci": 20, "release": 100})
    margins: Mapping[str, float] = MappingProxyType({"": 0.15, "smoke": 0.15, "ci": 0.05, "release": 0.02})

    def samples(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield the samples of one part in index order, each built when it is asked for.

        Raises `SpecError` naming the smallest context if `request.ctx` is too small.
        """
        if request.ctx < self.minimum_ctx:
            raise too_small(request.ctx, self.minimum_ctx)
        family = FAMILIES[request.part]
        return (family(request.part, request, tokenizer, index).sample() for index in range(request.samples))

    def controls(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield `no-needle` (one in ten) of the parts whose answer can be left out; a hit is a leak.

        There is no `needle-only`: a small model may fail a part that is sound.
        """
        if request.ctx < self.minimum_ctx:
            raise too_small(request.ctx, self.minimum_ctx)
        family = FAMILIES[request.part]
        full = min(ceil(request.samples / 10), _MOST_ABSENT) if family.removable else 0
        return (family(request.part, request, tokenizer, index).no_needle() for index in range(full))

    def score(self, sample: Sample, completion: Completion) -> dict[str, float]:
        """Return `accuracy` (share of the references in the answer; of qa any one) and `bounded`."""
        text = clean(completion.text, strip_think=bool(sample.meta.get("strip_think")))
        found = contains_any if FAMILIES[sample.meta["part"]].any_reference else contains
        return {"accuracy": found(text, sample.references), "bounded": bounded(text, sample.references)}


TASK = Ruler()
