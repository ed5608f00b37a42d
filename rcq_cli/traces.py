"""Stored certificates as numbers to look at: series over steps, maps of heads, worst steps, differences.

Works on run folders alone; nothing here is torch. A relative bound is E / (norm - E), as in the summary of a
run; a null has the reason beside it, in `<name>_status`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rcq_cli.contract import compare_contracts
from rcq_cli.errors import SpecError
from rcq_cli.readings import Status, known
from rcq_cli.steps import UNITS, arrays_of, figure

if TYPE_CHECKING:
    import numpy as np

    from rcq_cli.protocols import StepArrays
    from rcq_cli.store import RunReader

Json = Any
RUNGS = 5
WORST = 10
NOT_AUDITED = "not_audited"


class Filter(NamedTuple):
    """Which head-steps are wanted; None takes all."""

    sample: str | None = None
    step: int | None = None
    layer: int | None = None
    head: int | None = None
    rung: int | None = None
    """Least rung."""


class Recorded(NamedTuple):
    """The certificates of one sample."""

    sample_id: str
    arrays: StepArrays
    step_ns: tuple[int, ...]
    """Of the last steps; a question of several tokens is no timed step."""


def recorded(reader: RunReader, sample: str | None = None) -> list[Recorded]:
    """Return the certificates of a run's samples; raise `SpecError` when it has none or no such sample.

    `sample` is a sample id or the number of a sample in the run.
    """
    table = reader.steps()
    if table is None:
        raise SpecError(
            f"run {str(reader.folder)!r} holds no certificates",
            why=f"mode {reader.spec.mode} keeps none, or no sample was answered",
            fix="rcq trace --mode certified",
            id="RCQ-USE-14",
        )
    by_key = reader.timings()
    times = {row["sample_id"]: by_key.get(row["key"], {}).get("step_ns", ()) for row in reader.examples()}
    found = [Recorded(name, arrays, tuple(times.get(name, ()))) for name, arrays in arrays_of(table)]
    if sample is None:
        return found
    names = [entry.sample_id for entry in found]
    if sample.isdecimal() and int(sample) < len(found):
        return [found[int(sample)]]
    if sample not in names:
        raise SpecError(
            f"--sample {sample!r} is not in the run",
            fix=f"allowed: 0 to {len(found) - 1}, or an id such as {names[0]}",
            id="RCQ-USE-14",
        )
    return [found[names.index(sample)]]


class Flat(NamedTuple):
    """Chosen head-steps of a run, one entry each."""

    columns: Mapping[str, np.ndarray[Any, Any]]
    """`sample` (its position), `step`, `layer`, `head`, all of `steps.UNITS`, `rel_bound`, `rel_error`."""
    samples: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.columns["step"])

    def record(self, row: int) -> dict[str, Json]:
        """Return one head-step with everything that was recorded of it."""
        values = {name: column[row].item() for name, column in self.columns.items() if name != "sample"}
        named: dict[str, Json] = {"sample_id": self.samples[int(self.columns["sample"][row])], **values}
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                named[name] = None
                named[f"{name}_status"] = NOT_AUDITED if math.isnan(value) else "unbounded"
        return named

    def records(self) -> Iterator[dict[str, Json]]:
        """Yield every head-step in order."""
        for row in range(len(self)):
            yield self.record(row)

    def take(self, chosen: Any) -> Flat:
        """Return the entries of a mask or of indices."""
        return Flat({name: column[chosen] for name, column in self.columns.items()}, self.samples)


def flat(samples: Sequence[Recorded], wanted: Filter = Filter()) -> Flat:  # noqa: B008  immutable
    """Return the head-steps that `wanted` lets through; raise `SpecError` when none is left."""
    import numpy as np

    parts = [_columns(i, entry) for i, entry in enumerate(samples)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    keep = np.ones(len(columns["step"]), dtype=bool)
    for name in ("step", "layer", "head"):
        limit = getattr(wanted, name)
        if limit is not None:
            keep &= columns[name] == limit
    if wanted.rung is not None:
        keep &= columns["rung"] >= wanted.rung
    chosen = Flat(columns, tuple(entry.sample_id for entry in samples))
    if keep.all():
        return chosen
    if not keep.any():
        asked = ", ".join(f"--{n} {v}" for n, v in zip(wanted._fields, wanted, strict=True) if v is not None)
        raise SpecError(f"no head-step of the run has {asked}", fix=extent(columns), id="RCQ-USE-14")
    return chosen.take(keep)


def extent(columns: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Say which steps, layers and heads there are."""
    parts = []
    for name in ("step", "layer", "head"):
        low, high = int(columns[name].min()), int(columns[name].max())
        parts.append(f"{name} {low} to {high}" if low < high else f"{name} {low}")
    return "there are " + ", ".join(parts) + f", rung up to {int(columns['rung'].max())}"


