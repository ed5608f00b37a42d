"""Damage in memory: a bit of either tier changes behind the back of the cache.

Every case returns one word: `exact` (what came back is certified within its bound, or exact), `error` (a
`BrokenRun` says what is damaged) or `wrong`.
"""

import random

import torch

from rcq_cli.api import LayerCache
from rcq_cli.errors import BrokenRun

LAYERS = (
    ("certified", "reference"),
    ("certified", "cpu"),
    ("certified-paper", "reference"),
    ("recas-certified", "reference"),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS, HEADS, GROUP, DIM = 323, 2, 2, 32
METADATA = ("_scale", "_offset", "_low", "_step", "_marks")


class Layer:
    """A filled cache, the queries of a few steps, and what they must give."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        gen = torch.Generator().manual_seed(seed)
        mode, self.backend = LAYERS[seed % len(LAYERS)]
        dtype = DTYPES[seed // len(LAYERS) % len(DTYPES)]
        keys, values = (torch.randn(HEADS, TOKENS, DIM, generator=gen).to(dtype) for _ in "kv")
        self.queries = [(2 * torch.randn(HEADS * GROUP, DIM, generator=gen)).to(dtype) for _ in range(3)]
        self.truth = [attention(query, keys, values) for query in self.queries]
        self.cache = LayerCache(
            mode, query_heads=HEADS * GROUP, kv_heads=HEADS, head_dim=DIM, dtype=dtype, backend=self.backend
        )
        self.cache.prefill(keys, values)
        self.step(0)  # recas-certified evicts with the first query

    @property
    def store(self):
        return self.cache._state.cache

    def step(self, number: int) -> bool:
        """Attend once; return whether the output lies within the bound that came with it."""
        step = self.cache.attend(self.queries[number])
        error = (step.output.double() - self.truth[number]).norm(dim=-1)
        return bool((error <= step.certificate.total_bound * (1 + 1e-9) + 1e-13).all())

    def flip(self, rows: torch.Tensor) -> None:
        """Change one bit of one row of `[Hkv, n, ...]`."""
        row = rows[self.rng.randrange(rows.shape[0]), self.rng.randrange(rows.shape[1])]
        data = row.view(-1).view(torch.uint8)
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)

    def outcome(self) -> str:
        """Attend a few times, then verify as the engine does after a sample."""
        sound = True
        try:
            for number in range(len(self.queries)):
                sound &= self.step(number)
            self.cache.verify()
        except BrokenRun as error:
            return "error" if error.what and error.fix else "wrong"
        return "exact" if sound else "wrong"


def attention(query, keys, values):
    """Softmax attention in float64, `[Hq, D]`."""
    q, k, v = query.double(), keys.double(), values.double()
    k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
    return (torch.softmax((k @ q[:, :, None])[..., 0] * q.shape[-1] ** -0.5, -1)[:, None] @ v)[:, 0]


def _slabs(layer, *, metadata):
    found = layer.store.blocks
    if layer.backend == "cpu":  # one record holds both
        return list(found.values())
    return [slab for name, slab in found.items() if name.endswith(METADATA) == metadata]


def changed_code(seed, _folder):
    layer = Layer(seed)
    layer.flip(layer.rng.choice(_slabs(layer, metadata=False)).rows)
    return layer.outcome()


def changed_metadata(seed, _folder):
    layer = Layer(seed)
    layer.flip(layer.rng.choice(_slabs(layer, metadata=True)).rows)
    return layer.outcome()


def changed_annotation(seed, _folder):
    layer = Layer(seed)
    layer.flip(layer.store.annotations.rows)
    return layer.outcome()


def changed_original(seed, _folder):
    layer = Layer(seed)
    sealed = layer.store.block_count * layer.store.fmt.block
    layer.flip(layer.rng.choice(layer.store.originals).rows[:, :sealed])
    return layer.outcome()


def missing_original(seed, _folder):
    """A whole block of tier 2 reads as zeros, as a lost page does."""
    layer = Layer(seed)
    size = layer.store.fmt.block
    start = size * layer.rng.randrange(layer.store.block_count)
    layer.rng.choice(layer.store.originals).data[layer.rng.randrange(HEADS), start : start + size] = 0
    return layer.outcome()


def exchanged_originals(seed, _folder):
    """Two blocks of tier 2 change places, as with a wrong page table."""
    layer = Layer(seed)
    size = layer.store.fmt.block
    slab, head = layer.rng.choice(layer.store.originals).data, layer.rng.randrange(HEADS)
    a, b = (size * place for place in layer.rng.sample(range(layer.store.block_count), 2))
    kept = slab[head, a : a + size].clone()
    slab[head, a : a + size] = slab[head, b : b + size]
    slab[head, b : b + size] = kept
    return layer.outcome()


def changed_tail(seed, _folder):
    layer = Layer(seed)
    layer.flip(layer.store.tail[seed % 2, :, : layer.store.tail_tokens])
    return layer.outcome()


def changed_centre(seed, _folder):
    layer = Layer(seed)
    layer.flip(layer.store.centre[:, None])
    return layer.outcome()


def changed_spectrum(seed, _folder):
    """A bit above the last ten of a bound on all values or all their residuals, or of what it is made of."""
    layer = Layer(seed)
    bound = layer.rng.choice((layer.store.value_spectrum, layer.store.residual_spectrum))
    numbers = layer.rng.choice([part for part in vars(bound).values() if part.count_nonzero()])
    words = numbers.view(torch.int64).view(-1)
    places = words.nonzero().flatten().tolist()
    words[layer.rng.choice(places)] ^= 1 << layer.rng.randrange(30, 62)
    return layer.outcome()


CASES = {
    "tier 1: code": changed_code,
    "tier 1: scale or offset": changed_metadata,
    "tier 1: annotation": changed_annotation,
    "tier 1: open tail": changed_tail,
    "tier 1: mean of the values": changed_centre,
    "tier 1: spectral bound": changed_spectrum,
    "tier 2: bit": changed_original,
    "tier 2: block missing": missing_original,
    "tier 2: blocks exchanged": exchanged_originals,
}
