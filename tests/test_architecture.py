"""Who may import whom, read from the source: function bodies and `TYPE_CHECKING` blocks included."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"rcq_cli": "rcq_cli", "kernels": "rcq_cli.kernels", "tasks": "rcq_cli.tasks"}
# shared by everybody and importing nobody above them
BASE = {"errors", "readings", "protocols", "registry", "options", "phases", "stats", "glyphs", "files"}
REGISTRIES = ("kernels", "modes", "tasks", "models", "executors", "reports", "commands")
HEAVY = {"torch", "transformers", "numpy", "numba", "triton", "pyarrow", "ray", "pynvml", "datasets", "gguf"}


class Import(NamedTuple):
    """One imported name: which file says so, what it names, and whether at the top of the module."""

    path: Path
    target: str
    line: int
    at_top: bool


def module_name(path: Path) -> str:
    first, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = [FOLDERS[first], *rest]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files() -> list[Path]:
    return sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py") if "_triton" not in p.parts)


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, alias.name, node.lineno, id(node) in top)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = any(module_name(p) == full for p in files())
                yield Import(path, full if is_module else str(node.module), node.lineno, id(node) in top)


EDGES = [edge for path in files() for edge in imports_of(path)]


def ours(edge: Import) -> bool:
    return edge.target.split(".")[0] == "rcq_cli"


def area(module: str) -> str:
    """`rcq_cli.cache.tiers` is in `cache`; `rcq_cli.api` in `api`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def edges_from(*areas: str) -> list[Import]:
    return [edge for edge in EDGES if area(module_name(edge.path)) in areas]


def show(edges: list[Import]) -> list[str]:
    return [f"{e.path.relative_to(ROOT)}:{e.line} imports {e.target}" for e in edges]


def targets_outside(edges: list[Import], allowed: set[str]) -> list[str]:
    return show([e for e in edges if ours(e) and area(e.target) not in allowed | {""}])


# what each layer may use of rcq_cli, besides its own folder and the base
MAY_USE = {
    "kernels": set(),
    "cache": {"kernels", "certify"},
    "certify": {"kernels", "cache"},
    "recas": {"kernels", "cache", "certify"},
    "modes": {"kernels", "cache", "certify", "recas"},
    "tasks": {"recas"},  # the traces task runs the policy on synthetic attention
    "models": {
        "identity",
        "environment",
        "settings",
        "tasks",
    },  # the needle model shares the words of its task
    "telemetry": set(),
}


@pytest.mark.parametrize("layer", MAY_USE)
def test_a_layer_uses_only_layers_below_it(layer):
    assert targets_outside(edges_from(layer), MAY_USE[layer] | BASE | {layer}) == []


def test_the_base_uses_only_the_base():
    assert targets_outside(edges_from(*BASE), BASE) == []


def test_nothing_that_computes_knows_commands_or_reports():
    computing = [*MAY_USE, "engine", "api", "run", "executors"]
    above = {"commands", "reports", "main", "shell", "app", "render", "page"}
    assert show([e for e in edges_from(*computing) if ours(e) and area(e.target) in above]) == []


def test_only_the_terminal_imports_commands():
    callers = {area(module_name(e.path)) for e in EDGES if ours(e) and area(e.target) == "commands"}
    assert callers <= {"commands", "main", "app", "shell"}


def test_reports_and_judging_never_see_a_tensor():
    """What reads stored runs works on a machine without torch."""
    readers = edges_from("reports", "page", "judge", "pairing", "gates", "verdict", "stats", "table", "store")
    compute = {"engine", "modes", "cache", "certify", "kernels", "api", "run", "models", "recas"}
    assert show([e for e in readers if e.target.split(".")[0] in {"torch", "transformers"}]) == []
    assert show([e for e in readers if ours(e) and area(e.target) in compute]) == []


def test_transformers_is_met_in_one_file_of_the_engine():
    users = {e.path.name for e in edges_from("engine") if e.target.split(".")[0] == "transformers"}
    assert users <= {"hook.py"}


def test_only_engine_and_models_import_transformers():
    allowed = {"engine", "models", "commands", "environment"}
    users = [e for e in EDGES if e.target.split(".")[0] == "transformers"]
    assert show([e for e in users if area(module_name(e.path)) not in allowed]) == []


