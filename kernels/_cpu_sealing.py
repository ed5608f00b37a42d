"""Sealing: one block of originals becomes records, annotations and checksums.

Codes are chosen and every annotation is measured in float64 on what was stored (theory sections 1.1, 1.2 and
1.5).
"""

from typing import Any

import numpy as np

from rcq_cli.kernels._cpu_promote import block_print, bound_print, originals_print
from rcq_cli.kernels._cpu_score import MARGIN, item_bytes, widen
from rcq_cli.kernels._cpu_state import NOTES, Shape, Store, Turn
from rcq_cli.kernels._cpu_vector import (
    as_float,
    bfloat,
    bits,
    finite,
    floats_at,
    half,
    half_bits,
    loose,
    plain,
    put_float,
    put_short,
    put_word,
    word,
)
from rcq_cli.kernels._rounding import REFRESH

INFINITE = 0x7C00
"""Bits of the float16 that is infinite."""


@plain
def zero_bytes(data: Any, at: int, count: int) -> None:
    """Set `count` bytes from byte `at` on to 0."""
    for i in range(at, at + count):
        data[i] = np.uint8(0)


@plain
def half_up(x: float) -> int:
    """Return the bits of the smallest float16 that is not below `x`."""
    pattern = np.int64(half_bits(np.float32(x)))
    if np.float64(half(np.uint16(pattern))) >= x:
        return pattern
    if pattern in (0, 0x8000):
        return 1
    return pattern - 1 if pattern > 0x8000 else pattern + 1


@plain
def half_value(pattern: int) -> float:
    """Return the float64 value of float16 bits."""
    return np.float64(half(np.uint16(pattern)))


@plain
def key_scale(lo: float, hi: float, narrow: int) -> tuple[float, float]:
    """Return scale and offset of a channel with range [lo, hi], as stored: the grid covers the range."""
    ideal = (hi - lo) / 255
    if narrow:
        offset = half_value(np.int64(half_bits(np.float32(lo + 128 * ideal))))
    else:
        offset = np.float64(np.float32(lo + 128 * ideal))
    cover = max(ideal, (hi - offset) / 127.5, (offset - lo) / 128.5, 2.0**-24 if narrow else 2.0**-126)
    return step_up(cover, narrow), offset


@plain
def step_up(x: float, narrow: int) -> float:
    """Return the smallest number of the metadata dtype that is not below the positive `x`."""
    if narrow:
        return half_value(half_up(x))
    single = np.float32(x)
    if np.float64(single) < x:
        single = as_float(np.uint32(bits(single) + 1))
    return np.float64(single)


@plain
def encode_channel(rows: Any, c: int, codes: Any, scale: float, offset: float) -> bool:
    """Encode channel `c`; return whether every residual is within half a step."""
    fits = True
    for t in range(rows.shape[0]):
        k = np.float64(rows[t, c])
        code = min(max(np.rint((k - offset) / scale), -128.0), 127.0)
        codes[t, c] = np.int8(code)
        if not abs(k - (code * scale + offset)) <= scale / 2 * (1 + 2.0**-14):
            fits = False
    return fits


@finite
def key_ranges(rows: Any, lo: Any, hi: Any) -> None:
    """Write the smallest and largest number per channel."""
    lo[:] = rows[0]
    hi[:] = rows[0]
    for t in range(1, rows.shape[0]):
        for c in range(rows.shape[1]):
            lo[c], hi[c] = min(lo[c], rows[t, c]), max(hi[c], rows[t, c])


@finite
def encode_keys(rows: Any, codes: Any, scale: Any, offset: Any, worst: Any) -> None:
    """Encode all channels; write the largest residual per channel."""
    worst[:] = 0
    for t in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            k = np.float64(rows[t, c])
            code = min(max(np.rint((k - offset[c]) / scale[c]), -128.0), 127.0)
            codes[t, c] = np.int8(code)
            worst[c] = max(worst[c], abs(k - (code * scale[c] + offset[c])))


@loose
def products_of_rows(rows: Any, out: Any) -> float:
    """Write the products of all pairs of rows, `[n, n]`; return their Frobenius norm."""
    square = 0.0
    for i in range(rows.shape[0]):
        for j in range(i + 1):
            product = 0.0
            for c in range(rows.shape[1]):
                product += rows[i, c] * rows[j, c]
            out[i, j] = out[j, i] = product
            square += product * product * (1.0 if i == j else 2.0)
    return np.sqrt(square)


