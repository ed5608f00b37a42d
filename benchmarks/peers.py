"""Cache update plus attention of one layer: the quantised caches of transformers against a certified layer.

    python benchmarks/peers.py --tokens 8192 --threads 1 --json FILE

Every side appends the same token and attends with the same query in each round. The peers store keys and
values in 4 bits (groups of 64, 128 newest tokens in full) and give back the whole cache each step. It is then
read by the attention of transformers, which is what a user gets, and, in rows marked `rows`, by
scaled_dot_product_attention with the query group as rows, the fastest form there is. A peer that is not
installed is named and left out: `pip install optimum-quanto hqq`. Errors are relative to float64 attention on
the original tokens.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _record import append
from _timing import interleaved
from attention import Load, exact_output, load
from torch import Tensor
from transformers import cache_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rcq_cli import LayerCache

PEERS = {"quanto int4": "QuantoQuantizedLayer", "hqq int4": "HQQQuantizedLayer"}
AXIS = {"quanto int4": 0, "hqq int4": 1}
"""As `QuantizedCache` documents them for each backend."""


def certified(data: Load, args: argparse.Namespace) -> Callable[[int], Tensor]:
    """Return one step of a certified layer: the output `[Hq, D]` of appending a token and attending."""
    cache = LayerCache(
        "certified", query_heads=args.query_heads, kv_heads=args.kv_heads, head_dim=args.dim,
        dtype=args.dtype, backend="cpu", eps=args.eps,
    )  # fmt: skip
    cache.prefill(data.keys, data.values)

    def step(turn: int) -> Tensor:
        cache.append(data.keys[:, turn], data.values[:, turn])
        return cache.attend(data.queries[turn % 8]).output

    return step


def stock(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the attention of transformers for `[Hq, D]` queries, `[Hq, D]`."""
    module = torch.nn.Module()
    module.num_key_value_groups = query.shape[0] // keys.shape[1]  # type: ignore[assignment]
    module.is_causal = False  # type: ignore[assignment]
    output, _ = sdpa_attention_forward(module, query[None, :, None], keys, values, None)
    return output[0, 0]


def rows(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return attention with the queries of a group as rows of one product, `[Hq, D]`."""
    groups = query.unflatten(0, (keys.shape[1], -1))[None]
    return F.scaled_dot_product_attention(groups, keys, values)[0].flatten(0, 1)


def peer(
    name: str, data: Load, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[[int], Tensor]:
    """Return one step of a quantised layer of transformers; raises ImportError when it is not installed."""
    kind: Any = getattr(cache_utils, PEERS[name])
    layer = kind(nbits=4, axis_key=AXIS[name], axis_value=AXIS[name])
    layer.update(data.keys[None], data.values[None])

    def step(turn: int) -> Tensor:
        token = slice(turn, turn + 1)
        keys, values = layer.update(data.keys[None, :, token], data.values[None, :, token])
        return attend(data.queries[turn % 8], keys, values)

    return step


def after_one(data: Load) -> Load:
    """Return the data behind the first step of every side, which appends the first token again."""
    keys, values = (torch.cat((t, t[:, :1]), 1) for t in (data.keys, data.values))
    return data._replace(keys=keys, values=values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--data", default="topics")
    parser.add_argument("--query-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", default=torch.bfloat16, type=lambda name: getattr(torch, name))
    parser.add_argument("--eps", type=float, default=0.05)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="append one line, with the machine")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = load(
        args.data, args.kv_heads, args.query_heads // args.kv_heads, args.tokens, args.dim, args.dtype
    )
    sides, missing = {"certified": certified(data, args)}, {}
    for name in PEERS:
        try:
            sides |= {name: peer(name, data, stock), f"{name}, rows": peer(name, data, rows)}
        except ImportError as error:
            missing[name] = str(error).splitlines()[0]
    exact, errors = exact_output(data.queries[0], after_one(data), args.dim**-0.5), {}
    for name, step in sides.items():
        errors[name] = float((step(0).double() - exact).norm() / exact.norm())
    timed = interleaved(
        {name: lambda turn, step=step: step(turn + 1) for name, step in sides.items()}, args.rounds
    )
    print(
        f"{args.data}, {args.tokens} tokens, {args.threads} threads, {args.rounds} rounds: update + attention"
    )
    for name, times in timed.items():
        ratio = times.wall.median / timed["certified"].wall.median
        print(
            f"{name:>17}  median {times.wall.median:8.2f} ms [{times.wall.low:.2f}, {times.wall.high:.2f}]"
            f"  over certified {ratio:5.1f}x  relative error {errors[name]:.1e}"
        )
    for name, why in missing.items():
        print(f"{name:>17}  not measured: {why}")
    row = {
        "tokens": args.tokens, "data": args.data, "threads": args.threads, "errors": errors,
        "ms": {name: t.wall._asdict() for name, t in timed.items()}, "missing": missing,
    }  # fmt: skip
    append(args.json, row)


if __name__ == "__main__":
    main()
