"""Data sets of the Hugging Face hub: snapshots on this machine, fetched only where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rcq_cli.errors import UnsupportedHere

_PATTERNS = ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.json", "*.txt", "*.txt.gz", "*.zip")
_SPLITS = ("test", "validation")


def snapshot(name: str, *, online: bool, option: str) -> Path:
    """Return the folder of the data set `OWNER/NAME` or `OWNER/NAME@REVISION`.

    `option` is how the user asked for it. Raises `UnsupportedHere` when it is not on this machine and must
    not, or cannot, be fetched.
    """
    repository, _, revision = name.partition("@")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise _absent(option, "the package huggingface_hub is not installed", online=True) from error
    try:
        folder = snapshot_download(
            repository,
            repo_type="dataset",
            revision=revision or None,
            local_files_only=not online,
            allow_patterns=list(_PATTERNS),
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _absent(option, reason, online=online) from error
    return Path(folder)


def split_files(folder: Path) -> list[Path]:
    """Return the data files of the test split, else of the validation split, else all, by their paths."""
    found = [file for pattern in _PATTERNS for file in folder.rglob(pattern)]
    found.sort(key=lambda file: file.relative_to(folder).as_posix().encode())
    for split in _SPLITS:
        mine = [file for file in found if split in file.relative_to(folder).as_posix().lower()]
        if mine:
            return mine
    return found


def parquet_texts(file: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of each row of a Parquet file that has a column `text`."""
    from pyarrow import parquet

    for batch in parquet.ParquetFile(file).iter_batches(batch_size=8, columns=["text"]):
        for text in batch.column(0).to_pylist():
            yield f"{file.name}", text


def _absent(option: str, why: str, *, online: bool) -> UnsupportedHere:
    fix = (
        "give files of this machine instead"
        if online
        else "add -T online=true, or give files of this machine"
    )
    return UnsupportedHere(f"{option} is not available here", why=why, fix=fix, id="RCQ-ENV-20")
