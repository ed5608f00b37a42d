"""Mode `recas-certified` against float64 attention on the originals, at every head and step.

    python benchmarks/recas_certified.py traces --traces 250 --gamma 1 0 --json FILE
    python benchmarks/recas_certified.py model --model smollm2-135m --context 1536 --steps 256

`traces` builds one layer per synthetic trace of task recas-traces: keys of 64 channels whose scores with the
queries of its eight checkpoints are the logits of the trace, two KV heads with seven query heads each, which
differ by the noise of a checkpoint; at each checkpoint the trace's own queries and three mixtures of them.
With `--gamma 0` critical tokens are dropped and wake up later. `model` decodes given text.

Columns: audited head-steps; errors above their bound; true dropped masses outside their proven interval;
errors above eps; heads recomputed exactly; certified over true dropped mass (median, ninetieth percentile);
anchors that woke up while dropped, the worst error over eps in that very step, and the median error over eps
that the step would have had without what came back.
"""

import argparse
import os
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from _record import append
from torch import Tensor

from rcq_cli.backends import choose_backend
from rcq_cli.certify.exact import as_groups
from rcq_cli.engine.decoder import Engine
from rcq_cli.modes import recas_certified
from rcq_cli.protocols import Geometry, Sample, Step, TaskRequest
from rcq_cli.sources import SOURCES
from rcq_cli.tasks import ppl, recas_traces
from rcq_cli.tasks._traces import KEY_DIM, LENGTHS, STAGES, UNIT, Checkpoint, Recipe, draw_trace

KV_HEADS, GROUP = 2, 7
STEPS = 4
"""Steps per checkpoint of a trace."""
SHARE = 0.345
COMPARISON = 1 + 2.0**-40
COLUMNS = (
    "head_steps", "violations", "outside", "over_eps", "exact_share", "mass_ratio", "mass_ratio_p90", "woken",
    "woken_worst", "woken_without",
)  # fmt: skip


class Audit:
    """What was found over all layers."""

    def __init__(self, eps: float) -> None:
        self.eps = eps
        self.head_steps = self.violations = self.outside = self.over_eps = self.exact = self.woken = 0
        self.ratios: list[float] = []
        self.worst: list[float] = []
        self.without: list[float] = []

    def add(self, step: Step, error: Tensor, truth: Tensor, lost: Tensor) -> None:
        """Take one step of one layer: the true error, the exact output's norm and the true mass, `[Hq]`."""
        found = step.certificate
        assert found is not None
        low, high = (found.reported[name] for name in recas_certified.DROPPED)
        self.head_steps += len(error)
        self.violations += int((~(error <= found.total_bound * COMPARISON)).sum())
        self.outside += int((~((low <= lost * COMPARISON) & (lost <= high * COMPARISON))).sum())
        self.over_eps += int((~found.exact & (error > self.eps * truth)).sum())
        self.exact += int(found.exact.sum())
        seen = lost > 1e-12
        self.ratios += (high[seen] / lost[seen]).tolist()

    def row(self) -> dict[str, float | int | None]:
        """Return the figures of the table."""
        ratios = np.quantile(self.ratios, [0.5, 0.9]).tolist() if self.ratios else [None, None]
        without = np.median(self.without).item() if self.without else None
        woken = self.woken, max(self.worst, default=None), without
        counts = self.head_steps, self.violations, self.outside, self.over_eps, self.exact / self.head_steps
        figures = (*counts, *ratios, *woken)
        return dict(zip(COLUMNS, figures, strict=True))


