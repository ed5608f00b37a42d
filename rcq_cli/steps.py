"""Certificates of decode steps on disk: a gzip member per sample while a run works, Parquet when done."""

import base64
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rcq_cli.errors import BrokenRun
from rcq_cli.protocols import StepArrays
from rcq_cli.readings import known
from rcq_cli.spec import canonical

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    Arrays = Mapping[str, np.ndarray[Any, Any]]

UNITS = {
    "key_bound": "value norm",
    "value_bound": "value norm",
    "dropped_bound": "value norm",
    "rounding_bound": "value norm",
    "total_bound": "value norm",
    "output_norm": "value norm",
    "true_error": "value norm, null where the step was not audited",
    "violated": "bool",
    "exact": "bool",
    "rung": "0 to 4",
    "promoted_key_blocks": "blocks",
    "promoted_value_blocks": "blocks",
    "blocks": "completed blocks of the layer, the same for its heads",
    "paged_bytes": "bytes of the layer, the same for its heads",
}
"""Every array of `StepArrays` with its unit, in the order of the Parquet columns."""

_FLAGS = ("violated", "exact")
_FLOATS = tuple(name for name in UNITS if name.endswith(("_bound", "_norm", "_error")))

ROW_GROUP_STEPS = 1000


def encode(sample_id: str, key: str, steps: StepArrays, schema: int) -> bytes:
    """Return one gzip member: a JSON line, each array little-endian, zlib, base64, with dtype and shape."""
    import numpy as np

    arrays = {}
    for name in UNITS:
        array = np.ascontiguousarray(getattr(steps, name))
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        data = base64.b64encode(zlib.compress(array.tobytes(), 6)).decode("ascii")
        arrays[name] = {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}
    record = {
        "schema": schema,
        "sample_id": sample_id,
        "key": key,
        "layers": list(steps.layers),
        "arrays": arrays,
    }
    # arrays are packed already; the member only marks where a sample begins and ends
    return gzip.compress((canonical(record) + "\n").encode(), compresslevel=1, mtime=0)


def decode(record: Mapping[str, Any]) -> dict[str, "np.ndarray[Any, Any]"]:
    """Return the arrays of one record, `[N, L, Hq]` or `[N, L]`."""
    import numpy as np

    arrays = {}
    try:
        for name in UNITS:
            packed = record["arrays"][name]
            data = zlib.decompress(base64.b64decode(packed["data"]))
            arrays[name] = np.frombuffer(data, dtype=packed["dtype"]).reshape(packed["shape"])
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        what = f"the certificates of sample {record.get('sample_id')!r} cannot be read"
        raise BrokenRun(
            what, f"{type(error).__name__}: {error}", "run it again with --fresh", "RCQ-RUN-03"
        ) from error
    return arrays


class StepLog:
    """The members of `steps.jsonl.gz`, found by row key; the last of a key wins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.members: dict[str, tuple[int, int]] = {}
        """Offset and length of each member."""
        self.good_bytes = 0
        """Length of the file without a torn last member."""
        if path.exists():
            with path.open("rb") as file:
                self._index(file)

    def _index(self, file: BinaryIO) -> None:
        while True:
            file.seek(self.good_bytes)
            line, length = _member(file)
            try:
                record = json.loads(line or b"")
            except (ValueError, RecursionError):
                return
            if not isinstance(record, dict) or not isinstance(record.get("key"), str):
                raise _unreadable(self.path, f"the member at byte {self.good_bytes} is no record of a sample")
            self.add(record["key"], length)

    def add(self, key: str, length: int) -> None:
        """Note a member that was appended at the end."""
        self.members[key] = (self.good_bytes, length)
        self.good_bytes += length

    def read(self, keys: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yield the records of `keys` in that order, leaving out those that are not there."""
        for key in keys:
            if key in self.members:
                offset, length = self.members[key]
                with self.path.open("rb") as file:
                    file.seek(offset)
                    record: dict[str, Any] = json.loads(gzip.decompress(file.read(length)))
                yield record


def _member(file: BinaryIO) -> tuple[bytes | None, int]:
    """Return what the gzip member at the file's position holds, and its length; None for a torn one."""
    unpack, parts, read = zlib.decompressobj(wbits=31), [], 0
    while not unpack.eof:
        chunk = file.read(1 << 18)
        read += len(chunk)
        if not chunk:
            return None, 0
        try:
            parts.append(unpack.decompress(chunk))
        except zlib.error:
            return None, 0
    return b"".join(parts), read - len(unpack.unused_data)


