"""One decode layer, full and as RECAS reads it, side by side on one thread.

    python benchmarks/recas_layer.py --kept 0.341 --active 0.268 --json FILE

The table gives median, tenth and ninetieth percentile in ms of the thread's own time. Shares default
to those of `rcq eval --task recas-traces --mode recas`.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from _record import append

from rcq_cli.recas.latency import LENGTHS, STEPS, layer_latency


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kept", type=float, default=0.341, help="kept tokens over all tokens")
    parser.add_argument("--active", type=float, default=0.268, help="tokens read over all tokens")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of each side")
    parser.add_argument("--json", type=Path, help="append one line with the figures and the machine")
    args = parser.parse_args()
    found = layer_latency(args.kept, args.active, LENGTHS, args.steps)
    print(f"{'tokens':>8} {'kept':>7} {'active':>7}  {'full ms':>22}  {'sparse ms':>22}  ratio  full by")
    for row in found.lengths:
        full, sparse = (" ".join(f"{ms:7.3f}" for ms in spread) for spread in (row.full_ms, row.sparse_ms))
        print(
            f"{row.tokens:>8} {row.kept_tokens:>7} {row.active_tokens:>7}  {full}  {sparse}"
            f"  {row.ratio:.3f}  {row.full_by}"
        )
    means = f"full {found.full_ms:.3f} ms, sparse {found.sparse_ms:.3f} ms, ratio {found.ratio:.3f}"
    print(f"geometric mean: {means}; ratio of summed times {found.ratio_of_sums:.3f}")
    record = {
        "kept_share": args.kept,
        "active_share": args.active,
        "steps": args.steps,
        "latency_ratio": found.ratio,
        "ratio_of_sums": found.ratio_of_sums,
        "lengths": [row._asdict() | {"ratio": row.ratio} for row in found.lengths],
    }
    append(args.json, record)


if __name__ == "__main__":
    main()
