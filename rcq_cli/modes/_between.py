"""Steps of `recas-certified` that leave the ghosts alone: nothing is proven of them, their loss is estimated.

Every `cert_every`-th step and a share of steps drawn at random score the ghosts and are certified; these show
what the blocks at hand miss, the former to train the estimate, the latter to calibrate it. Until the estimate
is calibrated every step is certified.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rcq_cli.cache.ghosts import GhostStore
from rcq_cli.recas.estimator import Calibrator, MassEstimator, to_logit


class Glance(NamedTuple):
    """Attention over what is at hand."""

    output: Tensor
    """float64 `[Hkv, R, D]`"""
    tokens: Tensor
    """int64 `[Hkv, n]`: what was read."""
    attention: Tensor
    """`[Hkv, n]` group-mean weight of each."""
    scores: Tensor
    """`[Hkv, n]` group-mean score of each."""


def glance(cache: GhostStore, query: Tensor) -> Glance:
    """Attend with `[Hkv, R, D]` float64 queries to the blocks at hand and the open tail."""
    blocks = cache.at_hand().nonzero(as_tuple=True)[1].unflatten(0, (query.shape[0], -1))
    heads = torch.arange(query.shape[0])[:, None].expand_as(blocks)
    scores, values = _coded(cache, query, heads, blocks)
    raw = cache.raw.rows.gather(1, blocks)
    if bool(raw.any()):
        keys, originals = (t.double() for t in cache.original_blocks(heads[raw], blocks[raw]))
        head, place = raw.nonzero(as_tuple=True)
        scores[head, :, place] = query[head] @ keys.transpose(1, 2)
        values[head, place] = originals
    tail_keys, tail_values = cache.tail_rows()
    scores = torch.cat((scores.flatten(2), query @ tail_keys.transpose(1, 2)), -1) * cache.geometry.scale
    weights = scores.softmax(-1)
    size, first = cache.fmt.block, cache.tokens - tail_keys.shape[1]
    tokens = (blocks[..., None] * size + torch.arange(size)).flatten(1)
    tail = torch.arange(first, cache.tokens).expand(query.shape[0], -1)
    output = weights @ torch.cat((values.flatten(1, 2), tail_values), 1)
    return Glance(output, torch.cat((tokens, tail), 1), weights.mean(1), scores.mean(1))


def _coded(cache: GhostStore, query: Tensor, heads: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores `[Hkv, R, n, S]`, not scaled, and values `[Hkv, n, S, D]` of `[Hkv, n]` blocks."""
    if not cache.block_count:  # nothing was ever encoded: there are no tensors to pick from
        size, (count, group, dim) = cache.fmt.block, query.shape
        return query.new_empty(count, group, 0, size), query.new_empty(count, 0, size, dim)
    picked = cache.pick(heads.flatten(), blocks.flatten())
    rows = {name: data.unflatten(0, blocks.shape) for name, data in picked.items()}
    return cache.backend.score_blocks(query, rows), cache.backend.values(rows)


class Schedule:
    """Which steps of a layer are certified, and what is known of the others."""

    def __init__(self, heads: int, every: int, probe_rate: float, miss_rate: float) -> None:
        self.every, self.probe_rate = every, probe_rate
        self.estimator, self.calibrator = MassEstimator(), Calibrator(miss_rate)
        # one seed for all layers: they certify the same steps
        self.generator = torch.Generator().manual_seed(34530)
        self.last_mass = [0.0] * heads
        self.since_probe = self.steps = self.between = 0
        self.random = self.periodic = False

    def next(self) -> bool:
        """Begin a step and return whether it is to be certified."""
        draw = float(torch.rand((), generator=self.generator))
        self.random, self.periodic = draw < self.probe_rate, self.steps % self.every == 0
        self.steps += 1
        self.since_probe += 1
        return self.random or self.periodic or not self.calibrator.ready

    @property
    def probing(self) -> bool:
        """Return whether this step, once certified, tells what a glance misses."""
        return self.every > 1 and (self.random or self.periodic)

    def features(self, seen: Glance, tokens: int, evicted: Tensor) -> list[list[float]]:
        """Return what is known of each KV head's loss; `evicted` `[Hkv]` is the history that was dropped."""
        share = float(torch.tensor(seen.tokens.shape[1] / tokens).log())
        entropy = -torch.xlogy(seen.attention, seen.attention).sum(1)
        gap = seen.scores.amax(1) - seen.scores.amin(1)
        return [
            [share, to_logit(last), float(self.since_probe), float(h), float(g), float(e)]
            for last, h, g, e in zip(self.last_mass, entropy, gap, evicted, strict=True)
        ]

    def estimates(self, features: list[list[float]]) -> list[float]:
        """Return the estimated mass outside a glance, per KV head."""
        return [self.estimator.estimate(row) or 0.0 for row in features]

    def upper(self, features: list[list[float]]) -> float:
        """Return the largest calibrated upper estimate over the heads."""
        return max(self.calibrator.upper(value) for value in self.estimates(features))

    def observe(self, features: list[list[float]], masses: list[float]) -> None:
        """Take what a certified step has shown of the mass outside a glance, per KV head."""
        if self.random:
            self.calibrator.observe(masses, self.estimates(features))
        else:
            for row, mass in zip(features, masses, strict=True):
                self.estimator.train(row, mass)
        self.last_mass, self.since_probe = masses, 0

    def details(self) -> dict[str, Any]:
        """Return the counters of steps without a certificate, nothing where there was none."""
        if not self.between:
            return {}
        found = self.calibrator
        return {
            "uncertified_steps": self.between,
            "estimate_probes": found.probes,
            "estimate_misses": found.misses,
            "estimate_tested": found.tested,
        }
