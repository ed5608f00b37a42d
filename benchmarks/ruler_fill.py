"""Draw one prompt of every part of `ruler`: how full it is and how long drawing it took.

python benchmarks/ruler_fill.py [MODEL] [CTX ...]
"""

import sys
import time
from typing import Any

from rcq_cli.options import parse_tokens
from rcq_cli.protocols import TaskRequest
from rcq_cli.sources import resolve
from rcq_cli.tasks.ruler import TASK


class Counting:
    """The model's tokenizer, counting how often a whole prompt is encoded."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.prompts = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def prompt(self, *args: Any, **options: Any) -> Any:
        self.prompts += 1
        return self._tokenizer.prompt(*args, **options)


def main(model: str = "smollm2-135m", *contexts: str) -> int:
    """Print the table; leave with 1 where a prompt is emptier than it may be."""
    source, reference = resolve(model)
    tokenizer = source.load(reference, device="cpu", dtype="float32").tokenizer
    options = TASK.Options(overlength="allow")
    low = 0
    print("| part | ctx | tokens | fill | least | encodes | seconds |\n|---|---|---|---|---|---|---|")
    for ctx in map(parse_tokens, contexts or ("1k", "4k", "64k", "1m")):
        for part in TASK.parts:
            counting = Counting(tokenizer)
            begun = time.perf_counter()
            sample = next(iter(TASK.samples(TaskRequest(part, ctx, 1, 0, options), counting)))
            spent = time.perf_counter() - begun
            meta = sample.meta
            low += meta["fill"] < meta["fill_floor"]
            print(
                f"| {part} | {ctx:,} | {len(sample.prompt_ids):,} + {sample.max_new_tokens} | "
                f"{meta['fill']:.4f} | {meta['fill_floor']:.3f} | {counting.prompts} | {spent:.2f} |",
                flush=True,
            )
    return int(low > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
