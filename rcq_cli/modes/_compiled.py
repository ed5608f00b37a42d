"""What a float64 policy step on the tiered store takes from the compiled pieces of `_cpu_float64`.

Policy and formulas stay those of the ladder; these pieces read what is stored where it lies.
"""

import math
from functools import cache

import torch
from torch import Tensor

from rcq_cli.cache.tiers import Annotations, TieredStore, refuse_changed
from rcq_cli.certify.exact import score_slack, store
from rcq_cli.certify.ladder import CertifiedStep
from rcq_cli.certify.spectral import theta
from rcq_cli.kernels import _cpu_float64, _cpu_float64_blocks, _cpu_float64_bounds
from rcq_cli.kernels._cpu_float64 import Array, Layer, Place, place
from rcq_cli.kernels._cpu_float64_bounds import Bounds, Spread, Weighed
from rcq_cli.phases import phased


class CompiledStore(TieredStore):
    """The tiered store of one layer; checksums are taken where the data lies."""

    @property
    def columns(self) -> int:
        """Return how many annotations a block has room for: whole words, as checksums take them."""
        return -(-super().columns // 4) * 4

    def layer(self) -> Layer:
        """Return where everything lies."""
        assert self.originals is not None
        keys, values = (place(slab.data, self.fmt.block) for slab in self.originals)
        codes = {name: place(slab.data) for name, slab in self.blocks.items()}
        checks, slots = self.checks.data.numpy(), self.rows_of_values()
        return _cpu_float64.layer(codes, place(self.annotations.data), (keys, values), checks, slots)

    def rows_of_values(self) -> Array:
        """Return in which row of the codes the values of each block are, int32 `[Hkv, M]`: its own."""
        blocks = torch.arange(self.block_count, dtype=torch.int32)
        return blocks.expand(self.geometry.kv_heads, -1).contiguous().numpy()

    def tail_places(self) -> tuple[Place, Place]:
        """Return where the keys and the values of the open tail lie."""
        return place(self.tail[0]), place(self.tail[1])

    def damaged(self, heads: Tensor, blocks: Tensor) -> Tensor:
        """Return which chosen pairs hold codes, metadata or annotations that changed since sealing, `[n]`."""
        layer = self.layer()
        found = _cpu_float64.checksums(layer, layer.tier_1, (heads, blocks))
        return found != self.checks.rows[heads, blocks, 0]

    def changed_originals(self, head: int) -> Tensor:
        """Return which sealed blocks of a KV head have other originals than when they were sealed, `[M]`."""
        blocks = torch.arange(self.block_count)
        pairs, layer = (torch.full_like(blocks, head), blocks), self.layer()
        found = _cpu_float64.checksums(layer, layer.originals, pairs)
        return found != self.checks.rows[head, :, 1]

    def bounds(self) -> Annotations:
        """Return the annotations of all completed blocks and, last, of the open tail."""
        found = _cpu_float64_blocks.annotations(
            place(self.annotations.data), self.raw.rows, self.raw_bounds.rows,
            self.tail[:, :, : self.tail_tokens], self.centred_on(), self.fmt.block if self.joint else 0,
        )  # fmt: skip
        return Annotations(*found.unbind())


class CompiledStep(CertifiedStep):
    """The parts of a step that touch every token or every block.

    The open tail stands among the blocks as the last one, with scores of -inf where it holds no token.
    """

    cache: CompiledStore

    def allowed(self) -> Tensor:
        """Return how far the coded scores of a block may be from the exact ones, `[Hkv, R, M]`."""
        raise NotImplementedError

    @phased("score")
    def _score(self) -> None:
        self.layer, self.tails = self.cache.layer(), self.cache.tail_places()
        notes = self.notes.rk, self.notes.kappa, self._known(self.notes.sk)
        found, self.finite = _cpu_float64.score(
            self.query, self.scale, self.layer, notes, self.cache.fmt.block,
            self.tails[0], self.cache.tail_tokens, _slack_terms(self.query.shape[-1], self.scale),
        )  # fmt: skip
        self.scores, half_step, self.slack, self.delta_coded, self.wide = found
        self.half_step = half_step[..., :-1]

    def _known(self, norms: Tensor | None) -> Tensor:
        """Return spectral norms of blocks, infinite where the store has none."""
        return torch.full_like(self.notes.rk, torch.inf) if norms is None else norms

    @phased("score")
    def _weigh(self, pairs: tuple[Tensor, Tensor] | None = None) -> None:
        """Exponentiate relative to each block's maximum.

        All of them: what did not change is cheaper to repeat than to leave out.
        """
        del pairs
        self.log_mass = torch.empty_like(self.peak)
        sums = (self.peak, self.mass, self.square, self.log_mass)
        _cpu_float64.weigh(self.scores, self.weights, *sums)

    def _rescore(self, head: Tensor, block: Tensor, take: Tensor) -> None:
        self._page(len(head) * self.layer.keys.width * self.layer.keys.size)
        found = _cpu_float64.promote(
            self.query, self.scale, self.layer, (head, block), take, self.allowed(), self.scores
        )
        refuse_changed(found.changed, head, block)
        self._distrust(found.unlike, head, block)
        self._weigh()

    def weighed(self) -> Weighed:
        """Return the block masses in units of the total of what is read."""
        size, tail = self.cache.fmt.block, self.cache.tail_tokens
        masses, values = (self.peak, self.mass, self.square), (self.notes.eta, self.exact_values)
        return _cpu_float64_bounds.weighed(masses, self.read, values, (size, tail), self.backend.underflow)

    def proven(
        self, masses: Weighed, outputs: tuple[Tensor, Tensor, Tensor], limit: Tensor
    ) -> tuple[Bounds, Tensor]:
        """Return what is proven of an output and the bound on its rounding, storing included.

        `outputs` are the float64 output, the stored one and the error of storing it.
        """
        notes, dim = self.notes, self.query.shape[-1]
        exact_output, output, storing = outputs
        spectra = (self.residual_spectrum[:, 0], self.spectrum[:, 0])
        joint = self._known(notes.se), self._known(notes.sv)
        spread = Spread(notes.eta, notes.rv, *joint, self.centre, *spectra)
        roundoff, underflow = self.backend.roundoff, self.backend.underflow
        relative = theta(self.cache.tokens + 24 + 16 * math.sqrt(dim), roundoff)
        lost = math.sqrt(dim) * self.cache.tokens * underflow
        found = _cpu_float64_bounds.bounds(
            masses, spread, (self.slack, self.delta_coded, self.wide),
            (self.exact_keys, self.exact_values, self.read), (exact_output, output.double(), storing), limit,
            (relative, roundoff, lost),
        )  # fmt: skip
        return found, found.rounding + storing


class ReadingStep(CompiledStep):
    """A step of a policy that reads the values of all blocks, and reads them last.

    Nothing is skipped, and no sum over values is ever taken twice.
    """

    @phased("select")
    def _plan(self) -> None:
        """Pin what has no codes."""
        self.pinned = self.cache.raw.rows.clone()
        self.exact_keys, self.read = torch.zeros_like(self.pinned), torch.zeros_like(self.pinned)
        self.exact_values = self.pinned.clone()
        self.wanted_keys = self.wanted_values = torch.zeros(self.half_step.shape, dtype=torch.bool)
        self.weights = torch.empty_like(self.scores)
        self.peak, self.mass, self.square = self.query.new_empty(3, *self.scores.shape[:3]).unbind()

    def _read_values(self, chosen: Tensor) -> None:
        """Note that the values of `[Hkv, M]` blocks are read; `average` does it, when all is known."""
        self.read |= chosen

    @phased("attend")
    def average(self, masses: Weighed) -> Tensor:
        """Return the float64 output `[Hkv, R, D]`: exact values where promoted, else from the codes."""
        output, changed = _cpu_float64.sum_values(
            self.weights, masses.share, self.layer, self.exact_values, self.tails[1], self.cache.tail_tokens,
            self.query.shape[-1],
        )  # fmt: skip
        head, block = self.exact_values.nonzero(as_tuple=True)
        refuse_changed(changed[head, block], head, block)
        self._page(len(head) * self.layer.values.width * self.layer.values.size)
        return output

    @phased("bound")
    def bounded(self, masses: Weighed, exact_output: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the stored output and the bounds on errors of keys, values, dropping and rounding."""
        output, storing = store(exact_output, self.cache.dtype)
        nowhere = torch.full_like(masses.total, torch.inf)
        found, rounding = self.proven(masses, (exact_output, output, storing), nowhere)
        return output, (found.key, found.value, found.dropped, rounding)


@cache
def _slack_terms(dim: int, scale: float) -> tuple[float, float]:
    """Return the factor of ||q|| ||k|| and the constant of `score_slack`, which is linear in the former."""
    size = torch.tensor([0.0, 2.0**60], dtype=torch.float64)
    constant, large = score_slack(size, torch.ones_like(size), scale, dim).tolist()
    return (large - constant) / 2.0**60, constant
