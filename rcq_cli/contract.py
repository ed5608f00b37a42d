"""The validation contract: which fields must, should or may differ between two runs that are compared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from rcq_cli.errors import NotComparable, SpecError
from rcq_cli.registry import did_you_mean
from rcq_cli.spec import sha256_json

Fields = Mapping[str, Any]

MODE_PREFIX = "mode."
"""Fields of the cache mode: the one block that may differ freely."""
SHOWN_DIGITS = 12
"""Hex digits of a hash that tables show."""


class Level(Enum):
    """What a difference in a field means for a comparison."""

    MUST = "must"
    """The runs cannot be paired (exit 5)."""
    SHOULD = "should"
    """Scores are compared with a warning, times and memory are not."""
    RECORD = "record"
    """Shown, never compared."""
    FREE = "free"
    """The cache mode itself."""


_MUST = {
    "model": "id revision weights_sha256 config_sha256 dtype weight_quantisation",
    "tokenizer": "sha256 bos_policy bos_count chat_template_sha256 template_kwargs",
    "task": "name parts generator prompt_set metric corpus_kind corpus_sha256 seed ctx gen_tokens "
    "sample_ids_sha256 prompts_sha256 questions question_visible shots options controls",
    "decoding": "greedy temperature top_p stop_ids eos max_new_tokens batch_size",
    "pipeline": "prefill_mode prefill_attention",
    "software": "rcq_minor",
}
_SHOULD = {
    "decoding": "prefill_chunk",
    "pipeline": "decode_attention",
    "software": "torch transformers triton numba cuda driver rcq_commit",
    "hardware": "device cpu cpu_count memory_bytes gpu gpu_count gpu_memory_bytes gpu_sm_count power_limit_w "
    "clock_policy pcie threads",
    "determinism": "deterministic tf32 cublas_workspace",
}
_RECORD = {
    "model": "parameters name path source constructed max_positions tensor_types layers_managed "
    "layers_unmanaged query_heads kv_heads head_dim rope scale",
    "tokenizer": "vocab_size first_ids",
    "task": "corpus_package corpus_version units fill_ratio_min fill_ratio_mean prompt_tokens_min "
    "prompt_tokens_mean prompt_tokens_max",
    "pipeline": "logits_window sdpa_branch backend",
    "software": "rcq rcq_dirty python numpy tokenizers pyarrow accelerate gguf system",
    "hardware": "gpu_uuid_sha256 temperature_c clocks_mhz",
    "determinism": "seeds",
}


def _table() -> Mapping[str, Level]:
    levels: dict[str, Level] = {}
    for level, groups in ((Level.MUST, _MUST), (Level.SHOULD, _SHOULD), (Level.RECORD, _RECORD)):
        for group, names in groups.items():
            for name in names.split():
                # a field with two levels would make the comparison depend on the order of the tables
                assert levels.setdefault(f"{group}.{name}", level) is level, f"{group}.{name} has two levels"
    return MappingProxyType(levels)


LEVELS: Mapping[str, Level] = _table()
"""Level of every field a contract may hold, by `group.field`; the fields of the mode are free."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Fields in which two contracts differ, each with both values."""

    must: tuple[tuple[str, Any, Any], ...]
    should: tuple[tuple[str, Any, Any], ...]

    @property
    def comparable(self) -> bool:
        """Whether scores may be paired."""
        return not self.must

    @property
    def timing_comparable(self) -> bool:
        """Whether times and memory may be compared as well."""
        return not self.must and not self.should

    def refusal(
        self,
        reference: str,
        candidate: str,
        fix: str = "run both with the same settings, or pass --allow-mismatch",
    ) -> NotComparable:
        """Return the error that names every differing MUST field with both values."""
        return NotComparable(
            f"{reference} and {candidate} cannot be compared",
            why="these fields differ: " + "; ".join(difference_text(entry) for entry in self.must),
            fix=fix,
            id="RCQ-CMP-01",
        )

    def warnings(self) -> list[str]:
        """Return one line per differing SHOULD field."""
        return [f"{difference_text(entry)}: times and memory are not compared" for entry in self.should]


def level_of(name: str) -> Level:
    """Return the level of a field; raise `SpecError` for a name that has none."""
    if name.startswith(MODE_PREFIX):
        return Level.FREE
    if name not in LEVELS:
        raise SpecError(
            f"contract field {name!r} has no level",
            fix=did_you_mean(name, tuple(LEVELS)) + "add it to rcq_cli/contract.py",
            id="RCQ-CMP-03",
        )
    return LEVELS[name]


def is_must(name: str) -> bool:
    """Whether two runs that differ in this field cannot be paired."""
    return level_of(name) is Level.MUST


def complete(contract: Fields) -> dict[str, Any]:
    """Return the contract with an explicit null for every field it lacks; unknown names raise `SpecError`."""
    for name in contract:
        level_of(name)
    return {name: contract.get(name) for name in LEVELS} | dict(contract)


def contract_hash(contract: Fields) -> str:
    """Return the sha256 over the MUST fields that stand in the contract, 64 hex digits."""
    return _hash(contract, Level.MUST)


def timing_hash(contract: Fields) -> str:
    """Return the sha256 over the SHOULD fields: equal hashes make times comparable."""
    return _hash(contract, Level.SHOULD)


def mode_hash(contract: Fields) -> str:
    """Return the sha256 over the cache mode: the `mode.` fields of a contract, or the block by itself."""
    block = {name: value for name, value in contract.items() if name.startswith(MODE_PREFIX)}
    return sha256_json(block or dict(contract))


def short(digest: str) -> str:
    """Return a hash as tables show it."""
    return digest[:SHOWN_DIGITS]


def compare_contracts(reference: Fields, candidate: Fields) -> Mismatch:
    """Return the MUST and SHOULD fields in which two contracts differ; a missing field counts as null."""
    names = sorted({*reference, *candidate})
    levels = {name: level_of(name) for name in names}

    def differing(level: Level) -> Iterable[tuple[str, Any, Any]]:
        for name in names:
            values = reference.get(name), candidate.get(name)
            if levels[name] is level and sha256_json(values[0]) != sha256_json(values[1]):
                yield (name, *values)

    return Mismatch(tuple(differing(Level.MUST)), tuple(differing(Level.SHOULD)))


def _hash(contract: Fields, level: Level) -> str:
    return sha256_json({name: value for name, value in contract.items() if level_of(name) is level})


def difference_text(entry: tuple[str, Any, Any]) -> str:
    """Return `name (ours and theirs)` of a field that differs."""
    name, ours, theirs = entry
    return f"{name} ({ours!r} and {theirs!r})"
