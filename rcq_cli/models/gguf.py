"""One GGUF file of this machine, dequantised while loading."""

import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from rcq_cli.errors import BrokenRun, SpecError, UnsupportedHere
from rcq_cli.models._loading import as_loaded, files_sha256, first_line, load_pretrained, wrap_tokenizer
from rcq_cli.protocols import Availability, Json, Loaded

PACKAGES = ("gguf", "accelerate")
INSTALL = "pip install 'rcq[gguf]'"


class GgufSource:
    """Models in GGUF files."""

    name = "gguf"
    summary = "a local .gguf file, dequantised while loading (gguf:PATH)"
    licence = "as the model says"

    def availability(self, reference: str) -> Availability:
        """Say whether the file is there and the packages that read it are installed."""
        if not Path(reference).expanduser().is_file():
            return Availability(False, "no such file", "give the path of a .gguf file")
        missing = missing_packages()
        return Availability(
            not missing, f"needs {missing}" if missing else "found", INSTALL if missing else ""
        )

    def pull(self, reference: str) -> str:
        """Return what there is to say: a file is already here; raise `SpecError` when it is not."""
        _existing(reference)
        return f"{reference} is a local file; nothing to download"

    def load(self, reference: str, *, device: str, dtype: str) -> Loaded:
        """Load the model of the file `reference`; raise `SpecError` when there is no such file."""
        file = _existing(reference)
        return load_file(file, file.name, revision=None, device=device, dtype=dtype)


def _existing(reference: str) -> Path:
    """Return the file that `reference` names; raise `SpecError` when there is none."""
    file = Path(reference).expanduser()
    if not file.is_file():
        raise SpecError(f"{reference}: no such file", fix="give the path of a .gguf file", id="RCQ-USE-20")
    return file


def load_file(file: Path, name: str, *, revision: str | None, device: str, dtype: str) -> Loaded:
    """Load one GGUF file under the id `name`; raise `UnsupportedHere` without the packages that read it."""
    missing = missing_packages()
    if missing:
        raise UnsupportedHere(f"{name} needs {missing}", "it is not installed", INSTALL, "RCQ-ENV-02")
    from transformers import GgufConfig

    with _parsed_once():
        types = tensor_types(file)
        model, tokenizer = load_pretrained(
            str(file.parent),
            name,
            device,
            dtype,
            gguf_file=file.name,
            # without this some architectures look for a kernel that multiplies packed weights
            quantization_config=GgufConfig(dequantize=True),
        )
    return as_loaded(
        name,
        model,
        wrap_tokenizer(model, tokenizer),
        id=name,
        revision=revision,
        weights_sha256=files_sha256([file]),
        weight_quantisation=types,
    )


def tensor_types(file: Path) -> dict[str, Json]:
    """Return the file's size and its number of tensors per type: a dequantised config shows neither.

    Raises `BrokenRun` for a file that is cut off, damaged, or no GGUF file.
    """
    import gguf

    try:
        reader: Any = gguf.GGUFReader(str(file))
    except Exception as error:  # the parser checks little: a damaged file ends in an error of any class
        what = f"{file.name}: the weights cannot be read"
        raise BrokenRun(what, first_line(error), "fetch the file again", "RCQ-MOD-03") from error
    counts = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    return {"format": "gguf", "bytes": file.stat().st_size, "tensors": dict(sorted(counts.items()))}


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Share one parse of the file: transformers makes three, and one table of names per tensor."""
    library: Any = importlib.import_module("gguf")
    reader, name_map = library.GGUFReader, library.get_tensor_name_map

    class PlainReader(reader):  # type: ignore[misc, valid-type]
        """Slices plain arrays: a slice of a memory map costs several times more, and there are many."""

        def __setattr__(self, name: str, value: Any) -> None:
            object.__setattr__(self, name, value.view(np.ndarray) if name == "data" else value)

    library.GGUFReader, library.get_tensor_name_map = cache(PlainReader), cache(name_map)
    try:
        yield
    finally:
        library.GGUFReader, library.get_tensor_name_map = reader, name_map


def missing_packages() -> str:
    """Return the packages that are needed and not installed, or nothing."""
    return ", ".join(package for package in PACKAGES if find_spec(package) is None)


SOURCE = GgufSource()
