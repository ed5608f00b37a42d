"""What the families of `ruler` share: streams, budget, fitting and the finished sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from math import ceil
from typing import Any, ClassVar

from rcq_cli.errors import BrokenRun
from rcq_cli.protocols import EncodedPrompt, PromptTokenizer, Sample, TaskRequest
from rcq_cli.tasks._fitting import Secant, fill_floor, fit
from rcq_cli.tasks._splitmix import SplitMix64, seed
from rcq_cli.tasks._words import data, lexicon, words

_MOST_PROMPTS = 5
_LONG = 1 << 18
"""Above it every prompt costs seconds: one that leaves a percent of what is above is full enough."""
_GENEROUS, _EXTRA_TOKENS = 1.3, 8
SHORT_CTX = 4096
"""Below this context lists and documents have their short form."""


class Part(ABC):
    """Prompt `index` of one part; everything is drawn from the streams of this index alone."""

    gen: ClassVar[int]
    """Tokens to generate, unless the references need more."""
    floor_base: ClassVar[float] = 0.98
    any_reference: ClassVar[bool] = False
    """One of the references is enough."""
    removable: ClassVar[bool] = False
    """What is asked for can be left out of the text; a right answer is then a leak."""
    absent = False
    """It is left out: this prompt is a control."""
    opening: str
    references: tuple[str, ...]
    fewest: int
    """Units of the smallest prompt."""

    def __init__(self, part: str, request: TaskRequest, tokenizer: PromptTokenizer, index: int) -> None:
        self.part, self.request, self.tokenizer, self.index = part, request, tokenizer, index
        self.options = request.options
        self.wording: dict[str, Any] = data("prompts")["ruler"]

    @abstractmethod
    def render(self, units: int) -> str:
        """Return the user turn that holds `units` units; a function of them and of the streams."""

    @abstractmethod
    def unit_tokens(self) -> tuple[float, int]:
        """Return about how many tokens a unit takes, and how many the largest."""

    def maximum(self) -> int | None:
        """Return how many units there are, None if they do not run out before the budget."""
        return None

    def planted(self) -> Iterable[tuple[str, int]]:
        """Yield what must stand in the prompt, and how often."""
        return ()

    def meta(self, units: int) -> dict[str, Any]:
        """Return what the rows of this part tell beside the common fields."""
        del units
        return {}

    @property
    def cluster(self) -> str:
        """Return the cluster: every prompt has a text of its own."""
        return str(self.index)

    @cached_property
    def max_new_tokens(self) -> int:
        """Return the tokens to generate: the table's, or 1.3 times the references and 8 if that is more."""
        if self.options.gen is not None:
            return int(self.options.gen)
        lists = self.references if self.any_reference else (", ".join(self.references),)
        longest = max(len(self.tokenizer.encode(" " + text)) for text in lists)
        return max(self.gen, ceil(_GENEROUS * longest) + _EXTRA_TOKENS)

    @property
    def budget(self) -> int:
        """Return the tokens a prompt may have."""
        return self.request.ctx - self.max_new_tokens

    def rng(self, stream: str) -> SplitMix64:
        """Return the generator of one stream of this prompt, from its beginning."""
        return SplitMix64(seed(self.request.seed, f"ruler.{self.part}", self.index, stream))

    def layout(self) -> SplitMix64:
        """Return the generator of the layout at this context, from its beginning."""
        return self.rng(f"layout/{self.request.ctx}")

    def cost(self, text: str) -> int:
        """Return about how many tokens `text` takes."""
        return len(self.tokenizer.encode(text))

    def no_needle(self) -> Sample:
        """Return the control without what is asked for, scored against what would have been planted."""
        self.absent = True
        return self.sample()

    def sample(self) -> Sample:
        """Return the sample with as many units as the budget holds; `SpecError` if it holds too few."""
        average, largest = self.unit_tokens()
        fitted = fit(
            self._encode,
            lambda prompt: len(prompt.ids),
            self.budget,
            minimum=self.fewest,
            advance=Secant(self.budget, average).advance,
            maximum=self.maximum(),
            reserve=self.max_new_tokens,
            most=_MOST_PROMPTS,
            slack=max(self.budget // 2048, (self.budget - _LONG) // 100),
        )
        self._check(fitted.prompt)
        return Sample(
            sample_id=f"ruler/{self.part}{'/no-needle' * self.absent}/{self.request.ctx}/{self.index}",
            index=self.index,
            cluster=self.cluster,
            prompt_ids=fitted.prompt.ids,
            context_len=len(fitted.prompt.ids),
            references=self.references,
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.tokenizer.eos_ids,
            seed=seed(self.request.seed, f"ruler.{self.part}", self.index, "needle"),
            control="no-needle" if self.absent else None,
            meta={
                "part": self.part,
                "units": fitted.units,
                "prompts_built": fitted.probes,
                "prompt_tokens": len(fitted.prompt.ids),
                "budget": self.budget,
                "fill": len(fitted.prompt.ids) / self.budget,
                "fill_floor": fill_floor(self.budget, largest, self.floor_base),
                "question_visible": True,
                "strip_think": self.options.strip_think,
                **self.meta(fitted.units),
            },
        )

    def _encode(self, units: int) -> EncodedPrompt:
        opening = self.opening if self.options.prefix else ""
        return self.tokenizer.prompt(
            self.render(units), opening, chat=self.options.chat, bos=self.options.bos
        )

    def _check(self, prompt: EncodedPrompt) -> None:
        for text, expected in self.planted():
            if (found := prompt.text.count(text)) != expected:
                raise BrokenRun(
                    f"{text!r} occurs {found} times in the prompt instead of {expected}",
                    why=f"ruler/{self.part} built a prompt that is not what it planned",
                    id="RCQ-RUN-21",
                )


def stems(rng: SplitMix64, syllables: tuple[int, ...]) -> Iterator[str]:
    """Yield invented words, each of one of these numbers of syllables, none twice and none of the lexicon."""
    table = words(data("ruler")["syllables"])
    seen = set(lexicon_words())
    while True:
        text = "".join(rng.choice(table) for _ in range(rng.choice(syllables)))
        if text not in seen:
            seen.add(text)
            yield text


@cache
def lexicon_words() -> tuple[str, ...]:
    """Return the plain words of the prose lexicon in a fixed order: nouns, adjectives and verbs."""
    lex = data("lexicon")
    found = [
        word for group in ("nouns", "adjectives") for kind in lex[group] for word in lexicon(group, kind)
    ]
    found += [
        line.split()[0] for kind in lex["verbs"] for entry in lex["verbs"][kind] for line in entry.split(", ")
    ]
    return tuple(dict.fromkeys(word for word in found if word.isalpha() and word.islower()))
