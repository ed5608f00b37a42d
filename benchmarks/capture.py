"""Keys, values and queries of a real model at work, for attention.py --captured and formats.py.

    python benchmarks/capture.py --model smollm2-135m --ctx 4k --out needle.pt
    python benchmarks/capture.py --model smollm2-135m --ctx 4k --task ppl --out prose.pt

Stores for every layer the keys and values `[Hkv, T, D]` of the prompt, after RoPE, and the queries `[Hq, D]`
of the first decode steps.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rcq_cli.engine.decoder import Engine
from rcq_cli.engine.recorder import StepRecorder
from rcq_cli.options import parse_tokens
from rcq_cli.protocols import LayerState, Step, TaskRequest
from rcq_cli.registry import Registry
from rcq_cli.sources import resolve


class Capture(StepRecorder):
    """Keeps what the layers of one decode attend to."""

    layers_seen: dict[int, dict[str, Any]]

    def record(self, index: int, state: LayerState, query: Tensor, step: Step) -> None:
        """Take the originals at the first step of a layer, the query at every one."""
        found = Capture.layers_seen.setdefault(index, {"queries": []})
        if "keys" not in found:
            cache: Any = state.cache  # type: ignore[attr-defined]
            found["keys"], found["values"] = (slab.rows.clone() for slab in cache.originals)
            found["scale"] = cache.geometry.scale
        found["queries"].append(query.clone())
        super().record(index, state, query, step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--ctx", default="4k")
    parser.add_argument("--task", default="niah")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    source, reference = resolve(args.model)
    engine = Engine(source.load(reference, device="cpu", dtype="auto"), backend="auto")
    task = Registry("rcq_cli.tasks", "TASK", "task").load(args.task)
    length = "target_tokens" if args.task == "ppl" else "gen"
    request = TaskRequest("", parse_tokens(args.ctx), 1, 0, task.Options(**{length: args.steps + 1}))
    sample = next(iter(task.samples(request, engine.loaded.tokenizer)))
    mode = Registry("rcq_cli.modes", "MODE", "mode").load("certified")
    Capture.layers_seen = {}
    import rcq_cli.engine.decoder as decoder

    decoder.StepRecorder = Capture  # type: ignore[misc]
    engine.decode(engine.prefill(sample.prompt_ids), sample, mode, mode.Options(), audit=0.0)
    torch.save([Capture.layers_seen[i] for i in sorted(Capture.layers_seen)], args.out)
    print(f"{len(Capture.layers_seen)} layers, {len(sample.prompt_ids)} tokens: {args.out}")


if __name__ == "__main__":
    main()
