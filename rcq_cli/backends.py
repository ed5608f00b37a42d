"""Which backend serves a layer here: the asked-for one, or with `auto` the fastest that can."""

from typing import Any

from rcq_cli.errors import UnsupportedHere
from rcq_cli.protocols import Backend, Geometry
from rcq_cli.registry import Registry

BACKENDS: Registry[Backend] = Registry("rcq_cli.kernels", "BACKEND", "backend")
PREFERENCE = ("triton-fused", "cpu", "reference")


def choose_backend(name: str, geometry: Geometry) -> Any:
    """Return the backend `name` (`auto` for the first that can serve `geometry`).

    Raises `UnknownEntry` for an unknown name and `UnsupportedHere` with the reason when it cannot run here.
    """
    if name != "auto":
        backend = BACKENDS.load(name)
        reason = backend.unsupported(geometry)
        if reason:
            raise UnsupportedHere(
                f"backend {backend.name} cannot run here",
                why=reason,
                fix="use --backend auto",
                id="RCQ-ENV-03",
            )
        return backend
    reasons = []
    for candidate in PREFERENCE:
        if candidate not in BACKENDS.names():
            continue
        backend = BACKENDS.load(candidate)
        reason = backend.unsupported(geometry)
        if reason is None:
            return backend
        reasons.append(f"{candidate}: {reason}")
    raise UnsupportedHere("no backend can serve this layer", why="; ".join(reasons), id="RCQ-ENV-03")
