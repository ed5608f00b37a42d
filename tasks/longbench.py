"""LongBench (arXiv:2308.14508): 21 tasks on real documents; data of the user, wording of this project."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from rcq_cli.errors import SpecError, UnsupportedHere
from rcq_cli.protocols import Completion, EncodedPrompt, PromptTokenizer, Sample, TaskRequest
from rcq_cli.tasks._answer_metrics import METRICS, Answered, require_jieba, require_rouge
from rcq_cli.tasks._fitting import too_small
from rcq_cli.tasks._hub import snapshot
from rcq_cli.tasks._metrics import clean
from rcq_cli.tasks._records import (
    Check,
    Record,
    Records,
    bad_data,
    cut_middle,
    is_text,
    is_texts,
    member,
    parse,
    parse_object,
    substitute,
)
from rcq_cli.tasks._splitmix import seed
from rcq_cli.tasks._words import data

REPOSITORY = "THUDM/LongBench"
_FIELDS: Mapping[str, Check] = MappingProxyType(
    {
        **dict.fromkeys(("input", "context", "language"), is_text),
        "answers": lambda value: is_texts(value) and bool(value),
        "length": lambda value: isinstance(value, int),
        "all_classes": lambda value: value is None or is_texts(value),
    }
)
_BALANCED = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa"),
    *("samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
"""The parts of LongBench-E."""
_BUCKETS = ((4000, "0_4k"), (8000, "4_8k"))
_LONGEST = "8k_up"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `longbench`."""

    data: str | None = None
    """folder with one JSONL file per part; none: a snapshot of the hub on this machine"""
    extended: bool = False
    """LongBench-E: the 13 parts whose lengths are balanced, files PART_e.jsonl"""
    prompts: str | None = None
    """JSON file with templates of your own: PART to text with {context} and {input}"""
    rouge: Literal["own", "package"] = "own"
    """own: rouge_l@1; package: rouge_l@pkg of the package rouge, as upstream scores summaries"""
    gen: int | None = None
    """tokens to generate; none: those of each part"""
    online: bool = False
    """fetch data that is not on this machine"""
    chat: Literal["auto", "on", "off"] = "auto"
    """use the chat template; auto: if there is one, and not for parts with solved examples or code"""
    bos: Literal["auto", "always", "never"] = "auto"
    """put a BOS first; auto: as the tokenizer does"""
    strip_think: bool = False
    """remove thinking blocks before scoring"""
    overlength: Literal["refuse", "allow"] = "refuse"
    """allow a context longer than the model was made for"""

    def __post_init__(self) -> None:
        if self.gen is not None and not 1 <= self.gen <= 1 << 20:
            raise SpecError(f"gen={self.gen} is not allowed", fix=f"allowed: 1 to {1 << 20}", id="RCQ-USE-06")


class Wording(NamedTuple):
    """How a part is asked and judged."""

    gen: int
    metric: str
    template: str
    cue: str
    """Opening of the answer."""
    plain: bool = False
    """Without chat template: solved examples, or code."""
    first_line: bool = False
    """Only the first line of the answer counts."""


