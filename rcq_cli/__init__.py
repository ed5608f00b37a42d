"""rcq: evaluate and profile KV-cache compression for long-context LLM inference."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rcq_cli.api import LayerCache, attach
    from rcq_cli.errors import RcqError, SpecError, UnsupportedHere, UnsupportedModel

_ERRORS = {"RcqError", "SpecError", "UnsupportedHere", "UnsupportedModel"}
__all__ = [
    "LayerCache",
    "RcqError",
    "SpecError",
    "UnsupportedHere",
    "UnsupportedModel",
    "__version__",
    "attach",
]
__version__ = "0.1.0"

# A wheel carries kernels/, tasks/ and profiles/ inside this package; a checkout keeps them beside it.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir():
    __path__.append(str(_here.parent))


def __getattr__(name: str) -> Any:
    """Import the Python API on first use: `rcq --help` must not pay for torch."""
    if name in _ERRORS | {"LayerCache", "attach"}:
        module = import_module("rcq_cli.errors" if name in _ERRORS else "rcq_cli.api")
        return getattr(module, name)
    raise AttributeError(f"module 'rcq_cli' has no attribute {name!r}")
