"""The attention of one decode layer, full and as RECAS reads it, timed side by side on one thread.

The setting is the RECAS paper's: 8 heads of 64 channels in float32. A sparse step does all that a decode step
of mode `recas` does in the steady state: scores of all kept tokens, the utility from its three signals, the
choice of what is read, attention over that, and the update of the history. The full step is the fastest of
torch's own ways over all tokens. Nothing here decides anything; it only measures.
"""

import math
import time
from collections.abc import Callable
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from rcq_cli.recas.utility import DECAY, Weights

HEADS, DIM = 8, 64
LENGTHS = (4096, 8192, 16384)
WARM_UP, STEPS, ROUND = 20, 200, 20
"""Untimed and timed steps, and how many of one side run before the other has its turn."""
BINS = 1024
_LOG2_E = math.log2(math.e)
# minimax fit of 2^x on [0, 1), relative error 2e-7
_EXP2 = tuple(
    np.float32(c) for c in (1.0, 0.69314697, 0.24022348, 0.05550732, 0.0096822, 0.00124406, 0.00019593)
)
_jit: Callable[[Any], Any] = numba.njit(cache=True, fastmath=True, nogil=True, error_model="numpy")


class Latency(NamedTuple):
    """Geometric means over the lengths of the median time of a step, so that the ratio is one of ratios."""

    ratio: float
    sparse_ms: float
    full_ms: float
    lengths: tuple["Timing", ...]

    @property
    def ratio_of_sums(self) -> float:
        """Return the ratio of the times summed over the lengths, in which the longest counts most."""
        return sum(row.sparse_ms[0] for row in self.lengths) / sum(row.full_ms[0] for row in self.lengths)


class Timing(NamedTuple):
    """One length: median, tenth and ninetieth percentile in ms."""

    tokens: int
    kept_tokens: int
    active_tokens: int
    full_ms: tuple[float, float, float]
    sparse_ms: tuple[float, float, float]
    full_by: str
    """Which of torch's ways was the fastest."""

    @property
    def ratio(self) -> float:
        """Return sparse over full, of the medians."""
        return self.sparse_ms[0] / self.full_ms[0]


