"""Weights of the `needle` instrument model, from formulas: layer 0 copies tokens, layer 1 matches contexts.

The residual stream holds, in this order: value code, match code, eight slots for the match codes of the 1..8
previous tokens, output slot, a constant 1. Every code has norm 1, so what RMSNorm divides by is known in
closed form at every place and is multiplied into the projections: all scores are in nats.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.float64]]

CONTEXT = 8
"""K: previous tokens a position is matched by, and query heads per KV head."""
CODE_DIM = 16
"""m: dims of a match code; K * m is the head dim."""
HEAD_DIM = 128
WINDOW = 32
"""Tokens the copying layer sees."""
ROPE_THETA = 10.0
COPY_NATS = 320.0
"""A: score of the copied position in layer 0."""
MARGIN_NATS = 8.0
"""By how much a full match beats a needle with another key, in the mean, whatever `key_margin`."""
FREE_BETA = 80.0
"""Score of a full match without `key_margin`."""
LOGIT_GAIN = 40.0
OUTLIER_GAIN, OUTLIER_SHIFT = 4.0, 64.0
LARGEST_COSINE = 0.7
"""Between the free parts of two codes of one key list."""
NORM_EPS = 1e-6

VALUE = slice(0, HEAD_DIM)
MATCH = slice(HEAD_DIM, HEAD_DIM + CODE_DIM)
SLOTS = slice(MATCH.stop, MATCH.stop + CONTEXT * CODE_DIM)
NOW = slice(MATCH.start, MATCH.start + CONTEXT * CODE_DIM)
"""Match code and slots 1..7: the context up to now, in the layout of the slots."""
OUTPUT = slice(SLOTS.stop, SLOTS.stop + HEAD_DIM)
CONSTANT = OUTPUT.stop
HIDDEN = ceil((CONSTANT + 1) / 32) * 32


@dataclass(frozen=True, slots=True)
class Knobs:
    """What sets the difficulty of the instrument; None leaves a margin unset."""

    key_margin: float | None = None
    """Share of the full-match score by which a needle of the same form with another key falls short."""
    value_margin: float | None = None
    """Distance of two answer tokens of one class relative to the norm of a value."""
    outliers: int = 0
    """Key channels with a large constant and four times the spread."""
    seed: int = 0
    heads: int = 1
    """KV heads, each with its own rotation; scales the cost only."""
    layers: int = 1
    """Matching layers; scales the cost only."""

    @property
    def beta(self) -> float:
        """Score of a full match in nats."""
        return FREE_BETA if self.key_margin is None else MARGIN_NATS / self.key_margin


class Lists(NamedTuple):
    """Token ids whose codes are not independent."""

    size: int
    """Rows of the embedding."""
    silent: tuple[int, ...]
    """Ids that are never predicted."""
    stems: Sequence[int]
    """For every row the id whose match code it carries: a word is matched whatever its spelling."""
    keys: Sequence[Sequence[int]]
    """Lists of key words by their stems; the words of one list share a centre."""
    answers: Sequence[Sequence[int]]
    """Classes of answer tokens; the tokens of one class share a centre."""


class Codes(NamedTuple):
    """Codes of every token, float64; rows of `match` and `value` have norm 1."""

    match: Array
    """[vocabulary, 16]"""
    value: Array
    """[vocabulary, 128]"""
    head: Array
    """[vocabulary, 128] what the output slot is compared with."""


def draw_codes(lists: Lists, knobs: Knobs) -> Codes:
    """Draw the codes of every token from `knobs.seed`."""
    match = _unit(_stream(knobs.seed, "match").standard_normal((lists.size, CODE_DIM)))
    value = _unit(_stream(knobs.seed, "value").standard_normal((lists.size, HEAD_DIM)))
    head = value.copy()
    if knobs.key_margin is not None:
        spread = 4 * knobs.key_margin
        for number, ids in enumerate(lists.keys):
            centre, free = _family(_stream(knobs.seed, f"keys/{number}"), len(ids), CODE_DIM)
            match[list(ids)] = sqrt(1 - spread) * centre + sqrt(spread) * free
    match = match[list(lists.stems)]
    if knobs.value_margin is not None:
        spread = knobs.value_margin**2 / 2
        for number, ids in enumerate(lists.answers):
            centre, free = _family(_stream(knobs.seed, f"answers/{number}"), len(ids), HEAD_DIM)
            value[list(ids)] = sqrt(1 - spread) * centre + sqrt(spread) * free
            # with the codes themselves twins would differ by the margin squared, too little for 16 bits
            head[list(ids)] = centre + free
    head[list(lists.silent)] = 0
    return Codes(match, value, head)


def build_weights(codes: Codes, knobs: Knobs) -> dict[str, Tensor]:
    """Return the float32 attention, embedding and head weights by their names in `SmolLM3ForCausalLM`."""
    embedding = np.zeros((len(codes.match), HIDDEN))
    embedding[:, VALUE], embedding[:, MATCH], embedding[:, CONSTANT] = codes.value, codes.match, 1
    # several matching layers must not change the norm the later ones are divided by, so they write softly
    volume = 1.0 if knobs.layers == 1 else 2.0**-10
    head = np.zeros((len(codes.match), HIDDEN))
    head[:, OUTPUT] = codes.head * (LOGIT_GAIN / volume * _norm(3 + CONTEXT + volume**2))
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    for layer in range(1 + knobs.layers):
        parts = _matching_layer(knobs, layer, volume) if layer else _copying_layer(knobs)
        weights |= {f"model.layers.{layer}.self_attn.{name}.weight": part for name, part in parts.items()}
    return {name: torch.from_numpy(part.astype(np.float32)) for name, part in weights.items()}


def _copying_layer(knobs: Knobs) -> dict[str, Array]:
    """Return the projections of layer 0: head j writes the match code of the token j places back into slot j.

    Keys are one fixed vector, (a, 0) in every RoPE pair; head j asks with it turned back by j positions,
    which scores A/64 * sum_i cos((o - j) w_i) at offset o.
    """
    pairs = HEAD_DIM // 2
    size = sqrt(COPY_NATS * sqrt(HEAD_DIM) / pairs) * _norm(3)
    frequency = ROPE_THETA ** (-np.arange(pairs) / pairs)
    query = np.zeros((CONTEXT, HEAD_DIM, HIDDEN))
    output = np.zeros((HIDDEN, CONTEXT, HEAD_DIM))
    for j in range(1, CONTEXT + 1):
        turn = j * frequency
        query[j - 1, :, CONSTANT] = size * np.concatenate([np.cos(turn), -np.sin(turn)])
        slot = SLOTS.start + (j - 1) * CODE_DIM
        output[slot : slot + CODE_DIM, j - 1, :CODE_DIM] = np.eye(CODE_DIM) / knobs.heads
    key = np.zeros((HEAD_DIM, HIDDEN))
    key[:pairs, CONSTANT] = size
    value = np.zeros((HEAD_DIM, HIDDEN))
    value[:CODE_DIM, MATCH] = np.eye(CODE_DIM) * _norm(3)
    return {
        "q_proj": np.tile(query.reshape(-1, HIDDEN), (knobs.heads, 1)),
        "k_proj": np.tile(key, (knobs.heads, 1)),
        "v_proj": np.tile(value, (knobs.heads, 1)),
        "o_proj": np.tile(output.reshape(HIDDEN, -1), (1, knobs.heads)),
    }


def _matching_layer(knobs: Knobs, layer: int, volume: float) -> dict[str, Array]:
    """Return the projections of a matching layer, whose score is (beta/K) * sum_j cos(j-th tokens back).

    The key of a position is the context before it, its query the context up to now, its value the token.
    """
    scale = sqrt(knobs.beta / CONTEXT * sqrt(HEAD_DIM))
    gain = np.where(np.arange(HEAD_DIM) < knobs.outliers, OUTLIER_GAIN, 1.0)
    sign = np.where(np.arange(HEAD_DIM) % 2, -1.0, 1.0)
    shift = OUTLIER_SHIFT * scale * sqrt(CONTEXT / HEAD_DIM) * sign * (gain > 1)
    queries, keys = [], []
    for head in range(knobs.heads):
        rotation = _rotation(_stream(knobs.seed, f"rotation/{layer}/{head}"), HEAD_DIM) * scale
        query, key = np.zeros((HEAD_DIM, HIDDEN)), np.zeros((HEAD_DIM, HIDDEN))
        query[:, NOW] = rotation / gain[:, None]
        key[:, SLOTS], key[:, CONSTANT] = rotation * gain[:, None], shift
        queries.append(np.tile(query, (CONTEXT, 1)))
        keys.append(key)
    value = np.zeros((HEAD_DIM, HIDDEN))
    value[:, VALUE] = np.eye(HEAD_DIM)
    output = np.zeros((HIDDEN, HEAD_DIM))
    output[OUTPUT] = np.eye(HEAD_DIM) * (volume / (CONTEXT * knobs.heads * knobs.layers))
    return {
        "q_proj": np.concatenate(queries) * _norm(3 + CONTEXT),
        "k_proj": np.concatenate(keys) * _norm(3 + CONTEXT),
        "v_proj": np.tile(value, (knobs.heads, 1)) * _norm(3 + CONTEXT),
        "o_proj": np.tile(output, (1, CONTEXT * knobs.heads)),
    }


def _norm(squared: float) -> float:
    """Return what RMSNorm divides by where the squared norm of the residual stream is `squared`."""
    return sqrt(squared / HIDDEN + NORM_EPS)


def _family(stream: np.random.RandomState, count: int, dim: int) -> tuple[Array, Array]:
    """Return a unit centre [dim] and unit vectors [count, dim] orthogonal to it, no two of them close."""
    centre = _unit(stream.standard_normal((1, dim)))[0]
    free = np.empty((0, dim))
    while len(free) < count:
        drawn = stream.standard_normal((count, dim))
        drawn = _unit(drawn - np.outer(drawn @ centre, centre))
        drawn = drawn[(drawn @ free.T).max(axis=1, initial=-1) <= LARGEST_COSINE]
        free = np.concatenate([free, drawn[_far_apart(drawn)]])
    return centre, free[:count]


def _far_apart(rows: Array) -> list[int]:
    """Return the rows that are not close to a kept row before them."""
    close = rows @ rows.T > LARGEST_COSINE
    taken = np.zeros(len(rows), dtype=bool)
    kept: list[int] = []
    for row in range(len(rows)):
        if not taken[row]:
            kept.append(row)
            taken |= close[row]
    return kept


def _rotation(stream: np.random.RandomState, dim: int) -> Array:
    """Return a random orthogonal matrix [dim, dim]."""
    q, r = np.linalg.qr(stream.standard_normal((dim, dim)))
    return q * np.sign(np.diag(r))


def _unit(rows: Array) -> Array:
    unit: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


def _stream(seed: int, name: str) -> np.random.RandomState:
    """Return an own stream for each part; this generator's normals are frozen across NumPy versions."""
    digest = hashlib.sha256(f"rcq-needle-1|{seed}|{name}".encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, dtype=">u4").astype(np.uint32))
