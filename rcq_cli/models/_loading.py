"""What the sources share: device and dtype, quiet loading, fingerprints, and the size of a dense cache."""

import hashlib
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rcq_cli.errors import BrokenRun, RcqError, SpecError, UnsupportedHere, UnsupportedModel
from rcq_cli.models._download import cache_home
from rcq_cli.models._tokenizer import ModelTokenizer
from rcq_cli.protocols import Json, Loaded

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST_CHUNK, SMALLEST_CHUNK = 2048, 256
WHOLE_FILE_BYTES = 2**30
"""Weight files above this size are identified by header and size, smaller ones by their whole content."""
MODEL_FIX = "use a decoder-only model that transformers loads with attn_implementation='sdpa'"
TOKENIZER_FIX = "give a model that carries its tokenizer (tokenizer.json)"

SPLIT = "split"
"""Device of a model that no single one holds: layers over all GPUs, then memory, then disk."""


def pick_device(device: str) -> torch.device:
    """Return the torch device `device` names; `auto` is CUDA where there is one. Raises `UnsupportedHere`."""
    if device in ("auto", SPLIT):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise SpecError(
            f"device {device!r}", fix=f"allowed: auto, {SPLIT}, cpu, cuda, cuda:0, ...", id="RCQ-USE-15"
        )
    chosen = torch.device(device)
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UnsupportedHere(
            f"no device {device}",
            why=f"torch sees {torch.cuda.device_count()} CUDA devices",
            fix="use --device cpu",
            id="RCQ-ENV-01",
        )
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype `dtype` names; `auto` is float32 on a CPU and bfloat16 elsewhere."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise SpecError(f"dtype {dtype!r}", fix=f"allowed: auto, {', '.join(DTYPES)}", id="RCQ-USE-16")
    return DTYPES[dtype]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and the hub client off the terminal, and leave their settings as they were."""
    from transformers.utils import logging as theirs

    bars, loggers = (
        theirs.is_progress_bar_enabled(),
        [logging.getLogger(n) for n in ("transformers", "huggingface_hub")],
    )
    levels = [logger.level for logger in loggers]
    theirs.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        # the GGUF loader draws its bar whatever the settings say
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            theirs.enable_progress_bar()


def load_pretrained(folder: str, name: str, device: str, dtype: str, **options: Any) -> tuple[Any, Any]:
    """Return the transformers model of a local folder, in eval mode on its device, and its tokenizer.

    `options` go to both loaders (`gguf_file`) or the model's alone (`quantization_config`). Raises
    `UnsupportedModel` for an architecture that cannot be loaded, `BrokenRun` for weights that do not fit it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = pick_device(device)
    shared = {key: value for key, value in options.items() if key == "gguf_file"}
    with quiet(), explained(name, TOKENIZER_FIX):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **shared
        )
    with quiet(), explained(name):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            # never code out of a model's files, and no question on the terminal either
            trust_remote_code=False,
            weights_only=True,
            dtype=pick_dtype(dtype, place),
            attn_implementation="sdpa",
            output_loading_info=True,
            **(_placement(name) if device == SPLIT else {}),
            **options,
        )
    if info["missing_keys"]:
        raise BrokenRun(
            f"{name}: weights are missing",
            why=f"{len(info['missing_keys'])} tensors, e.g. {min(info['missing_keys'])}",
            fix="download the model again",
            id="RCQ-MOD-03",
        )
    model = model.eval()
    return model if device == SPLIT else model.to(place), tokenizer


def _placement(name: str) -> dict[str, Any]:
    """Return what transformers needs to spread a model; raise `UnsupportedHere` without accelerate."""
    if find_spec("accelerate") is None:
        raise UnsupportedHere(
            f"{name} cannot be spread over devices",
            "it needs accelerate",
            "pip install accelerate",
            "RCQ-ENV-02",
        )
    return {"device_map": "auto", "offload_folder": str(cache_home() / "offload")}


