"""The seams of rcq on one page: what a task, mode, backend, source, executor and report must offer.

Shapes use one legend: Hq query heads, Hkv KV heads, R = Hq / Hkv, T tokens, M blocks, S tokens per block, D
head dim, G value group, L layers, N steps. Everything here is plain data or a Protocol; nothing imports
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Json = Any

# -- tasks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One question put to a model."""

    sample_id: str
    """`task/sub/ctx/index[/qK]`; unique within a run, independent of `--samples`, shard and order."""
    index: int
    cluster: str
    """Samples of one cluster are not independent (same context, book or needle form)."""
    prompt_ids: tuple[int, ...]
    context_len: int
    """Tokens prefilled before compression; `len(prompt_ids)` when the question is part of the prefill."""
    references: tuple[str, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    meta: Mapping[str, Json] = field(default_factory=dict)
    """Needle form, nominal and achieved depth, units, fill, corpus digest and the like."""
    control: str | None = None
    """Name of the control this sample belongs to (`needle-only`, `no-needle`), None for a scored sample."""
    targets: int = 0
    """How many of the last ids are fed one by one and scored (teacher forcing); 0: an answer is generated."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model answered to one sample under one mode."""

    output_ids: tuple[int, ...]
    text: str
    finish_reason: str
    """`eos`, `stop` or `length`."""
    series: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Of a sample with targets, one value per target: `nll` in nats; where the dense model was run too, `kl`
    (dense || this) in nats, `flip` (1 where the likeliest token differs) and `dlogp` of the target. Where the
    prompt was scored, `prompt_nll` holds the sum over it and the number of its scored tokens."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One rendered prompt, encoded once."""

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    """Character of `text` at which each token starts; -1 for a BOS added by id."""
    text: str
    """The rendered prompt, chat template and answer prefix included."""


class PromptTokenizer(Protocol):
    """What a task may ask of a tokenizer."""

    bos_id: int | None
    eos_ids: tuple[int, ...]
    has_chat_template: bool
    sha256: str

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of `text` alone, without any special token, for estimates."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens left out."""

    def prompt(
        self, user: str, answer_prefix: str, *, chat: str = "auto", bos: str = "auto"
    ) -> EncodedPrompt:
        """Render one user turn plus the opening of the answer, and encode it once.

        `chat` is auto, on or off; `bos` auto, always or never. Exactly one BOS stands at position 0, or none
        anywhere.
        """


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """Which samples of a task are wanted."""

    part: str
    """Sub-task (`vt` of `ruler`), empty for a task of one part."""
    ctx: int
    """Tokens in all: BOS, template, context, question, answer prefix and the tokens to generate."""
    samples: int
    seed: int
    options: Any
    """An instance of the task's `Options`."""


class Task(Protocol):
    """One file of `tasks/`, exposed as `TASK`."""

    name: str
    summary: str
    parts: tuple[str, ...]
    """Sub-tasks; `("",)` for a task of one part."""
    Options: type
    """Frozen dataclass of the `-T` options; the docstring of a field is the help of the option."""
    generator: str
    prompt_set: str
    metric: str
    """`name@version` of the primary metric."""
    score_key: str
    """Key of the primary metric in what `score` returns, and its name in the JSON (`accuracy`)."""
    further_metrics: tuple[str, ...] | None
    """Every other key that `score` may return; None where only the samples tell."""
    higher_is_better: bool
    minimum_ctx: int
    default_samples: Mapping[str, int]
    """Samples per preset (`smoke`, `ci`, `release`); `""` without a preset."""
    margins: Mapping[str, float]
    """Non-inferiority margin per preset; `""` without a preset."""

    def samples(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield the samples in index order, lazily; sample i does not depend on `request.samples`."""

    def controls(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield the control samples (`Sample.control` set); they never enter a score."""

    def score(self, sample: Sample, completion: Completion) -> dict[str, float]:
        """Score one answer; pure, usable later on stored text."""


class ModelFreeTask(Task, Protocol):
    """A task that answers its own samples: no model, no prompt, `minimum_ctx` 0."""

    modes: tuple[str, ...]
    """The modes it can run."""

    def answer(self, sample: Sample, options: Any, mode: Mode, mode_options: Any) -> Completion:
        """Answer one sample under `mode`; `options` are the task's."""

    def timed(self, scores: Sequence[Mapping[str, float]], options: Any) -> Mapping[str, float]:
        """Return metrics that a clock measures once per run, given the scores of its samples."""


# -- models -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run."""

    name: str
    """As tables show it: `needle (constructed)`, `smollm2-135m`."""
    model: Any
    """transformers `PreTrainedModel` in eval mode, attention implementation sdpa."""
    tokenizer: PromptTokenizer
    fingerprint: Mapping[str, Json]
    """Contract fields, keys prefixed by group: `model.id`, `model.revision`, `model.weights_sha256`,
    `model.config_sha256`, `model.dtype`, `model.weight_quantisation`, `tokenizer.sha256`, ..."""
    max_positions: int
    prefill_chunk: int
    """Tokens per prefill call that suit this model."""
    constructed: bool = False
    """True for an instrument model, whose tasks plant decoys."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a source can provide a model here, and what to do if not."""

    available: bool
    reason: str
    fix: str = ""


class Source(Protocol):
    """One file of `rcq_cli/models/`, exposed as `SOURCE`."""

    name: str
    summary: str
    licence: str

    def availability(self, reference: str) -> Availability:
        """Say whether `reference` can be loaded here, without network and without loading it."""

    def load(self, reference: str, *, device: str, dtype: str) -> Loaded:
        """Load the model `reference` names; `dtype` is auto, float32, bfloat16 or float16.

        Raises `UnsupportedHere` (7) when it cannot be had, `SpecError` (2) for a bad reference.
        """


# -- modes and backends -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary positions of a layer: position p turns each pair of channels by p times its frequency."""

    frequencies: tuple[float, ...]
    """Radians per token of each pair; the first `2 * len(frequencies)` channels are turned, none if empty."""
    interleaved: bool = False
    """Whether neighbours are a pair; else channel i and channel `i + len(frequencies)`."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """One attention layer."""

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    """Dtype of the cache: float32, bfloat16 or float16."""
    device: str
    scale: float
    """Factor of the scores, `head_dim ** -0.5` unless the model says otherwise."""
    layer: int | None = None
    """Index of the layer in its model; None for a layer that stands alone."""
    rotation: Rotation | None = None
    """How positions turned its keys and queries; None where nobody asked or nobody knows."""

    @property
    def group(self) -> int:
        """R, the query heads that share one KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Needs:
    """What a mode wants to know about the attention of a prefill; exact, causal, mean over a GQA group."""

    last_rows: int = 0
    """Query rows at the end of the prompt."""
    probe_share: float = 0.0
    """Share of the rows at the end, and the same share again drawn from the others."""
    probe_seed: int = 0
    column_sums: bool = False
    """Probability that each token received, summed over all rows of the prompt."""
    token_ids: bool = False
    """The ids of prompt and answer, as a `StageTracker` given to `follow` of each layer's state."""
    rotation: bool = False
    """`Geometry.rotation`; a model without rotary positions that can be moved is refused."""

    @property
    def chooses_by_attention(self) -> bool:
        """Whether what is kept of the prompt depends on what its rows attended to."""
        return self.last_rows > 0 or self.probe_share > 0 or self.column_sums


@dataclass(frozen=True, slots=True)
class Certificate:
    """Proven bounds of one decode step of one layer, over query heads; all tensors are [Hq].

    Bounds are float64, absolute L2 norms in the unit of the values, and
    `total_bound = key_bound + value_bound + dropped_bound + rounding_bound`.
    """

    key_bound: Tensor
    value_bound: Tensor
    dropped_bound: Tensor
    rounding_bound: Tensor
    total_bound: Tensor
    output_norm: Tensor
    """float64 L2 norm of the returned output."""
    exact: Tensor
    """bool: recomputed from the originals."""
    rung: Tensor
    """int8: highest rung used, 0 to 4."""
    promoted_key_blocks: Tensor
    promoted_value_blocks: Tensor
    skipped_value_blocks: Tensor
    blocks: int
    """Completed blocks of this layer at this step."""
    paged_bytes: int
    """Bytes brought from tier 2 for this step."""
    reported: Mapping[str, Tensor] = field(default_factory=dict)
    """Figures `[Hq]` by formulas of a mode's own, beside the bounds and never part of them."""

    def finite(self) -> bool:
        """Return whether every bound is finite."""
        return bool(self.total_bound.isfinite().all())


@dataclass(frozen=True, slots=True)
class Step:
    """What one attention call returns."""

    output: Tensor
    """[Hq, D], dtype of the cache."""
    certificate: Certificate | None


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one layer holds, in bytes as allocated (`product.md` section 6)."""

    device: int
    host: int
    metadata: int
    """The part of `device` that is neither codes nor uncompressed keys and values."""
    scratch: int
    dense_equivalent: int
    """A dense cache of 16-bit elements for the same tokens."""


@dataclass(frozen=True, slots=True)
class Engagement:
    """Proof from counters that a mode acted on a sample (one layer)."""

    steps: int
    steps_acted: int
    coded_elems: int
    evicted_tokens: int
    engaged: bool
    reason: str
    """Empty when engaged, else `short_context`, `budget_ge_context`, `no_decode_steps` or `inactive`."""
    exempt: bool = False
    """The mode's own rule leaves this layer dense (the first layers of `quest`)."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Counters of this mode alone; over layers, names in `_max` take the largest, others the sum."""


class LayerState(Protocol):
    """The cache of one layer under one mode.

    A state whose mode has `needs` also has `end_prefill(statistics)`: the prompt is complete, and
    `statistics` (`rcq_cli.cache.statistics.Statistics`) is what was seen of its attention, None when nothing
    was. A state whose mode certifies also has `check_intact()`, called after the last step of a sample: it
    raises `BrokenRun` when something stored has changed since it was stored.
    """

    @property
    def tokens(self) -> int:
        """Return the logical length: tokens seen."""

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Add `[Hkv, T, D]` keys and values."""

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the `[Hkv, D]` key and value of one decode step."""

    def attend(self, query: Tensor) -> Step:
        """Attend with the `[Hq, D]` query of the newest token."""

    def exact(self, query: Tensor) -> Tensor:
        """Return the float64 `[Hq, D]` softmax attention on the stored originals (for audits).

        Raises `SpecError` for a mode that keeps no originals.
        """

    def fork(self) -> LayerState:
        """Return an independent copy; what is never rewritten is shared."""

    def bytes(self) -> LayerBytes:
        """Return what is allocated now."""

    def engagement(self) -> Engagement:
        """Return the counters since the cache was made."""


class Mode(Protocol):
    """One file of `rcq_cli/modes/`, exposed as `MODE`.

    A mode that compresses once the whole prompt is known also has `needs(options) -> Needs`.
    """

    name: str
    summary: str
    label: str
    """Strongest claim it may print: `reference`, `none`, `reported`, `calibrated`, `certified`."""
    certifies: bool
    Options: type
    """Frozen dataclass of the `-O` options; validates itself and raises `SpecError`."""

    def open(self, geometry: Geometry, options: Any, backend: Backend) -> LayerState:
        """Make the empty cache of one layer."""


class Backend(Protocol):
    """One file of `kernels/`, exposed as `BACKEND`; its operations are listed in `kernels/README.md`."""

    name: ClassVar[str]

    def unsupported(self, geometry: Geometry) -> str | None:
        """Return why this backend cannot serve `geometry` here, or None."""

    def finite(self, numbers: Tensor) -> bool:
        """Return whether no number is NaN or infinite."""


# -- what a decode returns ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Certificates of the steps of one sample: numpy arrays `[N, L, Hq]`, float32 bounds rounded up."""

    key_bound: np.ndarray[Any, Any]
    value_bound: np.ndarray[Any, Any]
    dropped_bound: np.ndarray[Any, Any]
    rounding_bound: np.ndarray[Any, Any]
    total_bound: np.ndarray[Any, Any]
    output_norm: np.ndarray[Any, Any]
    true_error: np.ndarray[Any, Any]
    """NaN where the step was not audited."""
    violated: np.ndarray[Any, Any]
    """bool; decided in float64 before rounding."""
    exact: np.ndarray[Any, Any]
    rung: np.ndarray[Any, Any]
    promoted_key_blocks: np.ndarray[Any, Any]
    promoted_value_blocks: np.ndarray[Any, Any]
    blocks: np.ndarray[Any, Any]
    """[N, L] completed blocks."""
    paged_bytes: np.ndarray[Any, Any]
    """[N, L]"""
    layers: tuple[int, ...]
    """Model layer index of each position along L."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """One sample answered under one mode: the completion and everything measured on the way."""

    completion: Completion
    step_ns: tuple[int, ...]
    """Wall time of each decode step, auditing left out."""
    prefill_ns: int
    steps: StepArrays | None
    bytes: LayerBytes | None
    """Summed over layers, at the end of the sample; unmanaged layers count in device and dense alike. None
    for a task without a model."""
    engagement: Mapping[str, Json]
    """The record of `baselines.md` section 6."""
    first_logits_sha256: str
    """Digest of the float32 logits that chose the second token (the first one after compression)."""
    selection_ns: int = 0
    """Time this mode took to choose and encode what it keeps of the prompt; not part of `prefill_ns`."""


# -- executors and reports ----------------------------------------------------------------------------------


class Executor(Protocol):
    """One file of `rcq_cli/executors/`, exposed as `EXECUTOR`: cells in, run folders out."""

    name: str
    summary: str

    def unsupported(self) -> str | None:
        """Return why this executor cannot run here, or None."""


class Report(Protocol):
    """One file of `rcq_cli/reports/`, exposed as `REPORT`: stored runs in, a table out."""

    name: str
    summary: str


class TextReport(Report, Protocol):
    """A report that is a file or lines of its own: the document of `rcq compare --json` in, text out.

    It also takes the document of a comparison that broke off (`exit_code` and `error`).
    """

    def text(self, document: Mapping[str, Json]) -> str:
        """Return the whole text, the same for the same document."""
