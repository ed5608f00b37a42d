"""A task from a YAML file, with the fields that users of lm-evaluation-harness know; no code, no Jinja."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from rcq_cli.errors import SpecError
from rcq_cli.protocols import Completion, EncodedPrompt, PromptTokenizer, Sample, TaskRequest
from rcq_cli.registry import did_you_mean
from rcq_cli.tasks._answer_metrics import Answered, code_sim, qa_f1, rouge_l
from rcq_cli.tasks._fitting import too_small
from rcq_cli.tasks._metrics import bounded, clean, contains, contains_any
from rcq_cli.tasks._records import Record, Records, cut_middle, parse
from rcq_cli.tasks._splitmix import seed

_SLOT = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}")
_CODE = re.compile(r"\{%|\{\{|\{#")
_IGNORED = (
    "tag",
    "group",
    "task_alias",
    "metadata",
    "training_split",
    "validation_split",
    "target_delimiter",
)
_FIELDS = (
    *("task", "dataset_path", "dataset_kwargs", "test_split", "description", "doc_to_text", "doc_to_target"),
    *("output_type", "num_fewshot", "generation_kwargs", "metric_list", "repeats", "rcq"),
)
_OWN = ("context", "cluster", "opening", "samples", "margin", "minimum_ctx")
_WHOLE, _TEXTS = ("max_gen_toks", "samples", "minimum_ctx"), ("context", "cluster", "opening")
_GENERATION = ("max_gen_toks", "until", "do_sample", "temperature")
_METRIC_FIELDS = ("metric", "aggregation", "higher_is_better", "ignore_case", "ignore_punctuation")
_DEEPEST = 20
"""Levels of nesting a task file may have."""
_ANSWER = "give a text or a number that is not blank, or a list of them"
_PUNCTUATION = re.compile(r"[^\w\s]")
_MARGINS = MappingProxyType({"": 0.15, "smoke": 0.15, "ci": 0.05, "release": 0.02})


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a task of a YAML file."""

    gen: int | None = None
    """tokens to generate; none: those of the file"""
    chat: Literal["auto", "on", "off"] = "auto"
    """use the chat template; auto: if there is one"""
    bos: Literal["auto", "always", "never"] = "auto"
    """put a BOS first; auto: as the tokenizer does"""
    strip_think: bool = False
    """remove thinking blocks before scoring"""
    overlength: Literal["refuse", "allow"] = "refuse"
    """allow a context longer than the model was made for"""

    def __post_init__(self) -> None:
        if self.gen is not None and not 1 <= self.gen <= 1 << 20:
            raise SpecError(f"gen={self.gen} is not allowed", fix=f"allowed: 1 to {1 << 20}", id="RCQ-USE-06")


def exact_match(text: str, references: tuple[str, ...]) -> float:
    """Return 1 if the text is one of the references, blanks at the ends aside."""
    return float(text.strip() in {reference.strip() for reference in references})


def _best(metric: Callable[[Answered], float]) -> Callable[[str, tuple[str, ...]], float]:
    return lambda text, references: max(metric(Answered(text, reference)) for reference in references)


METRICS: Mapping[str, Callable[[str, tuple[str, ...]], float]] = MappingProxyType(
    {
        "exact_match": exact_match,
        "contains": contains,
        "contains_any": contains_any,
        "bounded": bounded,
        "qa_f1": _best(qa_f1),
        "rouge_l": _best(rouge_l),
        "code_sim": _best(code_sim),
    }
)
"""What `metric_list` may name; the first one named is the score."""


