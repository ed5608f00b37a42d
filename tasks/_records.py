"""Tasks over records of a file: reading them, their order, and prompts whose context is cut to the budget."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from rcq_cli.errors import SpecError
from rcq_cli.protocols import EncodedPrompt
from rcq_cli.tasks._fitting import too_small
from rcq_cli.tasks._haystack import find, token_at
from rcq_cli.tasks._splitmix import SplitMix64, seed

Record = Mapping[str, Any]
Check = Callable[[Any], bool]
"""Says whether a field may hold a value."""

_FIELD = re.compile(r"\{([A-Za-z_]+)\}")
_MOST_CUTS = 8


class Records(NamedTuple):
    """The records of one file."""

    rows: tuple[Record, ...]
    places: tuple[str, ...]
    """Where each stands in the file: `line 3`, or `record 3` of a list."""
    sha256: str

    def drawn(self, base: int, task: str) -> Iterable[Record]:
        """Return all records in the order that the seed draws; a shorter run takes the first of them."""
        return (self.rows[i] for i in self.order(base, task))

    def order(self, base: int, task: str) -> list[int]:
        """Return the places in `rows` of all records in the order that the seed draws."""
        order = list(range(len(self.rows)))
        SplitMix64(seed(base, task, 0, "questions")).shuffle(order)
        return order


class Cut(NamedTuple):
    """A prompt within its budget."""

    prompt: EncodedPrompt
    truncated: bool


def parse(raw: bytes, where: str, fields: Mapping[str, Check]) -> Records:
    """Return the records of JSON lines, or of one JSON list.

    Raises `SpecError` naming the place for text that is no JSON, and for a record that lacks one of `fields`
    or holds there what its check does not take.
    """
    text = _text(raw, where)
    if text.lstrip().startswith("["):
        placed = {f"record {number}": row for number, row in enumerate(_json(text, where), 1)}
    else:
        lines = {f"line {number}": line for number, line in enumerate(text.split("\n"), 1)}
        placed = {place: _json(line, f"{where}, {place}") for place, line in lines.items() if line.strip()}
    for place, row in placed.items():
        if not isinstance(row, dict):
            raise bad_data(f"{where}, {place} is no JSON object")
        missing = [field for field in fields if field not in row]
        if missing:
            raise bad_data(f"{where}, {place} has no field {missing[0]!r}")
        wrong = [field for field, check in fields.items() if not check(row[field])]
        if wrong:
            raise bad_data(f"{where}, {place}: field {wrong[0]!r} cannot be {row[wrong[0]]!r:.40}")
    if not placed:
        raise bad_data(f"{where} holds no record")
    return Records(tuple(placed.values()), tuple(placed), sha256(raw).hexdigest())


def is_text(value: Any) -> bool:
    """Say whether a field holds text."""
    return isinstance(value, str)


def is_texts(value: Any) -> bool:
    """Say whether a field is a list of texts or numbers; a bare text would be read letter by letter."""
    return isinstance(value, list) and all(isinstance(entry, str | int | float) for entry in value)


def parse_object(raw: bytes, where: str) -> Record:
    """Return the one JSON object that `raw` holds; raise `SpecError` naming the place for anything else."""
    found = _json(_text(raw, where), where)
    if not isinstance(found, dict):
        raise bad_data(f"{where} is no JSON object")
    return found


def member(folder: Path, name: str) -> bytes | None:
    """Return the file `name` below `folder`, or in a zip file there; None without one."""
    for file in sorted(folder.rglob(name)):
        return file.read_bytes()
    for archive in sorted(folder.rglob("*.zip")):
        try:
            with zipfile.ZipFile(archive) as held:
                for entry in held.namelist():
                    if Path(entry).name == name:
                        return held.read(entry)
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # the last: a password
            raise bad_data(f"{archive} cannot be read: {error}") from error
    return None


def substitute(template: str, values: Mapping[str, str]) -> str:
    """Return `template` with `{name}` replaced in one pass; braces in the values stay as they are."""
    return _FIELD.sub(lambda slot: values.get(slot[1], slot[0]), template)


def cut_middle(encode: Callable[[str], EncodedPrompt], context: str, budget: int, reserve: int) -> Cut:
    """Return the prompt that `encode` makes of `context`, tokens taken from the middle where it is too long.

    The first and the last half of what fits are kept; where to cut is read from the offsets of the original
    text, no id is decoded. `reserve` are the tokens of the context outside the budget. Raises `SpecError`
    when the rest of the prompt leaves no room.
    """
    prompt = encode(context)
    if len(prompt.ids) <= budget:
        return Cut(prompt, truncated=False)
    start = find(prompt, context)
    first, end = token_at(prompt, start), token_at(prompt, start + len(context))
    excess = len(prompt.ids) - budget
    for _ in range(_MOST_CUTS):
        kept = end - first - excess
        if kept < 0:
            break
        head, tail = first + kept - kept // 2, end - kept // 2
        middle = prompt.starts[head] - start, prompt.starts[tail] - start if tail < end else len(context)
        shorter = encode(context[: middle[0]] + context[middle[1] :])
        # tokens may merge differently at the seam
        over = len(shorter.ids) - budget
        if over <= 0:
            return Cut(shorter, truncated=True)
        excess += over
    raise too_small(budget + reserve, len(prompt.ids) - (end - first) + reserve)


def bad_data(what: str) -> SpecError:
    """Return the error for a file that is not what it should be."""
    return SpecError(what, fix="see docs/tasks.md for the fields a file must have", id="RCQ-USE-23")


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_data(f"{where} is not UTF-8: bad byte at offset {error.start}") from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise bad_data(f"{where} is not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        raise bad_data(f"{where} cannot be read: {error}") from error
