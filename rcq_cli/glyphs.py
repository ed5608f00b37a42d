"""What a stream can show: its width, colours and characters, with an ASCII twin for every glyph."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters beyond letters and digits that rcq prints; the defaults are the ASCII twins."""

    line: str = "-"
    """Rule under a table's header."""
    times: str = "x"
    """Between a ratio and what it multiplies."""
    plus_minus: str = "+/-"
    """Between an estimate and its half width."""
    ellipsis: str = "..."
    """Work that goes on."""
    dot: str = "-"
    """Between the parts of a title."""
    spark: str = "_.:-=+*#"
    """Eight levels, low to high, of a line of bars."""


UNICODE = Glyphs(
    line="\u2500",
    times="\u00d7",
    plus_minus="\u00b1",
    ellipsis="\u2026",
    dot="\u00b7",
    spark="".join(map(chr, range(0x2581, 0x2589))),
)


def encodable(text: str, encoding: str) -> bool:
    """Return whether `encoding` has every character of `text`; an unknown encoding has none beyond ASCII."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def glyphs_for(encoding: str, ascii_only: bool = False) -> Glyphs:
    """Return the glyphs that `encoding` can write, each one replaced by its ASCII twin where it cannot."""
    if ascii_only:
        return Glyphs()
    fancy = {f.name: getattr(UNICODE, f.name) for f in fields(Glyphs)}
    return Glyphs(**{name: glyph for name, glyph in fancy.items() if encodable(glyph, encoding)})


@dataclass(frozen=True, slots=True)
class View:
    """How to write to one stream."""

    width: int | None
    """Columns to stay within; None where nothing limits a line (a file, a pipe)."""
    color: bool
    glyphs: Glyphs
    terminal: bool
    """A person watches: live progress is welcome."""


def view_of(
    stream: TextIO, *, color: str = "auto", ascii_only: bool = False, env: Mapping[str, str] = os.environ
) -> View:
    """Describe `stream`.

    Colour: the flag, RCQ_COLOR, NO_COLOR, FORCE_COLOR, then whether a colour terminal is there. Width:
    RCQ_WIDTH, the terminal's own, COLUMNS, else none.
    """
    terminal = stream.isatty()
    return View(
        width=_width(stream, terminal, env),
        color=_wants_color(color, terminal, env),
        glyphs=glyphs_for(stream.encoding or "ascii", ascii_only),
        terminal=terminal and env.get("TERM") != "dumb",
    )


def _wants_color(flag: str, terminal: bool, env: Mapping[str, str]) -> bool:
    choice = flag if flag != "auto" else env.get("RCQ_COLOR", "auto")
    if choice in ("always", "never"):
        return choice == "always"
    if env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return terminal and env.get("TERM") != "dumb"


def _width(stream: TextIO, terminal: bool, env: Mapping[str, str]) -> int | None:
    asked = _positive(env.get("RCQ_WIDTH"))
    if asked:
        return asked
    if terminal:
        try:
            return os.get_terminal_size(stream.fileno()).columns or _positive(env.get("COLUMNS")) or 80
        except (OSError, ValueError):
            return _positive(env.get("COLUMNS")) or 80
    return _positive(env.get("COLUMNS"))


def _positive(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and int(text) > 0 else None
