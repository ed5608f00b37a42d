"""What each mode keeps and reads of a synthetic trace, and what that costs.

The masses of a trace are known, so the retained set is sized by the mass it may lose, not by an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rcq_cli.tasks._traces import KEY_DIM, SINKS, UNIT, Checkpoint, Trace, ghost_keys

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rcq_cli.recas.utility import Weights

DECAY = 0.9
"""lambda of the accumulated attention, per checkpoint."""
GHOST_SEED = 64
SHARE = 0.345
"""Share of all tokens that a policy without a notion of mass keeps: what RECAS was published to keep."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How one mode selects."""

    order: Literal["utility", "static", "recency", "all"]
    """`static`: a token's utility when it was first seen, for good."""
    weights: Weights
    retain_loss: float
    """Share of the resident mass that eviction may lose at a checkpoint."""
    active_loss: float
    """Share of the kept mass that reading may leave out."""
    active_utility: float
    window: int
    sparse: bool
    """Whether fewer tokens are read than kept."""
    share: float | None = None
    """Share of all tokens that is kept, instead of what `retain_loss` leaves."""
    certified: bool = False
    """Whether INT8 ghosts certify what leaving tokens out costs."""


def policy_of(mode: str, options: Any) -> Policy:
    """Return how the mode `mode` selects; the modes of RECAS say so in their options."""
    from rcq_cli.recas.utility import Weights

    if mode in ("recas", "recas-certified"):
        return Policy(
            order="utility",
            weights=options.weights(),
            retain_loss=options.retain_loss,
            active_loss=options.active_loss,
            active_utility=options.active_utility,
            window=options.window,
            sparse=True,
            certified=mode == "recas-certified",
        )
    order, weights = _RIVALS[mode]
    return Policy(order, Weights(*weights), 0.0, 0.0, 0.0, WINDOW, sparse=False, share=SHARE)


WINDOW = 128
_RIVALS: dict[str, tuple[Literal["utility", "static", "recency", "all"], tuple[float, float, float]]] = {
    "topscore": ("static", (1.0, 0.0, 0.0)),
    "h2o": ("utility", (0.0, 1.0, 0.0)),
    "streaming-llm": ("recency", (0.0, 0.0, 0.0)),
    "dense": ("all", (0.0, 0.0, 0.0)),
}
"""Order and weights of the modes that know no stages; they read all they keep."""


class Chosen(NamedTuple):
    """Positions kept and read at one checkpoint; what is read is also kept."""

    kept: Tensor
    active: Tensor