def table(records: Iterable[Mapping[str, Any]]) -> "pa.Table | None":
    """Return a pyarrow table, one row per step, layer and query head; None without any certificate."""
    import pyarrow as pa

    tables = [_sample_table(record) for record in records]
    return pa.concat_tables(tables) if tables else None


def write_parquet(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write the certificates to `path`, a row group per thousand steps."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer, held, steps = None, [], 0
    try:
        for record in records:
            held.append(_sample_table(record))
            steps += record["arrays"]["blocks"]["shape"][0]
            if steps >= ROW_GROUP_STEPS:
                writer = _flush(pq, writer, path, pa.concat_tables(held))
                held, steps = [], 0
        if held:
            writer = _flush(pq, writer, path, pa.concat_tables(held))
    finally:
        if writer is not None:
            writer.close()


def read_parquet(path: Path) -> "pa.Table":
    """Return the table of a finished run; raise `BrokenRun` when it is damaged or no such table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found = pq.read_table(path, page_checksum_verification=True)
    except (OSError, ValueError, NotImplementedError, pa.ArrowException) as error:
        raise _unreadable(path, " ".join(str(error).split())[:300]) from error
    if why := _no_certificates(found):
        raise _unreadable(path, why)
    return found


def _no_certificates(rows: "pa.Table") -> str:
    """Return why a table is not one of certificates: a column of another kind, or a step left out."""
    import pyarrow.types as kinds

    for name in ("sample_id", "step", "layer", "head", *UNITS):
        if name not in rows.column_names:
            return f"column {name!r} is missing"
        column = rows[name]
        fits = (
            kinds.is_floating if name in _FLOATS else kinds.is_boolean if name in _FLAGS else kinds.is_integer
        )
        if not (fits(column.type) if name != "sample_id" else kinds.is_string(column.type)):
            return f"column {name!r} holds {column.type}"
        if column.null_count and name != "true_error":
            return f"column {name!r} has nulls"
    axes = ("step", "layer", "head")
    counted = rows.group_by("sample_id").aggregate(
        [*((name, "count_distinct") for name in axes), ("step", "count")]
    )
    for sample in counted.to_pylist():
        if sample["step_count"] != math.prod(sample[f"{name}_count_distinct"] for name in axes):
            return f"sample {sample['sample_id']!r} lacks steps, layers or heads"
    return ""


def _unreadable(path: Path, why: str) -> BrokenRun:
    return BrokenRun(f"{path} cannot be read", why=why, fix="run it again with --fresh", id="RCQ-RUN-03")


def arrays_of(rows: "pa.Table") -> Iterator[tuple[str, StepArrays]]:
    """Yield the arrays of each sample of a table, as they were before they became rows."""
    import numpy as np

    names = rows["sample_id"].combine_chunks()
    for sample_id in names.unique().to_pylist():
        mine = rows.filter(_equal(rows["sample_id"], sample_id))
        columns = {name: mine[name].to_numpy(zero_copy_only=False) for name in mine.column_names}
        shape = tuple(len(np.unique(columns[name])) for name in ("step", "layer", "head"))
        arrays = {name: columns[name].reshape(shape) for name in UNITS}
        for name in ("blocks", "paged_bytes"):
            arrays[name] = arrays[name][:, :, 0]
        layers = columns["layer"].reshape(shape)[0, :, 0].tolist()
        yield sample_id, StepArrays(**arrays, layers=tuple(layers))


def _equal(column: Any, value: str) -> Any:
    import pyarrow.compute as pc

    return pc.equal(column, value)


def _flush(pq: Any, writer: Any, path: Path, rows: "pa.Table") -> Any:
    if writer is None:
        # bounds hardly repeat: their bytes pack better apart than as words of a dictionary
        bounds = [field.name for field in rows.schema if str(field.type) == "float"]
        others = [field.name for field in rows.schema if field.name not in bounds]
        writer = pq.ParquetWriter(
            path,
            rows.schema,
            compression="zstd",
            use_byte_stream_split=bounds,
            use_dictionary=others,
            write_page_checksum=True,
        )
    writer.write_table(rows, row_group_size=max(rows.num_rows, 1))
    return writer


def _sample_table(record: Mapping[str, Any]) -> "pa.Table":
    import numpy as np
    import pyarrow as pa

    arrays = decode(record)
    steps, layers, heads = arrays["rung"].shape
    shape = (steps, layers, heads)
    grid = np.indices(shape, dtype=np.int32)
    names = pa.DictionaryArray.from_arrays(np.zeros(grid[0].size, np.int32), [record["sample_id"]])
    columns = {
        "sample_id": (names.cast(pa.string()), ""),
        "step": (grid[0].ravel(), "decode step of the sample, from 0"),
        "layer": (np.asarray(record["layers"], np.int32)[grid[1]].ravel(), "layer of the model"),
        "head": (grid[2].ravel(), "query head"),
    }
    for name, unit in UNITS.items():
        array = arrays[name] if arrays[name].ndim == 3 else np.broadcast_to(arrays[name][:, :, None], shape)
        flat = array.ravel()
        # not audited is null in the table, as everywhere else
        columns[name] = (pa.array(flat, from_pandas=True) if name == "true_error" else flat, unit)
    values = [
        pa.array(column) if not isinstance(column, pa.Array) else column for column, _ in columns.values()
    ]
    fields = [
        pa.field(name, value.type, metadata={"unit": unit})
        for (name, (_, unit)), value in zip(columns.items(), values, strict=True)
    ]
    return pa.Table.from_arrays(values, schema=pa.schema(fields))


def certificate_summary(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the `certificates` object of a cell, over all head-steps of its samples; None without any.

    A relative bound is E / (norm - E), infinite when E >= norm; percentiles are nearest rank over certified
    head-steps. An infinite value is null with `<name>_status: unbounded`.
    """
    import numpy as np

    total = _Totals()
    for record in records:
        total.add(decode(record))
    if total.head_steps == 0:
        return None
    bounds = np.sort(np.concatenate(total.rel_bounds)) if total.rel_bounds else np.empty(0)
    return {
        "head_steps": total.head_steps,
        "certified": total.head_steps - total.exact,
        "exact": total.exact,
        "violations": total.violations,
        "audited": total.audited,
        **figure("rel_bound_p50", _nearest_rank(bounds, 50), "no_certified_step"),
        **figure("rel_bound_p95", _nearest_rank(bounds, 95), "no_certified_step"),
        **figure("rel_error_max", total.rel_error_max, "not_audited"),
        "rungs": {str(rung): int(count) for rung, count in enumerate(total.rungs)},
        "promoted_key_share": total.key_share / total.head_steps,
        "promoted_value_share": total.value_share / total.head_steps,
        "host_to_device_bytes_per_step": total.paged_bytes / total.steps,
        "unbounded": total.unbounded,
    }


class _Totals:
    """Running sums over samples."""

    def __init__(self) -> None:
        self.steps = self.head_steps = self.exact = self.violations = self.audited = self.unbounded = 0
        self.paged_bytes = 0
        self.key_share = self.value_share = 0.0
        self.rungs = [0] * 5
        self.rel_bounds: list[Any] = []
        self.rel_error_max: float | None = None

    def add(self, arrays: "Arrays") -> None:
        import numpy as np

        exact, rung, norm = (
            arrays["exact"].astype(bool),
            arrays["rung"],
            arrays["output_norm"].astype(np.float64),
        )
        self.steps += rung.shape[0]
        self.head_steps += rung.size
        self.exact += int(exact.sum())
        self.violations += int(arrays["violated"].sum())
        self.paged_bytes += int(arrays["paged_bytes"].sum(dtype=np.int64))
        self.rungs = [count + int((rung == level).sum()) for level, count in enumerate(self.rungs)]
        blocks = np.maximum(arrays["blocks"], 1)[:, :, None].astype(np.float64)
        self.key_share += float((arrays["promoted_key_blocks"] / blocks).sum())
        self.value_share += float((arrays["promoted_value_blocks"] / blocks).sum())
        total = arrays["total_bound"].astype(np.float64)
        self.unbounded += int((~exact & ~np.isfinite(total)).sum())
        self.rel_bounds.append(_relative(total, norm)[~exact])
        error = arrays["true_error"].astype(np.float64)
        audited = ~np.isnan(error)
        self.audited += int(audited.sum())
        if audited.any():
            worst = float(_relative(error[audited], norm[audited]).max())
            self.rel_error_max = worst if self.rel_error_max is None else max(self.rel_error_max, worst)


def _relative(error: "np.ndarray[Any, Any]", norm: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return error / (norm - error): at least the error relative to the exact output's norm."""
    import numpy as np

    room = norm - error
    bounded = np.divide(error, room, out=np.full(error.shape, np.inf), where=room > 0)
    return np.where(error == 0, 0.0, bounded)


def _nearest_rank(ordered: "np.ndarray[Any, Any]", percent: int) -> float | None:
    """Return the smallest value with at least `percent` % of all at or below it."""
    return float(ordered[-(-percent * len(ordered) // 100) - 1]) if len(ordered) else None


def figure(name: str, value: float | None, absent: str) -> dict[str, Any]:
    """Return the value, or null and why it is null: `absent` for None, `unbounded` for what is not finite."""
    if value is None or math.isfinite(value):
        return known(name, value, absent)
    return known(name, None, "unbounded")