def _columns(position: int, entry: Recorded) -> dict[str, np.ndarray[Any, Any]]:
    import numpy as np

    arrays = entry.arrays
    shape = arrays.rung.shape
    grid = np.indices(shape, dtype=np.int32)
    columns: dict[str, Any] = {
        "sample": np.full(arrays.rung.size, position, np.int32),
        "step": grid[0].ravel(),
        "layer": np.asarray(arrays.layers, np.int32)[grid[1]].ravel(),
        "head": grid[2].ravel(),
    }
    for name in UNITS:
        values = getattr(arrays, name)
        values = values if values.ndim == 3 else np.broadcast_to(values[:, :, None], shape)
        columns[name] = values.ravel()
    norm = columns["output_norm"].astype(np.float64)
    for name, source in (("rel_bound", "total_bound"), ("rel_error", "true_error")):
        columns[name] = relative(columns[source].astype(np.float64), norm)
    return columns


def relative(error: np.ndarray[Any, Any], norm: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return error / (norm - error): infinite where the error is not below the norm, NaN stays NaN."""
    import numpy as np

    room = norm - error
    with np.errstate(invalid="ignore"):
        bounded = np.divide(error, room, out=np.full(error.shape, np.inf), where=room > 0)
    return np.where(np.isnan(error), np.nan, np.where(error == 0, 0.0, bounded))


def series(found: Flat) -> list[dict[str, Json]]:
    """Return one record per step: bound, error and the tightest bound over its head-steps, and the rungs."""
    import numpy as np

    c = found.columns
    order = np.argsort(c["step"], kind="stable")
    steps, starts = np.unique(c["step"][order], return_index=True)
    out = []
    for step, rows in zip(steps.tolist(), np.split(order, starts[1:]), strict=True):
        error = c["true_error"][rows]
        audited = ~np.isnan(error)
        above = audited & (error > 0)
        tight = (c["total_bound"][rows][above] / error[above]).min() if above.any() else None
        largest = c["rel_error"][rows][audited].max() if audited.any() else None
        out.append(
            {
                "step": step,
                **figure("bound_p50", _float(np.median(c["rel_bound"][rows])), NOT_AUDITED),
                **figure("bound_max", _float(c["rel_bound"][rows].max()), NOT_AUDITED),
                **figure("error_max", _float(largest), NOT_AUDITED),
                **figure("tightest", _float(tight), "no_error" if audited.any() else NOT_AUDITED),
                "audited": int(audited.sum()),
                "violations": int(c["violated"][rows].sum()),
                "exact": int(c["exact"][rows].sum()),
                "rungs": rung_counts(c["rung"][rows]),
            }
        )
    return out


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def rung_counts(rungs: np.ndarray[Any, Any]) -> list[int]:
    """Return how many head-steps ended on rung 0 to 4."""
    import numpy as np

    return [int(n) for n in np.bincount(rungs, minlength=RUNGS)]


def head_map(found: Flat) -> list[dict[str, Json]]:
    """Return, per layer, the rungs of each query head: their distribution, never a mean."""
    c = found.columns
    out = []
    for layer in sorted(set(c["layer"].tolist())):
        mine = c["layer"] == layer
        heads = sorted(set(c["head"][mine].tolist()))
        counts = [rung_counts(c["rung"][mine & (c["head"] == head)]) for head in heads]
        out.append({"layer": layer, "heads": heads, "rungs": counts})
    return out


def worst(found: Flat, count: int = WORST) -> list[dict[str, Json]]:
    """Return the head-steps to look at first: violated ones, then the widest bound of each layer and step."""
    import numpy as np

    c = found.columns
    width = np.where(np.isfinite(c["rel_bound"]), c["rel_bound"], np.inf)
    violated = c["violated"].astype(bool)
    seen: set[tuple[int, ...]] = set()
    rows: list[int] = []
    for row in np.lexsort((-width, ~violated)).tolist():
        place = tuple(int(c[name][row]) for name in ("sample", "step", "layer"))
        if violated[row] or place not in seen:
            rows.append(row)
            seen.add(place)
        if len(rows) == count:
            break
    return [found.record(row) for row in rows]


def show(reader: RunReader, wanted: Filter) -> dict[str, Json]:
    """Return the document of `rcq trace show`."""
    samples = recorded(reader, wanted.sample)
    found = flat(samples, wanted)
    c = found.columns
    spec = reader.spec
    one = wanted.step is not None and wanted.layer is not None and wanted.head is not None
    return {
        "run": str(reader.folder),
        "task": spec.task,
        "ctx": spec.ctx,
        "mode": spec.mode,
        "model": spec.model,
        **known("eps", spec.mode_options.get("eps"), Status.NOT_APPLICABLE),
        "samples": len(samples),
        "head_steps": len(found),
        "audited": int((c["true_error"] == c["true_error"]).sum()),
        "violations": int(c["violated"].sum()),
        "exact": int(c["exact"].sum()),
        "rungs": rung_counts(c["rung"]),
        "series": series(found),
        "map": head_map(found),
        "worst": worst(found),
        **known("head_step", next(found.records()) if one else None, Status.NOT_REQUESTED),
    }


# -- differences --------------------------------------------------------------------------------------------


_SAME = "diff two runs of one model, task, context and seed"


def difference(a: RunReader, b: RunReader, wanted: Filter) -> dict[str, Json]:
    """Return the document of `rcq trace diff`: head-steps of both runs, matched by sample, step, layer, head.

    Raises `NotComparable` for runs of other prompts or another model, `SpecError` when nothing matches.
    """
    import numpy as np

    from rcq_cli.identity import LATE

    # what follows from the samples that were taken may differ: those of both are matched
    early = [{name: value for name, value in run.contract.items() if name not in LATE} for run in (a, b)]
    mismatch = compare_contracts(*early)
    if not mismatch.comparable:
        raise mismatch.refusal(str(a.folder), str(b.folder), _SAME)
    left, right = (flat(recorded(reader, wanted.sample), wanted) for reader in (a, b))
    keys = [_keys(found) for found in (left, right)]
    places = {key: row for row, key in enumerate(keys[1])}
    pairs = [(row, places[key]) for row, key in enumerate(keys[0]) if key in places]
    if not pairs:
        raise SpecError(
            f"no head-step of {str(a.folder)!r} is in {str(b.folder)!r}",
            why="their samples, layers or heads differ",
            fix=_SAME,
            id="RCQ-USE-14",
        )
    rows = np.array(pairs).T
    one, two = left.take(rows[0]), right.take(rows[1])
    return {
        "runs": [str(a.folder), str(b.folder)],
        "modes": [a.spec.mode, b.spec.mode],
        "matched": len(pairs),
        "only_first": len(left) - len(pairs),
        "only_second": len(right) - len(pairs),
        "figures": [_figures(found) for found in (one, two)],
        "rung_up": int((two.columns["rung"] > one.columns["rung"]).sum()),
        "rung_down": int((two.columns["rung"] < one.columns["rung"]).sum()),
        **figure("bound_ratio_p50", _ratio_p50(one, two), "no_finite_bound"),
        "heads": _moved(one, two),
    }


def _keys(found: Flat) -> list[tuple[str, int, int, int]]:
    c = found.columns
    names = [found.samples[i] for i in c["sample"].tolist()]
    return list(zip(names, c["step"].tolist(), c["layer"].tolist(), c["head"].tolist(), strict=True))


def _figures(found: Flat) -> dict[str, Json]:
    import numpy as np

    c = found.columns
    finite = c["rel_bound"][np.isfinite(c["rel_bound"])]
    errors = c["rel_error"][np.isfinite(c["rel_error"])]
    absent = NOT_AUDITED if np.isnan(c["rel_error"]).all() else "unbounded"
    return {
        "rungs": rung_counts(c["rung"]),
        **figure("rel_bound_p50", _float(np.median(finite)) if len(finite) else None, "unbounded"),
        **figure("rel_bound_max", _float(finite.max()) if len(finite) else None, "unbounded"),
        **figure("rel_error_max", _float(errors.max()) if len(errors) else None, absent),
        "violations": int(c["violated"].sum()),
        "exact": int(c["exact"].sum()),
        "promoted_key_blocks": int(c["promoted_key_blocks"].sum(dtype=np.int64)),
        "promoted_value_blocks": int(c["promoted_value_blocks"].sum(dtype=np.int64)),
    }


def _ratio_p50(one: Flat, two: Flat) -> float | None:
    import numpy as np

    a, b = one.columns["total_bound"], two.columns["total_bound"]
    usable = (a > 0) & np.isfinite(a) & np.isfinite(b)
    return float(np.median(b[usable] / a[usable])) if usable.any() else None


def _moved(one: Flat, two: Flat, count: int = WORST) -> list[dict[str, Json]]:
    """Return the heads whose rungs changed most often."""
    changed: dict[tuple[int, int], list[int]] = {}
    c = one.columns
    moves = (two.columns["rung"].astype(int) - c["rung"].astype(int)).tolist()
    for layer, head, move in zip(c["layer"].tolist(), c["head"].tolist(), moves, strict=True):
        entry = changed.setdefault((layer, head), [0, 0, 0])
        entry[0] += move > 0
        entry[1] += move < 0
        entry[2] += 1
    order = sorted(changed.items(), key=lambda item: (-(item[1][0] + item[1][1]), item[0]))
    return [
        {"layer": layer, "head": head, "rung_up": up, "rung_down": down, "head_steps": n}
        for (layer, head), (up, down, n) in order[:count]
        if up or down
    ]