@plain
def spectral_norm(rows: Any) -> float:
    """Bound the largest singular value of `[n, D]` rows from above: at most n^(1/32) too large.

    lambda <= ||G^8||_F^(1/8) for the Gram matrix G of the rows (theory 5.4).
    """
    count = rows.shape[0]
    gram, power = np.empty((count, count)), np.empty((count, count))
    norm = products_of_rows(rows, gram)
    if not 0 < norm < np.inf:
        return np.sqrt(norm)
    log = np.log(norm)
    for i in range(1, 4):
        for j in range(count):
            for k in range(count):
                gram[j, k] /= norm
        norm = products_of_rows(gram, power)
        log += np.log(norm) / 2.0**i
        gram, power = power, gram
    return np.exp(log / 2) * (1 + 1e-6)


@finite
def key_norms(rows: Any, codes: Any, scale: Any, offset: Any, left: Any) -> tuple[float, float, float]:
    """Return the squares of the largest ||k - k'||, || |s * code| + |z| || and ||k|| over the tokens.

    The rows k - k' go to `left`.
    """
    residual, reach, norm = 0.0, 0.0, 0.0
    for t in range(rows.shape[0]):
        a, b, d = 0.0, 0.0, 0.0
        for c in range(rows.shape[1]):
            k, part = np.float64(rows[t, c]), codes[t, c] * scale[c]
            left[t, c] = k - (part + offset[c])
            a += left[t, c] ** 2
            b += (abs(part) + abs(offset[c])) ** 2
            d += k * k
        residual, reach, norm = max(residual, a), max(reach, b), max(norm, d)
    return residual, reach, norm


@plain
def seal_keys(shape: Shape, tiers: Store, at: int, rows: Any, notes: Any, left: Any) -> tuple[bool, float]:
    """Write the key record at byte `at`, rk and kappa to `notes`, and the rows K - K' to `left`.

    Return whether the block is raw, and max ||k||.
    """
    dim, padded = shape.dim, shape.padded
    codes = np.empty((shape.block, dim), np.int8)
    scale, offset, worst = np.empty(dim), np.empty(dim), np.empty(dim)
    lo, hi = np.empty(dim, np.float32), np.empty(dim, np.float32)
    key_ranges(rows, lo, hi)
    raw = False
    for c in range(dim):
        scale[c], offset[c] = key_scale(np.float64(lo[c]), np.float64(hi[c]), shape.narrow_keys)
    encode_keys(rows, codes, scale, offset, worst)
    for c in range(dim):
        attempts = 0
        while not worst[c] <= scale[c] / 2 * (1 + 2.0**-14) and attempts < 4:
            # a tie that rounding decided the other way: one step wider covers it
            scale[c] = step_up(scale[c] * (1 + 2.0**-23), shape.narrow_keys)
            worst[c] = 0.0 if encode_channel(rows, c, codes, scale[c], offset[c]) else np.inf
            attempts += 1
        raw |= not (
            worst[c] <= scale[c] / 2 * (1 + 2.0**-14) and scale[c] < np.inf and abs(offset[c]) < np.inf
        )
    residual, reach, norm = key_norms(rows, codes, scale, offset, left)
    notes[0], notes[1] = half_up(np.sqrt(residual) * MARGIN), half_up(np.sqrt(reach) * MARGIN)
    zero_bytes(tiers.keys, at, shape.key_bytes)
    for t in range(shape.block):
        for c in range(dim):
            tiers.keys[at + (c >> 1) * 2 * padded + 2 * t + (c & 1)] = np.uint8(codes[t, c])
    meta = at + padded * dim
    if not raw:
        for c in range(dim):
            if shape.narrow_keys:
                put_short(tiers.keys, meta + 2 * c, half_bits(np.float32(scale[c])))
                put_short(tiers.keys, meta + 2 * (dim + c), half_bits(np.float32(offset[c])))
            else:
                put_float(tiers.keys, meta + 4 * c, np.float32(scale[c]))
                put_float(tiers.keys, meta + 4 * (dim + c), np.float32(offset[c]))
    return raw, np.sqrt(norm)


@finite
def group_ranges(row: Any, chunk: int, lo: Any, hi: Any) -> tuple[float, float]:
    """Write the smallest and largest number per group of channels; return those of all channels."""
    lowest, highest = row[0], row[0]
    for g in range(len(lo)):
        low, high = row[g * chunk], row[g * chunk]
        for c in range(g * chunk, (g + 1) * chunk):
            low, high = min(low, row[c]), max(high, row[c])
        lo[g], hi[g] = low, high
        lowest, highest = min(lowest, low), max(highest, high)
    return np.float64(lowest), np.float64(highest)


@finite
def encode_group(
    row: Any, codes: Any, first: int, chunk: int, s: float, z: float, base: float, out: Any
) -> Any:
    """Encode a group of one token.

    Return its squared residual and absolute summands, and whether a code is not 0.
    """
    residual, magnitude, used = 0.0, 0.0, False
    inverse = 1 / s if s > 0 else 0.0
    for c in range(first, first + chunk):
        v = np.float64(row[c])
        code = min(max(np.rint((v - z) * inverse), 0.0), 15.0)
        codes[c] = np.uint32(code)
        left = v - (code * s + z)
        out[c] = left
        residual += left * left
        magnitude += (base + code * s) ** 2
        used |= code > 0
    return residual, magnitude, used


