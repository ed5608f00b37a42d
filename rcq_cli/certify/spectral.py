"""Upper bounds on the largest eigenvalue of growing Gram matrices: spectral norms of V and of V - V'."""

import math
from copy import copy
from typing import Self

import torch
from torch import Tensor

from rcq_cli.kernels._rounding import REFRESH


def power_bound(gram: Tensor) -> Tensor:
    """Return an upper bound of the largest eigenvalue of each PSD matrix in `[H, D, D]`, float64 `[H]`.

    lambda_max <= ||G^16||_F^(1/16) <= D^(1/32) * lambda_max: never below, at most 1.164 times above at D =
    128. Power iteration would give a lower bound and is of no use here.
    """
    norm = gram.flatten(1).norm(dim=1)
    safe = torch.where(norm > 0, norm, torch.ones_like(norm))
    power, log = gram / safe[:, None, None], safe.log()
    for i in range(1, 5):
        power = power @ power
        size = power.flatten(1).norm(dim=1)
        power = power / size[:, None, None].clamp_min(1e-300)
        log = log + size.clamp_min(1e-300).log() / 2**i
    return torch.where(norm > 0, log.exp() * (1 + 1e-4), torch.zeros_like(norm))


def spectral_norm(rows: Tensor) -> Tensor:
    """Return an upper bound of the spectral norm of each matrix in float64 `[..., S, D]`, `[...]`.

    At most min(S, D)^(1/64) times too large.
    """
    size, dim = rows.shape[-2:]
    gram = rows @ rows.mT if size <= dim else rows.mT @ rows
    return power_bound(gram.flatten(0, -3)).reshape(rows.shape[:-2]).sqrt()


class SpectralBound:
    """lambda_max of sum_t x_t x_t^T per KV head, kept up to date under append.

    Weyl: lambda_max(G1 + G2) <= lambda_max(G1) + ||G2||_F. Rows since the last refresh count with the norm of
    their own Gram matrix, which for many directions lies far below its trace; a refresh happens when it
    exceeds a tenth of the bound.
    """

    def __init__(self, heads: int, dim: int, device: str = "cpu") -> None:
        self.gram = torch.zeros(heads, dim, dim, dtype=torch.float64, device=device)
        """G1, as of the last refresh."""
        self.recent = torch.zeros_like(self.gram)
        """G2"""
        self.parts = self.gram.new_zeros(2, heads)
        """The two terms of the bound, `[2, H]`."""

    def add(self, rows: Tensor) -> None:
        """Add float64 rows `[H, n, D]`; a superset of what the bound must cover is always sound."""
        self.add_gram(rows.transpose(1, 2) @ rows)

    def add_gram(self, gram: Tensor) -> None:
        """Add rows by their float64 Gram matrix `[H, D, D]`."""
        self.recent += gram
        self.parts[1] = _norm(self.recent)
        if self.due():
            self.refresh()

    def due(self) -> bool:
        """Return whether recent rows add so much that everything should be bounded anew."""
        return bool((self.parts[1] > REFRESH * self.parts[0]).any())

    def refresh(self) -> None:
        """Bound everything anew."""
        self.gram += self.recent
        self.recent.zero_()
        self.parts[0] = _largest(self.gram)
        self.parts[1] = 0.0

    @property
    def value(self) -> Tensor:
        """Return the bound, float64 `[H]`."""
        return self.parts[0] + self.parts[1]

    def intact(self) -> bool:
        """Return whether the two terms are those of the two matrices."""
        found = torch.stack((_largest(self.gram), _norm(self.recent)))
        return bool(torch.isclose(self.parts, found, rtol=1e-9, atol=0.0).all())

    def made_of(self, head: int, rows: Tensor) -> bool:
        """Return whether the matrices of a head are, along one direction, those of float64 rows `[n, D]`.

        A look at all of them would cost D times as much.
        """
        direction = torch.arange(1.0, rows.shape[1] + 1, dtype=torch.float64).sin()
        held = direction @ (self.gram[head] + self.recent[head]).cpu() @ direction
        room = 1e-10 * rows.square().sum() * direction.square().sum()
        return bool((held - (rows @ direction).square().sum()).abs() <= room)

    def fork(self) -> Self:
        """Return an independent copy."""
        twin = copy(self)
        twin.gram, twin.recent, twin.parts = self.gram.clone(), self.recent.clone(), self.parts.clone()
        return twin

    @property
    def nbytes(self) -> int:
        """Return the bytes held."""
        return self.gram.nbytes + self.recent.nbytes + self.parts.nbytes


def _largest(gram: Tensor) -> Tensor:
    """Return the first term, of G1: the bound on its eigenvalues, with what rounding may take."""
    return power_bound(gram) * (1 + 2.0**-30)


def _norm(recent: Tensor) -> Tensor:
    """Return the second term, of G2: its Frobenius norm, likewise."""
    return recent.flatten(1).norm(dim=1) * (1 + 2.0**-30)


def theta(n: float, roundoff: float) -> float:
    """Return n * u / (1 - n * u), the relative error of n chained roundings; infinite from n * u = 1."""
    product = n * roundoff
    return product / (1 - product) if product < 1 else math.inf
