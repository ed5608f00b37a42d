"""Inject every fault many times and count how it came out; the column `silently wrong` must be 0.

python benchmarks/faults.py [TIMES] [PART OF A NAME]
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.faults import foreign, hub, machine, memory, model

CASES = {**memory.CASES, **model.CASES, **machine.CASES, **foreign.CASES, **hub.CASES}


def counted(name: str, times: int) -> Counter:
    """Return how `times` injections of one fault came out."""
    seen: Counter = Counter()
    with tempfile.TemporaryDirectory() as place:
        for seed in range(times):
            folder = Path(place) / str(seed)
            folder.mkdir()
            seen[CASES[name](seed, folder)] += 1
    return seen


def main() -> int:
    """Print the table; leave with 1 when something was silently wrong."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    print("| fault | injected | exact or certified | clear error | silently wrong |")
    print("|---|---|---|---|---|")
    total: Counter = Counter()
    for name in (name for name in CASES if wanted in name):
        seen = counted(name, times)
        total += seen
        print(
            f"| {name} | {seen.total()} | {seen['exact']} | {seen['error']} | {seen['wrong']} |", flush=True
        )
    print(f"| all | {total.total()} | {total['exact']} | {total['error']} | {total['wrong']} |")
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