@pytest.mark.parametrize(
    ("library", "home"),
    [("ray", "ray.py"), ("pynvml", "nvml.py"), ("numba", "cpu.py"), ("triton", "triton_fused.py")],
)
def test_a_library_with_one_purpose_is_imported_in_one_file(library, home):
    users = {e.path for e in EDGES if e.target.split(".")[0] == library}
    at_home = {p for p in users if p.name == home or p.name.startswith(f"_{home.removesuffix('.py')}")}
    # probes look for it; the latency of the traces task is timed in compiled code, as its source's was
    probes = {p for p in users if p.name in {"doctor.py", "environment.py", "latency.py"}}
    # the host side of the compiled kernels sets their thread count
    probes |= {p for p in users if p.name == "fused.py"}
    assert users <= at_home | probes


def test_nothing_imports_a_member_of_a_registry_by_name():
    """Entries are loaded by name; `dense` is the last rung, the reference kernels define every operation.

    A command has a report of its own, the page shows them all, and a command hands work to the local executor
    when it is not asked for another.
    """
    allowed = {"rcq_cli.modes.dense", "rcq_cli.kernels.reference"}
    # the packed store and the fused step are the host side of the cpu kernels and of nothing else
    host = {("cache/packed.py", "rcq_cli.kernels.cpu"), ("certify/fused.py", "rcq_cli.kernels.cpu")}
    defaults = {("commands", "reports"), ("commands", "executors"), ("page", "reports")}
    wrong = []
    for edge in EDGES:
        parts = edge.target.split(".")
        if not ours(edge) or len(parts) < 3 or parts[1] not in REGISTRIES or parts[2].startswith("_"):
            continue
        user = area(module_name(edge.path))
        if any(edge.path.as_posix().endswith(end) and edge.target == target for end, target in host):
            continue
        if edge.target not in allowed and user != parts[1] and (user, parts[1]) not in defaults:
            wrong.append(edge)
    assert show(wrong) == []


def test_nothing_on_the_way_to_a_help_text_imports_a_heavy_library_at_the_top():
    compute = {*MAY_USE, "engine", "api", "run", "executors", "render", "profiling"} - {"telemetry", "tasks"}
    light = [e for e in EDGES if area(module_name(e.path)) not in compute and e.at_top]
    assert show([e for e in light if e.target.split(".")[0] in HEAVY]) == []


def test_importing_by_a_bare_folder_name_is_never_done():
    assert show([e for e in EDGES if e.target.split(".")[0] in {"kernels", "tasks", "profiles"}]) == []


def test_no_import_goes_round_in_a_circle_at_the_top_of_modules():
    graph: dict[str, set[str]] = {}
    known = {module_name(p) for p in files()}
    for edge in EDGES:
        if edge.at_top and edge.target in known:
            graph.setdefault(module_name(edge.path), set()).add(edge.target)
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module in done:
            return
        for target in sorted(graph.get(module, ())):
            if target != module:
                walk(target, (*trail, module))
        done.add(module)

    for module in sorted(graph):
        walk(module, ())


def test_the_table_of_layers_names_folders_that_exist():
    known = {area(module_name(p)) for p in files()}
    assert {layer for layer in MAY_USE if layer not in known} <= {"recas"}


# where things lie, how they look, what is only recorded, what other libraries are told
VARIABLES = re.compile(
    r"RCQ_(HOME|CONFIG|COLOR|ASCII|DEBUG)|HF_.*|HUGGINGFACE_.*|TRANSFORMERS_.*|XDG_.*|.*_(HOME|DIR|CACHE)|NO_COLOR|"
    r"FORCE_COLOR|COLORTERM|TERM|COLUMNS|CI|GITHUB_.*|CUDA_.*|CUBLAS_.*|NUMBA_.*|OMP_.*|MKL_.*|TRITON_.*|RAY_.*|"
    r"PYTORCH_.*|TORCH.*|TOKENIZERS_.*|NVIDIA_.*|_TYPER_.*|PATH|HOME|LANG|LC_.*|PYTHON.*"
)
READ = ("os.environ.get(", "os.environ[", "os.getenv(", "environ.get(", "environ[")


def test_no_variable_of_the_environment_changes_a_result():
    """Behaviour comes from the spec."""
    wrong = []
    for path in files():
        source = path.read_text(encoding="utf-8")
        if "environ" not in source and "getenv" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            text = ast.unparse(node) if isinstance(node, ast.Call | ast.Subscript) else ""
            named = re.search(r"['\"]([A-Za-z_]+)['\"]", text) if text.startswith(READ) else None
            if named and not VARIABLES.fullmatch(named[1]):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} reads {named[1]}")
    assert wrong == []
