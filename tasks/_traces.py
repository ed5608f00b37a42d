"""Synthetic attention traces in which some tokens fall silent and are needed again much later.

A trace is one head over a growing sequence: logits at the end of each of its stages, values, units of 16
tokens, and anchors: four tokens whose logit is low until one later stage asks for them. Their units are
restated when their stage closes, which is what separates them from the background.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

LENGTHS = (4096, 8192, 16384, 32768)
STAGES = 8
UNIT = 16
CRITICAL = slice(4, 8)
"""Tokens of an anchor's unit that are critical."""
SINKS = 4
VALUE_DIM, KEY_DIM = 32, 64
FIRST_SEED = 1000003


@dataclass(frozen=True, slots=True)
class Recipe:
    """Parameters of the generator."""

    spread: float
    """Standard deviation of the persistent logits."""
    dormant: float
    """Mean logit of critical tokens that are not asked for."""
    lift: float
    """What is added to it in the stage that asks."""
    anchors: int
    pl: float
    """Probability that an anchor's unit is linked when its stage closes."""
    false_links: float
    """Share of all units that is linked without reason at each transition."""


class Checkpoint(NamedTuple):
    """The end of one stage."""

    tokens: int
    """b: tokens that exist."""
    logits: Array
    """float64 `[b]`"""
    linked: Array
    """Units linked at this transition, indices; a unit may stand in it twice."""
    asked: Array
    """Critical tokens that are needed now, `[anchors asked for, 4]`."""


class Trace(NamedTuple):
    """One trace; its checkpoints are drawn when asked for, in order."""

    number: int
    length: int
    values: Array
    """float64 `[N, 32]`"""
    checkpoints: Iterator[Checkpoint]


def draw_trace(index: int, seed: int, recipe: Recipe) -> Trace:
    """Return trace `index` (its length is one of four, in turn); it depends on nothing but the arguments."""
    import numpy as np

    draw = np.random.default_rng(FIRST_SEED + index if seed == 0 else [seed, FIRST_SEED + index])
    length = LENGTHS[index % len(LENGTHS)]
    ends = _boundaries(draw, length)
    persistent = draw.normal(0.0, recipe.spread, length)
    units = draw.choice(ends[1] // UNIT, recipe.anchors, replace=False)
    critical = units[:, None] * UNIT + np.arange(CRITICAL.start, CRITICAL.stop)
    persistent[critical] = draw.normal(recipe.dormant, 1.2, recipe.anchors)[:, None]
    asked_at = draw.integers(3, STAGES, recipe.anchors)
    restated = draw.random(recipe.anchors) < recipe.pl
    planted = (units * UNIT >= ends[0]).astype(int)
    values = draw.standard_normal((length, VALUE_DIM))
    values += 0.45 * draw.standard_normal(VALUE_DIM)
    links = [units[restated & (planted == stage)] for stage in range(STAGES)]
    asked = [critical[asked_at == stage] for stage in range(STAGES)]
    return Trace(index, length, values, _checkpoints(draw, ends, persistent, links, asked, recipe))


def _boundaries(draw: np.random.Generator, length: int) -> list[int]:
    """Return where the stages end: equal parts, jittered by a quarter of one, multiples of the unit."""
    step = length / STAGES
    ends = [
        round((stage * step + draw.uniform(-0.25, 0.25) * step) / UNIT) * UNIT for stage in range(1, STAGES)
    ]
    return [*ends, length]


def _checkpoints(
    draw: np.random.Generator,
    ends: list[int],
    persistent: Array,
    links: list[Array],
    asked: list[Array],
    recipe: Recipe,
) -> Iterator[Checkpoint]:
    import numpy as np

    for stage, tokens in enumerate(ends):
        age = np.arange(tokens - 1, -1, -1)
        logits = persistent[:tokens] + draw.normal(0.0, 0.45, tokens) + 2 * np.exp(-age / 256)
        logits[:SINKS] += 4
        logits[asked[stage]] += recipe.lift
        false = np.flatnonzero(draw.random(tokens // UNIT) < recipe.false_links)
        yield Checkpoint(tokens, logits, np.concatenate((links[stage], false)), asked[stage])


def ghost_keys(draw: np.random.Generator, logits: Array) -> tuple[Array, Array]:
    """Return a query `[64]` and keys `[b, 64]` whose scores q . k / 8 are `logits`, random otherwise."""
    query = draw.standard_normal(KEY_DIM)
    keys = draw.standard_normal((len(logits), KEY_DIM))
    wanted = logits * KEY_DIM**0.5 - keys @ query
    keys += wanted[:, None] * query / (query @ query)
    return query, keys
