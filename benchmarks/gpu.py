"""One certified decode step of one layer on a GPU against the fastest dense SDPA, in the same run.

    python benchmarks/gpu.py --tokens 8192,32768,65536,131072 --json FILE

Geometry of one layer of Llama-3.1-8B: 32 query heads, 8 KV heads, head dim 128. First answers: sums of tensor
cores against float64, codes against the reference backend, and steps against float64 attention; where one is
outside what its bound allows, nothing is timed. Then time by events of the device, all sides in every round.
Needs a CUDA or ROCm device, torch and Triton, neither transformers nor a network; about five minutes.
Exit 0; 4 when an answer lies outside its bound; 7 without such a device.
"""

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _record import append
from _timing import Spread, spread
from attention import Load, correct, load
from torch import Tensor

from rcq_cli import LayerCache
from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels.reference import BACKEND as REFERENCE

Side = Callable[[int], object]


def missing() -> str | None:
    """Return why nothing can be measured here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'rcq[gpu]')"
    if not torch.cuda.is_available():
        return "torch finds no CUDA or ROCm device"
    return None


# -- answers ------------------------------------------------------------------------------------------------


def codes_agree(fmt: TierFormat, dim: int, backend: Any) -> bool:
    """Return whether keys come back from the codes as near as from those of the reference."""
    keys = torch.randn(2, 8, fmt.block, dim, generator=torch.Generator().manual_seed(2)).half().double()
    ours, raw = backend.quantize_keys(keys.cuda(), fmt)
    theirs, expected = REFERENCE.quantize_keys(keys, fmt)
    same = torch.equal(raw.cpu(), expected)
    error = (keys - backend.keys(ours).cpu()).abs().amax()
    return same and float(error) <= 1.01 * float((keys - REFERENCE.keys(theirs)).abs().amax())


# -- sides --------------------------------------------------------------------------------------------------


def dense_sides(data: Load, scale: float) -> dict[str, Side]:
    """Return every dense attention that runs here; all give the same `[Hq, D]`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    k, v = data.keys[None], data.values[None]
    grouped = [q.unflatten(0, (k.shape[1], -1))[None] for q in data.queries]
    single = [q[None, :, None] for q in data.queries]

    def sdpa(kind: Any, rows: list[Tensor], gqa: bool) -> Side:
        def run(turn: int) -> Tensor:
            with sdpa_kernel(kind):
                return F.scaled_dot_product_attention(rows[turn % 8], k, v, scale=scale, enable_gqa=gqa)

        return run

    kinds = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    sides: dict[str, Side] = {}
    for name, kind in kinds.items():
        sides[f"sdpa {name}, group as rows"] = sdpa(kind, grouped, False)
        sides[f"sdpa {name}, gqa"] = sdpa(kind, single, True)

    def products(turn: int) -> Tensor:
        weights = torch.softmax(torch.matmul(grouped[turn % 8][0], k[0].transpose(1, 2)) * scale, -1)
        return torch.matmul(weights, v[0])

    sides["matmul + softmax"] = products
    return {name: side for name, side in sides.items() if runs(side)}


def runs(side: Side) -> bool:
    """Return whether a side works here; SDPA refuses with a RuntimeError what a kernel cannot do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            side(0)
        except RuntimeError:
            return False
    torch.cuda.synchronize()
    return True


def certified_sides(cache: LayerCache, data: Load) -> dict[str, Side]:
    """Return the step as a mode runs it, without its read-back, and as a captured graph of launches."""
    state: Any = cache._state
    sides: dict[str, Side] = {
        "certified": lambda turn: state.attend(data.queries[turn % 8]),
        "certified, no read-back": lambda turn: state._work(data.queries[turn % 8]).launch(),
    }
    sides["certified, no read-back"](0)
    torch.cuda.synchronize()
    work, graph = state._work(data.queries[0]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.launch()
    sides["certified, graph"] = lambda _turn: graph.replay()
    return sides


# -- time ---------------------------------------------------------------------------------------------------


def timed(sides: dict[str, Side], rounds: int) -> dict[str, Spread]:
    """Return milliseconds between events of the device, every side in every round, in turning order."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds + 3):
        for name in names if turn % 2 else reversed(names):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            sides[name](turn)
            end.record()
            end.synchronize()
            if turn >= 3:
                found[name].append(begin.elapsed_time(end))
    return {name: spread(samples) for name, samples in found.items()}


