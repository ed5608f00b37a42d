"""A measured number or the reason why there is none; never 0 for "could not measure"."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Number = int | float


class Status(StrEnum):
    """What stands behind a reading; the first four carry a value."""

    OK = "ok"
    SAMPLED = "sampled"
    INFERRED = "inferred"
    DATASHEET = "datasheet"
    NO_LIBRARY = "no_library"
    NO_DRIVER = "no_driver"
    DRIVER_MISMATCH = "driver_mismatch"
    NO_DEVICE = "no_device"
    DEVICE_LOST = "device_lost"
    NOT_SUPPORTED = "not_supported"
    NO_PERMISSION = "no_permission"
    MISSING_SYMBOL = "missing_symbol"
    PID_NAMESPACE = "pid_namespace"
    HIDDEN_BY_DRIVER = "hidden_by_driver"
    NOT_APPLICABLE = "not_applicable"
    NOT_REQUESTED = "not_requested"
    ERROR = "error"

    @property
    def has_value(self) -> bool:
        """Whether a reading of this status carries a number."""
        return self in (Status.OK, Status.SAMPLED, Status.INFERRED, Status.DATASHEET)


@dataclass(frozen=True, slots=True)
class Reading:
    """One number of one source."""

    value: Number | None
    """None exactly when the status carries no value."""
    status: Status
    source: str
    """`nvml.v2`, `torch.allocator`, `proc.VmHWM`, `ledger`, `cgroup.v2`, `datasheet`."""
    detail: str = ""
    """What the source said: `NVML_ERROR_NOT_SUPPORTED (3)`."""

    def __post_init__(self) -> None:
        if (self.value is not None) != self.status.has_value:
            raise ValueError(f"a reading of status {self.status} cannot hold {self.value!r}")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a reading must be finite, not {self.value!r}")
        if not self.source:
            raise ValueError("a reading needs a source")

    def to_json(self) -> dict[str, Any]:
        """Return the record; `value` is null where nothing was measured."""
        return {"value": self.value, "status": str(self.status), "source": self.source, "detail": self.detail}


def measured(value: Number, source: str, detail: str = "") -> Reading:
    """Return an exact reading."""
    return Reading(value, Status.OK, source, detail)


def absent(status: Status, source: str, detail: str = "") -> Reading:
    """Return a reading without a value."""
    return Reading(None, status, source, detail)


def combine(operation: Callable[..., Number], *readings: Reading) -> Reading:
    """Return `operation` of the values as an inferred reading; the first missing one makes it missing."""
    source = "+".join(dict.fromkeys(reading.source for reading in readings))
    for reading in readings:
        if reading.value is None:
            return Reading(None, reading.status, source, reading.detail)
    return Reading(operation(*(reading.value for reading in readings)), Status.INFERRED, source)


def known(name: str, value: Any, absent: str) -> dict[str, Any]:
    """Return the field `name`, or null and beside it in `<name>_status` why there is none."""
    return {name: value} if value is not None else {name: None, f"{name}_status": str(absent)}
