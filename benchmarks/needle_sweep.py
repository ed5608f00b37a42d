"""Accuracy of modes on the constructed model while its margins shrink.

    python benchmarks/needle_sweep.py --ctx 4k --samples 20 --modes dense,naive,certified

Each setting moves one knob of `needle`; the other stays off. Dense must be right everywhere: what a mode
loses is caused by the mode. Prints a markdown table and writes one JSON line per cell with --out.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from rcq_cli.engine.decoder import Engine
from rcq_cli.options import parse_options, parse_tokens, split_label
from rcq_cli.protocols import TaskRequest
from rcq_cli.registry import Registry
from rcq_cli.sources import resolve
from rcq_cli.stats import wilson

KEY_MARGINS = (0.1, 0.05, 0.025, 0.0125, 0.006, 0.003, 0.0015)
VALUE_MARGINS = (0.1, 0.07, 0.05, 0.04, 0.035, 0.03)


def settings() -> Iterator[tuple[str, str]]:
    """Yield name and model of every setting."""
    for margin in KEY_MARGINS:
        yield f"key_margin={margin:g}", f"needle:key_margin={margin:g},value_margin=off,outliers=4"
    for margin in VALUE_MARGINS:
        yield f"value_margin={margin:g}", f"needle:key_margin=off,value_margin={margin:g},outliers=0"
    yield "needle", "needle"
    yield "needle-hard", "needle-hard"


def measure(
    model: str, modes: list[str], ctx: int, samples: int, seed: int
) -> Iterator[tuple[str, int, int, float | None]]:
    """Yield mode label, right answers, violations and share of exact head-steps for one model."""
    source, reference = resolve(model)
    engine = Engine(source.load(reference, device="cpu", dtype="auto"), backend="auto")
    task = Registry("rcq_cli.tasks", "TASK", "task").load("niah")
    request = TaskRequest("", ctx, samples, seed, task.Options(decoys=16))
    registry = Registry("rcq_cli.modes", "MODE", "mode")
    totals = {label: [0, 0, 0, 0] for label in modes}
    for sample in task.samples(request, engine.loaded.tokenizer):
        prefill = engine.prefill(sample.prompt_ids)
        for label, total in totals.items():
            name, given = split_label(label)
            mode = registry.load(name)
            options = parse_options(mode.Options, given, noun=f"option of mode {name}")
            decoded = engine.decode(prefill, sample, mode, options, audit=1.0)
            total[0] += int(task.score(sample, decoded.completion)[task.score_key])
            if decoded.steps is not None:
                total[1] += int(decoded.steps.violated.sum())
                total[2] += int(decoded.steps.exact.sum())
                total[3] += decoded.steps.exact.size
    for label, (right, violations, exact, steps) in totals.items():
        yield label, right, violations, exact / steps if steps else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of modes while the margins of needle shrink")
    parser.add_argument("--ctx", default="4k")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", default="dense,naive,certified,certified:eps=0.1")
    parser.add_argument("--only", default="", help="settings whose name starts with this")
    parser.add_argument("--out", type=Path, help="JSON lines")
    args = parser.parse_args()
    modes, ctx = args.modes.split(","), parse_tokens(args.ctx)
    head = f"setting, {args.samples} samples at {args.ctx}, % right"
    print(f"| {head} | {' | '.join(modes)} | violations |")
    print("|---" * (len(modes) + 2) + "|")
    for name, model in settings():
        if not name.startswith(args.only):
            continue
        cells, violations = [], 0
        for label, right, broken, exact in measure(model, modes, ctx, args.samples, args.seed):
            low, high = wilson(right, args.samples)
            row = {
                "setting": name, "model": model, "mode": label, "ctx": ctx, "n": args.samples,
                "seed": args.seed, "right": right, "ci": [low, high], "violations": broken,
                "exact_share": exact,
            }  # fmt: skip
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            cells.append(f"{100 * right / args.samples:.0f}")
            violations += broken
        print(f"| {name} | " + " | ".join(cells) + f" | {violations} |", flush=True)


if __name__ == "__main__":
    main()
