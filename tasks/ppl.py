"""Perplexity while decoding: given targets are fed one by one through the cache under test."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from types import MappingProxyType
from typing import Any, Literal

from rcq_cli.errors import SpecError
from rcq_cli.protocols import Completion, PromptTokenizer, Sample, TaskRequest
from rcq_cli.tasks._corpora import Corpus, corpus_meta, open_corpus
from rcq_cli.tasks._fitting import too_small
from rcq_cli.tasks._splitmix import seed

_PER_BOOK = 4
_LEAST_STRIDE = 1024
_UNSETTLED = 64
"""Tokens at the end of an unfinished text that its continuation may change."""
_FIRST_WORDS = 2048


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `ppl`."""

    target_tokens: int | Literal["half"] = 32
    """tokens at the end of each text that are decoded and scored; half: half the context"""
    targets: Literal["shared", "independent"] = "shared"
    """shared: the same targets at every context; independent: texts side by side, others at each context"""
    longest: int | None = None
    """longest context of the comparison, which fixes shared targets; none: the longest of --ctx"""
    shadow: Literal["none", "dense"] = "none"
    """dense: also run the dense model, for divergence and flips; where dense is compared they come anyway"""
    pooled: bool = False
    """also score the prompt (dense for every mode), for comparison with papers that pool it"""
    corpus: str = "builtin"
    """builtin, a packaged corpus, hf:OWNER/NAME, or paths of text files or folders (one file is one book)"""
    text: str | None = None
    """another name of corpus"""
    online: bool = False
    """fetch a corpus that is not on this machine"""
    bos: Literal["auto", "always", "never"] = "auto"
    """put a BOS first; auto: as the tokenizer does"""
    overlength: Literal["refuse", "allow"] = "refuse"
    """allow a context longer than the model was made for"""

    def __post_init__(self) -> None:
        if self.text is not None and self.corpus not in ("builtin", self.text):
            raise SpecError(
                f"corpus={self.corpus} and text={self.text} name the same option twice",
                fix="give one of them",
                id="RCQ-USE-06",
            )
        if self.target_tokens != "half" and not 1 <= self.target_tokens <= 1 << 20:
            what = f"target_tokens={self.target_tokens} is not allowed"
            raise SpecError(what, fix=f"allowed: 1 to {1 << 20}, or half", id="RCQ-USE-06")


