"""Certificates of the steps of one sample, and the audits that check them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rcq_cli.errors import BrokenRun
from rcq_cli.kernels._rounding import round_up
from rcq_cli.protocols import Certificate, LayerState, Step, StepArrays

_BOUNDS = ("key_bound", "value_bound", "dropped_bound", "rounding_bound", "total_bound", "output_norm")
_COUNTS = ("exact", "rung", "promoted_key_blocks", "promoted_value_blocks")
# what float64 attention itself may be off by is inside the bound of every step; this covers the comparison
_COMPARISON = 1.0 + 2.0**-40


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
        self.rows: dict[int, list[dict[str, Any]]] = {index: [] for index in layers}
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
        rows = self.rows[index]
        row = {name: getattr(step.certificate, name) for name in (*_BOUNDS, *_COUNTS)}
        row["blocks"], row["paged_bytes"] = step.certificate.blocks, step.certificate.paged_bytes
        error = torch.full_like(step.certificate.total_bound, torch.nan)
        if self._plan[len(rows) - self._base[index]]:
            error = (state.exact(query) - step.output.double()).norm(dim=-1)
        row["true_error"] = error
        row["violated"] = violated(step.certificate, error)
        rows.append(row)
        self.audit_ns += time.perf_counter_ns() - started

    def arrays(self) -> StepArrays | None:
        """Return everything recorded as `[N, L, Hq]` arrays, None where no certificate was kept.

        A step that ended in an error has rows of some layers only; it is left out.
        """
        steps = min(len(rows) for rows in self.rows.values())
        if not self.certifies or not steps:
            return None

        def stack(name: str) -> Tensor:
            return torch.stack(
                [torch.stack([row[name] for row in self.rows[i][:steps]]) for i in self.layers], 1
            )

        arrays: dict[str, Any] = {name: round_up(stack(name), torch.float32).numpy() for name in _BOUNDS[:-1]}
        arrays["output_norm"] = stack("output_norm").float().numpy()
        arrays["true_error"] = stack("true_error").float().numpy()
        arrays |= {name: stack(name).numpy() for name in (*_COUNTS, "violated")}
        for name in ("blocks", "paged_bytes"):
            arrays[name] = np.array(
                [[row[name] for row in self.rows[i][:steps]] for i in self.layers], dtype=np.int64
            ).T
        return StepArrays(**arrays, layers=self.layers)


def _check_finite(index: int, state: LayerState, query: Tensor, certificate: Certificate) -> None:
    """Raise `BrokenRun` where a bound is not finite because the model's own keys, values or query are not."""
    if bool(torch.isfinite(certificate.total_bound).all()) or bool(torch.isfinite(state.exact(query)).all()):
        return
    raise BrokenRun(
        f"layer {index}: the model made keys, values or queries that are not finite",
        why="attention over what was stored is NaN or infinite",
        fix="try --dtype float32",
        id="RCQ-RUN-NAN",
    )


def violated(certificate: Certificate, error: Tensor) -> Tensor:
    """Return per query head whether an error is above its bound or the bound not finite; NaN passes."""
    over = error > certificate.total_bound * _COMPARISON
    return over | ~torch.isfinite(certificate.total_bound)