@plain
def seal_values(
    shape: Shape, tiers: Store, at: int, rows: Any, h: int, notes: Any, residuals: Any
) -> tuple[bool, float]:
    """Write the value record at byte `at`, eta, rv, magnitude and step to `notes`, and the residual rows.

    Returns whether the block is raw, and its rv.
    """
    dim, padded, groups, pairs = shape.dim, shape.padded, shape.groups, shape.padded // 2
    chunk, meta = dim // groups, at + padded * dim // 2
    count = padded // 8 * dim
    words, codes = np.empty(count, np.uint32), np.empty(dim, np.uint32)
    for i in range(count):
        words[i] = np.uint32(0)
    lo, hi = np.empty(groups, np.float32), np.empty(groups, np.float32)
    zero_bytes(tiers.values, at, shape.value_bytes)
    eta, magnitude, radius, step, raw = 0.0, 0.0, 0.0, 0.0, False
    for t in range(shape.block):
        lowest, highest = group_ranges(rows[t], chunk, lo, hi)
        low, unit, a, b = 0.0, 0.0, 0.0, 0.0
        if shape.two_level:
            low = -half_value(half_up(-lowest))
            unit = half_value(half_up(max((highest - low) / 255, 2.0**-24)))
            put_short(tiers.values, meta + 2 * t, half_bits(np.float32(low)))
            put_short(tiers.values, meta + 2 * (padded + t), half_bits(np.float32(unit)))
            raw |= not (abs(low) < np.inf and unit < np.inf)
        residual, summands = 0.0, 0.0
        for g in range(groups):
            if shape.two_level:
                a = min(max(np.floor((lo[g] - low) / unit), 0.0), 255.0)
                b = min(max(np.ceil((hi[g] - low) / unit), 0.0), 255.0)
                s, z, base = (b - a) * unit / 15, low + a * unit, abs(low) + a * unit
            else:
                s = half_value(half_up(max((np.float64(hi[g]) - np.float64(lo[g])) / 15, 2.0**-24)))
                z = half_value(np.int64(half_bits(lo[g])))
                base = abs(z)
                put_short(tiers.values, meta + 2 * ((groups + g) * padded + t), half_bits(np.float32(z)))
                raw |= not (s < np.inf and abs(z) < np.inf)
            one, two, used = encode_group(rows[t], codes, g * chunk, chunk, s, z, base, residuals[t])
            # a group whose codes are all 0 keeps scale 0, so that `step` bounds every scale
            step = max(step, s if used else 0.0)
            if shape.two_level:
                marks = meta + 4 * padded + g * padded + t
                tiers.values[marks] = np.uint8(a)
                tiers.values[marks + groups * padded] = np.uint8(b if used else a)
            elif used:
                put_short(tiers.values, meta + 2 * (g * padded + t), half_bits(np.float32(s)))
            residual, summands = residual + one, summands + two
        eta, magnitude = max(eta, residual), max(magnitude, summands)
        distance = 0.0
        for c in range(dim):
            distance += (np.float64(rows[t, c]) - tiers.centre[h * dim + c]) ** 2
        radius = max(radius, distance)
        p, shift = (t, 0) if t < pairs else (t - pairs, 16)
        for c in range(dim):
            words[p // 4 * dim + c] |= codes[c] << np.uint32(shift + 4 * (p % 4))
    for i in range(count):
        put_word(tiers.values, at + 4 * i, words[i])
    radius = np.sqrt(radius)
    notes[2], notes[3] = half_up(np.sqrt(eta) * MARGIN), half_up(radius * MARGIN)
    notes[4], notes[5] = half_up(np.sqrt(magnitude) * MARGIN), half_up(step)
    return raw, radius


@loose
def around(rows: Any, centre: Any, first: int) -> Any:
    """Return float64 rows less the vector at `centre[first:]`."""
    result = np.empty(rows.shape)
    for t in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            result[t, c] = np.float64(rows[t, c]) - centre[first + c]
    return result


@plain
def seal_block(shape: Shape, turn: Turn, tiers: Store, h: int, j: int, count: int, residuals: Any) -> None:
    """Seal block `j` of `count` of KV head `h` as block `turn.blocks + j`: records, annotations, checksums.

    The rows V - V' go to `residuals` `[Hkv, count, S, D]`.
    """
    b, dim, size_ = turn.blocks + j, shape.dim, item_bytes(shape)
    rows, notes = np.empty((shape.block, dim), np.float32), np.zeros(NOTES, np.int64)
    left, first = np.empty((shape.block, dim)), (h * count + j) * shape.block * dim
    flat, source = floats_at(rows.ctypes.data), h * turn.original_pitch + j * shape.block * dim * size_
    widen(tiers.original_keys, source, shape.kind, shape.block * dim, flat, 0)
    key_at, value_at = h * turn.key_pitch + b * shape.key_bytes, h * turn.value_pitch + b * shape.value_bytes
    raw, norm = seal_keys(shape, tiers, key_at, rows, notes, left)
    if turn.check_pitch:  # mode naive bounds nothing
        notes[6] = half_up(spectral_norm(left) * MARGIN)
    widen(tiers.original_values, source, shape.kind, shape.block * dim, flat, 0)
    raw_values, radius = seal_values(shape, tiers, value_at, rows, h, notes, left)
    if turn.check_pitch:
        notes[7] = half_up(spectral_norm(left) * MARGIN)
        notes[8] = half_up(spectral_norm(around(rows, tiers.centre, h * dim)) * MARGIN)
    raw = raw or raw_values
    for i in range(NOTES):
        raw |= notes[i] >= INFINITE
    for i in range(NOTES):
        # read only if the flag is lost: then nothing is known of the block
        tiers.notes[h * turn.note_pitch + NOTES * b + i] = np.uint16(INFINITE if raw else notes[i])
    if raw:
        zero_bytes(tiers.keys, key_at + shape.padded * dim, shape.key_bytes - shape.padded * dim)
        codes = shape.padded * dim // 2
        zero_bytes(tiers.values, value_at + codes, shape.value_bytes - codes)
    for t in range(shape.block):
        for c in range(dim):
            residuals[first + t * dim + c] = 0.0 if raw else left[t, c]
    tiers.raw[h * turn.raw_pitch + b] = raw
    bounds, checks = h * turn.raw_bound_pitch + 2 * b, h * turn.check_pitch + 4 * b
    tiers.raw_bounds[bounds], tiers.raw_bounds[bounds + 1] = norm * MARGIN, radius * MARGIN
    for part in range(4 if turn.check_pitch else 0):  # mode naive checks nothing
        if part < 2:
            tiers.checks[checks + part] = block_print(shape, turn, tiers, h, b, part, 0)
        else:  # originals are those of this call
            own = originals_print(shape, turn, tiers, h, j, part, 0)
            tiers.checks[checks + part] = own + bound_print(tiers, bounds, part)


@plain
def original(shape: Shape, data: Any, at: int) -> float:
    """Return the number of an original at byte `at`."""
    if shape.kind == 0:
        return np.float64(as_float(word(data, at)))
    pattern = np.uint16(data[at] | np.uint16(data[at + 1]) << np.uint16(8))
    return np.float64(bfloat(pattern) if shape.kind == 1 else half(pattern))


@loose
def add_to_gram(recent: Any, at: int, dim: int, row: Any) -> float:
    """Add the outer product of a row to the matrix at `recent[at:]`; return its squared Frobenius norm."""
    square = 0.0
    for i in range(dim):
        for j in range(dim):
            cell = recent[at + i * dim + j] + row[i] * row[j]
            recent[at + i * dim + j] = cell
            square += cell * cell
    return square


@plain
def append_token(shape: Shape, turn: Turn, tiers: Store, recent: Any, h: int, token: int) -> bool:
    """Store the rows of one token of KV head `h` as number `token` of the originals, and at the tail's end.

    Updates the spectral bound of the values: `recent` `[Hkv, D, D]` and its norms at `fields[Hkv:]`; returns
    whether the bound at `fields` needs a refresh.
    """
    dim, size_ = shape.dim, shape.dim * item_bytes(shape)
    tail = (h * turn.tail_pitch + turn.tail) * size_
    values = tail + shape.heads * turn.tail_pitch * size_
    for i in range(size_):
        key, value = tiers.source[h * size_ + i], tiers.output[h * size_ + i]
        tiers.tail[tail + i], tiers.tail[values + i] = key, value
        if turn.original_pitch:
            place = h * turn.original_pitch + token * size_ + i
            tiers.original_keys[place], tiers.original_values[place] = key, value
    if not turn.original_pitch:  # mode naive bounds nothing
        return False
    row = np.empty(dim)
    for c in range(dim):
        v = original(shape, tiers.output, h * size_ + c * item_bytes(shape))
        row[c] = v - tiers.centre[h * dim + c]
    norm = np.sqrt(add_to_gram(recent, h * dim * dim, dim, row)) * (1 + 2.0**-30)
    tiers.fields[shape.heads + h] = norm
    return not norm <= REFRESH * tiers.fields[h]