@dataclass(frozen=True)
class YamlTask:
    """A task whose prompts and references are fields of records."""

    path: Path
    settings: Mapping[str, Any]
    sha256: str

    parts = ("",)
    Options = Options
    higher_is_better = True
    prompt_set = "file"

    @property
    def name(self) -> str:
        """Return what the file calls the task."""
        return str(self.settings["task"])

    @property
    def summary(self) -> str:
        """Return where the task comes from."""
        return f"task of {self.path.name}"

    @property
    def generator(self) -> str:
        """Return the digest of the file."""
        return f"file:{self.sha256[:12]}"

    @property
    def metric(self) -> str:
        """Return the metrics with their version."""
        return ",".join(f"{entry['metric']}@1" for entry in self.settings["metric_list"])

    @property
    def score_key(self) -> str:
        """Return the first metric."""
        return str(self.settings["metric_list"][0]["metric"])

    @property
    def further_metrics(self) -> tuple[str, ...]:
        """Return the metrics after the first."""
        return tuple(str(entry["metric"]) for entry in self.settings["metric_list"][1:])

    @property
    def minimum_ctx(self) -> int:
        """Return the smallest context the file allows."""
        return int(self.settings["rcq"].get("minimum_ctx", 64))

    @property
    def default_samples(self) -> Mapping[str, int]:
        """Return the samples of the file; all records where it names none, at most 500."""
        return {"": int(self.settings["rcq"].get("samples", min(len(self._records.rows), 500)))}

    @property
    def margins(self) -> Mapping[str, float]:
        """Return the margin of the file, else those of the built-in tasks."""
        margin = self.settings["rcq"].get("margin")
        return _MARGINS if margin is None else {"": float(margin)}

    @property
    def _file(self) -> Path:
        return self.path.parent / Path(_data_file(self.settings, self.path)).expanduser()

    @cached_property
    def _records(self) -> Records:
        file = self._file
        if not file.is_file():
            raise _refused(self.path, f"data file {str(file)!r} does not exist")
        records = parse(file.read_bytes(), file.name, {})
        for place, record in zip(records.places, records.rows, strict=True):
            try:
                self._check(record)
            except SpecError as error:
                why = f"{file.name}, {place}: {error.why}"
                raise SpecError(error.what, why, error.fix, error.id) from error
        return records

    def samples(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield the samples in the order that the seed draws, until there are no more.

        Raises `SpecError` at once for any record that gives no prompt or no answer, and for one of those
        drawn that does not fit; a field that may be cut counts nothing there.
        """
        if request.ctx < self.minimum_ctx:
            raise too_small(request.ctx, self.minimum_ctx)
        records = self._records
        order = records.order(request.seed, f"file.{self.name}")[: request.samples]
        for i in order:
            self._check_room(request, tokenizer, records.rows[i], records.places[i])
        return (self._sample(request, tokenizer, index, records.rows[i]) for index, i in enumerate(order))

    def controls(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield nothing: rcq does not know what would be a leak here."""
        del request, tokenizer
        return iter(())

    def score(self, sample: Sample, completion: Completion) -> dict[str, float]:
        """Return every metric of the file; the answer ends at the first of its `until` texts."""
        text = completion.text
        for stop in sample.meta["until"]:
            text = text.partition(stop)[0]
        text = clean(text, strip_think=bool(sample.meta.get("strip_think")))
        return {
            entry["metric"]: METRICS[entry["metric"]](
                _plain(text, entry), tuple(_plain(reference, entry) for reference in sample.references)
            )
            for entry in self.settings["metric_list"]
        }

    def _sample(self, request: TaskRequest, tokenizer: PromptTokenizer, index: int, record: Record) -> Sample:
        options, cluster = request.options, self.settings["rcq"].get("cluster")
        gen = self._gen(request)
        prompt, truncated = self._fitted(request, tokenizer, record)
        return Sample(
            sample_id=f"{self.name}/{request.ctx}/{index}",
            index=index,
            cluster=str(index) if cluster is None else self._told(record, cluster),
            prompt_ids=prompt.ids,
            context_len=len(prompt.ids),
            references=self._references(record),
            max_new_tokens=gen,
            stop_ids=tokenizer.eos_ids,
            seed=seed(request.seed, f"file.{self.name}", index, "needle"),
            meta={
                "until": self.settings["generation_kwargs"].get("until", []),
                "truncated": truncated,
                "question_visible": True,
                "strip_think": options.strip_think,
                "corpus_kind": "file",
                "corpus_sha256": self._records.sha256,
            },
        )

    def _gen(self, request: TaskRequest) -> int:
        """Return the tokens to generate."""
        return request.options.gen or int(self.settings["generation_kwargs"].get("max_gen_toks", 64))

    def _encoded(self, request: TaskRequest, tokenizer: PromptTokenizer, record: Record) -> EncodedPrompt:
        options = request.options
        user = self.settings["description"] + self._text("doc_to_text", record)
        opening = self._filled(str(self.settings["rcq"].get("opening", "")), record)
        return tokenizer.prompt(user, opening, chat=options.chat, bos=options.bos)

    def _fitted(
        self, request: TaskRequest, tokenizer: PromptTokenizer, record: Record
    ) -> tuple[EncodedPrompt, bool]:
        """Return the prompt, its context cut in the middle where that is needed."""
        field, gen = self.settings["rcq"].get("context"), self._gen(request)
        if field is None:
            return self._encoded(request, tokenizer, record), False

        def encode(context: str) -> EncodedPrompt:
            return self._encoded(request, tokenizer, {**record, field: context})

        cut = cut_middle(encode, self._told(record, field), request.ctx - gen, gen)
        return cut.prompt, cut.truncated

    def _check_room(
        self, request: TaskRequest, tokenizer: PromptTokenizer, record: Record, place: str
    ) -> None:
        """Refuse a record whose prompt is too long without all that may be cut from it."""
        field = self.settings["rcq"].get("context")
        least = record if field is None else {**record, field: ""}
        needed = len(self._encoded(request, tokenizer, least).ids) + self._gen(request)
        if needed > request.ctx:
            fix = f"use --ctx {needed} or more"
            raise SpecError(
                f"{place} of {self._file.name} needs a context of {needed} tokens, --ctx is {request.ctx}",
                why="" if field else f"{self.path.name} does not say which field may be cut",
                fix=fix if field else f"{fix}, or add rcq: {{context: FIELD}} to the file",
                id="RCQ-USE-20",
            )

    def _check(self, record: Record) -> None:
        """Refuse a record of which a prompt or an answer would be made that is none."""
        own = self.settings["rcq"]
        if not self._text("doc_to_text", record).strip():
            raise _refused(self.path, "its prompt is blank", "fill the fields that doc_to_text names")
        self._filled(str(own.get("opening", "")), record)
        for name in ("context", "cluster"):
            if name in own:
                self._told(record, own[name])
        for reference in self._references(record):
            if not all(_plain(reference, entry).strip() for entry in self.settings["metric_list"]):
                why = f"{reference!r:.40} of doc_to_target leaves nothing that an answer could match"
                raise _refused(self.path, why, _ANSWER)

    def _references(self, record: Record) -> tuple[str, ...]:
        """Return the texts of `doc_to_target`: a field may hold several."""
        target = self._template("doc_to_target", record)
        slot = _SLOT.fullmatch(target.strip())
        if not slot and target not in record:
            return (self._filled(target, record),)
        name = slot[1] if slot else target
        value = _field(record, name, self.path)
        answers = value if isinstance(value, list) else [value]
        if not answers or not all(map(_is_told, answers)):
            raise _refused(self.path, f"field {name!r} is {_shown(value)}, which is no answer", _ANSWER)
        return tuple(map(str, answers))

    def _text(self, name: str, record: Record) -> str:
        template = self._template(name, record)
        return self._told(record, template) if template in record else self._filled(template, record)

    def _template(self, name: str, record: Record) -> str:
        """Return the field's name or the text that `name` is; raise `SpecError` for what is neither."""
        template = str(self.settings[name])
        if template in record or _SLOT.search(template):
            return template
        hint = did_you_mean(template, tuple(record)) or f"known: {', '.join(record)}; "
        raise _refused(
            self.path,
            f"{name} {template!r:.60} is no field of this record and names none",
            f"{hint}give a field, or a text with {{{{field}}}}",
        )

    def _filled(self, template: str, record: Record) -> str:
        return _SLOT.sub(lambda slot: self._told(record, slot[1]), template)

    def _told(self, record: Record, name: str) -> str:
        value = _field(record, name, self.path)
        if not _is_told(value):
            why = f"field {name!r} is {_shown(value)}, not a text or a number"
            raise _refused(self.path, why, "fill the field, or leave the record out")
        return str(value)


def read_task(path: Path) -> YamlTask:
    """Return the task of a YAML file; raise `SpecError` naming what it holds that rcq cannot do."""
    import yaml

    raw = path.read_bytes()
    try:
        found = _plain_yaml(raw)
    except yaml.constructor.ConstructorError as error:
        why = f"{error.problem}; a YAML task runs no code"
        raise _refused(path, why, "write the task as a .py file that exposes TASK") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date or number that cannot be
        raise _refused(path, str(error).replace("\n", " ")) from error
    if not isinstance(found, dict):
        raise _refused(path, "it is no table of fields")
    return YamlTask(path, _checked(found, path), sha256(raw).hexdigest())


def _plain_yaml(raw: bytes) -> Any:
    """Return what YAML without aliases and of little depth says.

    A few lines of nested aliases expand to any size, and the time to read brackets grows with their square.
    """
    import yaml

    depth = 0
    for event in yaml.parse(raw, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"alias *{event.anchor}; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
    return yaml.safe_load(raw)


def _checked(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields with their defaults; anything rcq would have to ignore silently is refused."""
    _known(found, (*_FIELDS, *_IGNORED), "field", path)
    for name in ("task", "doc_to_text", "doc_to_target", "metric_list"):
        if not found.get(name):
            raise _refused(path, f"field {name!r} is missing")
    if found.get("output_type", "generate_until") != "generate_until":
        raise _refused(path, f"output_type {found['output_type']!r}; allowed: generate_until")
    if found.get("num_fewshot", 0) != 0 or found.get("repeats", 1) != 1:
        raise _refused(path, "num_fewshot must be 0 and repeats 1; put examples into doc_to_text")
    generation = _table(found, "generation_kwargs", _GENERATION, path)
    if generation.get("do_sample", False) or generation.get("temperature", 0) != 0:
        raise _refused(path, "do_sample and temperature; rcq answers greedily")
    until = generation.get("until", [])
    generation["until"] = [until] if isinstance(until, str) else until
    _typed(generation, path)
    own = _table(found, "rcq", _OWN, path)
    _typed(own, path)
    for name in ("description", "doc_to_text", "doc_to_target"):
        _check_template(str(found.get(name, "")), name, path)
    _check_template(str(own.get("opening", "")), "rcq.opening", path)
    return {
        **found,
        "description": str(found.get("description", "")),
        "doc_to_text": str(found["doc_to_text"]),
        "doc_to_target": str(found["doc_to_target"]),
        "generation_kwargs": generation,
        "metric_list": _metrics(found["metric_list"], path),
        "rcq": own,
    }


def _typed(table: Mapping[str, Any], path: Path) -> None:
    """Refuse a value of another kind than its field has."""
    for name, value in table.items():
        if name in _WHOLE and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise _refused(path, f"{name} is {value!r:.40}, not a whole number above 0")
        if name in _TEXTS and not isinstance(value, str):
            raise _refused(path, f"{name} is {value!r:.40}, not a text")
        if name == "until" and not (isinstance(value, list) and all(isinstance(v, str) and v for v in value)):
            raise _refused(path, "until is no text and no list of texts")
        if name == "margin" and not (isinstance(value, int | float) and 0 < value < 1):
            raise _refused(path, f"margin is {value!r:.40}, not a number between 0 and 1")


def _metrics(entries: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _refused(path, "metric_list is no list of tables")
    for entry in entries:
        _known(entry, _METRIC_FIELDS, "field of metric_list", path)
        name = str(entry.get("metric"))
        if name not in METRICS:
            hint = did_you_mean(name, tuple(METRICS))
            raise _refused(path, f"metric {name!r}; {hint}known: {', '.join(METRICS)}")
        if entry.get("aggregation", "mean") != "mean" or entry.get("higher_is_better", True) is not True:
            raise _refused(path, f"metric {name}: aggregation must be mean and higher_is_better true")
    return entries


def _check_template(template: str, name: str, path: Path) -> None:
    rest = _SLOT.sub("", template)
    if found := _CODE.search(rest):
        why = f"{name} holds more than {{{{field}}}}: {rest[found.start() :][:40]!r}"
        raise _refused(path, why, "write the field into the data, or the task as a .py file")


def _data_file(settings: Mapping[str, Any], path: Path) -> str:
    """Return the data file that `dataset_kwargs: {data_files: ...}` names."""
    if settings.get("dataset_path", "json") not in ("json", "text"):
        why = f"dataset_path {settings['dataset_path']!r}; rcq reads local JSON files only"
        raise _refused(path, why, "use dataset_path: json with dataset_kwargs: {data_files: FILE}")
    given = settings.get("dataset_kwargs") or {}
    files = given.get("data_files") if isinstance(given, dict) else None
    if isinstance(files, dict):
        files = files.get(settings.get("test_split", "test"))
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if not isinstance(files, str):
        raise _refused(
            path, "dataset_kwargs names no data file", "dataset_kwargs: {data_files: {test: FILE}}"
        )
    return files


def _table(found: Mapping[str, Any], name: str, known: tuple[str, ...], path: Path) -> dict[str, Any]:
    table = found.get(name) or {}
    if not isinstance(table, dict):
        raise _refused(path, f"{name} is no table")
    _known(table, known, f"field of {name}", path)
    return dict(table)


def _known(table: Mapping[str, Any], known: tuple[str, ...], noun: str, path: Path) -> None:
    for name in table:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise _refused(path, f"unknown {noun} {name!r}; {hint}known: {', '.join(known)}")


def _field(record: Record, name: str, path: Path) -> Any:
    if name not in record:
        raise _refused(path, f"no field {name!r}; there are {', '.join(map(str, record))}")
    return record[name]


def _is_told(value: Any) -> bool:
    """Say whether a value of a record can stand in a text."""
    return isinstance(value, str | int | float)


def _shown(value: Any) -> str:
    """Return a value as the data file has it, cut where it is long."""
    return f"{json.dumps(value, ensure_ascii=False):.40}"


def _plain(text: str, entry: Mapping[str, Any]) -> str:
    """Return `text` as a metric compares it."""
    if entry.get("ignore_case"):
        text = text.lower()
    return _PUNCTUATION.sub("", text) if entry.get("ignore_punctuation") else text


def _refused(path: Path, why: str, fix: str = "see docs/tasks.md") -> SpecError:
    return SpecError(f"{path.name} is no task that rcq can run", why, fix, "RCQ-USE-25")
