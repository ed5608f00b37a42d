"""Four bits for salient tokens, two for the others; nothing is evicted. Source: arXiv:2405.14256.

Keys are quantised per channel over the tokens of a subset, values per token after division by a factor per
channel. Per KV head, where the reference takes ranges over all heads jointly, and with seeded probe rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rcq_cli.cache.statistics import Statistics, one_row, probe_rows
from rcq_cli.errors import SpecError
from rcq_cli.modes._evicting import gathered, top
from rcq_cli.modes._quantiser import Pair, attend_coded, decode, encode, joined, pack, unpack
from rcq_cli.modes._tiered import check_range
from rcq_cli.protocols import Engagement, Geometry, LayerBytes, Needs, Step

META = torch.float16
HIGH, LOW = 4, 2


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `zipcache`."""

    salient: float = 0.6
    """share of the tokens at 4 bits, the others have 2"""
    probe: float = 0.05
    """share of the last rows that are probes, and of the other rows that are drawn as such"""
    interval: int = 100
    """generated tokens that are encoded together"""
    seed: int = 0
    """seed of the drawn probe rows"""

    def __post_init__(self) -> None:
        check_range("salient", self.salient, 0.0, 1.0)
        check_range("probe", self.probe, 1e-6, 0.5)
        check_range("interval", self.interval, 1, 2**20)
        check_range("seed", self.seed, 0, 2**62)


class SubsetKeys(NamedTuple):
    """Keys of one subset: one scale per channel."""

    bits: int
    codes: Tensor
    """uint8 `[Hkv, n, D * bits / 8]`"""
    scale: Tensor
    """`[Hkv, D]`"""
    low: Tensor

    @property
    def tokens(self) -> int:
        """Return how many there are."""
        return self.codes.shape[1]

    @property
    def unit(self) -> int:
        """Return 1: any range can be read."""
        return 1

    def read(self, start: int, stop: int) -> Tensor:
        """Return float32 `[Hkv, n, D]`."""
        codes = unpack(self.codes[:, start:stop], self.bits).float()
        return codes.mul_(self.scale.float()[:, None]).add_(self.low.float()[:, None])

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what is allocated, codes first."""
        return self.codes, self.scale, self.low


class SubsetValues(NamedTuple):
    """Values of one subset: one scale per token, one factor per channel shared with the other subset."""

    bits: int
    codes: Tensor
    scale: Tensor
    """`[Hkv, n]`"""
    low: Tensor
    factor: Tensor
    """`[Hkv, D]`"""

    @property
    def tokens(self) -> int:
        """Return how many there are."""
        return self.codes.shape[1]

    @property
    def unit(self) -> int:
        """Return 1: any range can be read."""
        return 1

    def read(self, start: int, stop: int) -> Tensor:
        """Return float32 `[Hkv, n, D]`."""
        span = slice(start, stop)
        values = decode(unpack(self.codes[:, span], self.bits), self.scale[:, span], self.low[:, span])
        return values.mul_(self.factor.float()[:, None])

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what is allocated besides the shared factor, codes first."""
        return self.codes, self.scale, self.low


class Segment(NamedTuple):
    """Tokens encoded together: the salient ones, then the others, each in order of position."""

    keys: tuple[SubsetKeys, ...]
    values: tuple[SubsetValues, ...]
    mask: Tensor
    """uint8 `[Hkv, ceil(n / 8)]`: which tokens are salient, the first in the lowest bit."""

    def parts(self) -> tuple[SubsetKeys | SubsetValues, ...]:
        """Return the subsets of keys and of values."""
        return *self.keys, *self.values

    def codes_bytes(self) -> int:
        """Return the bytes of codes."""
        return sum(part.tensors()[0].nbytes for part in self.parts())

    def meta_bytes(self) -> int:
        """Return the bytes of everything else."""
        scales = sum(t.nbytes for part in self.parts() for t in part.tensors()[1:])
        return scales + self.values[0].factor.nbytes + self.mask.nbytes


def make_segment(keys: Tensor, values: Tensor, saliency: Tensor, share: float) -> Segment:
    """Encode `[Hkv, n, D]` tokens: the int((1 - share) * n) of least `[Hkv, n]` saliency get two bits."""
    count = keys.shape[1]
    fewer = int(round((1 - share) * count, 9))  # (1 - 0.6) * 5 is 2 and not 1.9999999999999996
    chosen = top(saliency, count - fewer)
    salient = torch.zeros_like(saliency, dtype=torch.bool).scatter(1, chosen, True)
    others = (~salient).nonzero()[:, 1].view(keys.shape[0], -1)
    factor = values.float().abs().amax(1).sqrt().clamp_max(torch.finfo(META).max).to(META)
    factor = torch.where(factor > 0, factor, torch.ones_like(factor))
    key_parts, value_parts = [], []
    for bits, index in ((HIGH, chosen), (LOW, others)):
        if index.shape[1]:
            key_parts.append(_encode_keys(gathered(keys, index), bits))
            value_parts.append(_encode_values(gathered(values, index), factor, bits))
    packed = F.pad(salient.to(torch.uint8), (0, -count % 8)).unflatten(1, (-1, 8))
    place = 1 << torch.arange(8, dtype=torch.uint8, device=keys.device)
    return Segment(tuple(key_parts), tuple(value_parts), (packed * place).sum(-1, dtype=torch.uint8))


def _encode_keys(keys: Tensor, bits: int) -> SubsetKeys:
    codes, scale, low = encode(keys, bits, META, dim=1)
    return SubsetKeys(bits, pack(codes, bits), scale, low)