def as_loaded(name: str, model: Any, tokenizer: ModelTokenizer, **identity: Json) -> Loaded:
    """Return the model with what a contract needs; `identity` holds id, revision, weights_sha256, ..."""
    config = model.config.get_text_config()
    fingerprint = {
        **{f"model.{key}": value for key, value in identity.items()},
        "model.config_sha256": config_sha256(model.config),
        "model.dtype": str(model.dtype).removeprefix("torch."),
        "model.parameters": sum(weight.numel() for weight in model.parameters()),
        **tokenizer.fingerprint(),
    }
    return Loaded(
        name=name,
        model=model,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        max_positions=max_positions(config),
        prefill_chunk=prefill_chunk(config),
    )


def wrap_tokenizer(model: Any, tokenizer: Any) -> ModelTokenizer:
    """Return the tokenizer with the stops of the model's generation config."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    return ModelTokenizer(tokenizer, eos if isinstance(eos, list) else [eos] if eos is not None else [])


def config_sha256(config: Any) -> str:
    """Return a digest of what a config changes of its class, without the library's version and paths."""
    known = {
        key: value
        for key, value in config.to_diff_dict().items()
        if key not in ("transformers_version", "dtype")
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def files_sha256(files: Sequence[Path]) -> str:
    """Return one digest over names and contents of weight files."""
    lines = [f"{file.name} {_file_sha256(file)}" for file in sorted(files, key=lambda file: file.name)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def max_positions(config: Any) -> int:
    """Return the longest context in tokens, scaled RoPE included."""
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = (rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 1)
    return int(max(getattr(config, "max_position_embeddings", 0) or 2**31 - 1, scaled))


def prefill_chunk(config: Any) -> int:
    """Return tokens per prefill call: a chunk far above a layer's window costs more than it saves."""
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    return min(LARGEST_CHUNK, max(SMALLEST_CHUNK, window)) if sliding and window else LARGEST_CHUNK


def kv_bytes(config: Any, ctx: int, element_bytes: int = 2) -> int:
    """Return the bytes of a dense cache: 2 * layers * kv_heads * head_dim * element_bytes * ctx.

    A sliding layer holds its window at most; a linear layer counts nothing.
    """
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    held = {
        "full_attention": ctx,
        "sliding_attention": min(ctx, getattr(config, "sliding_window", None) or ctx),
    }
    return 2 * heads * head_dim * element_bytes * sum(held.get(kind, 0) for kind in kinds)


@contextmanager
def explained(name: str, fix: str = MODEL_FIX) -> Iterator[None]:
    """Turn what transformers and the parsers below it raise while loading into an error with a fix.

    `fix` is for what does not say by its class what is wrong.
    """
    from pickle import UnpicklingError
    from struct import error as StructError

    from safetensors import SafetensorError

    try:
        yield
    except RcqError:
        raise
    except ImportError as error:
        raise UnsupportedHere(
            f"{name} needs a package", why=first_line(error), fix="pip install 'rcq[gguf]'", id="RCQ-ENV-02"
        ) from error
    except MemoryError as error:
        raise UnsupportedHere(
            f"{name} does not fit into memory",
            first_line(error),
            "use a machine with more memory",
            "RCQ-ENV-05",
        ) from error
    except (SafetensorError, RuntimeError, UnpicklingError, StructError, FileNotFoundError) as error:
        raise BrokenRun(
            f"{name}: the weights cannot be read", first_line(error), "download them again", "RCQ-MOD-03"
        ) from error
    except Exception as error:  # the tokenizers library raises no class of its own, others raise any
        raise UnsupportedModel(
            f"unsupported model: {name}",
            why=first_line(error),
            fix=fix,
            id="RCQ-MOD-02",
        ) from error


def first_line(error: BaseException) -> str:
    """Return class and text of an error in one line of ASCII."""
    text = " ".join(str(error).split()).encode("ascii", "replace").decode()
    return f"{type(error).__name__}: {text[:300]}"


def _file_sha256(file: Path) -> str:
    """Return the content's digest; the hub's cache names a large file by it already."""
    stored = file.resolve().name
    if file.is_symlink() and re.fullmatch(r"[0-9a-f]{64}", stored):
        return stored
    with file.open("rb") as stream:
        if file.stat().st_size <= WHOLE_FILE_BYTES:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        digest = hashlib.sha256(f"head {file.stat().st_size} ".encode())
        digest.update(stream.read(2**20))
        return digest.hexdigest()
