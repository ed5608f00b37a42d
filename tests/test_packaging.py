"""What an installation holds: versions, entry points, data files, no ghost of Hugging Face's `kernels`."""

import ast
import importlib.metadata
import importlib.resources
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rcq_cli

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BARE = ("kernels", "tasks", "profiles")


def run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_bare_folders_hold_no_package_marker():
    assert [str(p) for name in BARE for p in (ROOT / name).rglob("__init__.py")] == []


def test_no_installed_module_is_called_kernels():
    """transformers looks for Hugging Face's package of that name and imports what it finds."""
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None


@pytest.mark.parametrize("name", BARE)
def test_the_bare_folders_are_reached_through_the_package(name):
    spec = importlib.util.find_spec(f"rcq_cli.{name}")
    assert spec is not None
    assert [Path(p) for p in spec.submodule_search_locations] == [ROOT / name]


def test_the_version_is_said_in_one_place():
    assert re.fullmatch(r"\d+\.\d+\.\d+", rcq_cli.__version__)
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "rcq_cli.__version__"}
    assert "version" in PROJECT["project"]["dynamic"]
    assert importlib.metadata.version("rcq") == rcq_cli.__version__


def test_every_folder_of_code_is_declared_so_that_a_wheel_has_it():
    """The wheel takes the patterns of the declared packages: every file must match one."""
    tool = PROJECT["tool"]["setuptools"]
    assert set(tool["packages"]) == {"rcq_cli", *(f"rcq_cli.{name}" for name in BARE)}
    assert tool["package-dir"] == {"rcq_cli": "rcq_cli"} | {f"rcq_cli.{name}": name for name in BARE}
    patterns = tool["package-data"]
    for package, folder in tool["package-dir"].items():
        found = [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        allowed = patterns[package]
        matched = {p for pattern in allowed for p in (ROOT / folder).glob(pattern)}
        # top-level modules come with the package itself; documentation of a folder stays in the repository
        needed = [p for p in found if p.suffix != ".md" and (p.suffix != ".py" or p.parent != ROOT / folder)]
        assert [str(p.relative_to(ROOT)) for p in needed if p not in matched] == []


@pytest.mark.parametrize("name", ["kernels", "tasks", "profiles", "page"])
def test_a_data_file_of_each_kind_is_found_as_a_resource(name):
    suffix = {"kernels": ".py", "tasks": ".json", "profiles": ".yaml", "page": ".css"}[name]
    package = f"rcq_cli.{name}"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not there")
    folder = importlib.resources.files(package)
    where = folder / "data" if name == "tasks" else folder
    files = [entry for entry in where.iterdir() if entry.name.endswith(suffix)]
    assert files
    assert all(entry.read_text(encoding="utf-8").strip() for entry in files)


def test_the_typed_marker_and_the_entry_point_are_there():
    assert (importlib.resources.files("rcq_cli") / "py.typed").is_file()
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="rcq")
    assert script.value == PROJECT["project"]["scripts"]["rcq"] == "rcq_cli.__main__:main"
    assert callable(script.load())


def test_dependencies_are_what_the_code_imports():
    """Every third-party library that is imported is declared, as a dependency or in an extra."""
    names = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py", "llvmlite": "numba", "mpl_toolkits": "matplotlib"}
    project = PROJECT["project"]
    lines = [
        *project["dependencies"],
        *(d for extra in project["optional-dependencies"].values() for d in extra),
    ]
    declared = {re.split(r"[<>=\[; ]", line)[0].lower() for line in lines}
    used = set()
    for folder in ("rcq_cli", *BARE):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                used |= {m.split(".")[0] for m in modules}
    third_party = used - set(sys.stdlib_module_names) - {"rcq_cli"}
    # typer and transformers bring these and cannot do without; jieba is asked for by name where it is missing
    brought = {"click", "huggingface_hub", "safetensors", "jieba"}
    assert {names.get(m, m) for m in third_party} - declared - brought == set()


def test_importing_the_package_imports_neither_torch_nor_anything_slow(tmp_path):
    code = (
        "import sys, rcq_cli; print(sorted({'torch', 'numpy', 'transformers', 'typer'} & set(sys.modules)))"
    )
    done = run(code, tmp_path)
    assert done.stdout.strip() == "[]", done.stderr


def test_names_of_the_public_api_are_found_on_demand_and_others_are_not(tmp_path):
    code = (
        "import sys, rcq_cli\n"
        "from rcq_cli import RcqError, SpecError\n"
        "assert 'torch' not in sys.modules\n"
        "from rcq_cli import LayerCache, attach\n"
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules\n"
        "assert set(rcq_cli.__all__) >= {'LayerCache', 'attach', 'RcqError', '__version__'}\n"
        "assert all(getattr(rcq_cli, name) is not None for name in rcq_cli.__all__)\n"
        "try:\n    rcq_cli.nonsense\nexcept AttributeError as error:\n    print('nonsense' in str(error))\n"
    )
    done = run(code, tmp_path)
    assert done.stdout.strip() == "True", done.stderr


def test_what_is_not_installed_is_still_in_an_sdist():
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    assert "graft tests" in manifest
    assert "graft benchmarks" in manifest
    assert "global-exclude *.py[co]" in manifest


def test_constraints_pin_every_dependency_exactly():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line.strip() and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^\s=]+( *;.*)?", line) for line in pins)
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in pins}
    direct = {re.split(r"[<>=\[; ]", line)[0].lower() for line in PROJECT["project"]["dependencies"]}
    assert direct - pinned == set()
