"""The contract of one run: what was measured, on what and how, as flat `group.field` entries."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

from rcq_cli.options import parse_options
from rcq_cli.protocols import Loaded, Mode, Task
from rcq_cli.records import Row, TaskFacts
from rcq_cli.spec import RunSpec, sha256_json

CONSTRUCTED_DECOYS = 16
"""Needles of the asked form beside the planted one, where the model was built to be told apart by them."""

_FROM_META = ("corpus_kind", "corpus_sha256", "questions", "question_visible", "shots")
LATE = (
    "tokenizer.bos_count",
    "tokenizer.first_ids",
    "task.gen_tokens",
    "task.sample_ids_sha256",
    "task.prompts_sha256",
    "task.fill_ratio_min",
    "task.fill_ratio_mean",
    "task.prompt_tokens_min",
    "task.prompt_tokens_mean",
    "task.prompt_tokens_max",
    "decoding.max_new_tokens",
    "decoding.stop_ids",
    *(f"task.{name}" for name in _FROM_META),
)
"""Fields known only when every prompt was built; null in the contract a run begins with."""


def task_options(task: Task, spec: RunSpec, loaded: Loaded) -> Any:
    """Return the task's options; decoys left open become 16 for a constructed model and 0 for any other."""
    options: Any = parse_options(task.Options, spec.task_options, f"option of task {spec.task_name}")
    if any(f.name == "decoys" for f in fields(options)) and options.decoys in (None, "auto"):
        options = replace(options, decoys=CONSTRUCTED_DECOYS if loaded.constructed else 0)
    return options


def task_parts(task: Task, spec: RunSpec) -> tuple[str, ...]:
    """Return the parts this run asks for."""
    return (spec.part,) if spec.part else task.parts


def facts(spec: RunSpec, task: Task, mode: Mode, loaded: Loaded) -> TaskFacts:
    """Return what cells repeat of task, model and mode."""
    return TaskFacts(
        parts=task_parts(task, spec),
        metric=task.metric,
        score_key=task.score_key,
        higher_is_better=task.higher_is_better,
        dtype=str(loaded.fingerprint.get("model.dtype", spec.dtype)),
        model_name=loaded.name,
        constructed=loaded.constructed,
        label=mode.label,
    )


def begun(spec: RunSpec, task: Task, options: Any, loaded: Loaded, engine: Any) -> dict[str, Any]:
    """Return the contract before the first sample, without the machine; what prompts will tell is null."""
    resolved = asdict(options) if is_dataclass(options) and not isinstance(options, type) else {}
    return {
        **dict.fromkeys(LATE),
        **loaded.fingerprint,
        **({"tokenizer.bos_policy": resolved["bos"]} if resolved.get("bos", "auto") != "auto" else {}),
        "task.name": spec.cell_task(""),
        "task.parts": list(task_parts(task, spec)),
        "task.generator": task.generator,
        "task.prompt_set": task.prompt_set,
        "task.metric": task.metric,
        "task.seed": spec.seed,
        "task.ctx": spec.ctx,
        "task.options": resolved,
        "task.controls": spec.controls,
        "decoding.greedy": True,
        "decoding.temperature": 0.0,
        "decoding.top_p": 1.0,
        "decoding.eos": "stop",
        "decoding.batch_size": 1,
        "decoding.prefill_chunk": loaded.prefill_chunk,
        "mode.name": spec.mode_name,
        "mode.options": dict(spec.mode_options),
        "mode.backend": spec.backend,
        **engine.describe(),
    }


def late(rows: Sequence[Row], bos_id: int | None) -> dict[str, Any]:
    """Return the fields that the rows of all samples fix, in canonical order."""
    tokens = [row["prompt_tokens"] for row in rows]
    fills = [row["fill_ratio"] for row in rows if row["fill_ratio"] is not None]
    first = rows[0]["first_ids"] if rows else None
    return {
        "tokenizer.first_ids": first,
        "tokenizer.bos_count": None if first is None else first.count(bos_id),
        "task.gen_tokens": _distinct(row["max_new_tokens"] for row in rows),
        "task.sample_ids_sha256": sha256_json([row["sample_id"] for row in rows]),
        "task.prompts_sha256": sha256_json([row["prompt_ids_sha256"] for row in rows]),
        "task.fill_ratio_min": min(fills, default=None),
        "task.fill_ratio_mean": math.fsum(fills) / len(fills) if fills else None,
        "task.prompt_tokens_min": min(tokens, default=None),
        "task.prompt_tokens_mean": sum(tokens) / len(tokens) if tokens else None,
        "task.prompt_tokens_max": max(tokens, default=None),
        "decoding.max_new_tokens": _distinct(row["max_new_tokens"] for row in rows),
        "decoding.stop_ids": _distinct(stop for row in rows for stop in row["stop_ids"]),
        **{f"task.{name}": _distinct(_meta(rows, name)) for name in _FROM_META},
    }


def device_of(loaded: Loaded) -> str:
    """Return the device the model is on, `cpu` or `cuda:0`."""
    return str(getattr(loaded.model, "device", "cpu"))


def _meta(rows: Sequence[Row], name: str) -> list[Any]:
    metas: list[Mapping[str, Any]] = [row["meta"] for row in rows]
    return [meta[name] for meta in metas if meta.get(name) is not None]


def _distinct(values: Any) -> list[Any] | None:
    """Return the different values in order, None when there is none."""
    found = sorted(set(values), key=str)
    return found or None
