"""Keys per channel, values per token, a native residual. Source: arXiv:2402.02750."""

from dataclasses import dataclass
from typing import Any

from rcq_cli.errors import SpecError
from rcq_cli.modes._coded import CodedFormat, CodedLayer
from rcq_cli.modes._quantiser import Layout
from rcq_cli.protocols import Geometry


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `kivi` and `kivi-4`."""

    group: int = 32
    """tokens (keys) and channels (values) that share a scale"""
    residual: int = 128
    """newest tokens that stay uncompressed; a multiple of the group"""

    def __post_init__(self) -> None:
        # four two-bit codes make a byte
        if self.group < 4 or self.group % 4 or self.residual < 1 or self.residual % self.group:
            raise SpecError(
                f"group={self.group}, residual={self.residual} is not allowed",
                fix="allowed: group a multiple of 4, residual a multiple of group",
                id="RCQ-USE-11",
            )


def kivi_format(bits: int, options: Options) -> CodedFormat:
    """Return the published rule: keys go R at a time, values one by one as they leave the residual."""
    residual = options.residual

    def due(native_keys: int, native_values: int) -> tuple[int, int]:
        return native_keys // residual * residual, max(0, native_values - residual)

    keys, values = (Layout(bits, options.group, per_channel) for per_channel in (True, False))
    return CodedFormat(keys, values, due, residual)


class Kivi:
    """KIVI at a fixed number of bits."""

    label = "none"
    certifies = False
    Options = Options

    def __init__(self, name: str, bits: int) -> None:
        self.name, self.bits = name, bits
        self.summary = f"{bits}-bit keys per channel and values per token, newest tokens uncompressed"

    def open(self, geometry: Geometry, options: Any, backend: Any) -> CodedLayer:
        """Make the empty cache of one layer."""
        return CodedLayer(geometry, kivi_format(self.bits, options), backend)


MODE = Kivi("kivi", 2)
