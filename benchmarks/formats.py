"""What each format of tier 1 holds, and what has to be read beside it until every head is certified.

    python benchmarks/formats.py needle.pt prose.pt

The files are those of capture.py: all layers of a real model. `certified alone` are head-steps whose codes
were enough (no promotion round, first and newest block aside); the other columns are those of a full step.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rcq_cli import LayerCache

FORMATS: tuple[dict[str, Any], ...] = (
    {"block": 16, "group": 16},
    {"block": 32, "group": 16},
    {"block": 32, "group": 16, "value_meta": "float16"},
    {"block": 32, "group": 16, "key_meta": "float32"},
    {"block": 32, "group": 32},
    {"block": 32, "group": 64},
    {"block": 64, "group": 16},
    {"block": 64, "group": 32},
)


class Seen(NamedTuple):
    """Means over layers, heads and steps."""

    held: float
    """Bytes of tier 1 over those of a dense 16-bit cache."""
    alone: float
    keys: float
    values: float
    read: float
    """Bytes of tier 1 and of promoted originals, taken as 16 bit, over a dense 16-bit cache."""
    exact: float


def opened(layer: dict[str, Any], **options: Any) -> LayerCache:
    """Return a cache that holds the prompt of one layer."""
    keys = layer["keys"]
    cache = LayerCache(
        "certified",
        query_heads=len(layer["queries"][0]),
        kv_heads=keys.shape[0],
        head_dim=keys.shape[2],
        dtype=keys.dtype,
        backend="cpu",
        scale=layer["scale"],
        **options,
    )
    cache.prefill(keys, layer["values"])
    return cache


def measured(layers: list[dict[str, Any]], **options: Any) -> Seen:
    """Run every captured query on every layer in one format."""
    rows = list(rows_of(layers, **options))
    return Seen(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))


def rows_of(layers: list[dict[str, Any]], **options: Any) -> Iterator[Seen]:
    """Yield the figures of every step of every layer."""
    for layer in layers:
        once, full = opened(layer, rounds=0, **options), opened(layer, **options)
        for query in layer["queries"]:
            alone, c, held = once.attend(query).certificate, full.attend(query).certificate, full.bytes()
            tier_one = held["device"] / held["dense_equivalent"]
            keys, values = (
                (count / c.blocks).mean().item() for count in (c.promoted_key_blocks, c.promoted_value_blocks)
            )
            exact = c.exact.double().mean().item()
            certified = 1 - alone.exact.double().mean().item()
            yield Seen(tier_one, certified, keys, values, tier_one + (keys + values) / 2, exact)


def main(*files: str) -> int:
    """Print a table per file."""
    for name in files:
        layers = torch.load(Path(name), weights_only=True)
        tokens, steps = layers[0]["keys"].shape[1], len(layers[0]["queries"])
        print(f"\n{Path(name).stem}: {len(layers)} layers, {tokens} tokens, {steps} steps\n")
        print(
            "| block | group | metadata (keys, values) | held | certified alone | keys promoted "
            "| values promoted | held and promoted | exact |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for options in FORMATS:
            seen = measured(layers, **options)
            metadata = f"{options.get('key_meta', 'float16')}, {options.get('value_meta', 'two-level')}"
            print(
                f"| {options['block']} | {options['group']} | {metadata} | {seen.held:.1%} "
                f"| {seen.alone:.1%} | {seen.keys:.1%} | {seen.values:.1%} | {seen.read:.1%} "
                f"| {seen.exact:.2%} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
