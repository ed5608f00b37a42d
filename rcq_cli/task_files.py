"""Tasks that are files of the user: `--task ./mine.yaml` and `--task ./mine.py`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from rcq_cli.errors import SpecError, UnknownEntry
from rcq_cli.protocols import Task
from rcq_cli.registry import Registry
from rcq_cli.spec import is_file_name

_NEEDED = ("samples", "score", "Options", "metric", "score_key")
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "parts": ("",),
        "prompt_set": "none",
        "further_metrics": None,
        "higher_is_better": True,
        "minimum_ctx": 64,
        "default_samples": MappingProxyType({"": 20}),
        "margins": MappingProxyType({"": 0.15, "smoke": 0.15, "ci": 0.05, "release": 0.02}),
    }
)
_named: set[Path] = set()
"""Python tasks that the command line of this process named; no other one is ever run."""
_FAULTS = (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError, LookupError, OSError)


def name_on_command_line(task: str) -> None:
    """Allow the Python file `task` to be run: its user has typed its name. Other names need no leave."""
    if is_file_name(task):
        _named.add(Path(task).expanduser().resolve())


@dataclass(frozen=True, slots=True)
class TaskRegistry(Registry[Task]):
    """The built-in tasks by name, and any file by its path."""

    def resolve(self, name: str) -> str:
        """Return the full name, or the absolute path of a file; raise `UnknownEntry` without either."""
        if not is_file_name(name):
            return Registry.resolve(self, name)
        path = Path(name).expanduser()
        if not path.is_file():
            raise UnknownEntry(
                f"task file {name!r} does not exist", fix="give a .yaml or .py file", id="RCQ-USE-01"
            )
        return str(path.resolve())

    def load(self, name: str) -> Task:
        """Return the task of a name or file; raise `SpecError` for a file that gives none.

        A Python file is run only when the command line named it (`name_on_command_line`).
        """
        if not is_file_name(name):
            return Registry.load(self, name)
        path = Path(self.resolve(name))
        if path.suffix == ".py" and path not in _named:
            raise SpecError(
                f"Python task {path.name} was not named on the command line",
                why="a stored run or a settings file names it, and code from there is never run",
                fix=f"--task {path} runs it; its stored runs can be compared with --margin X",
                id="RCQ-USE-26",
            )
        task: Task = _load(path, sha256(path.read_bytes()).hexdigest())
        return task


@lru_cache(maxsize=8)
def _load(path: Path, digest: str) -> Any:
    if path.suffix == ".py":
        return _completed(_run(path, digest), path, digest)
    from rcq_cli.tasks._yaml_task import read_task

    return read_task(path)


def _run(path: Path, digest: str) -> ModuleType:
    """Return the module of a Python file, run under a name of its own."""
    name = f"rcq_user_task_{digest[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except _FAULTS as error:
        del sys.modules[name]
        raise _refused(path, f"{type(error).__name__}: {error}") from error
    return module


def _completed(module: ModuleType, path: Path, digest: str) -> Task:
    """Return the module's TASK; what it leaves out and has a sensible value is filled in."""
    task: Any = getattr(module, "TASK", None)
    if task is None:
        raise _refused(path, "it has no TASK")
    missing = [name for name in _NEEDED if getattr(task, name, None) is None]
    if missing:
        raise _refused(path, f"its TASK has no {', '.join(missing)}")
    own = {
        "name": path.stem,
        "summary": f"task of {path.name}",
        "generator": f"file:{digest[:12]}",
        "controls": lambda _request, _tokenizer: iter(()),
    }
    for name, value in {**_DEFAULTS, **own}.items():
        if not hasattr(task, name):
            try:
                setattr(task, name, value)
            except AttributeError as error:
                raise _refused(path, f"its TASK has no {name}, and takes none") from error
    found: Task = task
    return found


def _refused(path: Path, why: str) -> SpecError:
    return SpecError(
        f"{path.name} gives no task",
        why=why,
        fix=f"expose TASK with {', '.join(_NEEDED)}, as the files in tasks/ do; see docs/tasks.md",
        id="RCQ-USE-25",
    )