def host_syncs(side: Side) -> int:
    """Return how often a step makes the host wait, as torch sees it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            side(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


def measure(tokens: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """Return one row, None when an answer is wrong."""
    made = load(args.data, args.kv_heads, args.query_heads // args.kv_heads, tokens, args.dim, args.dtype)
    data = Load(made.keys.to("cuda:0"), made.values.to("cuda:0"), [q.to("cuda:0") for q in made.queries])
    cache = LayerCache(
        "certified", query_heads=args.query_heads, kv_heads=args.kv_heads, head_dim=args.dim,
        dtype=args.dtype, device="cuda:0", backend="triton-fused", eps=args.eps,
    )  # fmt: skip
    cache.prefill(data.keys, data.values)
    used = correct(cache, data, args.dim**-0.5, steps=len(data.queries))
    if used is None:
        return None
    ours = certified_sides(cache, data)
    dense = dense_sides(data, args.dim**-0.5)
    times = timed(ours | dense, args.rounds)
    step = cache._state._work(data.queries[0])  # type: ignore[attr-defined]
    step.run()
    held, fastest = cache.bytes(), min(dense, key=lambda name: times[name].median)
    return {
        "data": args.data,
        "tokens": tokens,
        "ms": {name: t._asdict() for name, t in times.items()},
        "fastest_dense": fastest,
        "ratios": {name: times[name].median / times[fastest].median for name in ours},
        "host_syncs": {name: host_syncs(ours[name]) for name in list(ours)[:2]},
        "paged_bytes": step.paged_bytes,
        "hits": step.hits,
        "device_share": held["device"] / held["dense_equivalent"],
        "device_and_scratch_share": (held["device"] + held["scratch"]) / held["dense_equivalent"],
        "used": used,
    }


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    print(f"{row['data']} at {row['tokens']} tokens; fastest dense: {row['fastest_dense']}")
    print(f"  {'side':<34} {'median ms':>10} {'quartiles':>17} {'ratio':>7} {'syncs':>6}")
    for name, t in row["ms"].items():
        ratio, syncs = row["ratios"].get(name), row["host_syncs"].get(name)
        print(
            f"  {name:<34} {t['median']:>10.3f} {t['low']:>8.3f} {t['high']:>8.3f}",
            f"{'' if ratio is None else f'{ratio:.2f}':>7} {'' if syncs is None else syncs:>6}",
        )
    used = row["used"]
    print(
        f"  exact {used['exact']:.1%}, promoted keys {used['keys']:.1%} values {used['values']:.1%},",
        f"skipped {used['skipped']:.1%}; worst error {used['worst_error']:.1e}",
    )
    print(
        f"  device {row['device_share']:.1%} of dense, {row['device_and_scratch_share']:.1%} with scratch;",
        f"brought in {row['paged_bytes']} bytes, {row['hits']} blocks were there already",
    )


def refuse(why: str, code: int) -> None:
    print(f"gpu.py: {why}", file=sys.stderr)
    sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", default="8192,32768,65536,131072")
    parser.add_argument("--data", default="topics", choices=("topics", "needle", "diffuse", "near-ties"))
    parser.add_argument("--query-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", default=torch.bfloat16, type=lambda name: getattr(torch, name))
    parser.add_argument("--eps", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path, help="append one line per row, with the machine")
    args = parser.parse_args()
    reason = missing()
    if reason:
        refuse(f"nothing can be measured here: {reason}; run it on a machine with a GPU", 7)
    from rcq_cli.kernels.triton_fused import BACKEND

    worst = BACKEND.kernels().core_error(torch.device("cuda:0"))
    if worst > 0.5:
        refuse(f"tensor cores err by {worst:.2f} of what is charged, at most 0.5 is allowed", 4)
    if not codes_agree(TierFormat(), args.dim, BACKEND):
        refuse("codes are further from the keys than those of the reference backend", 4)
    print(f"tensor cores err by {worst:.3f} of what is charged; codes agree with the reference")
    for tokens in map(int, args.tokens.split(",")):
        row = measure(tokens, args)
        if row is None:
            refuse(f"at {tokens} tokens an output lies outside its bound; no time is printed", 4)
            return
        show(row)
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        append(args.json, row | machine | {"tensor_core_error": worst}, "cuda")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
