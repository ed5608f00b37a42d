"""Options of modes, tasks and models: text in, frozen dataclass out, every refusal says what is allowed."""

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, fields
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from rcq_cli.errors import SpecError
from rcq_cli.registry import did_you_mean

T = TypeVar("T")

_BOOLS = {
    "true": True,
    "on": True,
    "yes": True,
    "1": True,
    "false": False,
    "off": False,
    "no": False,
    "0": False,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([km]?)", re.IGNORECASE)
_FACTOR = {"": 1, "k": 1024, "m": 1024 * 1024}


class OptionInfo(NamedTuple):
    """One option as help texts show it."""

    name: str
    type: str
    """`int`, `float`, `true|false`, `text` or the choices, joined by `|`."""
    default: Any
    help: str


def parse_tokens(text: str, noun: str = "ctx") -> int:
    """Return the tokens `text` means: `64000`, `64k` = 65,536, `1m` = 1,048,576, `0.5k` = 512.

    Raises `SpecError` for anything else, a fraction of a token and zero included.
    """
    match = _SIZE.fullmatch(text.strip())
    size = Fraction(match[1]) * _FACTOR[match[2].lower()] if match else Fraction(0)
    if not match or size.denominator != 1 or size < 1:
        raise SpecError(
            f"{noun} {text!r} is no number of tokens",
            fix="allowed: 4096, 4k (= 4096), 1m (= 1048576), 0.5k (= 512)",
            id="RCQ-USE-03",
        )
    return int(size)


def split_label(label: str) -> tuple[str, dict[str, str]]:
    """Split `certified:eps=0.02,block=16` into the name and its options, both as typed.

    Raises `SpecError` for an empty name, a part without `=` and an option given twice.
    """
    name, _, rest = label.strip().partition(":")
    if not name.strip():
        raise SpecError(
            f"{label!r} has no name before ':'",
            fix="allowed: NAME or NAME:key=value,key=value",
            id="RCQ-USE-04",
        )
    return name.strip(), split_pairs(rest.split(",") if rest.strip() else (), noun=label)


def split_pairs(pairs: list[str] | tuple[str, ...], noun: str) -> dict[str, str]:
    """Return `key=value` texts as a dict; `noun` says where they stood when one is refused."""
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key or not value:
            raise SpecError(f"{pair!r} in {noun} is no option", fix="allowed: key=value", id="RCQ-USE-04")
        if key in options:
            raise SpecError(f"option {key!r} stands twice in {noun}", fix="give it once", id="RCQ-USE-04")
        options[key] = value
    return options


def parse_options(
    cls: type[T], given: Mapping[str, Any], noun: str, places: Mapping[str, str] = MappingProxyType({})
) -> T:
    """Return `cls(**given)` with each value read as its field's type.

    Values are texts of the command line or plain values of a YAML file. `noun` completes "'x' is no ...":
    `option of mode certified`. `places` names the file of an option that came from one. Raises `SpecError`
    for an unknown option, a bad value and a missing one.
    """
    hints = get_type_hints(cls)
    known = tuple(f.name for f in fields(cls) if f.init)  # type: ignore[arg-type]
    read = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        place = f" in {places[key]}" if key in places else ""
        if name not in known:
            what = f"{key!r} is no {noun}{place}"
            allowed = f"known: {', '.join(known)}" if known else "it has none"
            raise SpecError(what, fix=did_you_mean(name, known) + allowed, id="RCQ-USE-05")
        read[name] = _read(hints[name], value, f"{key}={value!s} ({noun}){place}")
    missing = [f.name for f in fields(cls) if f.init and f.name not in read and _default(f) is MISSING]  # type: ignore[arg-type]
    if missing:
        raise SpecError(
            f"{noun} {missing[0]!r} must be given", fix=f"add {missing[0]}=VALUE", id="RCQ-USE-05"
        )
    return cls(**read)


def options_dict(options: Any) -> dict[str, Any]:
    """Return an options dataclass as a JSON object, every default written out."""
    values = {f.name: getattr(options, f.name) for f in fields(options) if f.init}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def describe(cls: type) -> list[OptionInfo]:
    """Return the options of `cls` in order: name, type, default and the docstring under the field."""
    hints, helps = get_type_hints(cls), _field_docs(cls)
    infos = []
    for f in fields(cls):
        if f.init:
            default = _default(f)
            infos.append(
                OptionInfo(
                    name=f.name,
                    type=_type_text(hints[f.name]),
                    default=None if default is MISSING else default,
                    help=helps.get(f.name, ""),
                )
            )
    return infos


def _default(f: Any) -> Any:
    if f.default is not MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not MISSING else MISSING


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _read(hint: Any, value: Any, where: str) -> Any:
    """Return `value` as the first member of `hint` that accepts it, in the order literals, numbers, text."""
    for member in sorted(_members(hint), key=_rank):
        done, result = _read_as(member, value)
        if done:
            return result
    raise SpecError(
        f"{where} has a value that is not allowed", fix=f"allowed: {_allowed(hint)}", id="RCQ-USE-06"
    )


def _rank(member: Any) -> int:
    if get_origin(member) is Literal:
        return 0
    return {NoneType: 1, bool: 2, int: 3, float: 4}.get(member, 5)


def _read_as(member: Any, value: Any) -> tuple[bool, Any]:
    """Return whether `member` accepts `value`, and what it then is."""
    if get_origin(member) is Literal:
        texts = {str(choice): choice for choice in get_args(member)}
        return str(value) in texts, texts.get(str(value))
    if member is NoneType:
        return value is None or value == "none", None
    if value is None:
        return False, None
    if member is bool:
        text = str(value).lower()
        return text in _BOOLS, _BOOLS.get(text)
    if member is int:
        return _read_int(value)
    if member is float:
        return _read_float(value)
    return isinstance(value, str | int | float), str(value)


def _read_int(value: Any) -> tuple[bool, int]:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return False, 0
    try:
        number = int(value)
        return abs(number) < 2**63, number
    except ValueError:
        pass
    try:
        return True, parse_tokens(str(value))
    except SpecError:
        return False, 0


def _read_float(value: Any) -> tuple[bool, float]:
    if isinstance(value, bool):
        return False, 0.0
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return False, 0.0
    return math.isfinite(number), number


def _type_text(hint: Any) -> str:
    texts = []
    for member in _members(hint):
        if get_origin(member) is Literal:
            texts += [str(choice) for choice in get_args(member)]
        else:
            texts.append({NoneType: "none", bool: "true|false", str: "text"}.get(member) or member.__name__)
    return "|".join(texts)


def _allowed(hint: Any) -> str:
    words = {"int": "a whole number", "float": "a finite number", "text": "a text"}
    return " or ".join(words.get(part, part) for part in _type_text(hint).split("|"))


def _field_docs(cls: type) -> dict[str, str]:
    """Return the text that stands under each field in the source of `cls` and its bases, as one line."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):
            continue
        body = getattr(ast.parse(source).body[0], "body", [])
        for statement, after in pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = _text(after)
                if text is not None:
                    docs[statement.target.id] = " ".join(text.split())
    return docs


def _text(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else None
    return None
