"""Models of the Hugging Face hub, from its cache here or from the net: `OWNER/NAME[@REVISION]`."""

import os
from pathlib import Path
from typing import Any

from rcq_cli.errors import UnsupportedHere
from rcq_cli.models._loading import quiet
from rcq_cli.models.folder import load_folder, missing_part
from rcq_cli.protocols import Availability, Loaded

PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
DUPLICATES = ["consolidated*", "original/*", "onnx/*"]
"""Copies of the same weights in formats nothing here reads."""


class HubSource:
    """Models named by a hub id."""

    name = "huggingface"
    summary = "any supported decoder of the Hugging Face hub, cached or online (hf:OWNER/NAME@REVISION)"
    licence = "as the model says"

    def availability(self, reference: str) -> Availability:
        """Say whether the hub's cache on this machine holds the model."""
        if cached_snapshot(reference):
            return Availability(True, "in the hub's cache")
        return Availability(False, "not in the hub's cache", f"rcq models pull {reference}")

    def pull(self, reference: str) -> str:
        """Download the model into the hub's cache and return where it lies; raise `UnsupportedHere`."""
        return f"{reference} lies at {snapshot(reference)}"

    def load(self, reference: str, *, device: str, dtype: str) -> Loaded:
        """Load `reference` from the cache, else from the hub; raise `UnsupportedHere` when neither has it."""
        folder = cached_snapshot(reference) or snapshot(reference)
        # the cache names a snapshot's folder by its commit
        return load_folder(folder, _split(reference)[0], revision=folder.name, device=device, dtype=dtype)


def cached_snapshot(reference: str) -> Path | None:
    """Return the folder of a complete snapshot in the hub's cache, or None; never asks the net."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repository, revision = _split(reference)
    try:
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return None if missing_part(folder) else folder


def snapshot(reference: str) -> Path:
    """Return the folder of the model's snapshot, downloaded where needed; raise `UnsupportedHere`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # whatever HTTP client the hub's library uses: the base class of its errors
    bases = [base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"]
    http_error: Any = bases[0] if bases else HfHubHTTPError
    repository, revision = _split(reference)
    try:
        with quiet():
            folder = snapshot_download(
                repository, revision=revision, allow_patterns=PATTERNS, ignore_patterns=DUPLICATES
            )
    # RuntimeError: a closed client and the hub's transfer library; the next three: an answer that is no JSON,
    # or not the JSON of a hub
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, http_error) as error:
        raise cannot_be_had(reference, error) from error
    missing = missing_part(Path(folder))
    if missing:
        raise UnsupportedHere(
            f"model {reference} cannot be used",
            missing,
            "choose a model with safetensors weights",
            "RCQ-ENV-03",
        )
    return Path(folder)


def cannot_be_had(reference: str, error: Exception) -> UnsupportedHere:
    """Return the error for a model that is neither in the cache nor to be reached."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    reason = "HF_HUB_OFFLINE is set" if offline else type(error).__name__
    return UnsupportedHere(
        f"model {reference} cannot be had",
        why=f"it is not in the hub's cache, and the hub gave {reason}",
        fix=f"run `rcq models pull {reference}` where there is a network, or give a folder: --model dir:PATH",
        id="RCQ-ENV-03",
    )


def _split(reference: str) -> tuple[str, str | None]:
    repository, _, revision = reference.partition("@")
    return repository, revision or None


SOURCE = HubSource()