@_jit
def _exponentials(x: Any, chosen: Any, count: int, out: Any, bits: Any) -> float:
    """Write e^(x - max x) of the chosen scores into the front of `out` and return the sum."""
    c0, c1, c2, c3, c4, c5, c6 = _EXP2
    shift = x[chosen[0]]
    for i in range(count):
        out[i] = x[chosen[i]]
        shift = max(shift, out[i])
    for i in range(count):
        y = max((out[i] - shift) * np.float32(_LOG2_E), np.float32(-126.0))
        whole = np.floor(y)
        f = y - whole
        out[i] = c0 + f * (c1 + f * (c2 + f * (c3 + f * (c4 + f * (c5 + f * c6)))))
        bits[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    powers = bits.view(np.float32)
    total = np.float32(0.0)
    for i in range(count):
        out[i] *= powers[i]
        total += out[i]
    return float(total)


@_jit
def _scores(query: Any, keys: Any, out: Any) -> None:
    for t in range(keys.shape[0]):
        total = np.float32(0.0)
        for c in range(DIM):
            total += query[c] * keys[t, c]
        out[t] = total


@_jit
def _rank(scores: Any, columns: Any, signals: Any, rank: Any) -> None:
    """Write the standard score plus half the utility of every kept token into `rank`."""
    history, evidence, ages = columns[0], columns[1], columns[2]
    n = scores.shape[0]
    mean, square = np.float32(0.0), np.float32(0.0)
    for i in range(n):
        mean += scores[i]
    mean /= np.float32(n)
    for i in range(n):
        square += (scores[i] - mean) * (scores[i] - mean)
    inverse = np.float32(1.0) / max(np.sqrt(square / np.float32(n)), np.float32(1e-6))
    alpha, beta, gamma = signals[0], signals[1], signals[2]
    for i in range(n):
        standard = (scores[i] - mean) * inverse
        z = np.sqrt(np.float32(n) * history[i] * ages[i])
        # a logistic function without an exponential of its own: (1 + tanh(x / 2)) / 2, rational, error 2e-4
        half = min(max(standard * np.float32(0.5), np.float32(-4.0)), np.float32(4.0))
        s = half * half
        tanh = (
            half
            * (np.float32(10395.0) + s * (np.float32(1260.0) + s * np.float32(21.0)))
            / (np.float32(10395.0) + s * (np.float32(4725.0) + s * (np.float32(210.0) + s)))
        )
        compatible = np.float32(0.5) + np.float32(0.5) * tanh
        worth = alpha * compatible + beta * z / (np.float32(1.0) + z) + gamma * evidence[i]
        rank[i] = standard + np.float32(0.5) * worth


@_jit
def _select(rank: Any, count: int, always: Any, counts: Any, bins: Any, chosen: Any) -> int:
    """Write the `count` best tokens, those of `always` among them, into `chosen`; return how many."""
    n = rank.shape[0]
    low, high = rank[0], rank[0]
    for i in range(n):
        low = min(low, rank[i])
        high = max(high, rank[i])
    scale = np.float32(BINS - 2) / max(high - low, np.float32(1e-20))
    for i in range(n):
        bins[i] = BINS - 1 if always[i] else np.int32((rank[i] - low) * scale)
    counts[:] = 0
    for i in range(n):
        counts[bins[i]] += 1
    above, edge = 0, BINS - 1
    while edge > 0 and above + counts[edge] < count:
        above += counts[edge]
        edge -= 1
    # of the bin on the edge as many as still fit; its tokens differ by less than a thousandth of the range
    room, found, taken = count - above, 0, 0
    for i in range(n):
        on_edge = bins[i] == edge
        take = (bins[i] > edge) | (on_edge & (taken < room))
        taken += on_edge
        chosen[found] = i  # without a branch: the next token overwrites it unless it is taken
        found += take
    return found


@_jit
def _read(weights: Any, values: Any, chosen: Any, count: int, total: float, out: Any) -> None:
    """Write the weighted mean of the chosen values into `out`; four rows at a time stay in registers."""
    out[:] = 0
    whole = count - count % 4
    for j in range(0, whole, 4):
        a, b, c, d = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        ra, rb, rc, rd = chosen[j], chosen[j + 1], chosen[j + 2], chosen[j + 3]
        for i in range(DIM):
            out[i] += (a * values[ra, i] + b * values[rb, i]) + (c * values[rc, i] + d * values[rd, i])
    for j in range(whole, count):
        for i in range(DIM):
            out[i] += weights[j] * values[chosen[j], i]
    share = np.float32(1.0) / np.float32(total)
    for i in range(DIM):
        out[i] *= share


@_jit
def sparse_step(
    query: Any, keys: Any, values: Any, columns: Any, always: Any, count: int, room: Any, out: Any
) -> None:
    """Run one decode step of all heads: score what is kept, choose what is read, read it, remember it.

    `query` `[H, D]`, scaled, `keys` and `values` `[H, n, D]`, `columns` `[H, 3, n]`: history, evidence, age
    factors. `room` holds the scratch arrays; its chosen tokens are those of the last head.
    """
    scores, weights, rank, bits, counts, bins, chosen, signals = room
    decay = np.float32(DECAY)
    for head in range(keys.shape[0]):
        history = columns[head, 0]
        _scores(query[head], keys[head], scores)
        _rank(scores, columns[head], signals, rank)
        found = _select(rank, count, always[head], counts, bins, chosen)
        total = _exponentials(scores, chosen, found, weights, bits)
        _read(weights, values[head], chosen, found, total, out[head])
        for i in range(history.shape[0]):
            history[i] *= decay
        share = (np.float32(1.0) - decay) / np.float32(total)
        for i in range(found):
            history[chosen[i]] += share * weights[i]


class Layer:
    """One layer at one length: all tokens for the full step, the kept ones for the sparse step."""

    def __init__(self, tokens: int, kept: int, active: int) -> None:
        self.tokens, self.kept, self.active = tokens, kept, active
        self.draw = np.random.default_rng(tokens)
        shape = (HEADS, tokens, DIM)
        self.keys, self.values = (self.draw.standard_normal(shape, dtype=np.float32) for _ in "kv")
        self.query = self.draw.standard_normal((HEADS, DIM), dtype=np.float32)
        index = np.sort(self.draw.permutation(tokens)[:kept])
        self.kept_keys, self.kept_values = (
            np.ascontiguousarray(rows[:, index]) for rows in (self.keys, self.values)
        )
        links = np.where(self.draw.random((HEADS, kept)) < 0.05, 0.5, 0.0)
        self.columns = np.stack((np.full_like(links, 1 / kept), links, np.ones_like(links)), 1)
        self.columns = self.columns.astype(np.float32)
        self.always = np.zeros((HEADS, kept), dtype=bool)
        self.always[:, :4] = self.always[:, -128:] = True
        self.output = np.empty((HEADS, DIM), dtype=np.float32)
        weights = Weights()
        self.room = (
            *(np.empty(kept, dtype=np.float32) for _ in range(3)),
            *(np.empty(size, dtype=np.int32) for size in (kept, BINS, kept, kept + 1)),
            np.array([weights.alpha, weights.beta, weights.gamma], dtype=np.float32),
        )

    def turn(self) -> None:
        """Let the query drift: half of it is new after about eleven steps."""
        fresh = self.draw.standard_normal((HEADS, DIM), dtype=np.float32)
        self.query[:] = np.float32(0.97) * self.query + np.float32((1 - 0.97**2) ** 0.5) * fresh

    def sparse(self) -> Any:
        """Run the next sparse step and return its `[H, D]` output."""
        sparse_step(
            self.query * np.float32(DIM**-0.5), self.kept_keys, self.kept_values,
            self.columns, self.always, self.active, self.room, self.output,
        )  # fmt: skip
        return self.output

    def full_ways(self) -> dict[str, Callable[[], Any]]:
        """Return torch's ways of attending to all tokens."""
        query, keys, values = (torch.from_numpy(a) for a in (self.query, self.keys, self.values))

        def fused() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(
                query[None, :, None], keys[None], values[None]
            )[0, :, 0]

        def plain() -> Any:
            return (torch.softmax(query[:, None] @ keys.transpose(1, 2) * DIM**-0.5, -1) @ values)[:, 0]

        return {"scaled_dot_product_attention": fused, "matmul and softmax": plain}


def layer_latency(
    kept_share: float, active_share: float, lengths: tuple[int, ...] = LENGTHS, steps: int = STEPS
) -> Latency:
    """Return times of one layer at the given shares of all tokens, both sides interleaved, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            found = tuple(_timing(n, kept_share, active_share, steps) for n in lengths)
    finally:
        torch.set_num_threads(threads)
    sparse, full = (
        geometric_mean(getattr(timing, name)[0] for timing in found) for name in ("sparse_ms", "full_ms")
    )
    return Latency(sparse / full, sparse, full, found)


def _timing(tokens: int, kept_share: float, active_share: float, steps: int) -> Timing:
    kept = max(133, round(kept_share * tokens))
    layer = Layer(tokens, kept, min(kept, max(133, round(active_share * tokens))))
    ways = {"sparse": layer.sparse, **layer.full_ways()}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(0, WARM_UP + steps, ROUND):
        for name, run in ways.items():
            for step in range(number, min(number + ROUND, WARM_UP + steps)):
                layer.turn()
                # time of this thread: what others do on the machine does not count
                started = time.thread_time_ns()
                run()
                if step >= WARM_UP:
                    spent[name].append((time.thread_time_ns() - started) / 1e6)
    best = min((name for name in ways if name != "sparse"), key=lambda name: median(spent[name]))
    return Timing(tokens, kept, layer.active, _spread(spent[best]), _spread(spent["sparse"]), best)


def _spread(times: list[float]) -> tuple[float, float, float]:
    ordered = sorted(times)
    return median(ordered), ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10]
