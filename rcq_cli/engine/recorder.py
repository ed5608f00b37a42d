"""Certificates of the steps of one sample, and the audits that check them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rcq_cli.errors import BrokenRun
from rcq_cli.kernels._rounding import round_up
from rcq_cli.protocols import Certificate, LayerState, Step, StepArrays

_BOUNDS = ("key_bound", "value_bound", "dropped_bound", "rounding_bound", "total_bound")
_COUNTS = ("exact", "rung", "promoted_key_blocks", "promoted_value_blocks")
# what float64 attention itself may be off by is inside the bound of every step; this covers the comparison
_COMPARISON = 1.0 + 2.0**-40


class _Row(NamedTuple):
    """One step of one layer: what a certificate says is read from it when the sample is done."""

    certificate: Certificate
    error: Tensor | None
    """[Hq], where the step was audited."""


class StepRecorder:
    """Collects one row per step, layer and query head.

    A step is audited with probability `audit`, drawn from a generator of the sample's seed; its time is kept
    apart.
    """

    def __init__(self, layers: tuple[int, ...], *, audit: float, seed: int, certifies: bool) -> None:
        self.layers = layers
        self.audit = audit if certifies else 0.0
        self.certifies = certifies
        self.audit_ns = 0
        self.rows: dict[int, list[_Row]] = {index: [] for index in layers}
        self._draw = np.random.Generator(np.random.PCG64(seed))
        self._plan: list[bool] = []

    def begin(self, tokens: int) -> None:
        """Start a forward call over `tokens` tokens."""
        self.audit_ns = 0
        self._plan = [bool(self._draw.random() < self.audit) for _ in range(tokens)]
        self._base = {index: len(rows) for index, rows in self.rows.items()}

    def record(self, index: int, state: LayerState, query: Tensor, step: Step) -> None:
        """Take one step of one layer."""
        if step.certificate is None:
            return
        started = time.perf_counter_ns()
        _check_finite(index, state, query, step.certificate)
        rows, error = self.rows[index], None
        if self._plan[len(rows) - self._base[index]]:
            error = (state.exact(query) - step.output.double()).norm(dim=-1)
        rows.append(_Row(step.certificate, error))
        self.audit_ns += time.perf_counter_ns() - started

    def arrays(self) -> StepArrays | None:
        """Return everything recorded as `[N, L, Hq]` arrays, None where no certificate was kept.

        A step that ended in an error has rows of some layers only; it is left out.
        """
        steps = min(len(rows) for rows in self.rows.values())
        if not self.certifies or not steps:
            return None

        def stack(read: Callable[[_Row], Tensor]) -> Tensor:
            return torch.stack(
                [torch.stack([read(row) for row in self.rows[i][:steps]]) for i in self.layers], 1
            )

        def held(name: str) -> Tensor:
            return stack(lambda row: getattr(row.certificate, name))

        error, bounds = stack(_error_of), {name: held(name) for name in _BOUNDS}
        arrays: dict[str, Any] = {name: round_up(b, torch.float32).numpy() for name, b in bounds.items()}
        arrays["output_norm"] = held("output_norm").float().numpy()
        arrays["true_error"] = error.float().numpy()
        arrays["violated"] = violated(bounds["total_bound"], error).numpy()
        arrays |= {name: held(name).numpy() for name in _COUNTS}
        for name in ("blocks", "paged_bytes"):
            arrays[name] = np.array(
                [[getattr(row.certificate, name) for row in self.rows[i][:steps]] for i in self.layers],
                dtype=np.int64,
            ).T
        return StepArrays(**arrays, layers=self.layers)


def _error_of(row: _Row) -> Tensor:
    """Return the error of an audited step; NaN where nobody looked."""
    return torch.full_like(row.certificate.total_bound, torch.nan) if row.error is None else row.error


def _check_finite(index: int, state: LayerState, query: Tensor, certificate: Certificate) -> None:
    """Raise `BrokenRun` where a bound is not finite because the model's own keys, values or query are not."""
    if certificate.finite() or bool(torch.isfinite(state.exact(query)).all()):
        return
    raise BrokenRun(
        f"layer {index}: the model made keys, values or queries that are not finite",
        why="attention over what was stored is NaN or infinite",
        fix="try --dtype float32",
        id="RCQ-RUN-NAN",
    )


def violated(bound: Tensor, error: Tensor) -> Tensor:
    """Return where an error is above its bound or the bound not finite; NaN, an unknown error, passes."""
    return (error > bound * _COMPARISON) | ~torch.isfinite(bound)
