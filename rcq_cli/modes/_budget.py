"""How many tokens an eviction mode may hold, said in one of three ways."""

from dataclasses import dataclass

from rcq_cli.errors import SpecError
from rcq_cli.protocols import Geometry


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """Budget of modes that evict; at most one of the three, frozen when the prompt ends."""

    keep_tokens: int | None = None
    """tokens held per KV head and layer, sinks, window and recent tokens included"""
    keep_fraction: float | None = None
    """the same as a share of the prompt; never fewer than the mode cannot do without"""
    budget_bytes: int | None = None
    """device bytes of one layer, positions and scores included"""

    def __post_init__(self) -> None:
        given = [name for name in _NAMES if getattr(self, name) is not None]
        if len(given) > 1:
            raise SpecError(f"{' and '.join(given)} at once", fix="give one of them", id="RCQ-USE-11")
        if self.keep_fraction is not None and not 0 < self.keep_fraction <= 1:
            raise _refused("keep_fraction", self.keep_fraction, "above 0, at most 1")
        for name in ("keep_tokens", "budget_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _refused(name, value, "1 or more")

    def check(self, minimum: int) -> None:
        """Raise `SpecError` for a `keep_tokens` below what the mode cannot do without."""
        if self.keep_tokens is not None and self.keep_tokens < minimum:
            raise _refused("keep_tokens", self.keep_tokens, f"{minimum} or more with these options")

    def tokens(self, prompt: int, token_bytes: int, minimum: int, room: int) -> int | None:
        """Return the tokens to hold for a prompt of `prompt` tokens, None when no budget is given.

        A share of a short prompt may come out below `minimum`, which then counts; a number of bytes that
        cannot hold `minimum` tokens of `token_bytes` and `room` free slots raises `SpecError`.
        """
        if self.keep_tokens is not None:
            return self.keep_tokens
        if self.keep_fraction is not None:
            return max(minimum, round(self.keep_fraction * prompt))
        if self.budget_bytes is None:
            return None
        count = self.budget_bytes // token_bytes - room
        if count < minimum:
            allowed = f"{(minimum + room) * token_bytes} or more here"
            raise _refused("budget_bytes", self.budget_bytes, allowed)
        return count


_NAMES = ("keep_tokens", "keep_fraction", "budget_bytes")


def token_bytes(geometry: Geometry, extra: int = 0) -> int:
    """Return the device bytes of one token in one layer: keys, values, position and `extra` per KV head."""
    element = 4 if geometry.dtype == "float32" else 2
    return geometry.kv_heads * (2 * geometry.head_dim * element + 4 + extra)


def _refused(name: str, value: float, allowed: str) -> SpecError:
    return SpecError(f"{name}={value:g} is not allowed", fix=f"allowed: {allowed}", id="RCQ-USE-11")
