"""What layers hold, item by item, and what a step reads, phase by phase: counted, not estimated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rcq_cli.cache.tiers import TieredStore
from rcq_cli.engine.decoder import total_bytes
from rcq_cli.engine.hook import ManagedLayer, managed_layers
from rcq_cli.protocols import Certificate, LayerState, Step

Entry = dict[str, Any]
"""`{"tier", "item", "bytes"}`; tier is `device`, `host`, `scratch` or `weights`."""


def holdings(states: Sequence[LayerState]) -> list[Entry]:
    """Return the entries of all layers together; device and host entries sum to the layers' own ledger."""
    found: dict[tuple[str, str], int] = {}
    for state in states:
        for place, count in _items(state).items():
            found[place] = found.get(place, 0) + count
    # layers run one after the other and share their scratch
    scratch = max((state.bytes().scratch for state in states), default=0)
    found["scratch", "promoted copies and step temporaries"] = scratch
    return [{"tier": tier, "item": item, "bytes": count} for (tier, item), count in found.items()]


def _items(state: LayerState) -> dict[tuple[str, str], int]:
    held, store = state.bytes(), getattr(state, "cache", None)
    metadata = {("device", "metadata and annotations"): held.metadata}
    if not isinstance(store, TieredStore):
        items = {("device", "keys and values"): held.device - held.metadata}
        items |= metadata if held.metadata else {}
        return items | ({("host", "originals and bookkeeping"): held.host} if held.host else {})
    items = {
        ("device", "key and value codes"): held.device - held.metadata - store.tail.nbytes,
        **metadata,
        ("device", "open tail"): store.tail.nbytes,
    }
    if store.originals is None:
        return items
    originals = sum(slab.nbytes for slab in store.originals)
    return items | {
        ("host", "originals"): originals,
        ("host", "checksums, norms and spectra"): held.host - originals,
    }


class Rest(NamedTuple):
    """What a model holds besides the layers that a mode keeps."""

    entries: list[Entry]
    dense_equivalent: int
    """Of the layers left as they are."""


def of_model(model: Any, cache: Any) -> Rest:
    """Return the weights, and what layers hold that no mode keeps (sliding windows)."""
    entries = [{"tier": "weights", "item": "model weights", "bytes": _weight_bytes(model)}]
    if not any(not isinstance(layer, ManagedLayer) for layer in cache.layers):
        return Rest(entries, 0)
    held = total_bytes([], cache)
    entries.append({"tier": "device", "item": "layers left as they are", "bytes": held.device})
    return Rest(entries, held.dense_equivalent)


def _weight_bytes(model: Any) -> int:
    return sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())


def weights_read(model: Any) -> int | None:
    """Return the bytes of the weights that one token passes; None for a mixture of experts."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        return None
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    return _weight_bytes(model) - (0 if tied else embedding.nbytes)


def traffic(state: LayerState, step: Step) -> Mapping[str, int] | None:
    """Return the bytes that one layer read in `step`, by phase; None where nobody counts them."""
    store = getattr(state, "cache", None)
    if isinstance(store, TieredStore):
        return _tiered(store, step.certificate)
    held = [getattr(state, name, None) for name in ("keys", "values")]
    if (
        step.certificate is None
        and all(hasattr(slab, "rows") for slab in held)
        and not state.bytes().metadata
    ):
        return {"attend": sum(_nbytes(slab.rows) for slab in held if slab is not None)}
    return None


def _tiered(store: TieredStore, certificate: Certificate | None) -> dict[str, int]:
    heads, blocks = store.geometry.kv_heads, store.block_count
    keys, values = (
        sum(_nbytes(slab.rows) for name, slab in store.blocks.items() if name.startswith(kind))
        for kind in ("key", "value")
    )
    tail = heads * store.tail_tokens * store.geometry.head_dim * store.tail.element_size()
    if certificate is None:
        return {"score": keys + tail, "attend": values + tail}
    # blocks are read for a whole group of query heads, and counted for each of its heads
    group = store.geometry.group
    uncoded = certificate.skipped_value_blocks + certificate.promoted_value_blocks
    read = heads * blocks - int(uncoded[::group].sum())
    coded = values * max(read, 0) // max(heads * blocks, 1)
    return {
        "score": keys + tail,
        "bound": _nbytes(store.annotations.rows),
        "page_in": certificate.paged_bytes,
        "attend": coded + tail,
    }


def appended(state: LayerState) -> int | None:
    """Return the bytes that one new token writes; None for a mode whose writes nobody counts."""
    store = getattr(state, "cache", None)
    if not isinstance(store, TieredStore):
        return None
    g = store.geometry
    return 2 * g.kv_heads * g.head_dim * store.tail.element_size() * (1 if store.originals is None else 2)


def _nbytes(rows: Tensor) -> int:
    return rows.numel() * rows.element_size()


def states_of(cache: Any) -> list[LayerState]:
    """Return the states of the managed layers of a transformers cache, in layer order."""
    return [layer.state for layer in managed_layers(cache).values() if layer.state is not None]
