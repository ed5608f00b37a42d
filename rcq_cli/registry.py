"""A folder of files as a registry: the file name is the entry's name."""

import importlib
import pkgutil
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from rcq_cli.errors import UnknownEntry

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Registry(Generic[T]):
    """The entries that stand in one package, one file each.

    `attribute` names what each file exposes (`MODE`, `TASK`, ...), `noun` what an entry is called in
    messages.
    """

    package: str
    attribute: str
    noun: str

    def names(self) -> tuple[str, ...]:
        """Every entry, in alphabetical order; imports none of them."""
        files = pkgutil.iter_modules(importlib.import_module(self.package).__path__)
        return tuple(sorted(f.name.replace("_", "-") for f in files if f.name[0] != "_" and not f.ispkg))

    def resolve(self, name: str) -> str:
        """Return the full name for `name` or a unique leading part of one; raise `UnknownEntry` otherwise."""
        names = self.names()
        if not isinstance(name, str):  # the Python API takes what it is given
            what = f"{self.noun}={name!r} is no name"
            raise UnknownEntry(what, fix=f"known: {', '.join(names)}", id="RCQ-USE-01")
        if name in names:
            return name
        leading = [entry for entry in names if name and entry.startswith(name)]
        if len(leading) == 1:
            return leading[0]
        raise UnknownEntry(
            f"unknown {self.noun} {name!r}",
            fix=did_you_mean(name, names) + f"known: {', '.join(names)}",
            id="RCQ-USE-01",
        )

    def load(self, name: str) -> T:
        """Import the file of `name` only and return its entry; raise `UnknownEntry` when there is none."""
        module = importlib.import_module(f"{self.package}.{self.resolve(name).replace('-', '_')}")
        entry: Any = getattr(module, self.attribute)
        return entry


def did_you_mean(name: str, known: tuple[str, ...]) -> str:
    """Return `did you mean 'x'? ` for the nearest known name, or nothing."""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}? " if near else ""
