"""Runs with certificates of known values, written by the store's own writer."""

from pathlib import Path

import numpy as np

from rcq_cli import records, store
from rcq_cli.protocols import StepArrays
from tests.unit.stored_runs import _row, spec_of

STEPS, LAYERS, HEADS = 6, (2, 5, 7), 4


def arrays(
    sample: int, *, scale: float = 1.0, audited: bool = True, violated: bool = False, steps: int = STEPS
) -> StepArrays:
    """Bounds grow with the step and the layer; rung = (head + layer position) mod 5 from step 3 on."""
    step, layer, head = np.indices((steps, len(LAYERS), HEADS))
    total = (scale * (0.01 + 0.01 * step + 0.001 * layer + 0.0001 * head + 0.00001 * sample)).astype(
        np.float32
    )
    error = total / 4 if audited else np.full_like(total, np.nan)
    broken = np.zeros(total.shape, bool)
    if violated:
        error = error.copy()
        error[4, 1, 2], broken[4, 1, 2] = 2 * total[4, 1, 2], True
    rung = np.where(step >= 3, (head + layer) % 5, 0).astype(np.int8)
    zero = np.zeros_like(total)
    return StepArrays(
        key_bound=total / 2,
        value_bound=total / 2,
        dropped_bound=zero,
        rounding_bound=zero,
        total_bound=total,
        output_norm=np.ones_like(total),
        true_error=error,
        violated=broken,
        exact=rung >= 3,
        rung=rung,
        promoted_key_blocks=rung.astype(np.int32),
        promoted_value_blocks=np.zeros(total.shape, np.int32),
        blocks=np.full((steps, len(LAYERS)), 8, np.int64),
        paged_bytes=np.full((steps, len(LAYERS)), 100, np.int64),
        layers=LAYERS,
    )


def traced_run(out: Path, mode: str = "certified", samples: int = 2, finish: bool = True, **how) -> Path:
    """Write a run whose sample i has `arrays(i)` and steps of 1, 2, ... ms."""
    changes = {name: how.pop(name) for name in ("model", "task", "ctx") if name in how}
    spec = spec_of(mode, samples=samples, mode_options={"eps": 0.05}, **changes)
    folder = store.new_folder(out, spec)
    facts = records.TaskFacts(("",), "bounded@1", "accuracy", True, "float32", "needle", True, "certified")
    known = {"model.id": spec.model, "task.ctx": spec.ctx, "software.rcq": "0.1.0", "mode.name": mode}
    from rcq_cli.files import write_json
    from rcq_cli.finish import finish_run, write_contract

    write_contract(folder, known, facts, "begun")
    write_json(folder / "environment.json", {"schema": 1, "software": {"rcq": "0.1.0"}, "hardware": {}})
    rows = [_row(i, 1.0, True, "") | {"steps": True} for i in range(samples)]
    with store.RunWriter(folder) as writer:
        for i, row in enumerate(rows):
            writer.append_steps(row["sample_id"], row["key"], arrays(i, **how))
            times = [1_000_000 * (n + 1) for n in range(how.get("steps", STEPS))]
            timing = {"kind": "timing", "key": row["key"], "sample_id": row["sample_id"], "step_ns": times}
            writer.append_telemetry(timing)
            writer.append_row(row)
        if finish:
            finish_run(writer, spec, facts, known, "begun", rows, [])
    return folder
