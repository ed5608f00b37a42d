"""The storage of `certified` with no check, promotion, fallback or originals: unchecked quantisation."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.packed import PackedStore, make_store
from rcq_cli.certify.exact import as_groups, store
from rcq_cli.certify.fused import naive_step
from rcq_cli.errors import SpecError
from rcq_cli.modes._tiered import FormatOptions, TieredCounters
from rcq_cli.protocols import Engagement, Geometry, LayerBytes, Step


@dataclass(frozen=True, slots=True)
class Options(FormatOptions):
    """Options of `naive`."""


class NaiveLayer:
    """One layer under `naive`."""

    def __init__(self, geometry: Geometry, options: Options, backend: Any) -> None:
        self.cache = make_store(geometry, options.format(), backend, originals=False)
        self.counters = TieredCounters(self.cache)
        self.scratch_bytes = 0

    @property
    def tokens(self) -> int:
        """Return the tokens seen."""
        return self.cache.tokens

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Add `[Hkv, T, D]` keys and values."""
        self.cache.extend(keys, values)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the `[Hkv, D]` key and value of one token; a full block is encoded after its attention."""
        self.cache.append(key, value, seal=False)

    def attend(self, query: Tensor) -> Step:
        """Return softmax attention of `[Hq, D]` queries on what the codes stand for."""
        self.counters.count()
        output = None
        backend: Any = self.cache.backend
        if isinstance(self.cache, PackedStore) and not backend.unfused(self.cache.fmt):
            output, scratch = naive_step(self.cache, query)
            self.scratch_bytes = max(self.scratch_bytes, scratch)
        if output is None:
            output = store(self._weighted(query), self.cache.dtype)[0].flatten(0, 1)
        self.cache.seal_full_tail()
        return Step(output, None)

    def _weighted(self, query: Tensor) -> Tensor:
        """Return the same in float64, `[Hkv, R, D]`."""
        cache, backend = self.cache, self.cache.backend
        groups, scale = as_groups(query, cache.geometry.kv_heads), cache.geometry.scale
        tail_keys, tail_values = cache.tail_rows()
        codes = cache.codes()
        scores = [groups @ tail_keys.transpose(1, 2)]
        if cache.block_count:
            scores.insert(0, backend.score_blocks(groups, codes).flatten(2))
        weights = torch.softmax(torch.cat(scores, -1) * scale, -1)
        coded = cache.block_count * cache.fmt.block
        output = weights[..., coded:] @ tail_values
        step = max(1, 2**21 // (groups.shape[0] * cache.fmt.block * groups.shape[2]))
        for first in range(0, cache.block_count, step):
            part = {name: rows[:, first : first + step] for name, rows in codes.items()}
            values = backend.values(part).flatten(1, 2)
            start = first * cache.fmt.block
            output += weights[..., start : start + values.shape[1]] @ values
            self.scratch_bytes = max(self.scratch_bytes, values.nbytes)
        return output

    def exact(self, query: Tensor) -> Tensor:
        """Raise `SpecError`: no originals are kept."""
        del query
        raise SpecError(
            "mode naive keeps no originals, so there is nothing to audit against", fix="audit certified"
        )

    def fork(self) -> "NaiveLayer":
        """Return an independent copy."""
        twin = NaiveLayer.__new__(NaiveLayer)
        twin.cache, twin.scratch_bytes = self.cache.fork(), self.scratch_bytes
        twin.counters = TieredCounters(twin.cache)
        return twin

    def bytes(self) -> LayerBytes:
        """Return what is allocated now."""
        return self.cache.bytes(self.scratch_bytes)

    def engagement(self) -> Engagement:
        """Return the counters since the cache was made."""
        return self.counters.engagement()


class Naive:
    """Unchecked INT8/INT4."""

    name = "naive"
    summary = "INT8 keys and INT4 values in the storage of certified, with no check, promotion or fallback"
    label = "none"
    certifies = False
    Options = Options

    def open(self, geometry: Geometry, options: Any, backend: Any) -> NaiveLayer:
        """Make the empty cache of one layer."""
        return NaiveLayer(geometry, options, backend)


MODE = Naive()
