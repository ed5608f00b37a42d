"""What modes over the tiered store have in common."""

from dataclasses import dataclass

from rcq_cli.cache.tiers import TieredStore
from rcq_cli.errors import SpecError
from rcq_cli.kernels._format import TierFormat
from rcq_cli.protocols import Engagement


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """Storage options shared by `naive` and `certified`, so that the two differ in the checks alone."""

    block: int = 32
    """tokens per block"""
    group: int = 16
    """channels that share one value scale; divides the head dim"""
    key_meta: str = "float16"
    """dtype of key scale and offset: float16 or float32"""
    value_meta: str = "two-level"
    """value metadata: two-level or float16"""

    def __post_init__(self) -> None:
        # any head dim a group divides will do here; the real one is checked when a layer is opened
        self.format().check(self.group)

    def format(self) -> TierFormat:
        """Return the layout of tier 1."""
        return TierFormat(self.block, self.group, self.key_meta, self.value_meta)


class TieredCounters:
    """Steps of one layer, and the engagement record made from them."""

    def __init__(self, cache: TieredStore) -> None:
        self.cache = cache
        self.steps = self.steps_on_codes = 0

    def count(self) -> None:
        """Count one decode step."""
        self.steps += 1
        self.steps_on_codes += self.cache.block_count > 0

    def engagement(self) -> Engagement:
        """Return whether codes were written and read."""
        engaged = self.cache.coded_elems > 0 and self.steps_on_codes > 0
        reason = ""
        if not engaged:
            short = self.cache.tokens < 2 * self.cache.fmt.block
            reason = "no_decode_steps" if not self.steps else "short_context" if short else "inactive"
        return Engagement(self.steps, self.steps_on_codes, self.cache.coded_elems, 0, engaged, reason)


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise `SpecError` unless low <= value <= high."""
    if not low <= value <= high:
        raise SpecError(
            f"{name}={value:g} is not allowed", fix=f"allowed: {low:g} to {high:g}", id="RCQ-USE-11"
        )
