"""One certified decode step of one layer against the fastest dense attention of PyTorch, in the same run.

    python benchmarks/attention.py --tokens 8192,65536 --threads 1 --json FILE

Synthetic heads with a known shape of attention (--data): topics (keys in clusters, values with a mean, the
heads of a group from diffuse to sharp), needle (one token holds the mass), diffuse (even attention to
zero-mean values), near-ties (all keys almost alike); or layers of a real model that capture.py stored
(--captured FILE). Outputs are compared with float64 first; where one lies
outside its bound no ratio is printed. Ratios are of lower quartiles. Wall time means little on a busy
machine: take one thread and its CPU time there.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _record import append
from _timing import Timed, interleaved, phases
from torch import Tensor

from rcq_cli import LayerCache


class Load(NamedTuple):
    keys: Tensor
    values: Tensor
    queries: list[Tensor]


def load(kind: str, heads: int, group: int, tokens: int, dim: int, dtype: torch.dtype) -> Load:
    """Return keys and values `[Hkv, T, D]` and eight queries `[Hq, D]` of one distribution."""
    gen = torch.Generator().manual_seed(20868)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    k, v, count = normal(heads, tokens, dim), normal(heads, tokens, dim), 64
    sharpness = torch.tensor([0.6, 0.8, 1.0, 2.0]).repeat((group + 3) // 4)[:group, None]
    topics = normal(heads, count, dim)
    if kind == "topics":
        topic = torch.randint(0, count, (tokens // 64 + 1,), generator=gen).repeat_interleave(64)[:tokens]
        k = topics[:, topic] + 0.6 * k
        v = 0.7 * normal(heads, count, dim)[:, topic] + 0.7 * v + 0.3
    elif kind == "needle":
        k[:, tokens // 3] = 4 * topics[:, 0]
    elif kind == "near-ties":
        k, v = topics[:, :1] + 1e-3 * k, v + 0.3
    queries = []
    for _ in range(8):
        chosen = torch.randint(0, count if kind == "topics" else 1, (group,), generator=gen)
        queries.append(topics[:, chosen] * sharpness if kind != "diffuse" else normal(heads, group, dim))
    return Load(k.to(dtype), v.to(dtype), [q.flatten(0, 1).to(dtype) for q in queries])


def dense_sides(data: Load, scale: float) -> dict[str, Any]:
    """Return the ways PyTorch has to attend with one token; all give `[Hq, D]`."""
    k, v = data.keys, data.values
    rows = [q.unflatten(0, (k.shape[0], -1)) for q in data.queries]

    def products(turn: int) -> Tensor:
        weights = torch.softmax(torch.matmul(rows[turn % 8], k.transpose(1, 2)) * scale, -1)
        return torch.matmul(weights, v)

    def packed(turn: int) -> Tensor:
        return F.scaled_dot_product_attention(rows[turn % 8][None], k[None], v[None], scale=scale)

    return {"matmul + softmax": products, "sdpa, group as rows": packed}


def exact_output(query: Tensor, data: Load, scale: float) -> Tensor:
    """Return float64 attention, KV head by KV head, `[Hq, D]`."""
    rows = []
    for head, group in enumerate(query.double().unflatten(0, (data.keys.shape[0], -1))):
        weights = torch.softmax(group @ data.keys[head].double().T * scale, -1)
        rows.append(weights @ data.values[head].double())
    return torch.cat(rows)


def correct(cache: LayerCache, data: Load, scale: float, steps: int) -> dict[str, float] | None:
    """Compare steps with float64; return what they used, or None when one lies outside its bound."""
    used: dict[str, list[float]] = {name: [] for name in ("exact", "keys", "values", "skipped", "error")}
    for query in data.queries[:steps]:
        step = cache.attend(query)
        truth, c = exact_output(query, data, scale), step.certificate
        error = (step.output.double() - truth).norm(dim=-1)
        if not bool((error <= c.total_bound).all()):
            return None
        blocks = max(c.blocks, 1)
        used["exact"] += c.exact.double().tolist()
        used["keys"] += (c.promoted_key_blocks / blocks).tolist()
        used["values"] += (c.promoted_value_blocks / blocks).tolist()
        used["skipped"] += (c.skipped_value_blocks / blocks).tolist()
        used["error"] += (error / truth.norm(dim=-1)).tolist()
    worst = max(used.pop("error"))
    return {name: sum(shares) / len(shares) for name, shares in used.items()} | {"worst_error": worst}


def loads(args: argparse.Namespace) -> Iterator[tuple[str, Load, float]]:
    """Yield name, data and scale of every row of the table."""
    for layer in map(int, args.layers.split(",")) if args.captured else ():
        found = torch.load(args.captured, weights_only=True)[layer]
        queries = [query.to(args.dtype) for query in (found["queries"] * 8)[:8]]
        keys, values = (found[name].to(args.dtype) for name in ("keys", "values"))
        yield f"layer {layer}", Load(keys, values, queries), found["scale"]
    for kind in args.data.split(",") if not args.captured else ():
        for tokens in map(int, args.tokens.split(",")):
            group = args.query_heads // args.kv_heads
            yield kind, load(kind, args.kv_heads, group, tokens, args.dim, args.dtype), args.dim**-0.5


def measure(kind: str, data: Load, scale: float, args: argparse.Namespace) -> dict[str, Any] | None:
    """Return one row of the table, None when the answers are wrong."""
    heads, tokens, dim = data.keys.shape
    cache = LayerCache(
        "certified", query_heads=len(data.queries[0]), kv_heads=heads, head_dim=dim, dtype=data.keys.dtype,
        backend="cpu", eps=args.eps, scale=scale,
    )  # fmt: skip
    cache.prefill(data.keys, data.values)
    used = correct(cache, data, scale, steps=3)
    if used is None:
        return None
    sides = {"certified": lambda turn: cache.attend(data.queries[turn % 8])} | dense_sides(data, scale)
    timed = interleaved(sides, args.rounds)
    with phases() as spent:
        for turn in range(8):
            cache.attend(data.queries[turn])
    held, whole = cache.bytes(), sum(spent.values())
    return {
        "data": kind,
        "tokens": tokens,
        "threads": args.threads,
        "ms": {name: {"wall": t.wall._asdict(), "cpu": t.cpu._asdict()} for name, t in timed.items()},
        "ratio_wall": ratio(timed, "wall"),
        "ratio_cpu": ratio(timed, "cpu"),
        "phase_shares": {name: ms / whole for name, ms in spent.items()},
        "device_share": held["device"] / held["dense_equivalent"],
        "used": used,
    }


def ratio(timed: dict[str, Timed], clock: str) -> float:
    """Certified over the fastest dense side."""
    low = {name: getattr(times, clock).low for name, times in timed.items()}
    return low["certified"] / min(ms for name, ms in low.items() if name != "certified")


def show(row: dict[str, Any]) -> None:
    sides = (
        f"{name} {t['wall']['low']:.2f} ({t['cpu']['low']:.2f}, median {t['cpu']['median']:.2f})"
        for name, t in row["ms"].items()
    )
    shares = ", ".join(f"{name} {share:.0%}" for name, share in row["phase_shares"].items())
    used, pad = row["used"], " " * 18
    print(f"{row['data']:>9} {row['tokens']:>7} tokens, lower quartile of wall (CPU) ms:")
    print(pad, "; ".join(sides))
    print(pad, f"ratio {row['ratio_wall']:.3f} wall, {row['ratio_cpu']:.3f} CPU; phases: {shares}")
    print(
        pad,
        f"exact {used['exact']:.1%}, promoted keys {used['keys']:.1%} values {used['values']:.1%},",
        f"skipped {used['skipped']:.1%}; tier 1 {row['device_share']:.1%};",
        f"worst error {used['worst_error']:.1e}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", default="8192,65536")
    parser.add_argument("--data", default="topics", help="topics,needle,diffuse,near-ties")
    parser.add_argument("--captured", type=Path, help="a file of capture.py, instead of --data and --tokens")
    parser.add_argument("--layers", default="1,5,10,15,20,25,29", help="of --captured")
    parser.add_argument("--query-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument(
        "--dtype", default=torch.bfloat16, type=lambda name: getattr(torch, name), help="of the originals"
    )
    parser.add_argument("--eps", type=float, default=0.05)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="append one line per row, with the machine")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for kind, data, scale in loads(args):
        row = measure(kind, data, scale, args)
        if row is None:
            sys.exit(f"{kind}: an output lies outside its bound; no ratio is printed")
        show(row)
        append(args.json, row)


if __name__ == "__main__":
    main()
