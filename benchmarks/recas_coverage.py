"""Does the upper estimate of the dropped mass cover the true one as often as it says, on a real model?

    python benchmarks/recas_coverage.py --steps 1024 --nominal 0.9 0.95 --json FILE

Mode `recas` decodes given text, and beside every step, unseen by the mode, the true mass outside what was
read is computed for every KV head of every layer. A step of a layer is covered when the estimate is above
the truth in all of its heads at once. `steady` decodes prose under a fixed budget; `drift` turns from prose
to program text and back every 128 tokens, the budget still fixed; `switching` reads the same while the
budget follows the estimate. Two simpler rules are read off the same probes: the plain empirical quantile of
each head's own residuals, and the conformal quantile of the first probes, never touched again.
"""

import argparse
import inspect
import os
import textwrap
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from _record import append

from rcq_cli.engine.decoder import Engine
from rcq_cli.modes import recas
from rcq_cli.protocols import Geometry, PromptTokenizer, Sample, TaskRequest
from rcq_cli.recas.estimator import RESIDUAL_WINDOW, Calibrator, conformal_rank
from rcq_cli.sources import SOURCES
from rcq_cli.tasks import ppl

FIGURES = (
    "rcq", "rcq_below_one", "upper_is_one", "naive", "once", "median_mass", "kept_share",
)  # fmt: skip
KINDS = ("steady", "drift", "switching")
SPAN = 128
"""Tokens of one kind of text before the other comes."""


class Row(NamedTuple):
    """One step of one layer: truth and estimate of each KV head, and whether it was a randomised probe."""

    masses: list[float]
    estimates: list[float]
    probed: bool


class WatchedLayer(recas.RecasLayer):
    """A layer of `recas` that also writes down what the mode does not know."""

    def _after(self, groups: torch.Tensor, reading: recas.Reading) -> None:
        masses, estimates = self._true_masses(groups, reading.read), self._estimates(reading)
        probes = self.calibrator.probes
        super()._after(groups, reading)
        self.rows.append(Row(masses, estimates, self.calibrator.probes > probes))


class Watched(recas.Recas):
    """Mode `recas`, watched; `layers` are those it opened."""

    def __init__(self) -> None:
        self.layers: list[WatchedLayer] = []

    def open(self, geometry: Geometry, options: recas.Options, backend: Any) -> WatchedLayer:
        layer = WatchedLayer(geometry, options, backend)
        layer.rows = []
        self.layers.append(layer)
        return layer


def prose(tokenizer: PromptTokenizer, count: int) -> list[int]:
    request = TaskRequest("", count, 1, 0, ppl.Options(target_tokens=1))
    (sample,) = ppl.TASK.samples(request, tokenizer)
    return list(sample.prompt_ids)


