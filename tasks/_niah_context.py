"""One context of `niah`: what is planted, what is asked, and the prompts filled to the budget."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import lcm
from typing import Any, NamedTuple

from rcq_cli.errors import BrokenRun, SpecError, UnsupportedModel
from rcq_cli.protocols import EncodedPrompt, PromptTokenizer, Sample, TaskRequest
from rcq_cli.tasks._corpora import Corpus, open_corpus
from rcq_cli.tasks._fitting import fill_floor, fit
from rcq_cli.tasks._haystack import Body, Haystack, Insert, find, insert, token_at
from rcq_cli.tasks._needles import Form, Needle, NeedleBag, payload_kind
from rcq_cli.tasks._splitmix import SplitMix64, seed
from rcq_cli.tasks._words import data

_BREAK = "\n\n"
_FEWEST_SENTENCES = 2
NEEDLE_ONLY = "needle-only"


class Question(NamedTuple):
    """One question, the opening of its answer, and the values that answer it."""

    text: str
    opening: str
    values: tuple[str, ...]


class Plan(NamedTuple):
    """What one kind of sample plants and asks."""

    control: str | None
    planted: tuple[Needle, ...]
    """The first needle of each question, then the others."""
    decoys: tuple[Needle, ...]
    asked: tuple[Question, ...]


class _Built(NamedTuple):
    """A prompt, encoded, and the haystack in it."""

    prompt: EncodedPrompt
    body: Body


class Context:
    """Context `index` of one request: everything is drawn from the streams of this index alone."""

    def __init__(self, request: TaskRequest, tokenizer: PromptTokenizer, index: int) -> None:
        self.request, self.tokenizer, self.index = request, tokenizer, index
        self.options = request.options
        self.corpus: Corpus = open_corpus(self.options.corpus, online=self.options.online)

    def samples(self) -> list[Sample]:
        """Return the scored samples, one per question."""
        asked = tuple(map(self._question, self.needles))
        return _Filling(self, Plan(None, self.needles + self.others, self.decoys, asked)).samples()

    def needle_only(self) -> Sample:
        """Return the control with the same needle and question in two sentences of haystack.

        One value is asked for even where the task has several: the control tells whether the model is fit.
        """
        needle = self.needles[0]
        plan = Plan(NEEDLE_ONLY, (needle,), (), (self._question(needle, alone=True),))
        return _Filling(self, plan).samples()[0]

    def no_needle(self) -> Sample:
        """Return the control without the needle, scored against what would have been planted."""
        plan = Plan("no-needle", (), self.decoys, (self._question(self.needles[0]),))
        return _Filling(self, plan).samples()[0]

    def wrong_key(self) -> Sample:
        """Return the control that asks for a key never planted; the planted values would be hits."""
        needle, decoys = self.needles[0], self.decoys
        # drawn last: the bag must know the keys of the decoys
        asked = self._question(self._draw(0))._replace(values=self._question(needle).values)
        return _Filling(self, Plan("wrong-key", self._facts(needle), decoys, (asked,))).samples()[0]

    def rng(self, stream: str) -> SplitMix64:
        """Return the generator of one stream of this context."""
        return SplitMix64(seed(self.request.seed, "niah", self.index, stream))

    def depth(self, question: int) -> float:
        """Return the nominal depth in percent of the first fact that answers a question."""
        return self.depth_of(self.needles[question])

    def depth_of(self, needle: Needle) -> float:
        """Return the nominal depth in percent; all facts that are asked for are spread over the grid."""
        asked = [fact for first in self.needles for fact in self._facts(first)]
        grid = self.options.depth_grid()
        return float(grid[(self.index + asked.index(needle) * len(grid) // len(asked)) % len(grid)])

    def form(self, question: int) -> Form:
        """Return the form; each pair of depth and form comes once before the forms move on."""
        chosen: tuple[Form, ...] = self.options.form_list()
        moved = self.index // lcm(len(self.options.depth_grid()), len(chosen))
        return chosen[(self.index + moved + question) % len(chosen)]

    @cached_property
    def needles(self) -> tuple[Needle, ...]:
        """Return the asked needles; drawn before all else, so that no other option moves them."""
        return tuple(self._draw(question) for question in range(self.options.questions))

    @cached_property
    def others(self) -> tuple[Needle, ...]:
        """Return further facts with the keys of the asked needles and other values."""
        more = range(1, self.options.values)
        kind = self.options.payload
        return tuple(self._bag.another(n, payload_kind(kind, n.form)) for n in self.needles for _ in more)

    @cached_property
    def decoys(self) -> tuple[Needle, ...]:
        """Return the decoys of all questions."""
        assert len(self.others) == len(self.needles) * (self.options.values - 1)  # drawn before the decoys
        each = self.options.decoys or 0
        return tuple(self._draw(question) for question, _ in enumerate(self.needles) for _ in range(each))

    @cached_property
    def _bag(self) -> NeedleBag:
        return NeedleBag(self.rng("needle"), self.corpus)

    def _draw(self, question: int) -> Needle:
        form = self.form(question)
        return self._bag.draw(form, payload_kind(self.options.payload, form))

    def _facts(self, needle: Needle) -> tuple[Needle, ...]:
        """Return an asked needle and the others with its key."""
        return (needle, *(other for other in self.others if other.key == needle.key))

    def _check_room(self, values: Sequence[str]) -> None:
        """Raise `SpecError` where an answer with several values would be cut off."""
        if len(values) == 1:
            return
        needed = len(self.tokenizer.encode(", ".join(values)))
        if needed > self.options.gen:
            raise SpecError(
                f"gen={self.options.gen} is too small for values={len(values)}",
                why=f"the values alone take {needed} tokens",
                fix=f"-T gen={needed + needed // 4}, or fewer values",
                id="RCQ-USE-06",
            )

    def _question(self, needle: Needle, *, alone: bool = False) -> Question:
        values = (needle.value,) if alone else tuple(fact.value for fact in self._facts(needle))
        self._check_room(values)
        wording = data("needles")["question" if alone or self.options.values == 1 else "question_all"]
        text = wording.format(question=needle.form.ask(needle.key), count=self.options.values)
        opening = needle.form.opening(needle.key) if self.options.prefix else ""
        return Question(text, opening, values)


class _Filling:
    """The prompts of one plan, with as much haystack as the budget holds."""

    def __init__(self, context: Context, plan: Plan) -> None:
        self.context, self.plan = context, plan
        self.options, self.tokenizer = context.options, context.tokenizer
        source = context.corpus.sentences(context.rng("haystack"), repeat=self.options.repeat)
        self.haystack = Haystack(source, self.tokenizer)
        self.sizes = [self._tail_size(question) for question in range(len(plan.asked))]
        self.fitted_for = self.sizes.index(max(self.sizes))
        self._measured = False
        self.reserve = self._reserve()
        self.budget = context.request.ctx - self.reserve
        places = context.rng(f"layout/{context.request.ctx}")
        self.decoys = self._inserts(plan.decoys, [places.next() / 2**64 for _ in plan.decoys])
        self.needles = self._inserts(
            plan.planted, [context.depth_of(needle) / 100 for needle in plan.planted]
        )

    def samples(self) -> list[Sample]:
        """Return one sample per question; `needle-only` has two sentences, the others a full haystack."""
        short = self.plan.control == NEEDLE_ONLY
        fewest = self.haystack.words_of(_FEWEST_SENTENCES)
        words, built = (fewest, self._build(fewest)) if short else self._fit(fewest)
        prompts = [self._prompt_of(question, built) for question in range(len(self.plan.asked))]
        shared = _common_prefix([prompt.ids for prompt in prompts])
        return [self._sample(k, prompt, built.body, words, shared) for k, prompt in enumerate(prompts)]

    def _tail_size(self, question: int) -> int:
        """Return the tokens from the question on, template and opening included."""
        body = self.haystack.cut(self.haystack.words_of(1))[0][0]
        prompt = self._encode(body, question)
        return len(prompt.ids) - _question_at(prompt, body)

    def _reserve(self) -> int:
        """Return the tokens of the context that no prompt may use."""
        if self.options.turns == "fresh" or len(self.sizes) == 1:
            return int(self.options.gen)
        # earlier questions and answers stay in the cache
        return int(self.options.gen) * len(self.sizes) + sum(self.sizes) - max(self.sizes)

    def _fit(self, fewest: int) -> tuple[int, _Built]:
        """Return the words of haystack that fill the budget, and the prompt with them."""
        end = None if self.options.repeat else self.haystack.exhausted_at(self.budget)
        fitted = fit(
            self._build,
            lambda built: len(built.prompt.ids),
            self.budget,
            minimum=fewest,
            advance=self._advance,
            maximum=end,
            reserve=self.reserve,
        )
        return fitted.units, fitted.prompt

    def _advance(self, words: int, tokens: int) -> int:
        if not self._measured:
            self.haystack.measure(self.budget, lambda text: self._encode(text, self.fitted_for))
            self._measured = True
        return self.haystack.advance(words, tokens)

    def _build(self, words: int) -> _Built:
        body = insert(*self.haystack.cut(words), self.decoys, self.needles)
        return _Built(self._encode(body.text, self.fitted_for), body)

    def _prompt_of(self, question: int, built: _Built) -> EncodedPrompt:
        return built.prompt if question == self.fitted_for else self._encode(built.body.text, question)

    def _encode(self, body: str, question: int) -> EncodedPrompt:
        asked = self.plan.asked[question]
        user = _BREAK.join((data("needles")["instruction"], body, asked.text))
        return self.tokenizer.prompt(user, asked.opening, chat=self.options.chat, bos=self.options.bos)

    def _inserts(self, needles: Sequence[Needle], places: Sequence[float]) -> list[Insert]:
        texts = [needle.sentence for needle in needles]
        costs = [len(self.tokenizer.encode(" " + text)) for text in texts]
        return [Insert(*item) for item in zip(texts, costs, places, strict=True)]

    def _sample(self, k: int, prompt: EncodedPrompt, body: Body, words: int, shared: int) -> Sample:
        context, asked = self.context, self.plan.asked[k]
        self._check(k, prompt, body)
        kind = "" if self.plan.control is None else f"/{self.plan.control}"
        several = f"/q{k}" if self.options.questions > 1 else ""
        visible = self.options.questions == 1
        return Sample(
            sample_id=f"niah{kind}/{context.request.ctx}/{context.index}{several}",
            index=context.index,
            cluster=context.form(k).name if visible else f"context-{context.index}",
            prompt_ids=prompt.ids,
            context_len=len(prompt.ids) if visible else min(_question_at(prompt, body.text), shared),
            references=asked.values,
            max_new_tokens=self.options.gen,
            stop_ids=self.tokenizer.eos_ids,
            seed=seed(context.request.seed, "niah", context.index, "needle"),
            meta=self._meta(k, prompt, body, words),
            control=self.plan.control,
        )

    def _meta(self, k: int, prompt: EncodedPrompt, body: Body, words: int) -> dict[str, Any]:
        context, corpus = self.context, self.context.corpus
        return {
            "form": context.form(k).name,
            "payload": payload_kind(self.options.payload, context.form(k)),
            "key": context.needles[k].key,
            "depth": context.depth(k),
            "achieved_depth": self._achieved_depth(k, prompt, body) if self.plan.planted else None,
            "values": self.options.values,
            "decoys": len(self.plan.decoys) // self.options.questions,
            "question": k,
            "question_visible": self.options.questions == 1,
            "turns": self.options.turns,
            "units": words,
            "prompt_tokens": len(prompt.ids),
            "budget": self.budget,
            "fill": len(prompt.ids) / (context.request.ctx - self.options.gen),
            "fill_floor": None if self.plan.control == NEEDLE_ONLY else self._fill_floor(k),
            "corpus": corpus.name,
            "corpus_kind": corpus.kind,
            "corpus_sha256": corpus.sha256,
            "repeats": self.haystack.repeats(words),
            "strip_think": self.options.strip_think,
        }

    def _fill_floor(self, k: int) -> float:
        """Return the least share of `ctx - gen` that the prompt of question k must fill."""
        # the context is fitted to the longest question
        slack = self.haystack.largest_word() + max(self.sizes) - self.sizes[k]
        full = self.context.request.ctx - self.options.gen
        return fill_floor(self.budget, slack) * self.budget / full

    def _achieved_depth(self, k: int, prompt: EncodedPrompt, body: Body) -> float:
        """Return the tokens before needle k in percent of the body's, the asked needles left out of both."""
        start = find(prompt, body.text)
        # a needle takes the blank before it along, a first one the blank after it
        edges = [(max(first - 1, 0), end if first else end + 1) for first, end in body.spans]
        tokens = [(token_at(prompt, start + first), token_at(prompt, start + end)) for first, end in edges]
        first = token_at(prompt, start)
        others = sum(end - begin for begin, end in tokens if begin < tokens[k][0])
        total = token_at(prompt, start + len(body.text)) - first - sum(end - begin for begin, end in tokens)
        return 100 * (tokens[k][0] - first - others) / total

    def _check(self, k: int, prompt: EncodedPrompt, body: Body) -> None:
        """Raise `BrokenRun` unless each key and value occurs as often as planned and the budget holds.

        Raises `UnsupportedModel` where the prompt is right and its ids do not give back the values.
        """
        asked = self.plan.asked[k]
        planted = (*self.plan.planted, *self.plan.decoys)
        values, keys = [needle.value for needle in planted], [needle.key for needle in planted]
        counts: list[tuple[str, str, int]] = []
        for needle in (*planted, self.context.needles[0]):
            there = keys.count(needle.key) + (asked.text + asked.opening).count(needle.key)
            counts += [
                (body.text, needle.value, values.count(needle.value)),
                (prompt.text, needle.key, there),
            ]
        for text, part, expected in counts:
            if text.count(part) != expected:
                raise _broken(f"{part!r} occurs {text.count(part)} times in the prompt instead of {expected}")
        if len(prompt.ids) > self.budget:
            raise _broken(f"the prompt has {len(prompt.ids)} tokens, more than its budget of {self.budget}")
        decoded = self.tokenizer.decode(prompt.ids)
        for value in asked.values:
            if decoded.count(value) != values.count(value):
                raise _changed_by_tokenizer(value, values.count(value), decoded.count(value))


def _question_at(prompt: EncodedPrompt, body: str) -> int:
    """Return the index of the first token of the question, which follows the haystack."""
    return token_at(prompt, find(prompt, body) + len(body) + len(_BREAK))


def _common_prefix(ids: Sequence[Sequence[int]]) -> int:
    """Return how many leading ids all of them share."""
    shortest = min(map(len, ids))
    return next((i for i in range(shortest) if len({part[i] for part in ids}) > 1), shortest)


def _changed_by_tokenizer(value: str, planted: int, given_back: int) -> UnsupportedModel:
    return UnsupportedModel(
        "the tokenizer of the model does not give back the text it was given",
        why=f"{value!r} stands {planted} times in the prompt, {given_back} times in what its ids decode to",
        fix="mend the tokenizer's files (its decoder and normalizer), use -T payload=words, or another model",
        id="RCQ-MOD-04",
    )


def _broken(what: str) -> BrokenRun:
    return BrokenRun(what, why="niah built a prompt that is not what it planned", id="RCQ-RUN-21")
