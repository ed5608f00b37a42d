"""docs/errors.md against the source: every id that is raised is listed with its exit code, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rcq_cli import errors
from rcq_cli.commands._compare import IDS
from rcq_cli.shell import Interrupted

ROOT = Path(__file__).resolve().parents[2]
ID = re.compile(r"RCQ-[A-Z]+-[0-9A-Z]+")
ROW = re.compile(r"\| (RCQ-\S+) \| (\d+) \| [^|]+ \| [^|]+ \|")
CLASSES = {
    **{name: cls.exit_code for name, cls in vars(errors).items() if isinstance(cls, type)},
    "Interrupted": Interrupted.exit_code,
}


def sources() -> list[Path]:
    return [path for folder in ("rcq_cli", "kernels", "tasks") for path in (ROOT / folder).rglob("*.py")]


def raised(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each id with the class of the error that carries it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                if isinstance(value, ast.Constant) and ID.fullmatch(str(value.value)):
                    yield str(value.value), ast.unparse(node.func).rpartition(".")[2]


def listed() -> dict[str, int]:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    return {name: int(code) for name, code in ROW.findall(text)}


def test_every_id_of_the_source_is_listed_and_no_other():
    written = {found for path in sources() for found in ID.findall(path.read_text(encoding="utf-8"))}
    assert sorted(written) == sorted(listed())


def test_every_error_leaves_with_the_code_that_is_listed():
    known = listed()
    wrong = [
        f"{path.name}: {name} is raised as {cls} ({CLASSES[cls]}), listed with {known[name]}"
        for path in sources()
        for name, cls in raised(path)
        if cls in CLASSES and name != "RCQ-RUN-00" and CLASSES[cls] != known[name]
    ]
    assert wrong == []


def test_the_ids_of_a_failed_comparison_have_the_codes_they_stand_for():
    known = listed()
    assert {name: known[name] for name in IDS.values()} == {name: code for code, name in IDS.items()}


def test_an_id_is_raised_by_a_class_that_this_test_knows():
    """A helper that builds errors may not hide their exit code from this page."""
    helpers = {cls for path in sources() for _, cls in raised(path)} - set(CLASSES)
    assert helpers == set()
