"""Which source a `--model` value means: a built-in name, a folder, a GGUF file or a hub id."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from rcq_cli.errors import SpecError, UnknownEntry
from rcq_cli.registry import Registry, did_you_mean

SOURCES: Registry[Any] = Registry("rcq_cli.models", "SOURCE", "model")
PREFIXES = {"hf": "huggingface", "dir": "folder", "gguf": "gguf"}
"""What forces a kind of source in front of a reference."""

_HUB_ID = re.compile(r"(?:[\w.-]+/)?[\w.-]+(?:@[\w./-]+)?", re.ASCII)


class Resolved(NamedTuple):
    """A source and what to hand to its `load`."""

    source: Any
    """A `Source`."""
    reference: str


def built_in() -> tuple[str, ...]:
    """Return the models that have a name of their own."""
    return tuple(name for name in SOURCES.names() if name not in PREFIXES.values())


def resolve(reference: str) -> Resolved:
    """Return the source of `reference` and what to load from it; nothing is loaded or looked up on the net.

    A built-in name wins (knobs may follow a colon), then an existing folder, then a file that ends in .gguf,
    then the form of a hub id. `hf:`, `dir:` and `gguf:` force one. Raises `UnknownEntry` for a name close to
    a built-in one and `SpecError` for what has no meaning.
    """
    prefix, colon, rest = reference.partition(":")
    if colon and prefix in PREFIXES:
        return Resolved(SOURCES.load(PREFIXES[prefix]), _named(rest, reference))
    if prefix in built_in():
        return Resolved(SOURCES.load(prefix), reference)
    return Resolved(SOURCES.load(_kind(reference)), reference)


def _named(rest: str, reference: str) -> str:
    if not rest:
        raise SpecError(f"model {reference!r}", fix="a path or an id must follow the prefix", id="RCQ-USE-21")
    return rest


def _kind(reference: str) -> str:
    """Return the source of a reference that is no built-in name."""
    path = Path(reference).expanduser()
    if reference and path.is_dir():
        return "folder"
    if path.suffix.lower() == ".gguf":
        return "gguf"
    near = did_you_mean(reference.partition(":")[0], built_in())
    if "/" not in reference and near:
        raise UnknownEntry(
            f"unknown model {reference!r}",
            fix=near + f"built in: {', '.join(built_in())}; hf:{reference} names a model of the hub",
            id="RCQ-USE-01",
        )
    if not _HUB_ID.fullmatch(reference) or reference.startswith((".", "/")):
        raise SpecError(
            f"model {reference!r}: no such folder or file, and no hub id",
            fix=f"built in: {', '.join(built_in())}; else a folder, a .gguf file or OWNER/NAME",
            id="RCQ-USE-21",
        )
    return "huggingface"
