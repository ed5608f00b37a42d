"""The built-in instrument model: its retrieval is exact, so what is lost is lost by the cache mode.

A `SmolLM3ForCausalLM` of two layers whose weights are formulas (`_needle_weights.py`). It needs no download
and takes contexts of up to 262,144 tokens. Its difficulty is set by knobs that are part of its name, e.g.
`needle:key_margin=0.05,seed=1`; a knob that is not named keeps the preset's value, and `off` unsets a margin.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from transformers import SmolLM3Config, SmolLM3ForCausalLM
from transformers.initialization import no_init_weights

from rcq_cli.errors import SpecError
from rcq_cli.models import _needle_weights as weights
from rcq_cli.models._loading import as_loaded, pick_device, pick_dtype
from rcq_cli.models._needle_weights import Knobs, build_weights, draw_codes
from rcq_cli.models._needle_words import build_tokenizer, token_lists
from rcq_cli.models._tokenizer import ModelTokenizer
from rcq_cli.protocols import Availability, Loaded
from rcq_cli.registry import did_you_mean

MAX_POSITIONS = 262_144
RECIPE = "needle-recipe-1"
"""Changes with every change of a formula: weights are known by recipe, knobs and tokenizer."""
BFLOAT16_KEY_MARGIN, BFLOAT16_VALUE_MARGIN = 0.025, 0.07
"""Below these margins bfloat16 itself loses answers."""
RANGES: dict[str, tuple[float, float]] = {
    "key_margin": (0.001, 0.25),
    "value_margin": (0.005, 1.0),
    "outliers": (0, weights.HEAD_DIM),
    "seed": (0, 2**32 - 1),
    "heads": (1, 16),
    "layers": (1, 16),
}


@dataclass(frozen=True, slots=True)
class NeedleSource:
    """One preset of the instrument."""

    name: str
    preset: Knobs
    summary: str
    licence: str = "Apache-2.0 (built from formulas)"

    def availability(self, reference: str) -> Availability:
        """Say whether `reference` can be loaded here: always."""
        self.knobs(reference)
        return Availability(True, "built in, no download")

    def pull(self, reference: str) -> str:
        """Return what there is to say: nothing needs to be fetched."""
        self.knobs(reference)
        return f"{self.name} is built in; nothing to download"

    def knobs(self, reference: str) -> Knobs:
        """Return the knobs of `NAME:key=value,...`; raise `SpecError` for one that is not allowed."""
        given = reference.removeprefix(self.name).removeprefix(":")
        pairs = [item.partition("=") for item in given.split(",")] if given else []
        changes: dict[str, Any] = {key.strip(): _knob(key.strip(), value.strip()) for key, _, value in pairs}
        if len(changes) < len(pairs):
            raise SpecError(f"{reference}: a knob is given twice", id="RCQ-USE-18")
        return replace(self.preset, **changes)

    def load(self, reference: str, *, device: str, dtype: str) -> Loaded:
        """Build the model `reference` names; dtype auto is float32 on every device."""
        knobs, place = self.knobs(reference), pick_device(device)
        kind = torch.float32 if dtype == "auto" else pick_dtype(dtype, place)
        _check_dtype(reference, knobs, kind)
        tokenizer = build_tokenizer()
        wrapped = ModelTokenizer(tokenizer)
        lists = token_lists(tokenizer)
        model = build_model(lists, knobs).to(device=place, dtype=kind)
        changed = [
            f"{key}={_shown(value)}"
            for key, value in asdict(knobs).items()
            if value != getattr(self.preset, key)
        ]
        name = ":".join([self.name, ",".join(changed)]) if changed else self.name
        full = ",".join(f"{key}={_shown(value)}" for key, value in asdict(knobs).items())
        recipe = f"{RECIPE}|{full}|{wrapped.sha256}"
        loaded = as_loaded(
            f"{name} (constructed)",
            model,
            wrapped,
            id=f"needle:{full}",
            revision=RECIPE,
            weights_sha256=hashlib.sha256(recipe.encode()).hexdigest(),
            weight_quantisation=None,
        )
        return replace(loaded, constructed=True)


def build_model(lists: weights.Lists, knobs: Knobs) -> SmolLM3ForCausalLM:
    """Return the float32 model in eval mode, on the CPU."""
    config = needle_config(lists, knobs)
    with no_init_weights():
        model = SmolLM3ForCausalLM(config)
    state = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    state |= {name: torch.ones_like(weight) for name, weight in state.items() if name.endswith("norm.weight")}
    model.load_state_dict(state | build_weights(draw_codes(lists, knobs), knobs))
    return model.eval()


def needle_config(lists: weights.Lists, knobs: Knobs) -> SmolLM3Config:
    """Return the architecture: one sliding layer with RoPE that copies, full layers without that match."""
    pad, bos, eos = lists.silent[:3]
    return SmolLM3Config(
        vocab_size=lists.size,
        hidden_size=weights.HIDDEN,
        intermediate_size=32,
        num_hidden_layers=1 + knobs.layers,
        num_attention_heads=weights.CONTEXT * knobs.heads,
        num_key_value_heads=knobs.heads,
        head_dim=weights.HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=weights.NORM_EPS,
        pad_token_id=pad,
        bos_token_id=bos,
        eos_token_id=eos,
        rope_parameters={"rope_type": "default", "rope_theta": weights.ROPE_THETA},
        use_sliding_window=True,
        sliding_window=weights.WINDOW,
        no_rope_layers=[1] + [0] * knobs.layers,
        layer_types=["sliding_attention"] + ["full_attention"] * knobs.layers,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )


def _knob(key: str, text: str) -> float | int | None:
    names = tuple(field.name for field in fields(Knobs))
    if key not in names:
        raise SpecError(
            f"needle has no knob {key!r}",
            fix=did_you_mean(key, names) + f"known: {', '.join(names)}",
            id="RCQ-USE-17",
        )
    low, high = RANGES[key]
    is_margin = key.endswith("margin")
    if is_margin and text == "off":
        return None
    read: Callable[[str], Any] = float if is_margin else int
    try:
        value = read(text)
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        allowed = (
            f"a {'number' if is_margin else 'whole number'} from {low} to {high}" + ", or off" * is_margin
        )
        raise SpecError(f"needle: {key}={text!r}", fix=f"allowed: {allowed}", id="RCQ-USE-18")
    return value


def _shown(value: float | int | None) -> str:
    return "off" if value is None else repr(value)


def _check_dtype(reference: str, knobs: Knobs, kind: torch.dtype) -> None:
    fine = (knobs.key_margin or 1) < BFLOAT16_KEY_MARGIN or (knobs.value_margin or 1) < BFLOAT16_VALUE_MARGIN
    if kind == torch.bfloat16 and fine:
        raise SpecError(
            f"{reference}: dtype bfloat16",
            why="its margins are below what bfloat16 can tell apart",
            fix="use --dtype float32 or float16",
            id="RCQ-USE-19",
        )


SOURCE = NeedleSource(
    name="needle",
    preset=Knobs(key_margin=0.025, value_margin=0.07, outliers=4),
    summary="constructed instrument model, up to 262,144 tokens: one scale per tensor loses most needles",
)
