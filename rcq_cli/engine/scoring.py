"""Teacher forcing: log-likelihood of given targets, and the distance to the dense model's predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

KEPT = 256
"""Entries of the dense distribution that are kept per target where all of them would take too much room."""
_ROOM_ENTRIES = 1 << 26


class Reference(NamedTuple):
    """The dense model's predictions for the same targets; K entries per target, the likeliest first."""

    logp: Tensor
    """float32 [T, K]"""
    ids: Tensor
    """int64 [T, K]"""
    tail: Tensor
    """float64 [T]: logarithm of the probability outside the kept entries, -inf where all are kept."""
    target_logp: Tensor
    """float32 [T]"""


class TargetScores:
    """Collects one row of logits per target, in order.

    Without `reference` only likelihoods are kept. `keep` also keeps the predictions, to become a reference.
    """

    def __init__(
        self, targets: Sequence[int], *, reference: Reference | None = None, keep: bool = False
    ) -> None:
        self._targets, self._reference, self._keep = targets, reference, keep
        self._nll: list[float] = []
        self._compared: list[tuple[float, float, float]] = []
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, logits: Tensor) -> None:
        """Take the float32 `[V]` logits that predict the next target."""
        number = len(self._nll)
        target = self._targets[number]
        logp = torch.log_softmax(logits, -1)
        self._nll.append(-float(logp[target]))
        if self._keep:
            self._kept.append(_likeliest(logp, len(self._targets)))
        if self._reference is not None:
            self._compared.append(_compare(logp, target, self._reference, number))

    def series(self) -> dict[str, tuple[float, ...]]:
        """Return per target: `nll` in nats; against a reference also `kl` in nats, `flip` and `dlogp`."""
        found: dict[str, tuple[float, ...]] = {"nll": tuple(self._nll)}
        if self._reference is not None:
            columns = zip(*self._compared, strict=True)
            found |= dict(zip(("kl", "flip", "dlogp"), map(tuple, columns), strict=True))
        return found

    def as_reference(self) -> Reference:
        """Return what was kept."""
        logp, ids, tail = (torch.stack(column) for column in zip(*self._kept, strict=True))
        return Reference(logp, ids, tail, -torch.tensor(self._nll, dtype=torch.float32))


def _likeliest(logp: Tensor, targets: int) -> tuple[Tensor, Tensor, Tensor]:
    size = logp.shape[-1]
    kept = size if size * targets <= _ROOM_ENTRIES else min(KEPT, size)
    top = torch.topk(logp, kept)
    return top.values, top.indices, _outside(logp, top.indices)


def _outside(logp: Tensor, ids: Tensor) -> Tensor:
    """Return the logarithm of the probability of everything but `ids`, float64."""
    rest = logp.double()
    rest[ids] = -torch.inf
    return torch.logsumexp(rest, -1)


def _compare(logp: Tensor, target: int, reference: Reference, number: int) -> tuple[float, float, float]:
    """Return KL(dense || this) in nats, whether the likeliest token differs, and the change of log p.

    What is outside the kept entries counts as one event, so that the divergence is a lower bound; it is exact
    where every entry was kept.
    """
    dense, ids, tail = reference.logp[number].double(), reference.ids[number], reference.tail[number]
    here = logp[ids].double()
    divergence = float((dense.exp() * (dense - here)).sum())
    if bool(torch.isfinite(tail)):
        divergence += float(tail.exp() * (tail - _outside(logp, ids)))
    flip = float(int(logp.argmax()) != int(ids[0]))
    return divergence, flip, float(logp[target] - reference.target_logp[number])


def prompt_nll(logits: Tensor, ids: Sequence[int]) -> float:
    """Return the summed NLL in nats of `ids`, each predicted by the row of `[T, V]` logits before it."""
    targets = torch.tensor(list(ids), device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits[: len(ids)].float(), targets, reduction="sum"))
