"""LongBench v2 (arXiv:2412.15204): 503 questions with four choices; data of the user, own wording."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from types import MappingProxyType
from typing import Literal

from rcq_cli.errors import SpecError
from rcq_cli.protocols import Completion, EncodedPrompt, PromptTokenizer, Sample, TaskRequest
from rcq_cli.tasks._answer_metrics import Answered, choice
from rcq_cli.tasks._fitting import too_small
from rcq_cli.tasks._metrics import clean
from rcq_cli.tasks._records import Check, Record, Records, cut_middle, is_text, member, parse, substitute
from rcq_cli.tasks._splitmix import seed
from rcq_cli.tasks._words import data
from rcq_cli.tasks.longbench import absent_file, data_folder

REPOSITORY = "THUDM/LongBench-v2"
_FILES = ("longbench2.jsonl", "data.jsonl", "data.json")
_CHOICES = "ABCD"
_ANSWER_TOKENS, _REASON_TOKENS = 128, 1024
_FIELDS: Mapping[str, Check] = MappingProxyType(
    {
        **dict.fromkeys(("question", "context", "difficulty", "length"), is_text),
        **{f"choice_{letter}": is_text for letter in _CHOICES},
        "answer": lambda value: value in tuple(_CHOICES),
    }
)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `longbench2`."""

    data: str | None = None
    """folder with data.json, data.jsonl or longbench2.jsonl; none: a snapshot of the hub on this machine"""
    cot: bool = False
    """ask for the reasons first (chain of thought); the letter stated last counts"""
    gen: int | None = None
    """tokens to generate; none: 128, with cot 1024 more"""
    online: bool = False
    """fetch data that are not on this machine"""
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

    @property
    def tokens(self) -> int:
        """Return the tokens to generate."""
        return self.gen or _ANSWER_TOKENS + self.cot * _REASON_TOKENS


class LongBench2:
    """The task; an answer without a letter is wrong."""

    name = "longbench2"
    summary = "503 questions with four choices on long documents (your data)"
    parts = ("",)
    Options = Options
    generator = "rcq-lb2-1"
    prompt_set = "rcq-lb2"
    metric = "choice@1"
    score_key = "accuracy"
    further_metrics = None  # one for each difficulty and length that the data name
    higher_is_better = True
    minimum_ctx = 1024
    default_samples: Mapping[str, int] = MappingProxyType({"": 503, "smoke": 8, "ci": 110, "release": 503})
    margins: Mapping[str, float] = MappingProxyType({"": 0.15, "smoke": 0.15, "ci": 0.05, "release": 0.02})

    def samples(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield the samples in the order that the seed draws, until there are no more.

        Raises like `longbench`.
        """
        if request.ctx < self.minimum_ctx:
            raise too_small(request.ctx, self.minimum_ctx)
        records = _records(request.options.data, online=request.options.online)
        drawn = islice(records.drawn(request.seed, "longbench2"), request.samples)
        return (
            _sample(request, tokenizer, index, record, records.sha256) for index, record in enumerate(drawn)
        )

    def controls(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield nothing: the answers are given by people, not planted."""
        del request, tokenizer
        return iter(())

    def score(self, sample: Sample, completion: Completion) -> dict[str, float]:
        """Return `accuracy`, and the same under the difficulty and the length of the question."""
        text = clean(completion.text, strip_think=bool(sample.meta.get("strip_think")))
        right = choice(Answered(text, sample.references[0]))
        return {"accuracy": right, **{f"accuracy_{sample.meta[k]}": right for k in ("difficulty", "length")}}


def _sample(
    request: TaskRequest, tokenizer: PromptTokenizer, index: int, record: Record, source: str
) -> Sample:
    options: Options = request.options
    wording = data("longbench")["choices"]
    template = wording["reasoned" if options.cot else "template"]
    fields = {letter: record[f"choice_{letter}"] for letter in _CHOICES}
    fields["question"] = record["question"]
    context = record["context"]

    def encode(text: str) -> EncodedPrompt:
        user = substitute(template, fields | {"context": text})
        return tokenizer.prompt(user, wording["cue"], chat=options.chat, bos=options.bos)

    cut = cut_middle(encode, context, request.ctx - options.tokens, options.tokens)
    return Sample(
        sample_id=f"longbench2/{request.ctx}/{index}",
        index=index,
        cluster=sha256(context.encode()).hexdigest()[:12],
        prompt_ids=cut.prompt.ids,
        context_len=len(cut.prompt.ids),
        references=(record["answer"],),
        max_new_tokens=options.tokens,
        stop_ids=tokenizer.eos_ids,
        seed=seed(request.seed, "longbench2", index, "needle"),
        meta={
            "difficulty": record["difficulty"],
            "length": record["length"],
            "domain": str(record.get("domain", "")),
            "record": str(record.get("_id", "")),
            "truncated": cut.truncated,
            "question_visible": True,
            "cot": options.cot,
            "strip_think": options.strip_think,
            "corpus_kind": "longbench2",
            "corpus_sha256": source,
        },
    )


@lru_cache(maxsize=1)
def _records(given: str | None, *, online: bool) -> Records:
    folder = data_folder(given, REPOSITORY, online=online, task="longbench2")
    for name in _FILES:
        raw = member(folder, name)
        if raw is not None:
            return parse(raw, f"{folder.name}/{name}", _FIELDS)
    raise absent_file(folder, _FILES[-1], given)


TASK = LongBench2()