class Selection:
    """The memory of a policy over one trace."""

    def __init__(self, policy: Policy, length: int) -> None:
        import torch

        self.policy = policy
        self.resident = torch.zeros(length, dtype=torch.bool)
        self.seen = 0
        self.history, self.age, self.score = (torch.zeros(length, dtype=torch.float64) for _ in range(3))
        self.links = torch.zeros(length // UNIT, dtype=torch.float64)

    def admit(self, checkpoint: Checkpoint) -> None:
        """Take in the tokens of a stage and what its end says about units; nothing is evicted yet."""
        self.resident[self.seen : checkpoint.tokens] = True
        for unit in checkpoint.linked.tolist():
            self.links[unit] += 1

    def select(self, checkpoint: Checkpoint, mass: Tensor) -> Chosen:
        """Evict, then choose what is read; `mass` is the exact softmax `[b]`."""
        import torch

        from rcq_cli.recas import selector, utility

        policy = self.policy
        tokens = checkpoint.tokens
        held = self.resident[:tokens].nonzero()[:, 0]
        standard = utility.standard_scores(torch.from_numpy(checkpoint.logits)[held])
        always = selector.protected(tokens, SINKS, policy.window)[held]
        worth = self._worth(held, standard, mass[held] / mass[held].sum())
        if policy.order == "all":
            keep = torch.ones_like(always)
        elif policy.share is not None:
            keep = selector.top(worth, round(policy.share * tokens), always)
        else:
            keep = selector.covering(worth, mass[held], 1 - policy.retain_loss, always)
        self.resident[held[~keep]] = False
        self.seen = tokens
        kept = held[keep]
        if not policy.sparse:
            return Chosen(kept, kept)
        score = selector.sparse_scores(standard[keep], worth[keep], policy.active_utility)
        read = selector.covering(score, mass[kept], 1 - policy.active_loss, always[keep])
        return Chosen(kept, kept[read])

    def _worth(self, held: Tensor, standard: Tensor, attention: Tensor) -> Tensor:
        from rcq_cli.recas import utility

        self.history[held] = utility.accumulate(self.history[held], attention, DECAY)
        self.age[held] += 1
        mean = utility.mean_attention(self.history[held], self.age[held], DECAY)
        worth = utility.utility(
            standard.sigmoid(),
            utility.heavy_hitter(mean, len(held)),
            utility.stage_evidence(self.links[held // UNIT]),
            self.policy.weights,
        )
        if self.policy.order == "recency":
            return held.double()
        if self.policy.order == "static":
            fresh = held >= self.seen
            self.score[held[fresh]] = worth[fresh]
            worth = self.score[held]
        return worth


class Values:
    """The values of a trace and their norms, which every checkpoint needs."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.centre = rows.mean(0)
        self.norm, self.radius = rows.norm(dim=-1), (rows - self.centre).norm(dim=-1)


def measure(trace: Trace, policy: Policy) -> dict[str, float]:
    """Return the metrics of one trace: means over its checkpoints but the first, shares of its anchors."""
    import numpy as np
    import torch

    selection = Selection(policy, trace.length)
    values = Values(torch.from_numpy(trace.values))
    asked = found = 0
    rows: list[dict[str, float]] = []
    for stage, checkpoint in enumerate(trace.checkpoints):
        selection.admit(checkpoint)
        available = selection.resident[torch.from_numpy(checkpoint.asked)].all(-1)
        asked, found = asked + len(available), found + int(available.sum())
        mass = torch.softmax(torch.from_numpy(checkpoint.logits), 0)
        chosen = selection.select(checkpoint, mass)
        if not stage:
            continue
        figures = _figures(mass, values, chosen)
        if policy.certified:
            draw = np.random.default_rng([GHOST_SEED, trace.number, stage])
            figures = _certified(draw, checkpoint, values, chosen, figures)
        rows.append(figures)
    return {"critical_recall": found / asked, **_summary(rows)}


def _certified(
    draw: np.random.Generator,
    checkpoint: Checkpoint,
    values: Values,
    chosen: Chosen,
    figures: dict[str, float],
) -> dict[str, float]:
    """Add what the joint certificate says of this checkpoint; true errors are checked against it."""
    import torch

    from rcq_cli.recas.joint import Head, joint_certificate

    query, keys = (torch.from_numpy(array) for array in ghost_keys(draw, checkpoint.logits))
    head = Head(query, keys, values.rows[: checkpoint.tokens], KEY_DIM**-0.5)
    read = torch.zeros(checkpoint.tokens, dtype=torch.bool)
    read[chosen.active] = True
    found = joint_certificate(head, read)
    mass = torch.softmax(keys @ query * head.scale, 0)
    error = (mass @ head.values - found.output).norm()
    lost = torch.where(read, 0.0, mass).sum()
    wrong = int(not error <= found.bound) + int(not found.mass[0] <= lost <= found.mass[1])
    return figures | {
        "certified_relative_bound": found.bound / float(found.output.norm()),
        **({"certified_mass_ratio": found.mass[1] / float(lost)} if lost > 0 else {}),
        "bound_violations": figures["bound_violations"] + wrong,
    }


_MEDIANS = ("bound_tightness", "certified_relative_bound", "certified_mass_ratio")
_SUMS = ("bound_violations",)


def _summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return one figure per name: the mean over checkpoints, the median of ratios, the sum of counts."""
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        column = sorted(row[name] for row in rows if name in row)
        if name in _MEDIANS:
            found[name] = column[(len(column) - 1) // 2]
        else:
            found[name] = sum(column) / (1 if name in _SUMS else len(column))
    return found


def _figures(mass: Tensor, values: Values, chosen: Chosen) -> dict[str, float]:
    """Return what one checkpoint measured; both bounds of the dropped mass are checked against the truth."""
    import torch

    from rcq_cli.recas.dropped import dropped_bound, widest_bound

    tokens = len(mass)
    rows = values.rows[:tokens]
    read = torch.zeros(tokens, dtype=torch.bool)
    read[chosen.active] = True
    used = torch.where(read, mass, 0.0)
    full, raw = torch.stack((mass, used)) @ rows
    # summed over what was dropped: one minus the rest would lose the digits of a small mass
    lost = (mass - used).sum()
    output = raw / used.sum()
    radius = torch.where(read, 0.0, values.radius[:tokens]).max()
    tight = dropped_bound(lost, radius, (values.centre - output).norm())
    widest = widest_bound(lost, values.norm[:tokens].max())
    error = (full - output).norm()
    figures = {
        "retained_ratio": len(chosen.kept) / tokens,
        "active_ratio": len(chosen.active) / tokens,
        "mass_preserved": float(used.sum()),
        "mass_retained": float(mass[chosen.kept].sum()),
        "relative_error": float(error / full.norm()),
        "cosine": float(torch.cosine_similarity(full, output, 0)),
        "raw_relative_error": float((full - raw).norm() / full.norm()),
        "raw_cosine": float(torch.cosine_similarity(full, raw, 0)),
        "bound_violations": int(error > widest + 1e-6) + int(error > tight + 1e-6),
    }
    return figures | ({"bound_tightness": float(error / widest)} if lost > 0 else {})
