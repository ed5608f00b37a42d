"""Run folders as the store writes them, with chosen scores, to drive the commands that read runs."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rcq_cli import records, store
from rcq_cli.contract import contract_hash, mode_hash
from rcq_cli.files import write_json
from rcq_cli.main import run
from rcq_cli.spec import RunSpec


def spec_of(mode: str, **changes) -> RunSpec:
    return RunSpec(model="needle", task="niah", mode=mode, ctx=8192, samples=100).but(**changes)


def stored_run(
    out: Path,
    mode: str,
    scores: Sequence[float],
    *,
    engaged: bool = True,
    reason: str = "",
    failed: int = 0,
    violations: int | None = None,
    fields: dict | None = None,
    finish: bool = True,
    problems: Sequence[dict] = (),
    **changes,
) -> Path:
    """Write a run by the store's own writer; sample i has depth 10 * (i mod 11) and its own cluster."""
    spec = spec_of(mode, **changes)
    folder = store.new_folder(out, spec)
    label = "reference" if mode == "dense" else "certified" if violations is not None else "none"
    facts = records.TaskFacts(
        ("",), "bounded@1", "accuracy", True, "float32", "needle (constructed)", True, label
    )
    known = {
        "model.id": "needle",
        "task.ctx": spec.ctx,
        "software.rcq": "0.1.0",
        "mode.name": mode,
        **(fields or {}),
    }
    contract = {
        "schema": 1,
        "contract_hash": contract_hash(known),
        "begun_hash": contract_hash(known),
        "mode_hash": mode_hash(known),
        "fields": known,
        "facts": facts._asdict(),
    }
    write_json(folder / "contract.json", contract)
    write_json(folder / "environment.json", {"schema": 1})
    rows = [_row(i, score, engaged, reason) for i, score in enumerate(scores)]
    rows = [
        records.failed(r, "nan", "logits are not finite") if i < failed else r for i, r in enumerate(rows)
    ]
    with store.RunWriter(folder) as writer:
        for row in rows:
            writer.append_row(row)
            writer.append_telemetry({"kind": "timing", "key": row["key"], "step_ns": [4_000_000, 4_000_000]})
        if finish:
            timings = {t["key"]: t for t in writer.telemetry}
            status = "error" if failed else "complete"
            cells = [p.cell for p in store.build_cells(spec, facts, rows, timings, writer.log, status)]
            cells[0]["certificates"] = None if violations is None else certificates(violations)
            told = [*problems, *records.problems(facts, rows, [], [None])]
            summary = {"status": status, "contract": contract_hash(known), "mode_hash": mode_hash(known)}
            writer.finish({**summary, "cells": cells, "problems": told}, [])
    return folder


def _row(index: int, score: float, engaged: bool, reason: str) -> dict:
    sizes = {"device": 100, "host": 50, "metadata": 10, "scratch": 5, "dense_equivalent": 200}
    sample = {"schema": 1, "key": f"k{index}", "sample_id": f"niah//8192/{index}", "part": "", "index": index}
    prompt = {
        "prompt_ids_sha256": f"p{index}",
        "prompt_tokens": 8000,
        "context_len": 8000,
        "fill_ratio": 0.99,
    }
    fixed = {
        "references": ["7"],
        "max_new_tokens": 48,
        "stop_ids": [],
        "seed": 0,
        "control": None,
        "error": None,
    }
    answer = {"status": "ok", "text": f"{score} {reason}", "output_ids": [1], "finish_reason": "stop"}
    return {
        **sample,
        **prompt,
        **fixed,
        **answer,
        "cluster": f"c{index}",
        "meta": {"depth": 10.0 * (index % 11)},
        "scores": {"accuracy": score},
        "engaged": {"engaged": engaged, "reason": reason},
        "first_logits_sha256": f"l{index}",
        "bytes": sizes,
        "steps": False,
    }


def certificates(violations: int) -> dict:
    counts = {"head_steps": 1000, "certified": 990, "exact": 10, "violations": violations, "audited": 1000}
    shares = {"promoted_key_share": 0.03, "promoted_value_share": 0.02, "host_to_device_bytes_per_step": 12}
    bounds = {"rel_bound_p50": 0.006, "rel_bound_p95": 0.021, "rel_error_max": 0.0007}
    return {**counts, **bounds, "rungs": {"0": 980, "1": 10, "2": 0, "3": 0, "4": 10}, **shares}


def outcomes(
    both: int, reference_only: int, candidate_only: int, neither: int
) -> tuple[list[float], list[float]]:
    table = (
        [(1.0, 1.0)] * both
        + [(1.0, 0.0)] * reference_only
        + [(0.0, 1.0)] * candidate_only
        + [(0.0, 0.0)] * neither
    )
    return [pair[0] for pair in table], [pair[1] for pair in table]


def ask(capsys: pytest.CaptureFixture, *argv: str) -> tuple[int, str, str]:
    code = run(argv)
    out = capsys.readouterr()
    return code, out.out, out.err
