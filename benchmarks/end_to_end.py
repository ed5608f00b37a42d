"""Tokens per second of a whole model: as transformers decodes it, and under modes of rcq.

    python benchmarks/end_to_end.py --model smollm2-135m --ctx 2k 4k 8k --threads 1 --json FILE

One prefill a context; all sides start from its cache and are fed the same tokens, a few steps of one side,
then of the next, in turning order. `stock` is the unmodified model with the cache of transformers, SDPA
attention; the others decode through rcq. Columns: median step in milliseconds, tokens per second, and the
ratio of a side's tokens per second to those of `stock` and of `dense`: medians and quartiles over rounds of
the ratio in one round, so that a busy machine troubles both sides of it. No ratio is printed unless the
logits of `dense` are those of `stock`, and of `certified` unless every head-step was within its budget or
exact.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from _record import append
from _timing import Spread, spread
from torch import Tensor
from transformers import DynamicCache

from rcq_cli.engine.decoder import Engine, Prefill
from rcq_cli.engine.hook import managed_layers
from rcq_cli.engine.stepper import ModelStepper
from rcq_cli.options import parse_tokens
from rcq_cli.protocols import Sample, TaskRequest
from rcq_cli.registry import Registry
from rcq_cli.sources import resolve

STOCK = "stock"
BASES = (STOCK, "dense")
"""Sides that ratios are taken to."""
MODES = Registry("rcq_cli.modes", "MODE", "mode")


@dataclass
class Stock:
    """The unmodified model, its cache filled from a prefill of rcq."""

    model: Any
    cache: DynamicCache
    forced: Sequence[int]
    count: int = 0

    @contextmanager
    def ready(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def step(self) -> int:
        token = torch.tensor([[self.forced[self.count % len(self.forced)]]])
        self.count += 1
        began = time.perf_counter_ns()
        logits = self.model(token, cache=self.cache, use_cache=True, logits_to_keep=1).logits
        int(logits[0, -1].argmax())
        return time.perf_counter_ns() - began


@dataclass
class Measured:
    """What the rounds of one side took, milliseconds a step, and its head-steps."""

    rounds: list[float] = field(default_factory=list)
    head_steps: int = 0
    exact: int = 0


def stock_cache(prefill: Prefill) -> DynamicCache:
    """Return a cache of transformers with what a prefill collected."""
    cache = DynamicCache()
    for index, layer in managed_layers(prefill.cache).items():
        keys, values = layer.collected()
        cache.update(keys[None].clone(), values[None].clone(), index)
    return cache


def logits_after(side: Any, token: int) -> Tensor:
    """Return the logits after one more token, which stays in the side's cache."""
    model = side.model if isinstance(side, Stock) else side.engine.model
    with side.ready():
        fed = torch.tensor([[token]])
        return model(fed, cache=side.cache, use_cache=True, logits_to_keep=1).logits[0, -1].float()


def prompt(engine: Engine, tokens: int) -> Sample:
    """Return a needle prompt of that length."""
    task = Registry("rcq_cli.tasks", "TASK", "task").load("niah")
    request = TaskRequest("", tokens, 1, 0, task.Options())
    sample: Sample = next(iter(task.samples(request, engine.loaded.tokenizer)))
    return replace(sample, context_len=len(sample.prompt_ids))


def sides_of(engine: Engine, tokens: int, modes: Sequence[str]) -> dict[str, Any]:
    """Return the sides after one prefill of a prompt."""
    sample = prompt(engine, tokens)
    prefill = engine.prefill(sample.prompt_ids)
    forced = sample.prompt_ids[:64]
    sides: dict[str, Any] = {STOCK: Stock(engine.model, stock_cache(prefill), forced)}
    for name in modes:
        mode = MODES.load(name)
        sides[name] = ModelStepper(engine, prefill, sample, mode, mode.Options(), forced)
    return sides


