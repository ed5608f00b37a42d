"""RunSpec: everything that was asked of one run, frozen, checked, hashed."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rcq_cli.errors import SpecError
from rcq_cli.registry import did_you_mean

ORIGINS = ("flag", "file", "preset", "default")
TASK_ENDINGS = (".yaml", ".yml", ".py")
MOST_SAMPLES = 10**9
DTYPES = ("auto", "float32", "bfloat16", "float16")


def canonical(value: Any) -> str:
    """Return the one JSON text of `value`: keys sorted, no blanks, UTF-8, NaN and infinity refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def is_file_name(task: str) -> bool:
    """Say whether `--task` names a file rather than a task of rcq."""
    return task.endswith(TASK_ENDINGS)


def sha256_json(value: Any) -> str:
    """Return the sha256 of the canonical JSON of `value`, 64 hex digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One task at one context with one mode; the parts of the task are cells of the run."""

    model: str
    task: str
    """`niah`, `ruler` (all parts) or `ruler/vt` (one part)."""
    mode: str
    """As typed, options included: `certified:eps=0.02`. The name of this mode in tables and JSON."""
    ctx: int | None
    """Tokens in all; None for a task without a model."""
    samples: int
    """Samples of each part."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    """Every option of the task, defaults written out."""
    mode_options: Mapping[str, Any] = field(default_factory=dict)
    """Every option of the mode, defaults written out."""
    seed: int = 0
    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    audit: float = 0.0
    """Share of decode steps that are recomputed exactly, 0 to 1."""
    controls: bool = True
    keep_prompts: bool = False
    preset: str | None = None
    shard: str | None = None
    """`i/N`, 1-based: the samples whose index is i - 1 modulo N."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each field's value came from: `flag`, `file`, `preset` or `default`. Not part of the digest."""

    def __post_init__(self) -> None:
        for name in ("model", "task", "mode"):
            if not getattr(self, name):
                raise _refused(name, getattr(self, name), "a name")
        if self.ctx is not None and self.ctx < 1:
            raise _refused("ctx", self.ctx, "1 token or more")
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise _refused("samples", self.samples, f"1 to {MOST_SAMPLES}")
        if not 0 <= self.seed < 2**63:
            raise _refused("seed", self.seed, "0 to 2^63 - 1")
        if not (math.isfinite(self.audit) and 0.0 <= self.audit <= 1.0):
            raise _refused("audit", self.audit, "a share from 0 to 1")
        # 1 and 1.0 are the same request and must have the same digest
        object.__setattr__(self, "audit", float(self.audit))
        if self.dtype not in DTYPES:
            raise _refused("dtype", self.dtype, ", ".join(DTYPES), did_you_mean(self.dtype, DTYPES))
        if self.shard is not None:
            _shard(self.shard)

    @property
    def mode_name(self) -> str:
        """The mode's registry name: the label before `:`."""
        return self.mode.partition(":")[0]

    @property
    def task_name(self) -> str:
        """The task's registry name: the label before `/`; of a task that is a file, its path."""
        return self.task if is_file_name(self.task) else self.task.partition("/")[0]

    @property
    def part(self) -> str:
        """The one part asked for, empty for all of them."""
        return "" if is_file_name(self.task) else self.task.partition("/")[2]

    @property
    def task_title(self) -> str:
        """The task as tables show it: a file by its name alone."""
        return self.task.rpartition("/")[2].rpartition(".")[0] if is_file_name(self.task) else self.task

    def cell_task(self, part: str) -> str:
        """Return the name of the cell of one part: `ruler/vt`, or the task alone where it has no parts."""
        title = self.task_title.partition("/")[0]
        return f"{title}/{part}" if part else title

    @property
    def shard_place(self) -> tuple[int, int]:
        """Number and count of this run's shard; 1 of 1 for a whole run."""
        return (1, 1) if self.shard is None else _shard(self.shard)

    def takes(self, index: int) -> bool:
        """Say whether sample `index` belongs to this run's shard."""
        number, count = self.shard_place
        return index % count == number - 1

    @property
    def taken(self) -> int:
        """How many of the `samples` belong to this run's shard."""
        number, count = self.shard_place
        return max(0, -(-(self.samples - number + 1) // count))

    def digest(self) -> str:
        """Return the sha256 of everything that was asked, origins left out."""
        record = self.to_json()
        del record["origins"]
        return sha256_json(record)

    def to_json(self) -> dict[str, Any]:
        """Return the record of `spec.json`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "RunSpec":
        """Return the spec of a stored record; raise `SpecError` for an unknown, missing or wrong field."""
        known = tuple(f.name for f in fields(cls))
        for name in record:
            if name not in known:
                raise SpecError(
                    f"unknown field {name!r} in a run spec", fix=did_you_mean(name, known), id="RCQ-USE-07"
                )
        missing = [name for name in known if name not in record]
        if missing:
            raise SpecError(f"field {missing[0]!r} is missing in a run spec", id="RCQ-USE-07")
        for name, types in _TYPES.items():
            value = record[name]
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise _refused(
                    name, value, " or ".join("null" if t is type(None) else t.__name__ for t in types)
                )
        return cls(**record)

    def but(self, **changes: Any) -> "RunSpec":
        """Return a copy with `changes`."""
        return replace(self, **changes)


_NULL = type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "task", "mode", "backend", "device", "dtype"), (str,)),
    **dict.fromkeys(("task_options", "mode_options", "origins"), (dict,)),
    **dict.fromkeys(("samples", "seed"), (int,)),
    **dict.fromkeys(("controls", "keep_prompts"), (bool,)),
    **dict.fromkeys(("preset", "shard"), (str, _NULL)),
    "ctx": (int, _NULL),
    "audit": (float, int),
}


def _shard(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
        return int(number), int(count)
    raise _refused("shard", text, "i/N with i from 1 to N, such as 1/4")


def _refused(name: str, value: Any, allowed: str, hint: str = "") -> SpecError:
    return SpecError(f"{name} {value!r} is not allowed", fix=f"{hint}allowed: {allowed}", id="RCQ-USE-07")