class AuditedLayer(recas_certified.RecasCertifiedLayer):
    """A layer that compares every output with float64 attention on the originals."""

    audit: Audit
    asked = torch.zeros(0, 4, dtype=torch.int64)
    """Critical tokens that the next step asks for."""

    def attend(self, query: Tensor) -> Step:
        """Return the step, audited."""
        before = self._tokens_of(self.cache.at_hand())
        step = super().attend(query)
        assert self.cache.originals is not None
        assert step.certificate is not None
        keys, values = (slab.rows.double() for slab in self.cache.originals)
        scores = as_groups(query, keys.shape[0]) @ keys.transpose(1, 2) * self.cache.geometry.scale
        weights = scores.softmax(-1)
        full = (weights @ values).flatten(0, 1)
        error, truth = (full - step.output.double()).norm(dim=-1), full.norm(dim=-1)
        lost = torch.where(self._tokens_of(self.read)[:, None], 0.0, weights).sum(-1).flatten()
        self.audit.add(step, error, truth, torch.where(step.certificate.exact, 0.0, lost))
        woken = ~before[:, self.asked].all(-1)
        if bool(woken.any()):
            used = torch.where(before[:, None], weights, 0.0)
            kept = (used @ values / used.sum(-1, keepdim=True)).flatten(0, 1)
            heads = woken.any(1).repeat_interleave(query.shape[0] // keys.shape[0])
            limit = self.audit.eps * truth[heads]
            self.audit.woken += int(woken.sum())
            self.audit.worst += (error[heads] / limit).tolist()
            self.audit.without += ((full - kept).norm(dim=-1)[heads] / limit).tolist()
        return step

    def _tokens_of(self, blocks: Tensor) -> Tensor:
        """Return which tokens `[Hkv, T]` stand in these blocks or in the open tail."""
        tokens = torch.ones(blocks.shape[0], self.tokens, dtype=torch.bool)
        tokens[:, : blocks.shape[1] * self.cache.fmt.block] = blocks.repeat_interleave(
            self.cache.fmt.block, 1
        )
        return tokens


class Audited(recas_certified.RecasCertified):
    """Mode `recas-certified`, audited."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit

    def open(self, geometry: Geometry, options: Any, backend: Any) -> AuditedLayer:
        """Make the empty cache of one layer."""
        layer = AuditedLayer(geometry, options, backend)
        layer.audit = self.audit
        return layer


class TraceStages:
    """Links of a trace in the place of a `StageTracker`."""

    def __init__(self) -> None:
        self.transitions = 0
        self.counts = np.zeros(0)

    @property
    def tokens(self) -> int:
        """Return the tokens read."""
        return len(self.counts) * UNIT

    def take(self, checkpoint: Checkpoint) -> None:
        """Take the end of a stage."""
        self.counts = np.concatenate((self.counts, np.zeros(checkpoint.tokens // UNIT - len(self.counts))))
        np.add.at(self.counts, checkpoint.linked, 1)
        self.transitions += 1

    def close(self) -> None:
        """Do nothing: stages end at checkpoints."""

    def links(self) -> np.ndarray[Any, Any]:
        """Return the count of each token's unit."""
        return self.counts.repeat(UNIT)

    def credit(self, tokens: np.ndarray[Any, Any]) -> None:
        """Raise the counts of these tokens' units to one."""
        units = np.unique(tokens // UNIT)
        self.counts[units] = np.maximum(1, self.counts[units])


def layer_of(trace: Any, draw: np.random.Generator) -> tuple[list[Checkpoint], Tensor, Tensor, Tensor]:
    """Return checkpoints, queries `[8, Hq, 64]`, keys and values `[Hkv, N, 64]` of a trace, float32."""
    checkpoints = list(trace.checkpoints)
    logits = np.zeros((STAGES, trace.length))
    for stage in reversed(range(STAGES)):
        # what does not exist yet is scored as it will be when it arrives
        logits[stage] = logits[min(stage + 1, STAGES - 1)]
        logits[stage, : checkpoints[stage].tokens] = checkpoints[stage].logits
    noise = draw.normal(0.0, 0.45, (KV_HEADS, STAGES, GROUP, trace.length))
    wanted = (logits[None, :, None] + noise).reshape(KV_HEADS, STAGES * GROUP, trace.length)
    basis = np.stack([np.linalg.qr(draw.standard_normal((KEY_DIM, KEY_DIM)))[0] for _ in range(KV_HEADS)])
    aimed = basis[:, :, : STAGES * GROUP]
    queries = (aimed * KEY_DIM**0.5).transpose(2, 0, 1).reshape(STAGES, GROUP, KV_HEADS, KEY_DIM)
    rest = draw.standard_normal((KV_HEADS, trace.length, KEY_DIM - STAGES * GROUP))
    coordinates = np.concatenate((wanted.transpose(0, 2, 1), rest), 2)
    keys = coordinates @ basis.transpose(0, 2, 1)
    values = np.zeros((KV_HEADS, trace.length, KEY_DIM))
    values[:, :, : trace.values.shape[1]] = trace.values
    heads = queries.transpose(0, 2, 1, 3).reshape(STAGES, KV_HEADS * GROUP, KEY_DIM)
    return checkpoints, *(torch.from_numpy(a).float() for a in (heads, keys, values))


def mixtures(queries: Tensor, draw: np.random.Generator) -> Iterator[Tensor]:
    """Yield the queries of a checkpoint, then mixtures of neighbouring heads of a group."""
    yield queries
    grouped = queries.unflatten(0, (KV_HEADS, GROUP))
    for _ in range(STEPS - 1):
        share = torch.from_numpy(draw.uniform(0.2, 0.8, (KV_HEADS, GROUP, 1))).float()
        yield (share * grouped + (1 - share) * grouped.roll(1, 1)).flatten(0, 1)


def run_trace(
    number: int, recipe: Recipe, options: recas_certified.Options, audit: Audit, backend: str
) -> None:
    trace = draw_trace(number, 0, recipe)
    draw = np.random.default_rng([number, KEY_DIM])
    checkpoints, queries, keys, values = layer_of(trace, draw)
    geometry = Geometry(KV_HEADS * GROUP, KV_HEADS, KEY_DIM, "float32", "cpu", KEY_DIM**-0.5)
    layer, stages = Audited(audit).open(geometry, options, choose_backend(backend, geometry)), TraceStages()
    layer.follow(stages)  # type: ignore[arg-type]  # all that the mode asks of a tracker
    for stage, checkpoint in enumerate(checkpoints):
        layer.prefill(keys[:, layer.tokens : checkpoint.tokens], values[:, layer.tokens : checkpoint.tokens])
        layer.kept_tokens = round(SHARE * checkpoint.tokens)
        stages.take(checkpoint)
        layer.asked = torch.from_numpy(checkpoint.asked)
        for query in mixtures(queries[stage], draw):
            layer.attend(query)
            layer.asked = layer.asked[:0]


def options_of(args: argparse.Namespace, **more: float) -> recas_certified.Options:
    return recas_certified.Options(eps=args.eps, block=args.block, ghost_bits=args.bits, **more)  # type: ignore[arg-type]


def traces(args: argparse.Namespace) -> Iterator[tuple[str, Audit]]:
    fitting = (n for n in count(recas_traces.FITTED) if LENGTHS[n % len(LENGTHS)] <= args.longest)
    numbers = list(islice(fitting, args.traces))
    recipe = recas_traces.Options(dormant=args.dormant, lift=args.lift).recipe()
    for gamma in args.gamma:
        audit = Audit(args.eps)
        for number in numbers:
            run_trace(number, recipe, options_of(args, gamma=gamma), audit, args.backend)
        yield f"traces gamma={gamma:g}", audit


def model(args: argparse.Namespace) -> Iterator[tuple[str, Audit]]:
    engine = Engine(
        SOURCES.load(args.model).load(args.model, device="cpu", dtype="auto"), backend=args.backend
    )
    request = TaskRequest("", args.context + args.steps, 1, 0, ppl.Options(target_tokens=args.steps))
    (sample,) = ppl.TASK.samples(request, engine.loaded.tokenizer)
    assert isinstance(sample, Sample)
    options, audit = options_of(args), Audit(args.eps)
    mode: Any = Audited(audit)
    prefill = engine.prefill(sample.prompt_ids[: sample.context_len], ((mode, options),))
    engine.decode(prefill, sample, mode, options)
    yield args.model, audit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["traces", "model"])
    parser.add_argument("--traces", type=int, default=250, help="number of traces, 448 head-steps each")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="tokens of the longest trace taken")
    parser.add_argument(
        "--gamma", type=float, nargs="+", default=[1.0, 0.0], help="weights of stage evidence"
    )
    parser.add_argument("--dormant", type=float, default=3.4, help="mean logit of what is not asked for")
    parser.add_argument("--lift", type=float, default=4.0, help="what is added to it when it is")
    parser.add_argument("--model", default="smollm2-135m", help="a built-in model")
    parser.add_argument("--context", type=int, default=1536, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=256, help="tokens decoded after it")
    parser.add_argument("--backend", default="auto", help="who computes: auto, cpu, reference")
    parser.add_argument("--eps", type=float, default=0.05, help="error budget")
    parser.add_argument("--block", type=int, default=16, help="tokens per block")
    parser.add_argument("--bits", type=int, default=8, choices=[4, 8], help="bits of a ghost key")
    parser.add_argument("--json", type=Path, help="append one line per row of the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':<16}" + " ".join(f"{name:>14}" for name in COLUMNS))
    failed = 0
    with torch.inference_mode():
        for name, audit in (traces if args.what == "traces" else model)(args):
            row = audit.row()
            failed += audit.violations + audit.outside + audit.over_eps
            shown = (
                "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
                for value in row.values()
            )
            print(f"{name:<16}" + " ".join(f"{text:>14}" for text in shown), flush=True)
            append(args.json, row | {"name": name, "options": vars(args) | {"json": None}})
    raise SystemExit(4 if failed else 0)


if __name__ == "__main__":
    main()