class Ppl:
    """The task: a sample is a text whose last tokens are targets; the text before them is the context."""

    name = "ppl"
    summary = "perplexity of given text, decoded token by token through the cache"
    parts = ("",)
    Options = Options
    generator = "rcq-ppl-1"
    prompt_set = "none"
    metric = "suffix_perplexity@1"
    score_key = "perplexity"
    further_metrics = (
        *("nll_suffix", "n_targets", "bits_per_token", "bits_per_byte", "nll_pooled", "perplexity_pooled"),
        *("kl_mean", "kl_p99", "top1_flip", "abs_dlogp"),
    )
    higher_is_better = False
    minimum_ctx = 128
    default_samples: Mapping[str, int] = MappingProxyType({"": 4, "smoke": 4, "ci": 20, "release": 60})
    margins: Mapping[str, float] = MappingProxyType({"": 0.05, "smoke": 0.05, "ci": 0.02, "release": 0.01})

    def samples(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield the samples in index order, book after book, until the corpus has no more.

        Raises `SpecError` for a context that leaves no room before the targets, and for a corpus in which no
        book is long enough.
        """
        return islice(_Windows(request, tokenizer).samples(), request.samples)

    def controls(self, request: TaskRequest, tokenizer: PromptTokenizer) -> Iterator[Sample]:
        """Yield nothing: there is no answer that could leak."""
        del request, tokenizer
        return iter(())

    def score(self, sample: Sample, completion: Completion) -> dict[str, float]:
        """Return `perplexity` of the targets and what is known of them beside it; NLL and KL in nats."""
        series, nll = completion.series, completion.series["nll"]
        total, n = math.fsum(nll), len(nll)
        found = {
            "perplexity": perplexity(total / n),
            "nll_suffix": total / n,
            "n_targets": float(n),
            "bits_per_token": total / n / math.log(2),
            "bits_per_byte": total / math.log(2) / max(sample.meta["bytes"], 1),
        }
        if "prompt_nll" in series:
            before, tokens = series["prompt_nll"]
            found["nll_pooled"] = (before + total) / (tokens + n)
            found["perplexity_pooled"] = perplexity(found["nll_pooled"])
        if "kl" in series:
            found |= {
                "kl_mean": math.fsum(series["kl"]) / n,
                "kl_p99": sorted(series["kl"])[-(-99 * n // 100) - 1],
                "top1_flip": math.fsum(series["flip"]) / n,
                "abs_dlogp": math.fsum(map(abs, series["dlogp"])) / n,
            }
        return found


def perplexity(nll: float) -> float:
    """Return exp(nll), infinity where no float can hold it."""
    return math.exp(nll) if nll < 709 else math.inf


class _Windows:
    """The texts of one request."""

    def __init__(self, request: TaskRequest, tokenizer: PromptTokenizer) -> None:
        options: Options = request.options
        self.request, self.tokenizer, self.options = request, tokenizer, options
        half = options.target_tokens == "half"
        self.targets = request.ctx // 2 if half else int(options.target_tokens)
        probe = tokenizer.prompt("a", "", chat="off", bos=options.bos).ids
        self.opening = probe[:1] if tokenizer.bos_id is not None and probe[0] == tokenizer.bos_id else ()
        self.longest = request.ctx if options.longest is None else options.longest
        if request.ctx > self.longest:
            what = f"longest={self.longest} is below --ctx {request.ctx}"
            raise SpecError(what, fix="leave longest out, or give the longest context", id="RCQ-USE-06")
        if request.ctx < self.targets + len(self.opening) + 1:
            raise too_small(request.ctx, self.targets + len(self.opening) + 1)
        self.corpus: Corpus = open_corpus(options.text or options.corpus, online=options.online)

    def samples(self) -> Iterator[Sample]:
        """Yield every sample the corpus has."""
        ends = self._independent() if self.options.targets == "independent" else self._shared()
        index = -1
        for index, (book, end) in enumerate(ends):
            yield self._sample(index, book, end)
        if index < 0:
            raise SpecError(
                f"no book of corpus {self.corpus.name} has {self.longest + 1} tokens",
                fix="use a smaller --ctx, or a corpus with longer books",
                id="RCQ-USE-22",
            )

    def _shared(self) -> Iterator[tuple[_Book, int]]:
        """Yield where targets end, round robin over the books; the same for every context up to `longest`."""
        stride = max(self.targets, _LEAST_STRIDE)
        books = list(self._books())
        for turn in range(_PER_BOOK):
            end, long_enough = self.longest + turn * stride, []
            for book in books:
                if book.holds(end + 1):
                    long_enough.append(book)
                    yield book, end
            books = long_enough

    def _independent(self) -> Iterator[tuple[_Book, int]]:
        """Yield the ends of texts that lie side by side, one book after the other."""
        for book in self._books():
            for number in count(1):
                if not book.holds(number * self.request.ctx + 1):
                    break
                yield book, number * self.request.ctx

    def _books(self) -> Iterator[_Book]:
        return (_Book(name, parts, self.tokenizer) for name, parts in self.corpus.paragraphs())

    def _sample(self, index: int, book: _Book, end: int) -> Sample:
        ids = book.window(end - self.request.ctx + len(self.opening), end)
        return Sample(
            sample_id=f"ppl/{self.request.ctx}/{index}",
            index=index,
            cluster=book.name,
            prompt_ids=(*self.opening, *ids),
            context_len=self.request.ctx - self.targets,
            references=(),
            max_new_tokens=self.targets,
            stop_ids=(),
            seed=seed(self.request.seed, "ppl", index, "targets"),
            meta=self._meta(book, end, ids[-self.targets :]),
            targets=self.targets,
        )

    def _meta(self, book: _Book, end: int, targets: tuple[int, ...]) -> dict[str, Any]:
        return {
            "book": book.name,
            "start": end - self.targets,
            "targets": self.options.targets,
            "bytes": len(self.tokenizer.decode(targets).encode()),
            "shadow": self.options.shadow,
            "pooled": self.options.pooled,
            "budget": self.request.ctx,
            "fill": 1.0,
            **corpus_meta(self.corpus, repeats=False),
        }


class _Book:
    """The tokens of one book, read as far as they are needed; none of them is a special token."""

    def __init__(self, name: str, paragraphs: Iterator[str], tokenizer: PromptTokenizer) -> None:
        self.name = name
        self.read = array("I")
        """Tokens that no further text can change."""
        self._paragraphs, self._tokenizer = paragraphs, tokenizer
        self._parts: list[str] = []
        self._words = 0
        self._finished = False

    def holds(self, tokens: int) -> bool:
        """Return whether the book has so many tokens."""
        while len(self.read) < tokens and not self._finished:
            rate = (len(self.read) + _UNSETTLED) / self._words if self._words else 1.0
            self._pull(max(_FIRST_WORDS, int((tokens + 2 * _UNSETTLED) * 1.02 / rate) - self._words))
        return len(self.read) >= tokens

    def window(self, first: int, end: int) -> tuple[int, ...]:
        """Return the tokens from `first` to before `end`."""
        return tuple(self.read[first:end])

    def _pull(self, words: int) -> None:
        """Read about so many words more, and encode the whole text so far."""
        wanted = self._words + words
        while self._words < wanted:
            paragraph = next(self._paragraphs, None)
            if paragraph is None:
                self._finished = True
                break
            self._parts.append(paragraph)
            self._words += len(paragraph.split())
        ids = self._tokenizer.encode("\n\n".join(self._parts))
        self.read = array("I", ids if self._finished else ids[:-_UNSETTLED])


TASK = Ppl()
