"""Fingerprints of records and originals: whatever changes in one place, or changes places, shows."""

import numpy as np
import pytest
from numba import njit

from rcq_cli.kernels._cpu_integer import HASH_BYTES, hash_words
from rcq_cli.kernels._cpu_vector import bytes_at


@njit
def printed(address: int, at: int, count: int, seed: int) -> int:
    return hash_words(bytes_at(address), at, count, seed, 0)


def print_of(data: np.ndarray, seed: int = 1, at: int = 0) -> int:
    return printed(data.ctypes.data, at, len(data) - at, seed)


def drawn(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, count).astype(np.uint8)


SIZES = [HASH_BYTES, 224, 256, 512 + 96, 2688, 4608]


@pytest.mark.parametrize("count", SIZES)
def test_every_bit_counts(count: int) -> None:
    data = drawn(count)
    known = print_of(data)
    seen = {known}
    for byte in range(count):
        for bit in range(8):
            data[byte] ^= 1 << bit
            seen.add(print_of(data))
            data[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * count
    assert print_of(data) == known


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("value", [0x0000, 0x8000, 0xFFFF])
def test_any_16_bit_number_in_place_of_another_shows(count: int, value: int) -> None:
    data = drawn(count)
    words, known = data.view(np.uint16), print_of(data)
    for i, old in enumerate(words.tolist()):
        words[i] = value
        assert (print_of(data) == known) == (old == value)
        words[i] = old


def test_what_changes_places_shows() -> None:
    data = drawn(4608)
    known = print_of(data)
    for piece in (2, 4, 16, 64, 256):
        parts = data.reshape(-1, piece)
        for i in range(len(parts) - 1):
            for j in {i + 1, len(parts) - 1}:
                if (parts[i] == parts[j]).all():
                    continue
                parts[[i, j]] = parts[[j, i]]
                assert print_of(data) != known, (piece, i, j)
                parts[[i, j]] = parts[[j, i]]


def test_it_reads_what_it_is_told_to() -> None:
    data = drawn(4 * HASH_BYTES)
    inner = data[HASH_BYTES : 3 * HASH_BYTES].copy()
    assert printed(data.ctypes.data, HASH_BYTES, 2 * HASH_BYTES, 7) == print_of(inner, 7)
    assert print_of(inner, 7) != print_of(inner, 8)