def texts(kind: str, tokenizer: PromptTokenizer, context: int, steps: int) -> list[int]:
    """Return a context of prose and `steps` tokens to decode after it."""
    ids = prose(tokenizer, context + steps)
    if kind == "steady":
        return ids
    source = "".join(inspect.getsource(module) for module in (textwrap, argparse))
    streams = (iter(ids[context:]), iter(tokenizer.encode(source)))
    spans = (islice(streams[turn % 2], SPAN) for turn in range(-(-steps // SPAN)))
    return ids[:context] + list(chain.from_iterable(spans))[:steps]


def covered(rows: list[Row], miss: float) -> dict[str, np.ndarray]:
    """Return per step whether each rule covered all heads at once, once there are probes enough for all."""
    masses, estimates = (np.array([getattr(row, name) for row in rows]) for name in ("masses", "estimates"))
    residuals = masses - estimates
    calibrator, probed, least = Calibrator(miss), list[int](), 0
    found: dict[str, list[bool]] = {"rcq": [], "naive": [], "once": [], "open": []}
    for step, row in enumerate(rows):
        if calibrator.ready:
            least = len(probed) if not found["rcq"] else least
            uppers = np.array([calibrator.upper(value) for value in row.estimates])
            naive = np.quantile(residuals[probed[-RESIDUAL_WINDOW:]], 1 - miss, axis=0, method="inverted_cdf")
            first = np.sort(residuals[probed[: 2 * least]].max(1))
            once = first[conformal_rank(len(first), miss) - 1]
            for name, above in (
                ("rcq", uppers),
                ("naive", estimates[step] + naive),
                ("once", estimates[step] + once),
            ):
                found[name].append(bool((masses[step] <= above.clip(0, 1)).all()))
            found["open"].append(bool((uppers >= 1).any()))
        if row.probed:
            probed.append(step)
            calibrator.observe(row.masses, row.estimates)
    return {name: np.array(values) for name, values in found.items()}


def decode(engine: Engine, kind: str, miss: float, args: argparse.Namespace) -> list[WatchedLayer]:
    """Return the layers after `args.steps` steps of mode `recas`."""
    ids = texts(kind, engine.loaded.tokenizer, args.context, args.steps)
    sample = Sample(
        "coverage", 0, "coverage", tuple(ids), args.context, (), args.steps, (), 0, targets=args.steps
    )
    adapt = kind == "switching"
    options = recas.Options(eps=args.eps, miss_rate=miss, probe_rate=args.probe_rate, adapt=adapt)
    mode = Watched()
    prefill = engine.prefill(ids[: args.context], ((mode, options),))
    engine.decode(prefill, sample, mode, options)
    return mode.layers


def summary(layers: list[WatchedLayer], miss: float) -> dict[str, float | int | None]:
    each = [covered(layer.rows, miss) for layer in layers]
    total = {name: np.concatenate([layer[name] for layer in each]) for name in each[0]}
    rows = [row for layer in layers for row in layer.rows]
    closed = ~total["open"]
    return {
        "nominal": 1 - miss,
        "layer_steps": len(total["rcq"]),
        "probes": sum(row.probed for row in rows),
        "rcq": float(total["rcq"].mean()),
        "rcq_below_one": float(total["rcq"][closed].mean()) if closed.any() else None,
        "upper_is_one": float(total["open"].mean()),
        "naive": float(total["naive"].mean()),
        "once": float(total["once"].mean()),
        "median_mass": float(np.median([max(row.masses) for row in rows])),
        "kept_share": float(np.mean([layer.positions.length / layer.tokens for layer in layers])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a built-in model")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=1024, help="tokens decoded after it")
    parser.add_argument("--nominal", type=float, nargs="+", default=[0.9, 0.95], help="coverage asked for")
    parser.add_argument("--probe-rate", type=float, default=0.125, help="share of steps probed at random")
    parser.add_argument("--eps", type=float, default=0.2, help="budget that the switching text steers by")
    parser.add_argument("--text", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--json", type=Path, help="append one line per row of the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine(SOURCES.load(args.model).load(args.model, device="cpu", dtype="auto"), backend="auto")
    names = ("rcq", "below 1", "is 1", "naive", "once", "mass", "kept")
    print(f"{'text':<10} {'nominal':>7} {'n':>7} " + " ".join(f"{name:>7}" for name in names))
    for kind in args.text:
        layers: list[WatchedLayer] = []
        for nominal in args.nominal:
            miss = round(1 - nominal, 6)
            # without feedback the miss rate changes nothing, so one decode serves for all
            layers = layers if layers and kind != "switching" else decode(engine, kind, miss, args)
            row = {"text": kind, **summary(layers, miss)}
            figures = (row[name] for name in FIGURES)
            shown = " ".join("      -" if figure is None else f"{figure:>7.3f}" for figure in figures)
            print(f"{kind:<10} {nominal:>7} {row['layer_steps']:>7} {shown}", flush=True)
            append(args.json, row | {"options": vars(args) | {"json": None}})


if __name__ == "__main__":
    main()
