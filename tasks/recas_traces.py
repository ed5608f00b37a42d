"""Selection on synthetic attention traces: tokens fall silent and are needed again much later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rcq_cli.errors import SpecError
from rcq_cli.protocols import Completion, Mode, PromptTokenizer, Sample, TaskRequest
from rcq_cli.tasks._trace_policy import measure, policy_of
from rcq_cli.tasks._traces import LENGTHS, Recipe, draw_trace

FITTED = 100
"""Traces on which the generator's free parameters were fitted; samples are the ones after them."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `recas-traces`."""

    anchors: int = 8
    """groups of four critical tokens per trace, planted in the first two stages"""
    pl: float = 1.0
    """probability that the text comes back to an anchor's unit before its stage closes"""
    false_links: float = 0.01
    """share of all units that is linked without reason at each transition"""
    spread: float = 2.88
    """standard deviation of the persistent logits; larger means fewer tokens hold the mass"""
    dormant: float = 3.4
    """mean logit of critical tokens while nobody asks for them"""
    lift: float = 4.0
    """what is added to it in the stage that asks"""
    latency: bool = True
    """time one decode layer at the shares this run kept and read"""

    def __post_init__(self) -> None:
        _require("anchors", self.anchors, 1, LENGTHS[0] // 64)
        _require("pl", self.pl, 0.0, 1.0)
        _require("false_links", self.false_links, 0.0, 1.0)
        _require("spread", self.spread, 0.0, 10.0)

    def recipe(self) -> Recipe:
        """Return the parameters of the generator."""
        return Recipe(self.spread, self.dormant, self.lift, self.anchors, self.pl, self.false_links)


def _require(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise SpecError(
            f"{name}={value:g} is not allowed", fix=f"allowed: {low:g} to {high:g}", id="RCQ-USE-06"
        )


class RecasTraces:
    """The task: trace i is the same whatever the number of traces, one cell for all lengths."""

    name = "recas-traces"
    summary = "synthetic attention traces: are critical tokens there when they are needed again (no model)"
    parts = ("",)
    Options = Options
    generator = "rcq-traces-1"
    prompt_set = "none"
    metric = "critical_recall@1"
    score_key = "critical_recall"
    further_metrics = (
        *("retained_ratio", "active_ratio", "mass_preserved", "mass_retained", "relative_error", "cosine"),
        *("raw_relative_error", "raw_cosine", "bound_violations", "bound_tightness"),
        *("certified_relative_bound", "certified_mass_ratio", "latency_ratio", "layer_ms", "full_layer_ms"),
    )
    higher_is_better = True
    minimum_ctx = 0
    default_samples: Mapping[str, int] = MappingProxyType(
        {"": 1000, "smoke": 8, "ci": 40, "release": 1000, "paper": 1000}
    )
    margins: Mapping[str, float] = MappingProxyType({"": 0.02, "smoke": 0.15, "ci": 0.05, "release": 0.02})
    modes = ("recas", "recas-certified", "topscore", "h2o", "streaming-llm", "dense")

    def samples(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield one sample per trace, in index order; the trace itself is drawn when it is answered."""
        del tokenizer
        for index in range(request.samples):
            yield Sample(
                sample_id=f"recas-traces/{index}",
                index=index,
                cluster=f"trace{index}",
                prompt_ids=(),
                context_len=0,
                references=(),
                max_new_tokens=0,
                stop_ids=(),
                seed=request.seed,
                meta={"trace": FITTED + index, "tokens": LENGTHS[(FITTED + index) % len(LENGTHS)]},
            )

    def controls(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield nothing: there is no prompt that could leak an answer."""
        del request, tokenizer
        return iter(())

    def answer(self, sample: Sample, options: Any, mode: Mode, mode_options: Any) -> Completion:
        """Run the policy of `mode` over the trace; the text holds the metrics as JSON."""
        trace = draw_trace(sample.meta["trace"], sample.seed, options.recipe())
        found = measure(trace, policy_of(mode.name, mode_options))
        return Completion((), json.dumps(found, sort_keys=True), "stop")

    def score(self, sample: Sample, completion: Completion) -> dict[str, float]:
        """Return the metrics of one trace, `critical_recall` among them."""
        del sample
        found: dict[str, float] = json.loads(completion.text)
        return found

    def timed(self, scores: Sequence[Mapping[str, float]], options: Any) -> dict[str, float]:
        """Return the time of one decode layer at the mean shares of `scores`, sparse and full, in ms."""
        if not options.latency or not scores:
            return {}
        from rcq_cli.recas.latency import layer_latency

        kept, read = (
            sum(row[name] for row in scores) / len(scores) for name in ("retained_ratio", "active_ratio")
        )
        found = layer_latency(kept, read)
        return {"latency_ratio": found.ratio, "layer_ms": found.sparse_ms, "full_layer_ms": found.full_ms}


TASK = RecasTraces()
