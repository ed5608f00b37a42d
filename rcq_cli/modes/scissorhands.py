"""Drops tokens that recent rows give less than their uniform share. Source: arXiv:2305.17118.

No official code exists; window, protected tokens and the size of a drop are rcq's reading of the paper, and
every layer has the same budget.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rcq_cli.cache.statistics import Statistics
from rcq_cli.errors import SpecError
from rcq_cli.modes._budget import BudgetOptions
from rcq_cli.modes._evicting import EvictingLayer, gathered, top
from rcq_cli.protocols import Geometry, Needs

DEFAULT_FRACTION = 0.25


@dataclass(frozen=True, slots=True)
class Options(BudgetOptions):
    """Options of `scissorhands`; without a budget a quarter of the prompt is kept."""

    window: int = 400
    """rows whose verdict is remembered"""
    recent: int = 10
    """last tokens that are always kept"""

    def __post_init__(self) -> None:
        BudgetOptions.__post_init__(self)
        if self.window < 1 or self.recent < 1:
            raise SpecError(
                f"window={self.window}, recent={self.recent} is not allowed",
                fix="allowed: 1 or more",
                id="RCQ-USE-11",
            )
        self.check(2 * self.recent)


class ScissorhandsLayer(EvictingLayer):
    """One layer under `scissorhands`.

    A verdict is one bit per slot and row: seen, with a probability below 1 / (keys the row attended to). The
    bits of the last `window` rows form a ring that is gathered together with keys and values.
    """

    room = 0

    def __init__(self, geometry: Geometry, options: Any, backend: Any) -> None:
        super().__init__(geometry, options, backend)
        self.score_bytes = -(-options.window // 8)
        self.bits = torch.zeros(
            geometry.kv_heads, 0, self.score_bytes, dtype=torch.uint8, device=geometry.device
        )
        self.rows = 0

    def minimum(self) -> int:
        """Return enough for the protected tokens to survive a drop of half the budget."""
        return 2 * self.options.recent

    def default_budget(self) -> int:
        """Return a quarter of the prompt."""
        return max(self.minimum(), round(DEFAULT_FRACTION * self.tokens))

    def choose(self, seen: Statistics | None) -> Tensor | None:
        """Judge the prompt by its last rows."""
        if seen is None:
            return None
        probabilities = seen.last(self.keys.rows, self.options.window)
        count = probabilities.shape[1]
        visible = torch.arange(self.tokens - count + 1, self.tokens + 1, device=probabilities.device)
        low = probabilities < 1 / visible[:, None]
        low &= torch.arange(self.tokens, device=low.device) < visible[:, None]
        packed = _packed(low).transpose(1, 2)
        self.bits = F.pad(packed, (0, self.score_bytes - packed.shape[2])).contiguous()
        self.rows = count
        return self.compress(None)

    def observe(self, row: Tensor) -> None:
        """Take the verdict of a decode row."""
        self._remember(row < 1 / row.shape[1])

    def _remember(self, low: Tensor) -> None:
        """Write the verdict `[Hkv, slots]` of one row over that of the row `window` before."""
        byte, bit = divmod(self.rows % self.options.window, 8)
        self.bits[..., byte] = (self.bits[..., byte] & (255 - (1 << bit))) | (low.to(torch.uint8) << bit)
        self.rows += 1

    def verdicts(self) -> Tensor:
        """Return per slot the remembered rows that gave it less than a uniform share, `[Hkv, slots]`."""
        ones = torch.tensor([value.bit_count() for value in range(256)], device=self.bits.device)
        return ones[self.bits.long()].sum(-1)

    def compress(self, row: Tensor | None) -> Tensor | None:
        """Drop half the budget at once when it is exceeded: the worst first, of a tie the older."""
        del row
        excess = self.held - self.budget
        if excess <= 0:
            return None
        worst = self.verdicts()
        worst[:, -self.options.recent :] = 0
        dropped = top(worst.float(), max(self.budget // 2, excess))
        keep = torch.ones_like(worst, dtype=torch.bool).scatter(1, dropped, False)
        # equally many per head, so the row-major list of kept slots splits evenly
        return keep.nonzero()[:, 1].view(keep.shape[0], -1)

    def grow(self, count: int) -> None:
        """Add slots that no row has seen yet."""
        new = self.bits.new_zeros(self.bits.shape[0], count, self.bits.shape[2])
        self.bits = torch.cat((self.bits, new), 1)

    def pick(self, index: Tensor) -> None:
        """Keep the verdicts of kept slots."""
        self.bits = gathered(self.bits, index)

    def extra(self) -> list[Tensor]:
        """Return the verdicts."""
        return [self.bits]

    def copy_extra(self, twin: Any) -> None:
        """Copy the verdicts, which are rewritten in place."""
        twin.bits, twin.rows = self.bits.clone(), self.rows


def _packed(bits: Tensor) -> Tensor:
    """Return `[H, n, T]` bools as bytes along n, `[H, ceil(n / 8), T]`, the first in the lowest bit."""
    padded = F.pad(bits.to(torch.uint8), (0, 0, 0, -bits.shape[1] % 8)).unflatten(1, (-1, 8))
    place = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded * place[:, None]).sum(2, dtype=torch.uint8)


class Scissorhands:
    """Verdicts of recent rows."""

    name = "scissorhands"
    summary = "drops, half a budget at a time, what recent rows give less than its uniform share"
    label = "none"
    certifies = False
    Options = Options

    def needs(self, options: Any) -> Needs:
        """Return the last rows of the prompt."""
        return Needs(last_rows=options.window)

    def open(self, geometry: Geometry, options: Any, backend: Any) -> ScissorhandsLayer:
        """Make the empty cache of one layer."""
        return ScissorhandsLayer(geometry, options, backend)


MODE = Scissorhands()