class LongBench:
    """The task; a context that is too long loses its middle, never its question."""

    name = "longbench"
    summary = "21 tasks on real documents (your data): questions, summaries, classes, counting, code"
    # parts that need a package come first, so that a run without it ends at once
    parts = tuple(data("longbench")["parts"])
    Options = Options
    generator = "rcq-lb-1"
    prompt_set = "rcq-lb1"
    metric = "qa_f1@1,rouge_l@1,classification@1,para_id@1,count@1,code_sim@1"
    score_key = "score"
    further_metrics = (*METRICS, *(f"score_{name}" for name in (*(name for _, name in _BUCKETS), _LONGEST)))
    higher_is_better = True
    minimum_ctx = 1024
    default_samples: Mapping[str, int] = MappingProxyType({"": 500, "smoke": 5, "ci": 20, "release": 500})
    margins: Mapping[str, float] = MappingProxyType({"": 0.15, "smoke": 0.15, "ci": 0.05, "release": 0.02})

    def samples(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield the samples of one part in the order that the seed draws, until there are no more.

        Raises `SpecError` for data that are not what they should be and `UnsupportedHere` for data or a
        package that this machine lacks.
        """
        if request.ctx < self.minimum_ctx:
            raise too_small(request.ctx, self.minimum_ctx)
        wording, digest = _wording(request.part, request.options.prompts)
        if request.options.rouge == "package" and wording.metric.startswith("rouge_l"):
            require_rouge()
            wording = wording._replace(metric=wording.metric.replace("rouge_l", "rouge_l_pkg"))
        if wording.metric.endswith("_segmented"):
            require_jieba()
        records = _records(request.part, request.options)
        drawn = records.drawn(request.seed, f"longbench.{request.part}")
        source = sha256(f"{records.sha256}|{digest}".encode()).hexdigest() if digest else records.sha256
        return (
            _sample(request, tokenizer, wording, index, record, source)
            for index, record in enumerate(islice(drawn, request.samples))
        )

    def controls(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield nothing: the answers are given by people, not planted."""
        del request, tokenizer
        return iter(())

    def score(self, sample: Sample, completion: Completion) -> dict[str, float]:
        """Return `score`, the same under the name of its metric, and under the length of the document."""
        text = clean(completion.text, strip_think=bool(sample.meta.get("strip_think")))
        if sample.meta["first_line"]:
            text = text.lstrip("\n").split("\n")[0]
        metric, classes = sample.meta["metric"], tuple(sample.meta["classes"])
        answers = (Answered(text, reference, classes) for reference in sample.references)
        score = max(METRICS[metric](answer) for answer in answers)
        return {"score": score, metric: score, f"score_{sample.meta['bucket']}": score}


def bucket(words: int) -> str:
    """Return the class of length of a document: `0_4k`, `4_8k` or `8k_up`."""
    return next((name for limit, name in _BUCKETS if words < limit), _LONGEST)


def _sample(
    request: TaskRequest,
    tokenizer: PromptTokenizer,
    wording: Wording,
    index: int,
    record: Record,
    source: str,
) -> Sample:
    options: Options = request.options
    gen = options.gen or wording.gen
    chat = "off" if wording.plain and options.chat == "auto" else options.chat
    context = record["context"]

    def encode(text: str) -> EncodedPrompt:
        user = substitute(wording.template, {"context": text, "input": record["input"]})
        return tokenizer.prompt(user, wording.cue, chat=chat, bos=options.bos)

    cut = cut_middle(encode, context, request.ctx - gen, gen)
    return Sample(
        sample_id=f"longbench/{request.part}/{request.ctx}/{index}",
        index=index,
        cluster=sha256(context.encode()).hexdigest()[:12],
        prompt_ids=cut.prompt.ids,
        context_len=len(cut.prompt.ids),
        references=tuple(map(str, record["answers"])),
        max_new_tokens=gen,
        stop_ids=tokenizer.eos_ids,
        seed=seed(request.seed, f"longbench.{request.part}", index, "needle"),
        meta={
            "part": request.part,
            "metric": wording.metric,
            "first_line": wording.first_line,
            "classes": list(record["all_classes"] or ()),
            "bucket": bucket(record["length"]),
            "language": record["language"],
            "record": str(record.get("_id", "")),
            "truncated": cut.truncated,
            "question_visible": True,
            "strip_think": options.strip_think,
            "corpus_kind": "longbench-e" if options.extended else "longbench",
            "corpus_sha256": source,
        },
    )


def _wording(part: str, path: str | None) -> tuple[Wording, str]:
    """Return how a part is asked, and the digest of the user's templates, empty without any."""
    own = Wording(**data("longbench")["parts"][part])
    if path is None:
        return own, ""
    file = Path(path).expanduser()
    if not file.is_file():
        raise bad_data(f"prompts={path} does not exist")
    raw = file.read_bytes()
    templates = parse_object(raw, f"prompts={path}")
    template = templates.get(part, own.template)
    if not isinstance(template, str) or "{context}" not in template:
        raise bad_data(f"prompts={path}: the template of {part} is no text with {{context}}")
    return own._replace(template=template), sha256(raw).hexdigest()


@lru_cache(maxsize=4)
def _records(part: str, options: Options) -> Records:
    if options.extended and part not in _BALANCED:
        raise SpecError(
            f"longbench/{part} has no extended set",
            fix="name the parts: " + ",".join(f"longbench/{name}" for name in _BALANCED),
            id="RCQ-USE-24",
        )
    name = f"{part}_e.jsonl" if options.extended else f"{part}.jsonl"
    folder = data_folder(options.data, REPOSITORY, online=options.online, task="longbench")
    raw = member(folder, name)
    if raw is None:
        raise absent_file(folder, name, options.data)
    return parse(raw, f"{folder.name}/{name}", _FIELDS)


def data_folder(given: str | None, repository: str, *, online: bool, task: str) -> Path:
    """Return the folder the user named, else a snapshot of the hub; `UnsupportedHere` without either."""
    if given is not None:
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise SpecError(
                f"data={given} is no folder", fix="give the folder with the data", id="RCQ-USE-23"
            )
        return folder
    try:
        return snapshot(repository, online=online, option=f"the data of {task}")
    except UnsupportedHere as error:
        fix = f"-T data=DIR with the files of {repository}, or -T online=true"
        raise UnsupportedHere(error.what, error.why, fix, error.id) from error


def absent_file(folder: Path, name: str, given: str | None) -> Exception:
    """Return the error for a folder that lacks a file: of the user, or of a snapshot."""
    there = sorted(file.name for file in folder.glob("*.json*"))
    what, held = f"{folder} holds no {name}", f"it holds {', '.join(there) or 'no JSON file'}"
    if given is not None:
        return SpecError(what, held, "name only parts whose file is there", "RCQ-USE-23")
    return UnsupportedHere(what, held, "-T data=DIR with the file", "RCQ-ENV-20")


TASK = LongBench()
