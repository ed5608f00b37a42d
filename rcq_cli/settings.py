"""Presets in `profiles/` and settings files: strict tables of what a run may be given."""

import os
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from rcq_cli.errors import SpecError, UnknownEntry
from rcq_cli.registry import did_you_mean
from rcq_cli.spec import MOST_SAMPLES

_SHARED = ("model", "tasks", "ctx", "mode", "modes", "samples", "seed", "backend", "device", "dtype", "audit")
_OPTIONS = ("task_options", "mode_options")
PRESET_KEYS = ("summary", "needs", *_SHARED, *_OPTIONS)
FILE_KEYS = ("preset", "out", "executor", "workers", "address", *_SHARED, *_OPTIONS)


class Settings(NamedTuple):
    """What a preset or a settings file gives, every value of the kind its key has."""

    values: Mapping[str, Any]
    where: str
    """What a message calls the place: `preset ci`, or the path of a file."""


class Kind(NamedTuple):
    """What a key may hold."""

    holds: Callable[[Any], bool]
    allowed: str


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_whole(value: Any, least: int, most: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _one_or_more(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: holds(value) or (isinstance(value, list) and bool(value) and all(map(holds, value)))


def _names(value: Any) -> bool:
    return isinstance(value, str) and all(part.strip() for part in value.split(","))


def _sizes(value: Any) -> bool:
    return _names(value) or _is_whole(value, 1, float("inf"))


def _table_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(holds, value.values()))


def _samples(value: Any) -> bool:
    return _is_whole(value, 1, MOST_SAMPLES)


_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("summary", "preset", "out", "executor", "address"), Kind(_is_text, "a text in quotes")),
    **dict.fromkeys(("model", "mode", "backend", "device", "dtype"), Kind(_is_text, "a name in quotes")),
    **dict.fromkeys(("tasks", "modes", "needs"), Kind(_one_or_more(_names), "a name, or a list of names")),
    "ctx": Kind(_one_or_more(_sizes), 'a number of tokens, or a list of them: ["8k", 32768]'),
    "samples": Kind(
        lambda value: _samples(value) or _table_of(_samples)(value),
        f"a whole number from 1 to {MOST_SAMPLES}, or a table of them: {{niah = 22, ppl = 4}}",
    ),
    "seed": Kind(lambda value: _is_whole(value, 0, 2**63 - 1), "a whole number from 0 to 2^63 - 1"),
    "workers": Kind(lambda value: _is_whole(value, 1, float("inf")), "a whole number from 1"),
    "audit": Kind(_is_share, "a share from 0 to 1"),
    **dict.fromkeys(
        _OPTIONS, Kind(_table_of(lambda entry: isinstance(entry, dict)), "names with tables of options")
    ),
}


def preset_names() -> tuple[str, ...]:
    """Return the presets that stand in `profiles/`, in alphabetical order."""
    found = (entry.name for entry in files("rcq_cli.profiles").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml")))


def load_preset(name: str) -> Settings:
    """Return the preset `name`.

    Raises `UnknownEntry` if there is none, `SpecError` for an unknown key and a value of another kind.
    """
    names = preset_names()
    if name not in names:
        known = f"known: {', '.join(names)}"
        raise UnknownEntry(f"unknown preset {name!r}", fix=did_you_mean(name, names) + known, id="RCQ-USE-01")
    import yaml

    try:
        values = yaml.safe_load(files("rcq_cli.profiles").joinpath(f"{name}.yaml").read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise SpecError(f"preset {name} cannot be read", why=str(error), id="RCQ-USE-08") from error
    return _checked(values or {}, PRESET_KEYS, f"preset {name}")


def load_settings(folder: Path) -> Settings:
    """Return the settings of `$RCQ_CONFIG`, else of the nearest `rcq.toml` or `[tool.rcq]` above `folder`.

    Raises `SpecError` for a file that cannot be read, an unknown key and a value of another kind.
    """
    named = os.environ.get("RCQ_CONFIG")
    if named:
        path = Path(named)
        if not path.is_file():
            raise SpecError(f"RCQ_CONFIG names {named!r}, which is no file", id="RCQ-USE-08")
        return _checked(_settings_of(path), FILE_KEYS, str(path))
    for parent in (folder, *folder.parents):
        for path in (parent / "rcq.toml", parent / "pyproject.toml"):
            values = _settings_of(path) if path.is_file() else {}
            if values:
                return _checked(values, FILE_KEYS, str(path))
    return Settings({}, "")


def _settings_of(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} cannot be read", why=str(error), id="RCQ-USE-08") from error
    for name in ("tool", "rcq") if path.name == "pyproject.toml" else ():
        found = found.get(name, {})
        if not isinstance(found, dict):
            raise _wrong(name, found, str(path), "a table: [tool.rcq]")
    return found


def _checked(values: Any, known: tuple[str, ...], where: str) -> Settings:
    if not isinstance(values, dict):
        raise SpecError(f"{where} is no table of settings", id="RCQ-USE-08")
    for key, value in values.items():
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise SpecError(
                f"unknown key {key!r} in {where}", fix=f"{hint}known: {', '.join(known)}", id="RCQ-USE-08"
            )
        if not _KINDS[key].holds(value):
            raise _wrong(key, value, where, _KINDS[key].allowed)
    return Settings(values, where)


def _wrong(key: str, value: Any, where: str, allowed: str) -> SpecError:
    return SpecError(f"{key} in {where} is {value!r:.60}", fix=f"allowed: {allowed}", id="RCQ-USE-08")
