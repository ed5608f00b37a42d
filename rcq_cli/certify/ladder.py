"""One certified decode step of one layer: score, skip, promote until the budget holds, else recompute.

Policy (theory of rungs): 0 skip values or bring dropped ones back, 1 promote keys, 2 promote values, 3
recompute the head from the originals, 4 run the whole layer through dense attention. What is returned is
certified within the budget or exact, never neither. Keys are promoted and values read for a whole group of
query heads: a superset is sound for each of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rcq_cli.cache.tiers import Annotations, TieredStore
from rcq_cli.certify.bounds import (
    MARGIN,
    Masses,
    Split,
    breadth,
    key_shares,
    key_split,
    key_terms,
    rounding,
    value_split,
)
from rcq_cli.certify.exact import as_groups, exact_attention, score_slack, store
from rcq_cli.phases import phase, phased
from rcq_cli.protocols import Certificate, Step

STAGE_ONE_MASS = 0.95
SKIP_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Budget:
    """What a step has to meet and how it may try."""

    eps: float
    denominator: str
    """`out`: the head's output; `layer`: the layer's output; `abs`: `eps` is in the unit of the values."""
    skip: bool
    rounds: int
    first_share: float
    """tau: promote the heaviest blocks up to this mass before the first round."""


class Bounds(NamedTuple):
    """Every bound of one evaluation, `[Hkv, R]`, and what promotion needs to choose."""

    key: Tensor
    dropped: Tensor
    value: Tensor
    rounding: Tensor
    floor: Tensor
    limit: Tensor
    contribution: Tensor
    """`[Hkv, R, M + 1]` share of each block in the triangle form of key + dropped."""
    key_split: Split
    value_split: Split

    @property
    def total(self) -> Tensor:
        """Return E, the sum of the four parts."""
        return self.key + self.dropped + self.value + self.rounding


class CertifiedStep:
    """The working state of one step: float64 tensors, heads as [Hkv, R], blocks as M plus the open tail."""

    def __init__(self, cache: TieredStore, query: Tensor, budget: Budget, explore: Tensor) -> None:
        self.cache, self.backend, self.budget = cache, cache.backend, budget
        self.raw_query = query
        self.query = as_groups(query, cache.geometry.kv_heads)
        self.scale = cache.geometry.scale
        with phase("bound"):
            self.notes: Annotations = cache.bounds()
        self.blocks = cache.block_count
        self.tail_keys, self.tail_values = cache.tail_rows()
        self.spectrum = cache.value_spectrum.value[:, None]
        self.residual_spectrum = cache.residual_spectrum.value[:, None]
        self.centre = cache.centred_on()
        self.explore = explore
        self.paged_bytes = 0
        self.scratch_bytes = 0
        self.broken = False
        self._score()
        self._plan()

    # -- scores ---------------------------------------------------------------------------------------------

    @phased("score")
    def _score(self) -> None:
        heads, group, dim = self.query.shape
        size = self.cache.fmt.block
        scores = self.query.new_empty(heads, group, self.blocks, size)
        half_step = self.query.new_zeros(heads, group, self.blocks)
        if self.blocks:
            codes = self.cache.codes()
            scores = self.backend.score_blocks(self.query, codes)
            half_step = self.backend.half_steps(self.query, codes)
        self.scores, self.half_step = scores * self.scale, half_step
        self.tail_scores = (self.query @ self.tail_keys.transpose(1, 2)) * self.scale
        self.norm = norm = self.query.norm(dim=-1)[..., None] * MARGIN
        reach = (self.notes.kappa + self.notes.rk)[:, None]
        self.slack = score_slack(norm, reach, self.scale, dim)
        coded = torch.minimum(half_step, norm * self.notes.rk[:, None, :-1]) * (abs(self.scale) * MARGIN)
        self.delta_coded = (
            torch.cat((coded, torch.zeros_like(coded[..., :1])), -1) + self.slack
            if self.blocks
            else self.slack
        )
        finite = torch.isfinite(self.scores).all() and torch.isfinite(self.tail_scores).all()
        self.finite = bool(finite) and bool(torch.isfinite(self.slack).all())

    @phased("select")
    def _plan(self) -> None:
        """Pin what is always read from the originals: raw blocks, the first one (sinks) and the newest."""
        heads, group = self.query.shape[:2]
        pinned = self.cache.raw.rows.clone()
        if self.blocks:
            pinned[:, 0] = pinned[:, -1] = True
        self.pinned = pinned
        self.at_hand = self.cache.at_hand() | pinned  # others are read from the originals, if the bound asks
        self.readmitted = torch.zeros_like(pinned)
        self.exact_keys = torch.zeros_like(pinned)
        self.exact_values = pinned.clone()
        self.read = torch.zeros_like(pinned)
        self.wanted_keys = torch.zeros(heads, group, self.blocks, dtype=torch.bool)
        self.wanted_values = torch.zeros_like(self.wanted_keys)
        self.weights = torch.empty_like(self.scores)
        shape = (heads, group, self.blocks + 1)
        self.peak = self.query.new_full(shape, -torch.inf)
        self.mass, self.square = self.query.new_zeros(shape), self.query.new_zeros(shape)
        self.sums = self.query.new_zeros(*shape, self.query.shape[-1])

    @phased("score")
    def _weigh(self, pairs: tuple[Tensor, Tensor] | None = None) -> None:
        """Exponentiate relative to each block's maximum, for all blocks or chosen (KV head, block) pairs."""
        if pairs is None:
            self._weigh_blocks()
            if self.tail_keys.shape[1]:
                peak, weights = _exponentials(self.tail_scores)
                self.peak[..., -1] = peak
                self.mass[..., -1], self.square[..., -1] = weights.sum(-1), weights.square().sum(-1)
                self.sums[..., -1, :] = weights @ self.tail_values
            return
        head, block = pairs
        peak, weights = _exponentials(self.scores[head, :, block])
        self.weights[head, :, block] = weights
        self.peak[head, :, block] = peak
        self.mass[head, :, block], self.square[head, :, block] = weights.sum(-1), weights.square().sum(-1)

    def _weigh_blocks(self) -> None:
        peak, weights = _exponentials(self.scores)
        self.peak[..., :-1], self.weights = peak, weights
        self.mass[..., :-1], self.square[..., :-1] = weights.sum(-1), weights.square().sum(-1)

    # -- promotion ------------------------------------------------------------------------------------------

    @phased("rank_check")
    def promote_keys(self, chosen: Tensor) -> None:
        """Replace the scores of `[Hkv, M]` blocks by exact ones, checking the INT8 scores on the way."""
        fresh = chosen & ~self.exact_keys
        probe = self.explore & ~fresh & ~self.exact_keys
        self.explore = torch.zeros_like(probe)
        head, block = (fresh | probe).nonzero(as_tuple=True)
        if not len(head):
            return
        self._rescore(head, block, fresh[head, block])
        self.exact_keys |= fresh
        self._read_values(fresh & self.read)

    def _rescore(self, head: Tensor, block: Tensor, take: Tensor) -> None:
        """Check the coded scores of (KV head, block) pairs and put exact ones in their place where `take`."""
        keys, _ = self._originals(head, block)
        self._page(keys.numel() * keys.element_size())
        scores = (self.query[head] @ keys.double().transpose(1, 2)) * self.scale
        self._check(head, block, scores)
        head, block = head[take], block[take]
        self.scores[head, :, block] = scores[take]
        if len(head):
            self._weigh((head, block))

    def _check(self, head: Tensor, block: Tensor, exact: Tensor) -> None:
        """Compare INT8 with exact scores: a difference above Delta proves corruption (rung 4)."""
        coded = self.scores[head, :, block]
        allowed = (self.delta_coded[head, :, block] + self.slack[head, :, block])[..., None]
        bad = ((exact - coded).abs() > allowed).flatten(1).any(1) | self.cache.damaged(head, block)
        self._distrust(bad, head, block)

    def _distrust(self, bad: Tensor, head: Tensor, block: Tensor) -> None:
        """Quarantine the pairs that are `bad`, and leave this step to rung 4."""
        bad = bad & ~self.cache.raw.rows[head, block]
        if bool(bad.any()):
            self.broken = True
            self.cache.quarantine(head[bad], block[bad])

    def promote_values(self, chosen: Tensor) -> None:
        """Read the values of `[Hkv, M]` blocks from the originals."""
        fresh = chosen & ~self.exact_values
        self.exact_values |= fresh
        self._read_values(fresh | (chosen & ~self.read))

    @phased("attend")
    def _read_values(self, chosen: Tensor) -> None:
        """Sum weights times values over `[Hkv, M]` blocks, exact where promoted, else from the codes."""
        self.read |= chosen
        self.readmitted |= chosen & ~self.at_hand
        self.exact_values |= chosen & ~self.at_hand
        for exact in (False, True):
            head, block = (chosen & (self.exact_values == exact)).nonzero(as_tuple=True)
            for part in range(0, len(head), 1024):
                h, b = head[part : part + 1024], block[part : part + 1024]
                if exact:
                    values = self._originals(h, b)[1]
                    self._page(values.numel() * values.element_size())
                    self.sums[h, :, b] = self.weights[h, :, b] @ values.double()
                else:
                    self._sum_codes(h, b)

    def _sum_codes(self, head: Tensor, block: Tensor) -> None:
        """Sum weights times the values that the codes of (KV head, block) pairs stand for."""
        rows = self.backend.values(self.cache.pick(head, block))
        self.scratch_bytes = max(self.scratch_bytes, rows.nbytes)
        self.sums[head, :, block] = self.weights[head, :, block] @ rows

    @phased("page_in")
    def _originals(self, head: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.original_blocks(head, block)

    def _page(self, count: int) -> None:
        self.paged_bytes += count
        self.scratch_bytes = max(self.scratch_bytes, self.paged_bytes)

    # -- evaluation -----------------------------------------------------------------------------------------

    def masses(self) -> tuple[Masses, Tensor, Tensor]:
        """Return the block masses in units of the active total, the combining factors and that total."""
        skipped = _with_tail(~self.read, False)[:, None].expand_as(self.mass)
        top = torch.where(skipped, -torch.inf, self.peak).amax(-1, keepdim=True)
        factor = torch.where(skipped, 0.0, (self.peak - top).exp())
        total = (factor * self.mass).sum(-1, keepdim=True)
        relative = self.peak - top - total.log()
        log_weight = relative + self.mass.log()
        log_square = self.square.log() + 2 * relative
        count = torch.full_like(self.mass, self.cache.fmt.block)
        count[..., -1] = self.tail_keys.shape[1]
        log_flushed = (
            count.log() + (self.peak - top).clamp_max(math.log(self.backend.underflow)) - total.log()
        )
        masses = Masses(log_weight, log_square, log_flushed, skipped, relative)
        return masses, factor / total, total[..., 0]

    @phased("bound")
    def evaluate(self) -> tuple[Tensor, Tensor, Bounds]:
        """Return the stored output `[Hkv, R, D]`, its norm and all bounds for the present state."""
        masses, share, total = self.masses()
        exact_output = (share[..., None, :] @ self.sums)[..., 0, :]
        output, stored = store(exact_output, self.cache.dtype)
        norm = output.double().norm(dim=-1)
        eta = torch.where(_with_tail(self.exact_values, True), 0.0, self.notes.eta)[:, None]
        rv = self.notes.rv[:, None]
        mean = (masses.active() * (rv + self.centre.norm(dim=-1)[:, None, None] + eta)).sum(-1) * MARGIN
        limits = (self.backend.roundoff, self.backend.underflow)
        fp = (
            rounding(mean, exact_output.norm(dim=-1), self.cache.tokens, self.query.shape[-1], total, limits)
            + stored
        )
        residuals = self.residual_spectrum.expand_as(norm)
        values = value_split(masses, eta.expand_as(self.mass), residuals, _by_head(self.notes.se))
        value_bound = values.value()
        limit = self._limit(norm)
        away = ((self.centre[:, None] - output.double()).norm(dim=-1) + fp) * MARGIN
        terms = key_terms(masses, *self._score_errors())
        spectrum = self.spectrum.expand_as(norm)
        widest = 2 * rv.amax(-1) * terms.total_variation * MARGIN
        spread, drift = (rv.expand_as(self.mass), _by_head(self.notes.sv)), away + value_bound
        split = key_split(terms, spread[0], drift, spectrum, spread[1])
        joint = torch.minimum(split.value(), widest)
        contribution = key_shares(terms, spread[0], drift, spread[1]) / terms.z_low[..., None]
        dropped = joint * _share(contribution, masses.skipped)
        floor = self._floor(masses, rv.expand_as(self.mass), away, spectrum)
        bounds = Bounds(joint - dropped, dropped, value_bound, fp, floor, limit, contribution, split, values)
        return output, norm, bounds

    def _score_errors(self) -> tuple[Tensor, Tensor | None]:
        """Return the largest score error of each block and the norm of all over it, `[Hkv, R, M + 1]`."""
        exact = _with_tail(self.exact_keys, True)[:, None]
        delta = torch.where(exact, self.slack, self.delta_coded)
        if self.notes.sk is None:
            return delta, None
        reach = torch.where(exact, 0.0, self.norm * self.notes.sk[:, None] * abs(self.scale))
        return delta, breadth(delta, self.slack, reach, self.cache.fmt.block)

    def _floor(self, masses: Masses, radius: Tensor, away: Tensor, spectrum: Tensor) -> Tensor:
        """Return the key bound with every key exact and nothing skipped: what promotion can reach at best."""
        calm = key_terms(masses._replace(skipped=torch.zeros_like(masses.skipped)), self.slack)
        floor = key_split(calm, radius, away, spectrum, _by_head(self.notes.sv)).value()
        return torch.minimum(floor, 2 * radius.amax(-1) * calm.total_variation * MARGIN)

    def _limit(self, norm: Tensor) -> Tensor:
        eps = self.budget.eps
        if self.budget.denominator == "abs":
            return torch.full_like(norm, eps)
        if self.budget.denominator == "layer":
            # every head at most this far off keeps the concatenated output within eps
            norm = torch.full_like(norm, float(norm.square().sum().sqrt()) / norm.numel() ** 0.5)
        return norm * (eps / (1 + eps)) / (1 + 2.0**-40)

    # -- the step -------------------------------------------------------------------------------------------

    def run(self) -> Step:
        """Run the ladder and return the output with its certificate."""
        if not self.finite:
            return self._finish(None)
        self._weigh()
        self.promote_keys(self.pinned | self._heaviest(self.budget.first_share))
        self._first_read()
        state = self.evaluate()
        for _ in range(self.budget.rounds):
            if self.broken or not self._promote(state[2]):
                break
            state = self.evaluate()
        return self._finish(state)

    @phased("select")
    def _heaviest(self, share: float) -> Tensor:
        """Shortest prefix of blocks per head with `share` of the mass, joined over a group: `[Hkv, M]`."""
        if share <= 0 or not self.blocks:
            return torch.zeros_like(self.read)
        log = self.peak + self.mass.log()
        weight = torch.softmax(log, -1)
        order = weight.argsort(dim=-1, descending=True, stable=True)
        ahead = weight.gather(-1, order).cumsum(-1) - weight.gather(-1, order)
        chosen = torch.zeros_like(weight, dtype=torch.bool).scatter(-1, order, ahead < share)
        return chosen[..., :-1].any(1)

    @phased("select")
    def _first_read(self) -> None:
        """Read the heaviest values, decide from that output which others may be skipped, read the rest."""
        if not self.budget.skip:
            return self._read_values(self.at_hand)
        self._read_values(self.pinned | (self._heaviest(STAGE_ONE_MASS) & self.at_hand))
        masses, share, _ = self.masses()
        output = (share[..., None, :] @ self.sums)[..., 0, :]
        limit = self._limit(output.norm(dim=-1))
        away = (self.centre[:, None] - output).norm(dim=-1)
        cost = (masses.log_weight + self.delta_coded).exp() * (self.notes.rv[:, None] + away[..., None])
        cost = torch.nan_to_num(cost, nan=torch.inf, posinf=torch.inf)
        needed = self._dearest(torch.where(masses.skipped, cost, 0.0)[..., :-1], limit * SKIP_SHARE)
        return self._read_values(needed & ~self.read & self.at_hand)

    @staticmethod
    def _dearest(cost: Tensor, allowance: Tensor) -> Tensor:
        """Blocks that do not fit when the cheapest are skipped up to `allowance` per head: `[Hkv, M]`."""
        order = cost.argsort(dim=-1, stable=True)
        spent = cost.gather(-1, order).cumsum(-1)
        needed = torch.zeros_like(cost, dtype=torch.bool).scatter(-1, order, spent > allowance[..., None])
        return (needed & (cost > 0)).any(1)

    @phased("select")
    def _promote(self, bounds: Bounds) -> bool:
        """Rungs 0 to 2 for every head over its budget; return whether anything changed."""
        room = bounds.limit - bounds.rounding - bounds.floor
        over = ~(bounds.total <= bounds.limit) & (room > 0) & self._within_reads()
        if not bool(over.any()):
            return False
        if self._readmit(bounds, over):
            return True
        half = room / 2
        before = (self.exact_keys.sum(), self.exact_values.sum(), self.read.sum())
        joint = bounds.key + bounds.dropped
        keys = over & (joint > bounds.floor + half)
        if bool(keys.any()):
            chosen = _prefix_blocks(bounds.key_split, half, keys, self.wanted_keys)
            self.wanted_keys |= chosen & ~self.exact_keys[:, None]
            cost = torch.where(self.read[:, None], 0.0, bounds.contribution[..., :-1])
            self._read_values(
                self._dearest(cost, torch.where(keys, half * SKIP_SHARE, torch.inf)) & ~self.read
            )
            self.promote_keys(chosen.any(1))
            self._read_values(chosen.any(1) & ~self.read)
        values = over & (bounds.value > half)
        if bool(values.any()):
            chosen = _prefix_blocks(bounds.value_split, half, values, self.wanted_values)
            self.wanted_values |= chosen & ~self.exact_values[:, None]
            self.promote_values(chosen.any(1))
        after = (self.exact_keys.sum(), self.exact_values.sum(), self.read.sum())
        return any(int(a) != int(b) for a, b in zip(after, before, strict=True))

    def _readmit(self, bounds: Bounds, over: Tensor) -> bool:
        """Rung 0: read dropped blocks from the originals where they make most of the error.

        The dearest ones, until the rest stays below a third of what a head may spend.
        """
        heads = over & (bounds.dropped > bounds.key)
        away = ~(self.at_hand | self.read)
        if not bool((heads[..., None] & away[:, None]).any()):
            return False
        allowance = torch.where(heads, (bounds.limit - bounds.rounding) / 3, torch.inf)
        cost = torch.where(away[:, None], bounds.contribution[..., :-1], 0.0)
        chosen = self._dearest(cost, allowance) & away
        self._read_values(chosen)
        return bool(chosen.any())

    def _within_reads(self) -> Tensor:
        """Heads that would still read less than dense attention does, `[Hkv, R]`."""
        return self.wanted_keys.sum(-1) + self.wanted_values.sum(-1) <= self.blocks

    # -- results --------------------------------------------------------------------------------------------

    def _finish(self, state: tuple[Tensor, Tensor, Bounds] | None) -> Step:
        heads, group, dim = self.query.shape
        if state is None:
            output = torch.zeros(heads, group, dim, dtype=self.cache.dtype)
            zero = self.query.new_zeros(heads, group)
            parts: tuple[Tensor, ...] = (zero, zero, zero, zero)
            exact = torch.ones(heads, group, dtype=torch.bool)
        else:
            output, _, bounds = state
            parts = (bounds.key, bounds.value, bounds.dropped, bounds.rounding)
            exact = ~(bounds.total <= bounds.limit)
        rung = torch.where(self.wanted_values.any(-1), 2, torch.where(self.wanted_keys.any(-1), 1, 0))
        if self.broken:
            output, parts, exact = *self._whole_layer(), torch.ones_like(exact)
            rung = torch.full_like(rung, 4)
        elif bool(exact.any()):
            output, parts = self._exact_heads(output, parts, exact)
            rung = torch.where(exact, 3, rung)
        return self._step(output, parts, exact, rung)

    @phased("fallback")
    def _exact_heads(
        self, output: Tensor, parts: tuple[Tensor, ...], exact: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rung 3: replace `exact` heads by float64 attention on the originals of their KV heads."""
        chosen = exact.any(1).nonzero()[:, 0]
        keys, values = (rows[chosen] for rows in self._everything(chosen.tolist()))
        truth = exact_attention(self.query[chosen], keys, values, self.scale)
        stored, error = store(truth.output, self.cache.dtype)
        mine, output, lost = exact[chosen], output.clone(), parts[3].clone()
        output[chosen] = torch.where(mine[..., None], stored, output[chosen])
        lost[chosen] = torch.where(mine, truth.bound + error, lost[chosen])
        zeros = [torch.where(exact, 0.0, part) for part in parts[:3]]
        return output, (*zeros, lost)

    @phased("fallback")
    def _whole_layer(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rung 4: the dense call on the originals; its error is measured against float64 attention."""
        keys, values = self._everything()
        output = self.backend.dense(self.raw_query, keys, values, self.scale).unflatten(
            0, self.query.shape[:2]
        )
        truth = exact_attention(self.query, keys, values, self.scale)
        stored, _ = store(truth.output, self.cache.dtype)
        # the library may overflow where float64 does not
        output = torch.where(torch.isfinite(output).all(-1, keepdim=True), output, stored)
        error = (truth.output - output.double()).norm(dim=-1) * (1 + 2.0**-40) + truth.bound
        zero = torch.zeros_like(error)
        return output, (zero, zero, zero, error)

    def _everything(self, heads: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return the originals, of which those of `heads` (all without it) are checked and will be read."""
        self.cache.check_originals(heads)
        assert self.cache.originals is not None
        keys, values = (slab.rows.to(self.cache.geometry.device) for slab in self.cache.originals)
        count = len(keys) if heads is None else len(heads)
        self._page(count * (keys[0].nbytes + values[0].nbytes))
        self.scratch_bytes = max(self.scratch_bytes, 4 * count * keys[0].nbytes)
        return keys, values

    @phased("bound")
    def _step(self, output: Tensor, parts: tuple[Tensor, ...], exact: Tensor, rung: Tensor) -> Step:
        group = self.query.shape[1]

        def counts(mask: Tensor) -> Tensor:
            per_head = mask.sum(-1)[:, None].expand(-1, group)
            return torch.where(exact, self.blocks, per_head).flatten().to(torch.int32)

        key, value, dropped, fp = (part.flatten() for part in parts)
        skipped = (
            torch.where(exact, 0, (~self.read).sum(-1)[:, None].expand(-1, group)).flatten().to(torch.int32)
        )
        certificate = Certificate(
            key_bound=key,
            value_bound=value,
            dropped_bound=dropped,
            rounding_bound=fp,
            total_bound=key + value + dropped + fp,
            output_norm=output.double().norm(dim=-1).flatten(),
            exact=exact.flatten(),
            rung=rung.flatten().to(torch.int8),
            promoted_key_blocks=counts(self.exact_keys),
            promoted_value_blocks=counts(self.exact_values),
            skipped_value_blocks=skipped,
            blocks=self.blocks,
            paged_bytes=self.paged_bytes,
        )
        return Step(output.flatten(0, 1), certificate)


def _share(contribution: Tensor, skipped: Tensor) -> Tensor:
    """Part of the contributions that skipped blocks make; 0 where that is undefined."""
    part = torch.where(skipped, contribution, 0.0).sum(-1) / contribution.sum(-1)
    return torch.nan_to_num(part, nan=0.0).clamp(0, 1)


def _prefix_blocks(split: Split, target: Tensor, heads: Tensor, wanted: Tensor) -> Tensor:
    """Blocks to promote per head: the shortest prefix predicted to leave at most `target`, `[Hkv, R, M]`.

    From the second round on it at least doubles what the head asked for, so that few rounds suffice.
    """
    count = (split.after_removing() > target[..., None]).sum(-1)
    count = torch.maximum(count, wanted.sum(-1))
    rank = torch.arange(split.order.shape[-1], device=count.device)
    chosen = torch.zeros_like(split.order, dtype=torch.bool)
    chosen = chosen.scatter(-1, split.order, (rank < count[..., None]) & heads[..., None])
    return chosen[..., :-1]


def _exponentials(scores: Tensor) -> tuple[Tensor, Tensor]:
    peak = scores.amax(-1)
    return peak, (scores - peak[..., None]).exp()


def _by_head(notes: Tensor | None) -> Tensor | None:
    """Return annotations `[Hkv, M + 1]` for every query head of a group, None where there are none."""
    return None if notes is None else notes[:, None]


def _with_tail(mask: Tensor, value: bool) -> Tensor:
    return torch.cat((mask, mask.new_full((mask.shape[0], 1), value)), 1)
