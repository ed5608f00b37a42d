from dataclasses import dataclass
from typing import Literal

import pytest

from rcq_cli.errors import SpecError
from rcq_cli.options import describe, options_dict, parse_options, parse_tokens, split_label, split_pairs

NOUN = "option of mode toy"


@dataclass(frozen=True)
class Base:
    eps: float = 0.05
    """Relative budget,
    per head."""


@dataclass(frozen=True)
class Toy(Base):
    block: int = 16
    skip: bool = True
    norm: Literal["out", "layer"] = "out"
    budget: int | None = None
    """Tokens kept."""
    decoys: int | Literal["auto"] = "auto"
    text: str = ""

    def __post_init__(self):
        if self.eps <= 0:
            raise SpecError("eps must be above 0")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Toy()),
        ({"eps": "0.02", "block": "32"}, Toy(eps=0.02, block=32)),
        ({"skip": "off"}, Toy(skip=False)),
        ({"norm": "layer"}, Toy(norm="layer")),
        ({"budget": "4k"}, Toy(budget=4096)),
        ({"budget": "none"}, Toy(budget=None)),
        ({"decoys": "3"}, Toy(decoys=3)),
        ({"decoys": "auto"}, Toy(decoys="auto")),
        ({"text": "none"}, Toy(text="none")),
        ({"eps": 1, "skip": False, "budget": None}, Toy(eps=1.0, skip=False)),
    ],
)
def test_values_are_read_as_their_fields_types(given, expected):
    assert parse_options(Toy, given, NOUN) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epz": "1"}, "'epz' is no option of mode toy; did you mean 'eps'"),
        ({"eps": "much"}, "eps=much.*allowed: a finite number"),
        ({"eps": "inf"}, "allowed: a finite number"),
        ({"block": "1.5"}, "allowed: a whole number"),
        ({"block": True}, "allowed: a whole number"),
        ({"skip": "maybe"}, "allowed: true or false"),
        ({"norm": "inner"}, "allowed: out or layer"),
        ({"decoys": "many"}, "allowed: a whole number or auto"),
        ({"eps": "0"}, "eps must be above 0"),
        ({"block": None}, "allowed: a whole number"),
    ],
)
def test_what_is_refused_says_what_is_allowed(given, message):
    with pytest.raises(SpecError, match=message) as caught:
        parse_options(Toy, given, NOUN)
    assert caught.value.exit_code == 2


def test_a_required_option_is_asked_for():
    @dataclass(frozen=True)
    class Needy:
        data: str

    with pytest.raises(SpecError, match="'data' must be given"):
        parse_options(Needy, {}, NOUN)


def test_options_without_any_field_say_so():
    @dataclass(frozen=True)
    class Empty:
        pass

    with pytest.raises(SpecError, match="it has none"):
        parse_options(Empty, {"eps": "1"}, NOUN)


def test_every_default_is_written_out_and_read_back():
    written = options_dict(Toy(budget=7))
    assert written == {
        "eps": 0.05,
        "block": 16,
        "skip": True,
        "norm": "out",
        "budget": 7,
        "decoys": "auto",
        "text": "",
    }
    assert parse_options(Toy, written, NOUN) == Toy(budget=7)


def test_options_are_described_from_the_source():
    infos = describe(Toy)
    assert [info.name for info in infos] == ["eps", "block", "skip", "norm", "budget", "decoys", "text"]
    assert infos[0] == ("eps", "float", 0.05, "Relative budget, per head.")
    assert infos[4] == ("budget", "int|none", None, "Tokens kept.")
    assert [infos[i].type for i in (2, 3, 5, 6)] == ["true|false", "out|layer", "int|auto", "text"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("64000", 64000),
        ("64k", 65536),
        ("64K", 65536),
        ("1m", 1048576),
        ("0.5k", 512),
        (" 4k ", 4096),
        ("1.5k", 1536),
    ],
)
def test_sizes_are_tokens(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "0", "-4k", "4g", "0.3k", "1.5", "4 k", "1e3", "4k,8k"])
def test_sizes_that_are_no_number_of_tokens_are_refused(text):
    with pytest.raises(SpecError, match="number of tokens"):
        parse_tokens(text)


def test_labels_are_split():
    assert split_label("certified") == ("certified", {})
    assert split_label("certified:eps=0.02, block=16") == ("certified", {"eps": "0.02", "block": "16"})


@pytest.mark.parametrize("label", ["", ":a=1", "m:eps", "m:a=1,a=2", "m:=1", "c:eps="])
def test_broken_labels_are_refused(label):
    with pytest.raises(SpecError):
        split_label(label)


def test_a_value_may_hold_an_equals_sign():
    assert split_pairs(["path=a=b"], "-T") == {"path": "a=b"}
