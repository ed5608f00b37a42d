"""Throughput of executor ray: samples per minute with two workers of one thread over one such worker.

python benchmarks/executors.py [CTX] [SAMPLES]

Counts from the moment every worker has answered once, so that starting Ray and loading the model stay out,
and compares the rows of both runs.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def watched(ctx: str, samples: int, workers: int, place: Path) -> tuple[float, bytes]:
    """Run an evaluation; return samples per minute once all workers are at work, and the rows."""
    command = [sys.executable, "-m", "rcq_cli", "eval", "--mode", "dense", "--model", "smollm2-135m"]
    command += ["--task", "niah", "--ctx", ctx, "--samples", str(samples), "-T", "controls=off"]
    command += ["--executor", "ray", "--workers", str(workers), "--out", str(place)]
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=os.environ | threads, stdout=subprocess.DEVNULL)
    begun, warm, seen = 0.0, 0, 0
    while True:
        ended = process.poll() is not None
        rows = b"".join(file.read_bytes() for file in place.glob("*/examples.jsonl"))
        now, seen_before, seen = time.perf_counter(), seen, rows.count(b"\n")
        if not warm and seen >= workers:
            begun, warm = now, seen
        if seen > seen_before:
            last = now
        if ended:
            break
        time.sleep(0.02)
    if process.returncode or seen < samples:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode} after {seen} samples")
    return 60 * (seen - warm) / (last - begun), rows


def main(ctx: str = "1k", samples: str = "24") -> int:
    """Print both rates and their ratio; leave with 1 when the rows differ."""
    with tempfile.TemporaryDirectory() as place:
        one, rows = watched(ctx, int(samples), 1, Path(place) / "one")
        two, others = watched(ctx, int(samples), 2, Path(place) / "two")
    if rows != others:
        print("the rows of the two runs differ")
        return 1
    print(f"{ctx}, {samples} samples: one worker {one:.2f}, two workers {two:.2f} samples a minute,")
    print(f"{two / one:.2f} times; the rows are the same, byte for byte")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
