"""Reading what R stores lazily: an index (`.rdx`) and a file of compressed objects (`.rdb`), without R."""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from typing import Any

_NULL, _SYMBOL, _PAIRS, _CHARS = 254, 1, 2, 9
_LOGICALS, _INTEGERS, _REALS, _STRINGS, _LIST, _REFERENCE = 10, 13, 14, 16, 19, 255
_HAS_ATTRIBUTES, _HAS_TAG = 0x200, 0x400


def read_strings(index: bytes, objects: bytes) -> dict[str, list[str]]:
    """Return every character vector of a lazy-load pair by its name; `ValueError` for anything unknown."""
    places = _Reader(_unpacked(index)).item()["variables"]
    found = {}
    for name, (offset, length) in places.items():
        content = _Reader(_chunk(objects[offset : offset + length])).item()
        if isinstance(content, list) and all(isinstance(text, str) for text in content):
            found[name] = content
    return found


def _unpacked(raw: bytes) -> bytes:
    if raw[:2] == b"\x1f\x8b":
        return zlib.decompress(raw, wbits=31)
    return zlib.decompress(raw) if raw[:1] == b"\x78" else raw


def _chunk(raw: bytes) -> bytes:
    """Return one object: four bytes of length, then a zlib stream, or a letter and another kind of stream."""
    body = raw[4:]
    if body[:1] == b"2":
        return bz2.decompress(body[1:])
    if body[:1] == b"Z":
        return lzma.decompress(body[1:])
    return body[1:] if body[:1] == b"0" else zlib.decompress(body)


class _Reader:
    """One value in R's serialisation, XDR form, versions 2 and 3."""

    def __init__(self, raw: bytes) -> None:
        if raw[:2] != b"X\n":
            raise ValueError("no XDR serialisation of R")
        self._raw, self._at = raw, 2
        self._references: list[Any] = []
        version, _, _ = (self._int() for _ in range(3))
        if version == 3:
            self._take(self._int())  # the name of the encoding

    def item(self) -> Any:
        """Return the next value: strings and numbers as lists, named lists as dicts."""
        flags = self._int()
        kind = flags & 0xFF
        if kind == _NULL:
            return None
        if kind == _REFERENCE:
            return self._references[(flags >> 8) - 1]
        if kind == _SYMBOL:
            self._references.append(self.item())
            return self._references[-1]
        if kind == _PAIRS:
            return self._pairs(flags)
        if kind == _CHARS:
            length = self._int()
            return "" if length < 0 else self._take(length).decode("utf-8", "replace")
        return self._vector(kind, named=bool(flags & _HAS_ATTRIBUTES))

    def _pairs(self, flags: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while flags & 0xFF == _PAIRS:
            if flags & _HAS_ATTRIBUTES:
                self.item()
            tag = self.item() if flags & _HAS_TAG else str(len(found))
            found[tag] = self.item()
            flags = self._int()
        return found

    def _vector(self, kind: int, *, named: bool) -> Any:
        length = self._int()
        if kind in (_LOGICALS, _INTEGERS):
            values: list[Any] = list(struct.unpack(f">{length}i", self._take(4 * length)))
        elif kind == _REALS:
            values = list(struct.unpack(f">{length}d", self._take(8 * length)))
        elif kind in (_STRINGS, _LIST):
            values = [self.item() for _ in range(length)]
        else:
            raise ValueError(f"R type {kind}")
        names = (self.item() or {}).get("names") if named else None
        return dict(zip(names, values, strict=True)) if names else values

    def _int(self) -> int:
        return int.from_bytes(self._take(4), "big", signed=True)

    def _take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._raw):
            raise ValueError("the stream ends too early")
        return self._raw[start : self._at]