def check(sides: dict[str, Any]) -> None:
    """Stop when the logits of `dense` are not those of the unmodified model."""
    stock, *dense = (logits_after(sides[name], sides[STOCK].forced[0]) for name in sides if name in BASES)
    for logits in dense:
        error = (logits - stock).abs().max() / stock.abs().max()
        assert error < 1e-4, f"the logits of dense differ from those of the stock model by {error:.1e}"


def measure(sides: dict[str, Any], rounds: int, steps: int) -> dict[str, Measured]:
    """Let the sides take turns; a round that is not counted comes first."""
    measured = {name: Measured() for name in sides}
    for turn in range(rounds + 1):
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            side, mine = sides[name], measured[name]
            with side.ready():
                spent = []
                for _ in range(steps):
                    spent.append(side.step() / 1e6)
                    audit(side, mine)
            if turn:
                mine.rounds.append(spread(spent).median)
    return measured


def audit(side: Any, mine: Measured) -> None:
    """Count the head-steps of the last step; stop when one is neither within its budget nor exact.

    certified-paper reports its bounds and enforces none.
    """
    for state, step in getattr(side, "last", ()):
        found = step.certificate
        if found is None:
            continue
        budget = getattr(state, "budget", None)
        if budget is not None:
            limit = budget.eps / (1 + budget.eps) * found.output_norm
            kept = found.exact | (found.total_bound <= limit)
            assert bool(kept.all()), "a head-step is beyond its budget"
        mine.head_steps += len(found.exact)
        mine.exact += int(found.exact.sum())


def ratios(mine: Measured, other: Measured) -> Spread:
    """Return the ratio of tokens per second to those of another side, round by round."""
    return spread([theirs / ours for ours, theirs in zip(mine.rounds, other.rounds, strict=True)])


def rows_of(measured: dict[str, Measured], tokens: int, threads: int) -> Iterator[dict[str, Any]]:
    for name, mine in measured.items():
        against = {other: ratios(mine, measured[other])._asdict() for other in BASES if other in measured}
        step = spread(mine.rounds)
        exact = mine.exact / mine.head_steps if mine.head_steps else None
        yield {
            "side": name, "tokens": tokens, "threads": threads, "step_ms": step._asdict(),
            "tokens_per_second": 1e3 / step.median, "against": against, "exact_share": exact,
        }  # fmt: skip


def show(row: dict[str, Any]) -> str:
    shown = "  ".join(f"{r['median']:.2f} [{r['low']:.2f}, {r['high']:.2f}]" for r in row["against"].values())
    exact = "-" if row["exact_share"] is None else f"{row['exact_share']:.2%}"
    return (
        f"{row['side']:<16} {row['tokens']:>6} {row['threads']:>7} {row['step_ms']['median']:>8.1f}"
        f" {row['tokens_per_second']:>8.2f}  {shown}  {exact:>6}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a built-in model")
    parser.add_argument("--ctx", nargs="+", default=["2k", "4k", "8k"], help="tokens of the prompt")
    parser.add_argument(
        "--modes", nargs="+", default=["dense", "naive", "certified"], help="modes beside stock"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch and of the kernels")
    parser.add_argument("--rounds", type=int, default=12, help="rounds that count")
    parser.add_argument("--steps", type=int, default=4, help="steps of a side in one round")
    parser.add_argument("--json", type=Path, help="append one line per row of the table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source, reference = resolve(args.model)
    engine = Engine(source.load(reference, device="cpu", dtype="auto"), backend="auto")
    print("side             tokens threads  step ms    tok/s  over stock         over dense         exact")
    for ctx in args.ctx:
        sides = sides_of(engine, parse_tokens(ctx), args.modes)
        check(sides)
        measured = measure(sides, args.rounds, args.steps)
        for row in rows_of(measured, parse_tokens(ctx), args.threads):
            print(show(row), flush=True)
            append(args.json, row | {"options": vars(args) | {"json": None}})


if __name__ == "__main__":
    main()
