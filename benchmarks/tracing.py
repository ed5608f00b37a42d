"""What tracing costs: decoding with the certificate of every head-step kept and written, and without.

    python benchmarks/tracing.py --model smollm2-135m --ctx 2k --steps 32 --rounds 12 --json FILE

One prefill; the sides decode the same answer from it in turning order, one after the other in every round.
`traced` keeps what the certificates say, and writes it as a run does: packed lines while it runs, the Parquet
table at its end. With `--audited` a third side also compares every output with exact attention, as
`rcq trace` does unless told otherwise. The answers must be the same, and the file must hold every head-step.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from _timing import spread
from torch import Tensor

from rcq_cli import steps
from rcq_cli.engine import decoder
from rcq_cli.engine.decoder import Engine, Prefill
from rcq_cli.engine.recorder import StepRecorder
from rcq_cli.environment import collect
from rcq_cli.options import parse_tokens
from rcq_cli.protocols import Decoded, LayerState, Mode, Sample, Step, StepArrays, TaskRequest
from rcq_cli.registry import Registry
from rcq_cli.sources import resolve
from rcq_cli.store import SCHEMA

SIDES = {"untraced": None, "traced": 0.0, "audited": 1.0}
"""Share of steps whose true error is measured; None where nothing is kept."""


class Recorder(StepRecorder):
    """Adds up the time that recording takes; keeps nothing when told so."""

    keeps = True
    spent_ns = 0

    def record(self, index: int, state: LayerState, query: Tensor, step: Step) -> None:
        """Take one step of one layer, or leave it."""
        if Recorder.keeps:
            begun = time.perf_counter_ns()
            super().record(index, state, query, step)
            Recorder.spent_ns += time.perf_counter_ns() - begun

    def arrays(self) -> StepArrays | None:
        """Return everything recorded; this is part of the cost."""
        begun = time.perf_counter_ns()
        found = super().arrays()
        Recorder.spent_ns += time.perf_counter_ns() - begun
        return found


@contextmanager
def recording(keeps: bool) -> Iterator[None]:
    """Let the decoder record with `Recorder` inside the block."""
    usual = decoder.StepRecorder
    Recorder.keeps, Recorder.spent_ns = keeps, 0
    decoder.StepRecorder = Recorder  # type: ignore[misc]
    try:
        yield
    finally:
        decoder.StepRecorder = usual  # type: ignore[misc]


@dataclass
class Bench:
    """One prefilled sample, and the folder that traces are written to."""

    engine: Engine
    prefill: Prefill
    sample: Sample
    mode: Mode
    folder: Path

    def turn(self, side: str) -> tuple[Decoded, dict[str, float]]:
        """Decode once; return the answer and milliseconds: of the steps, of recording, of writing."""
        audit = SIDES[side]
        with recording(audit is not None):
            options = self.mode.Options()
            done = self.engine.decode(self.prefill, self.sample, self.mode, options, audit=audit or 0.0)
        begun = time.perf_counter_ns()
        if done.steps is not None:
            self.write(done.steps)
        written = time.perf_counter_ns() - begun
        spent = {"steps": sum(done.step_ns), "recording": Recorder.spent_ns, "writing": written}
        return done, {name: ns / 1e6 for name, ns in spent.items()}

    def write(self, arrays: StepArrays) -> None:
        """Write the certificates of the sample in both forms of a run."""
        member = steps.encode(self.sample.sample_id, "key", arrays, SCHEMA)
        (self.folder / "steps.jsonl.gz").write_bytes(member)
        log = steps.StepLog(self.folder / "steps.jsonl.gz")
        steps.write_parquet(self.folder / "steps.parquet", log.read(["key"]))


def prepared(args: argparse.Namespace, folder: Path) -> Bench:
    """Load the model and prefill one needle prompt, all but its last token."""
    source, reference = resolve(args.model)
    engine = Engine(source.load(reference, device="cpu", dtype="auto"), backend="auto")
    task = Registry("rcq_cli.tasks", "TASK", "task").load("niah")
    request = TaskRequest("", parse_tokens(args.ctx), 1, 0, task.Options(gen=args.steps))
    sample = next(iter(task.samples(request, engine.loaded.tokenizer)))
    # nothing stops the answer early, and what the prefill made is shared by all rounds
    sample = replace(sample, stop_ids=(), context_len=len(sample.prompt_ids) - 1, max_new_tokens=args.steps)
    engine.loaded.tokenizer.eos_ids = ()
    mode = Registry("rcq_cli.modes", "MODE", "mode").load("certified")
    prefill = engine.prefill(sample.prompt_ids[: sample.context_len])
    return Bench(engine, prefill, sample, mode, folder)


def check(bench: Bench, answers: dict[str, Decoded]) -> int:
    """Return the head-steps of a side; stop when answers differ or the files hold anything else."""
    assert len({done.completion.output_ids for done in answers.values()}) == 1, "the answers differ"
    kept = answers["traced"].steps
    assert answers["untraced"].steps is None
    assert kept is not None
    assert kept.rung.shape[0] == len(answers["traced"].step_ns)
    bench.write(kept)
    ((_, stored),) = steps.arrays_of(steps.read_parquet(bench.folder / "steps.parquet"))
    for name in steps.UNITS:
        np.testing.assert_array_equal(getattr(stored, name), getattr(kept, name), err_msg=name)
    return kept.rung.size


def measure(bench: Bench, sides: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return, per side, quartiles of a step in milliseconds, its parts, and bytes per head-step."""
    spent: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    answers = {}
    for turn in range(rounds + 1):
        for side in sides if turn % 2 else reversed(sides):
            answers[side], parts = bench.turn(side)
            spent[side] += [parts] if turn else []
    head_steps = check(bench, answers)
    count = len(answers["traced"].step_ns)
    rows = {}
    base = [sum(parts.values()) / count for parts in spent["untraced"]]
    for side, found in spent.items():
        totals = [sum(parts.values()) / count for parts in found]
        whole, ratio = spread(totals), spread([a / b for a, b in zip(totals, base, strict=True)])
        inside = {name: spread([parts[name] / count for parts in found]).median for name in found[0]}
        rows[side] = {
            "low_ms": whole.low,
            "median_ms": whole.median,
            "ratio_in_round": ratio._asdict(),
            "inside_median_ms": inside,
        }
    sizes = {name: (bench.folder / name).stat().st_size for name in ("steps.jsonl.gz", "steps.parquet")}
    return {
        "head_steps": head_steps,
        "steps": count,
        "sides": rows,
        "bytes_per_head_step": {name: size / head_steps for name, size in sizes.items()},
    }


def show(found: dict[str, Any]) -> None:
    print(
        f"{found['steps']} steps, {found['head_steps']} head-steps; over untraced: within a round, quartiles"
    )
    print("| side | ms a step, lower quartile | median | over untraced | recording ms | writing ms |")
    print("|---|---|---|---|---|---|")
    for side, row in found["sides"].items():
        ratios = " ".join(f"{value:.3f}" for value in row["ratio_in_round"].values())
        inside = row["inside_median_ms"]
        print(
            f"| {side} | {row['low_ms']:.1f} | {row['median_ms']:.1f} | {ratios}"
            f" | {inside['recording']:.2f} | {inside['writing']:.2f} |"
        )
    for name, size in found["bytes_per_head_step"].items():
        print(f"{name}: {size:.1f} bytes a head-step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--ctx", default="2k")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--audited", action="store_true", help="measure the audited side too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        sides = tuple(SIDES) if args.audited else tuple(SIDES)[:2]
        found = measure(prepared(args, Path(folder)), sides, args.rounds)
    show(found)
    if args.json:
        args.json.write_text(json.dumps({**vars(args), "json": None, **found, "environment": collect("cpu")}))


if __name__ == "__main__":
    main()
