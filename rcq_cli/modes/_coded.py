"""What modes that quantise every token but the newest have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rcq_cli.errors import SpecError
from rcq_cli.modes._quantiser import CodedRows, Layout, Pair, attend_coded, joined
from rcq_cli.protocols import Engagement, Geometry, LayerBytes, Step


@dataclass(frozen=True, slots=True)
class NoOptions:
    """A variant whose name fixes everything has no options."""


class CodedFormat(NamedTuple):
    """How a mode encodes, and when."""

    keys: Layout
    values: Layout
    due: Callable[[int, int], tuple[int, int]]
    """How many of the oldest native keys and values are to be encoded, given how many there are."""
    residual: int
    """Tokens that may stay native: below twice as many, nothing encoded is no surprise."""


class CodedLayer:
    """One layer: encoded tokens, then native ones; what is due is encoded after a step's attention."""

    def __init__(self, geometry: Geometry, form: CodedFormat, backend: Any) -> None:
        self.geometry, self.form, self.backend = geometry, form, backend
        heads, dim, device = geometry.kv_heads, geometry.head_dim, geometry.device
        self.coded = tuple(
            CodedRows(heads, dim, layout.fitted(dim), device) for layout in (form.keys, form.values)
        )
        nothing = torch.empty(heads, 0, dim, dtype=getattr(torch, geometry.dtype), device=device)
        self.native: Pair = (nothing, nothing)
        self.tokens = 0
        self.coded_elems = self.steps = self.steps_on_codes = 0
        self.scratch_bytes = 0

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Add `[Hkv, T, D]` keys and values."""
        self._add(keys, values)
        self._encode()

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the `[Hkv, D]` key and value of one token; it stays native for the attention of its step."""
        self._encode()
        self._add(key[:, None], value[:, None])

    def _add(self, keys: Tensor, values: Tensor) -> None:
        self.tokens += keys.shape[1]
        self.native = joined(self.native, keys, values)

    def _encode(self) -> None:
        """Encode what is due, once."""
        counts = self.form.due(self.native[0].shape[1], self.native[1].shape[1])
        rest = []
        for rows, coded, count in zip(self.native, self.coded, counts, strict=True):
            if count:
                if not coded.tokens:
                    coded.reserve(count)
                coded.extend(rows[:, :count])
                self.coded_elems += rows[:, :count].numel()
            rest.append(rows[:, count:].clone() if count else rows)
        self.native = (rest[0], rest[1])

    def attend(self, query: Tensor) -> Step:
        """Return attention of `[Hq, D]` queries on what the codes stand for and the native tokens."""
        self.steps += 1
        scale = self.geometry.scale
        if not any(coded.tokens for coded in self.coded):
            output = self.backend.dense(query, *self.native, scale)
        else:
            self.steps_on_codes += 1
            keys, values = self.coded
            done = attend_coded(query, [keys], [values], self.native, scale)
            output, self.scratch_bytes = done.output, max(self.scratch_bytes, done.scratch_bytes)
        self._encode()
        return Step(output, None)

    def exact(self, query: Tensor) -> Tensor:
        """Raise `SpecError`: no originals are kept."""
        del query
        raise SpecError(
            "this mode keeps no originals, so there is nothing to audit against", fix="audit certified"
        )

    def fork(self) -> "CodedLayer":
        """Return an independent copy that shares what is encoded; counters of steps start anew."""
        twin = type(self)(self.geometry, self.form, self.backend)
        twin.coded = tuple(coded.fork() for coded in self.coded)
        twin.native, twin.tokens = self.native, self.tokens  # native rows are replaced, never rewritten
        twin.coded_elems, twin.scratch_bytes = self.coded_elems, self.scratch_bytes
        return twin

    def bytes(self) -> LayerBytes:
        """Return what is allocated now."""
        g = self.geometry
        return LayerBytes(
            device=sum(coded.nbytes for coded in self.coded) + sum(rows.nbytes for rows in self.native),
            host=0,
            metadata=sum(coded.meta_bytes for coded in self.coded),
            scratch=self.scratch_bytes,
            dense_equivalent=2 * g.kv_heads * self.tokens * g.head_dim * 2,
        )

    def engagement(self) -> Engagement:
        """Return whether codes were written and read."""
        engaged = self.coded_elems > 0 and self.steps_on_codes > 0
        reason = ""
        if not engaged:
            short = self.tokens < 2 * self.form.residual
            reason = "no_decode_steps" if not self.steps else "short_context" if short else "inactive"
        return Engagement(self.steps, self.steps_on_codes, self.coded_elems, 0, engaged, reason)


class CodedMode:
    """A mode that is nothing but a format."""

    label = "none"
    certifies = False
    Options = NoOptions

    def __init__(self, name: str, form: CodedFormat, summary: str) -> None:
        self.name, self.form, self.summary = name, form, summary

    def open(self, geometry: Geometry, options: Any, backend: Any) -> CodedLayer:
        """Make the empty cache of one layer."""
        del options
        return CodedLayer(geometry, self.form, backend)


def naive_format(keys: Layout, values: Layout) -> CodedFormat:
    """Return a format that encodes keys and values of complete blocks together, as `naive` does."""
    block = keys.size if keys.per_channel else 1

    def due(native_keys: int, native_values: int) -> tuple[int, int]:
        del native_values
        return native_keys // block * block, native_keys // block * block

    return CodedFormat(keys, values, due, block)
