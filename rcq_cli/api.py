"""The Python API: `LayerCache` for one layer, `attach` for a whole model."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rcq_cli.backends import choose_backend
from rcq_cli.cache.statistics import Collector, Statistics, needs_of
from rcq_cli.errors import SpecError, UnsupportedHere
from rcq_cli.options import parse_options
from rcq_cli.protocols import Geometry, LayerBytes, Mode, Rotation, Step
from rcq_cli.registry import Registry

if TYPE_CHECKING:
    from rcq_cli.engine.session import Session

MODES: Registry[Mode] = Registry("rcq_cli.modes", "MODE", "mode")
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def attach(
    model: Any, mode: str, *, backend: str = "auto", **options: Any
) -> AbstractContextManager[Session]:
    """Let `mode` keep the cache of a transformers decoder inside a `with` block.

    `model.generate` then gives each call a cache of its own; the block yields a `Session` with `summary()`
    and `steps()`. Further keywords are options of the mode. Raises `UnsupportedModel`, `SpecError` or
    `UnsupportedHere`. Afterwards the model, its config and the registries of transformers are as before.
    """
    from rcq_cli.engine.session import attach_session

    entry = MODES.load(mode)
    chosen: Any = parse_options(entry.Options, options, noun=f"option of mode {entry.name}")
    return attach_session(model, entry, chosen, backend)


class LayerCache:
    """The cache of one attention layer under one mode.

    `keys` and `values` are `[kv_heads, tokens, head_dim]` after RoPE, queries `[query_heads, head_dim]`. For
    mode `certified`, `||output - exact|| <= total_bound` on every rung, where `exact` is softmax attention
    in float64 on the stored keys and values. Wrong shapes, dtypes or non-finite input raise `SpecError`, and
    nothing of a rejected call is stored. `rotation` says how positions turned the keys, for modes that move
    them. Further keywords are options of the mode.
    """

    def __init__(
        self,
        mode: str,
        *,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        backend: str = "auto",
        scale: float | None = None,
        rotation: Rotation | None = None,
        **options: Any,
    ) -> None:
        entry = MODES.load(mode)
        _check_heads(query_heads, kv_heads, head_dim)
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
            raise SpecError(
                f"dtype={dtype} is not allowed", fix="allowed: torch.float32, torch.bfloat16, torch.float16"
            )
        factor = _scale(scale, head_dim)
        place = _device(device)
        _check_rotation(rotation, head_dim)
        self.geometry = Geometry(
            query_heads, kv_heads, head_dim, DTYPES[dtype], place, factor, None, rotation
        )
        self.mode, self._certifies = entry.name, entry.certifies
        chosen: Any = parse_options(entry.Options, options, noun=f"option of mode {entry.name}")
        self._dtype, self._device = dtype, torch.device(place)
        self._backend = choose_backend(backend, self.geometry)
        self._state = entry.open(self.geometry, chosen, self._backend)
        self._needs = needs_of(entry, chosen)
        self._prompt_open = self._needs is not None
        self._prompt: list[tuple[Tensor, Tensor | None]] = []  # keys and queries, until the prompt ends

    @property
    def tokens(self) -> int:
        """Return the tokens stored so far."""
        return self._state.tokens

    def prefill(self, keys: Tensor, values: Tensor, queries: Tensor | None = None) -> None:
        """Add `[kv_heads, tokens, head_dim]` keys and values; may be called again.

        `queries` `[query_heads, tokens, head_dim]` are those of the same tokens, from which an eviction mode
        knows how the prompt was attended to; other modes ignore them. Without them such a mode keeps the
        whole prompt until the first `attend` and judges it by that query alone. The prompt ends with the
        first call of `append`, `attend` or `bytes`.
        """
        g = self.geometry
        shape = (g.kv_heads, None, g.head_dim)
        self._check("keys", keys, shape)
        self._check("values", values, (g.kv_heads, keys.shape[1], g.head_dim))
        if queries is not None:
            self._check("queries", queries, (g.query_heads, keys.shape[1], g.head_dim))
        if self._prompt_open:
            if self._prompt and (self._prompt[0][1] is None) != (queries is None):
                raise SpecError(
                    "queries came with some calls of prefill and not with others", fix="give them always"
                )
            self._prompt.append((keys.detach(), None if queries is None else queries.detach()))
        self._state.prefill(keys.detach(), values.detach())

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the `[kv_heads, head_dim]` key and value of one token."""
        shape = (self.geometry.kv_heads, self.geometry.head_dim)
        self._check("key", key, shape)
        self._check("value", value, shape)
        self._end_prompt()
        self._state.append(key.detach(), value.detach())

    def attend(self, query: Tensor) -> Step:
        """Attend with the `[query_heads, head_dim]` query; the certificate is None in a mode without one."""
        self._check("query", query, (self.geometry.query_heads, self.geometry.head_dim))
        if self._state.tokens == 0:
            raise SpecError("attend on an empty cache", fix="call prefill or append first")
        self._end_prompt()
        return self._state.attend(query.detach() if query.requires_grad else query)

    def bytes(self) -> dict[str, int]:
        """Return device, host, metadata, scratch and dense_equivalent bytes as allocated now."""
        self._end_prompt()
        return ledger(self._state.bytes())

    def verify(self) -> None:
        """Raise `BrokenRun` when something stored has changed since it was stored; modes without checks pass.

        `attend` checks what it promotes and a share of the rest. Call this after the last step to know that
        no step read a damaged block.
        """
        self._end_prompt()
        if self._certifies:
            self._state.check_intact()  # type: ignore[attr-defined]  # there because the mode certifies

    def _end_prompt(self) -> None:
        """Tell a mode that waits for it that the prompt is complete."""
        if not self._prompt_open:
            return
        self._prompt_open, prompt, self._prompt = False, self._prompt, []
        queries = [q for _, q in prompt if q is not None]
        seen: Statistics | None = None
        if queries and self._needs is not None:
            keys = torch.cat([k for k, _ in prompt], 1)
            collector = Collector((self._needs,), keys.shape[1], self.geometry.scale)
            collector.add(torch.cat(queries, 1), keys)
            seen = collector.result()
        self._state.end_prefill(seen)  # type: ignore[attr-defined]  # there because the mode has needs

    def _check(self, name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
        if not isinstance(tensor, Tensor):
            raise SpecError(f"{name} is a {type(tensor).__name__}", fix=f"give a tensor {_sizes(shape)}")
        given = tuple(tensor.shape)
        if not (given == shape or _fits(given, shape)) or 0 in given:
            raise SpecError(
                f"{name} has shape {list(given)}", fix=f"expected {_sizes(shape)}, at least one token"
            )
        if tensor.dtype != self._dtype:
            raise SpecError(
                f"{name} has dtype {tensor.dtype}", fix=f"expected {self._dtype}, the dtype of this cache"
            )
        if tensor.layout is not torch.strided:
            raise SpecError(f"{name} is sparse ({tensor.layout})", fix="give a dense tensor: to_dense()")
        if tensor.device != self._device:
            raise SpecError(f"{name} is on {tensor.device}", fix=f"expected {self.geometry.device}")
        if not self._backend.finite(tensor):
            raise SpecError(f"{name} holds NaN or infinity", fix="only finite numbers can be stored")


def _fits(given: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(given) == len(shape) and all(n in (None, m) for n, m in zip(shape, given, strict=True))


def _sizes(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("tokens" if n is None else str(n) for n in shape) + "]"


def ledger(held: LayerBytes) -> dict[str, int]:
    """Return the five byte counts under their names in the JSON contract."""
    return {
        "device": held.device,
        "host": held.host,
        "metadata": held.metadata,
        "scratch": held.scratch,
        "dense_equivalent": held.dense_equivalent,
    }


def _scale(scale: Any, head_dim: int) -> float:
    """Return the factor of the scores; raise `SpecError` for what is no finite number."""
    if scale is None:
        return float(head_dim**-0.5)
    try:
        if isinstance(scale, int | float) and not isinstance(scale, bool) and math.isfinite(scale):
            return float(scale)
    except OverflowError:  # an integer beyond the largest float
        pass
    raise SpecError(f"scale={_shown(scale)} is not allowed", fix="give a finite number or None")


def _shown(value: Any) -> str:
    """Return what came, in a length that fits a line; Python writes out no integer of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.40}"


def _check_rotation(rotation: Any, head_dim: int) -> None:
    """Raise `SpecError` unless it is None or a `Rotation` of finite frequencies that fits the head dim."""
    if rotation is None:
        return
    if not isinstance(rotation, Rotation):
        raise SpecError(f"rotation {rotation!r}", fix="give a rcq_cli.protocols.Rotation")
    if 2 * len(rotation.frequencies) > head_dim or not all(map(math.isfinite, rotation.frequencies)):
        raise SpecError(
            f"rotation with {len(rotation.frequencies)} frequencies for head dim {head_dim}",
            fix="give finite frequencies, at most one for every two channels",
        )


def _device(name: Any) -> str:
    """Return the device as torch names it; raise `SpecError` or, for an absent one, `UnsupportedHere`."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError) as error:
        raise SpecError(f"device={name!r} is not allowed", fix="allowed: cpu, cuda, cuda:0, ...") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise UnsupportedHere(
            f"device {device} cannot be used", why="torch finds no such device here", fix="device='cpu'"
        )
    return str(device)


def _check_heads(query_heads: int, kv_heads: int, head_dim: int) -> None:
    for name, value in (("query_heads", query_heads), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise SpecError(
                f"{name}={_shown(value)} is not allowed", fix="give an integer from 1 to 2^31 - 1"
            )
    if query_heads % kv_heads:
        raise SpecError(f"query_heads={query_heads} is no multiple of kv_heads={kv_heads}")
    if head_dim % 16:
        raise SpecError(f"head_dim={head_dim} is not allowed", fix="allowed: multiples of 16")
