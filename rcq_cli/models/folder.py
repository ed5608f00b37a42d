"""A local folder in the layout of the hub: config.json, tokenizer files and weights."""

from pathlib import Path

from rcq_cli.errors import SpecError
from rcq_cli.models._loading import as_loaded, explained, files_sha256, load_pretrained, wrap_tokenizer
from rcq_cli.protocols import Availability, Json, Loaded

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


class FolderSource:
    """Models in folders of this machine."""

    name = "folder"
    summary = "a local folder with config.json, tokenizer and weights (dir:PATH)"
    licence = "as the model says"

    def availability(self, reference: str) -> Availability:
        """Say whether the folder holds a model, by looking at file names only."""
        missing = missing_part(Path(reference).expanduser())
        if missing:
            return Availability(False, missing, "give a folder that save_pretrained or the hub has written")
        return Availability(True, "found")

    def pull(self, reference: str) -> str:
        """Return what there is to say: a folder is already here; raise `SpecError` when it is not."""
        _existing(reference)
        return f"{reference} is a local folder; nothing to download"

    def load(self, reference: str, *, device: str, dtype: str) -> Loaded:
        """Load the model of the folder `reference`; raise `SpecError` when there is none in it."""
        folder = _existing(reference)
        # the path is no part of the identity: the same files elsewhere are the same model
        return load_folder(folder, folder.resolve().name, revision=None, device=device, dtype=dtype)


def load_folder(folder: Path, name: str, *, revision: str | None, device: str, dtype: str) -> Loaded:
    """Load a folder in the hub's layout under the id `name`."""
    model, tokenizer = load_pretrained(str(folder), name, device, dtype)
    with explained(name):
        return as_loaded(
            name,
            model,
            wrap_tokenizer(model, tokenizer),
            id=name,
            revision=revision,
            weights_sha256=files_sha256(weight_files(folder)),
            weight_quantisation=_quantisation(model.config),
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files transformers would read: safetensors, or the older format without them."""
    for pattern in WEIGHT_PATTERNS:
        files = [file for file in folder.glob(pattern) if not file.name.startswith("consolidated")]
        if files:
            return files
    return []


def _existing(reference: str) -> Path:
    """Return the folder that `reference` names; raise `SpecError` when no model is in it."""
    folder = Path(reference).expanduser()
    missing = missing_part(folder)
    if missing:
        raise SpecError(f"{reference}: {missing}", fix="give a folder with a model in it", id="RCQ-USE-20")
    return folder


def missing_part(folder: Path) -> str:
    """Return what keeps `folder` from being a model, or nothing."""
    if not folder.is_dir():
        return "no such folder"
    if not (folder / "config.json").is_file():
        return "no config.json in this folder"
    return "" if weight_files(folder) else "no weights (*.safetensors) in this folder"


def _quantisation(config: object) -> Json:
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    known = settings if isinstance(settings, dict) else settings.to_dict()
    return {"method": str(known.get("quant_method")), "bits": known.get("bits")}


SOURCE = FolderSource()