def _encode_values(values: Tensor, factor: Tensor, bits: int) -> SubsetValues:
    codes, scale, low = encode(values.float() / factor.float()[:, None], bits, META)
    return SubsetValues(bits, pack(codes, bits), scale, low, factor)


class ZipCacheLayer:
    """One layer under `zipcache`."""

    def __init__(self, geometry: Geometry, options: Options, backend: Any) -> None:
        self.geometry, self.options, self.backend = geometry, options, backend
        heads, dim = geometry.kv_heads, geometry.head_dim
        dtype = getattr(torch, geometry.dtype)
        nothing = torch.empty(heads, 0, dim, dtype=dtype, device=geometry.device)
        self.native: Pair = (nothing, nothing)
        self.segments: tuple[Segment, ...] = ()
        self.tokens = 0
        self.ended = self.waiting = False
        self.coded_elems = self.steps = self.steps_on_codes = self.probes = 0
        self.scratch_bytes = 0

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Add `[Hkv, T, D]` keys and values."""
        self.tokens += keys.shape[1]
        self.native = joined(self.native, keys, values)

    def end_prefill(self, seen: Statistics | None) -> None:
        """Encode the prompt by what its probe rows attended to."""
        self.ended = True
        self.waiting = seen is None and self.tokens > 0
        if seen is not None:
            self._encode_prompt(seen)

    def _encode_prompt(self, seen: Statistics) -> None:
        wanted = probe_rows(self.options.probe, self.options.seed, seen.tokens)
        rows = seen.probabilities(self.native[0], wanted)
        self.probes = rows.shape[1]
        visible = torch.arange(seen.tokens, 0, -1, device=rows.device)
        self._encode(seen.tokens, rows.sum(1) / visible)

    def _encode(self, count: int, saliency: Tensor) -> None:
        keys, values = (rows[:, :count] for rows in self.native)
        self.segments += (make_segment(keys, values, saliency, self.options.salient),)
        self.coded_elems += keys.numel() + values.numel()
        self.native = (self.native[0][:, count:].clone(), self.native[1][:, count:].clone())

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the `[Hkv, D]` key and value of one token."""
        if not self.ended:
            self.end_prefill(None)
        self.prefill(key[:, None], value[:, None])

    def attend(self, query: Tensor) -> Step:
        """Return attention of `[Hq, D]` queries, then encode the new tokens once there are enough."""
        if not self.ended:
            self.end_prefill(None)
        self.steps += 1
        scale = self.geometry.scale
        if self.waiting:
            self.waiting = False
            output = self.backend.dense(query, *self.native, scale)
            self._encode_prompt(one_row(query, self.native[0], scale))
            return Step(output, None)
        self.steps_on_codes += bool(self.segments)
        keys = [part for segment in self.segments for part in segment.keys]
        values = [part for segment in self.segments for part in segment.values]
        done = attend_coded(query, keys, values, self.native, scale)
        self.scratch_bytes = max(self.scratch_bytes, done.scratch_bytes)
        coded = done.weights.shape[2] - self.native[0].shape[1]
        newest = done.weights[..., coded:].mean(1)
        interval = self.options.interval
        while self.native[0].shape[1] >= interval:
            self._encode(interval, newest[:, :interval])
            newest = newest[:, interval:]
        return Step(done.output, None)

    def exact(self, query: Tensor) -> Tensor:
        """Raise `SpecError`: no originals are kept."""
        del query
        raise SpecError(
            "mode zipcache keeps no originals, so there is nothing to audit against", fix="audit certified"
        )

    def fork(self) -> "ZipCacheLayer":
        """Return an independent copy: segments and native rows are never rewritten."""
        twin = ZipCacheLayer(self.geometry, self.options, self.backend)
        twin.native, twin.segments, twin.tokens = self.native, self.segments, self.tokens
        twin.ended, twin.waiting, twin.probes = self.ended, self.waiting, self.probes
        twin.coded_elems, twin.scratch_bytes = self.coded_elems, self.scratch_bytes
        return twin

    def bytes(self) -> LayerBytes:
        """Return what is allocated now."""
        g = self.geometry
        meta = sum(segment.meta_bytes() for segment in self.segments)
        codes = sum(segment.codes_bytes() for segment in self.segments)
        return LayerBytes(
            device=codes + meta + sum(rows.nbytes for rows in self.native),
            host=0,
            metadata=meta,
            scratch=self.scratch_bytes,
            dense_equivalent=2 * g.kv_heads * self.tokens * g.head_dim * 2,
        )

    def engagement(self) -> Engagement:
        """Return whether codes were written and read."""
        engaged = self.coded_elems > 0 and self.steps_on_codes > 0
        reason = ""
        if not engaged:
            # without queries of the prompt the first step is dense
            short = self.tokens < self.options.interval and (not self.segments or self.steps < 2)
            reason = "no_decode_steps" if not self.steps else "short_context" if short else "inactive"
        details = {"probe_rows_max": self.probes, "probe_seed_max": self.options.seed}
        return Engagement(
            self.steps, self.steps_on_codes, self.coded_elems, 0, engaged, reason, details=details
        )


class ZipCache:
    """Mixed precision by saliency."""

    name = "zipcache"
    summary = "4 bits for the tokens that probe rows attend to, 2 for the others"
    label = "none"
    certifies = False
    Options = Options

    def needs(self, options: Any) -> Needs:
        """Return the probe rows."""
        return Needs(probe_share=options.probe, probe_seed=options.seed)

    def open(self, geometry: Geometry, options: Any, backend: Any) -> ZipCacheLayer:
        """Make the empty cache of one layer."""
        return ZipCacheLayer(geometry, options, backend)


MODE = ZipCache()
