"""Random numbers that no library version can change: SplitMix64 and the seeds derived for it."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from hashlib import sha256
from typing import Any, TypeVar

T = TypeVar("T")

_SIZE = 1 << 64
_MASK = _SIZE - 1


def seed(base: int, task: str, index: int, stream: str) -> int:
    """Return the seed of one stream of one sample; `task` is `niah`, `ruler.vt` and the like.

    Streams are `needle`, `haystack`, `layout/{ctx}`, `shots` and `questions`; only `layout` knows the
    context, so that needle i is the same at every context.
    """
    return digest_seed(f"rcq-gen-1|{base}|{task}|{index}|{stream}")


def digest_seed(text: str) -> int:
    """Return the first 8 bytes of the SHA-256 of `text`, big-endian."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big")


class SplitMix64:
    """The SplitMix64 generator (Steele, Lea and Flood, OOPSLA 2014), 64 bits per draw."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def next(self) -> int:
        """Return 64 uniform bits."""
        self._state = z = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        """Return a uniform integer in [0, n), without modulo bias."""
        limit = _SIZE - _SIZE % n
        while (x := self.next()) >= limit:
            pass
        return x % n

    def choice(self, items: Sequence[T]) -> T:
        """Return one of `items`."""
        return items[self.below(len(items))]

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Shuffle `items` in place (Fisher-Yates, from the back)."""
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]

    def sample(self, n: int, k: int) -> list[int]:
        """Return k distinct integers in [0, n), in the order drawn (partial Fisher-Yates, from the front)."""
        pool = list(range(n))
        for i in range(k):
            j = i + self.below(n - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:k]
