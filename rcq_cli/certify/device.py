"""One certified step decided on the device; the host reads back once, and only the last rungs need it."""

from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.device import DeviceStore
from rcq_cli.certify.exact import as_groups, exact_attention, store
from rcq_cli.certify.ladder import Budget
from rcq_cli.phases import phase, phased
from rcq_cli.protocols import Certificate, Step


class DeviceStep:
    """One step on a device store; promises what `CertifiedStep` promises.

    `launch` never waits. `run` reads one small tensor back: faults, pages, and which heads are still over
    their budget. A head over its budget costs one more round and read-back, up to the rounds allowed.
    """

    def __init__(self, cache: DeviceStore, query: Tensor, budget: Budget, explore: float) -> None:
        self.cache, self.query, self.budget = cache, query.contiguous(), budget
        kernels, tiers, g = cache.kernels, cache.tiers(), cache.geometry
        limits = kernels.Limits(
            scale=g.scale,
            eps=budget.eps,
            absolute=budget.denominator == "abs",
            layer=budget.denominator == "layer",
            skip=budget.skip,
            rounds=budget.rounds,
            explore=explore,
            tau=budget.first_share,
        )
        self.step = kernels.StepKernels(tiers, cache.slots(tiers), self.query, limits)
        self.blocks = tiers.blocks
        self.read_backs = 0
        self.paged_bytes = self.hits = 0
        self.scratch_bytes = self.step.work.nbytes + self.step.resident.nbytes

    def launch(self) -> Any:
        """Launch the step without waiting; return its tensors."""
        with phase("score"):
            return self.step.begin()

    def run(self) -> Step:
        """Launch the step, read back once, and finish heads that need more."""
        out, number = self.launch(), 0
        faults, still = self._read_back(out)
        while not any(faults) and any(still) and number < self.budget.rounds:
            number += 1
            with phase("attend"):
                out = self.step.round(number)
            faults, still = self._read_back(out)
        if any(faults):
            return self._faulty(out, faults)
        fields = out.fields
        exact = torch.tensor(still, dtype=torch.bool, device=self.query.device)
        if any(still):
            self._exact_heads(out.output, fields, still)
        return Step(out.output, self._certificate(fields, exact))

    @phased("page_in")
    def _read_back(self, out: Any) -> tuple[list[int], list[bool]]:
        """Return faults per KV head and which query heads are over their budget; the one wait of a step."""
        self.read_backs += 1
        numbers = out.status().tolist()
        heads, size = self.cache.geometry.kv_heads, self.cache.fmt.block * self.cache.geometry.head_dim
        pages, self.hits = int(numbers[heads]), int(numbers[heads + 1])
        self.paged_bytes = pages * size * self.query.element_size()
        return [int(x) for x in numbers[:heads]], [x != 0 for x in numbers[heads + 2 :]]

    def _originals(self) -> tuple[Tensor, Tensor]:
        assert self.cache.originals is not None
        keys, values = (slab.rows for slab in self.cache.originals)
        return keys, values

    @phased("fallback")
    def _exact_heads(self, output: Tensor, fields: Tensor, still: list[bool]) -> None:
        """Rung 3: replace open heads by float64 attention on the originals, KV head by KV head."""
        keys, values = self._originals()
        group, device, k = self.cache.geometry.group, self.query.device, self.cache.kernels
        needed = sorted({row // group for row, is_open in enumerate(still) if is_open})
        self.cache.check_originals(needed)
        for h in needed:
            mine = [row for row in range(h * group, (h + 1) * group) if still[row]]
            rows = (keys[h : h + 1].to(device), values[h : h + 1].to(device))
            truth = exact_attention(self.query[mine].double()[None], *rows, self.cache.geometry.scale)
            stored, error = store(truth.output[0], self.cache.dtype)
            output[mine] = stored
            fields[: k.ROUNDING_BOUND, mine] = 0
            fields[k.ROUNDING_BOUND, mine] = truth.bound[0] + error
            fields[k.NORM, mine] = stored.double().norm(dim=-1)
            fields[k.RUNG, mine] = 3
            self.paged_bytes += keys[h].nbytes + values[h].nbytes
            self.scratch_bytes += 6 * keys[h].numel() * 8

    @phased("fallback")
    def _faulty(self, out: Any, faults: list[int]) -> Step:
        """Rung 4: quarantine what is damaged and run the whole layer through the dense call."""
        cache, k = self.cache, self.cache.kernels
        cache.check_originals()  # raises when they are what is damaged
        found = [(head, fault // 4) for head, fault in enumerate(faults) if fault]
        cache.quarantine(*torch.tensor(found, device=self.query.device).unbind(1))
        device, scale = self.query.device, cache.geometry.scale
        keys, values = (rows.to(device) for rows in self._originals())
        output = cache.backend.dense(self.query, keys, values, scale)
        truth = exact_attention(as_groups(self.query, cache.geometry.kv_heads), keys, values, scale)
        stored = store(truth.output, cache.dtype)[0].flatten(0, 1)
        # the library may overflow where float64 does not
        output = torch.where(torch.isfinite(output).all(-1, keepdim=True), output, stored)
        error = (truth.output.flatten(0, 1) - output.double()).norm(dim=-1) * (1 + 2.0**-40)
        out.fields[: k.ROUNDING_BOUND] = 0
        out.fields[k.ROUNDING_BOUND] = error + truth.bound.flatten()
        out.fields[k.NORM] = output.double().norm(dim=-1)
        out.fields[k.RUNG] = 4
        self.paged_bytes = keys.nbytes + values.nbytes
        self.scratch_bytes += 6 * keys.numel() * 8
        return Step(output, self._certificate(out.fields, torch.ones_like(output[:, 0], dtype=torch.bool)))

    def _certificate(self, fields: Tensor, exact: Tensor) -> Certificate:
        k = self.cache.kernels
        used = torch.where(exact, float(self.blocks), fields[[k.KEYS, k.VALUES]]).to(torch.int32)
        skipped = torch.where(exact, 0.0, fields[k.SKIPPED]).to(torch.int32)
        key, value, dropped, rounding = fields[: k.ROUNDING_BOUND + 1].unbind(0)
        return Certificate(
            key_bound=key,
            value_bound=value,
            dropped_bound=dropped,
            rounding_bound=rounding,
            total_bound=key + value + dropped + rounding,
            output_norm=fields[k.NORM],
            exact=exact,
            rung=fields[k.RUNG].to(torch.int8),
            promoted_key_blocks=used[0],
            promoted_value_blocks=used[1],
            skipped_value_blocks=skipped,
            blocks=self.blocks,
            paged_bytes=self.paged_bytes,
        )
