"""Presets in `profiles/` and settings files: strict tables of what a run may be given."""

import os
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from rcq_cli.errors import SpecError, UnknownEntry
from rcq_cli.registry import did_you_mean

_SHARED = ("model", "tasks", "ctx", "mode", "modes", "samples", "seed", "backend", "device", "dtype", "audit")
_TEXTS = ("preset", "out", "executor", "address")
_OPTIONS = ("task_options", "mode_options")
PRESET_KEYS = ("summary", "needs", *_SHARED, *_OPTIONS)
FILE_KEYS = ("preset", "out", "executor", "workers", "address", *_SHARED, *_OPTIONS)


def preset_names() -> tuple[str, ...]:
    """Return the presets that stand in `profiles/`, in alphabetical order."""
    found = (entry.name for entry in files("rcq_cli.profiles").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml")))


def load_preset(name: str) -> dict[str, Any]:
    """Return the preset `name`; raise `UnknownEntry` if there is none, `SpecError` for an unknown key."""
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


def load_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of `$RCQ_CONFIG`, else of the nearest `rcq.toml` or `[tool.rcq]` above `folder`."""
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
    return {}


def _settings_of(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} cannot be read", why=str(error), id="RCQ-USE-08") from error
    found: dict[str, Any] = table if path.name != "pyproject.toml" else table.get("tool", {}).get("rcq", {})
    return found


def _checked(values: Any, known: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise SpecError(f"{where} is no table of settings", id="RCQ-USE-08")
    for key in values:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise SpecError(
                f"unknown key {key!r} in {where}", fix=f"{hint}known: {', '.join(known)}", id="RCQ-USE-08"
            )
    for key in _TEXTS:
        if key in values and (not isinstance(values[key], str) or not values[key].strip()):
            raise SpecError(f"{key} in {where} is {values[key]!r:.40}", fix="give a text", id="RCQ-USE-08")
    for key in _OPTIONS:
        table = values.get(key, {})
        if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
            raise SpecError(f"{key} in {where} must map names to tables of options", id="RCQ-USE-08")
    return values
