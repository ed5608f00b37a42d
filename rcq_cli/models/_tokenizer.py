"""A Hugging Face tokenizer behind the `PromptTokenizer` seam: one rendering, one encoding, one BOS."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any

from rcq_cli.errors import SpecError, UnsupportedModel
from rcq_cli.protocols import EncodedPrompt, Json

FIXED_DATE = date(2024, 1, 1)
TEMPLATE_KWARGS: Mapping[str, Json] = {"date_string": FIXED_DATE.isoformat(), "enable_thinking": False}
"""What every chat template is given, so that no prompt depends on the day it was made."""

_CLOCK_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


class ModelTokenizer:
    """The tokenizer of one model; `eos_ids` adds the stops its generation config names."""

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int] = ()) -> None:
        if not tokenizer.is_fast:
            raise UnsupportedModel(
                f"tokenizer {type(tokenizer).__name__} gives no character offsets",
                fix="use a checkpoint that carries tokenizer.json",
                id="RCQ-MOD-01",
            )
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = (
            _pinned(tokenizer.chat_template) if isinstance(tokenizer.chat_template, str) else None
        )
        self.bos_id: int | None = tokenizer.bos_token_id
        own_eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.eos_ids: tuple[int, ...] = tuple(sorted({*own_eos, *eos_ids}))
        self.has_chat_template = self._template is not None
        self._adds_bos = self.bos_id is not None and tokenizer("a").input_ids[:1] == [self.bos_id]
        self._printed_bos = self._render("", "").count(tokenizer.bos_token or "\0") if self._template else 0
        self.sha256 = _sha256(self._backend.to_str(), str(self.bos_id), str(self.eos_ids))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of `text` alone; what spells a special token stays text."""
        return self._encode(text, special=False)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens left out."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def prompt(
        self, user: str, answer_prefix: str, *, chat: str = "auto", bos: str = "auto"
    ) -> EncodedPrompt:
        """Render one user turn plus the opening of the answer, and encode it once.

        `chat` is auto, on or off; `bos` auto, always or never. Without a template the two parts are joined by
        a line break; an empty part is left out. Raises `SpecError` for a choice this tokenizer cannot honour
        and for a text that itself contains the BOS.
        """
        templated = self._templated(chat)
        parts = [part for part in (user, answer_prefix) if part]
        text = self._render(user, answer_prefix) if templated else "\n".join(parts)
        printed = self._printed_bos if templated else 0
        if printed and bos == "never":
            text, printed = self._without_bos(text), 0
        ids, starts = self._encode(text, special=templated)
        if self._wants_bos(bos) and not printed:
            ids, starts, printed = (self._bos(), *ids), (-1, *starts), 1
        if self.bos_id is not None and ids.count(self.bos_id) != printed:
            raise SpecError(
                f"the prompt holds {ids.count(self.bos_id)} BOS tokens instead of {printed}",
                why=f"the text contains {self._tokenizer.bos_token!r}",
                fix="remove it from the text",
                id="RCQ-USE-14",
            )
        return EncodedPrompt(ids, starts, text)

    @property
    def bos_policy(self) -> str:
        """Where a BOS comes from under `bos=auto`: `template`, `tokenizer` or `none`."""
        if self._printed_bos:
            return "template"
        return "tokenizer" if self._adds_bos else "none"

    def fingerprint(self) -> dict[str, Json]:
        """Return the contract fields of the group `tokenizer`."""
        return {
            "tokenizer.sha256": self.sha256,
            "tokenizer.bos_policy": self.bos_policy,
            "tokenizer.chat_template_sha256": _sha256(self._template) if self._template else None,
            "tokenizer.template_kwargs": dict(TEMPLATE_KWARGS) if self._template else None,
        }

    def _templated(self, chat: str) -> bool:
        if chat not in ("auto", "on", "off"):
            raise SpecError(f"chat={chat!r}", fix="allowed: auto, on, off", id="RCQ-USE-11")
        if chat == "on" and not self.has_chat_template:
            raise SpecError(
                "chat=on: this tokenizer has no chat template", fix="use chat=off", id="RCQ-USE-12"
            )
        return chat != "off" and self.has_chat_template

    def _wants_bos(self, bos: str) -> bool:
        if bos not in ("auto", "always", "never"):
            raise SpecError(f"bos={bos!r}", fix="allowed: auto, always, never", id="RCQ-USE-11")
        return bos == "always" or (bos == "auto" and self._adds_bos)

    def _bos(self) -> int:
        if self.bos_id is None:
            raise SpecError("bos=always: this tokenizer has no BOS", fix="use bos=auto", id="RCQ-USE-13")
        return self.bos_id

    def _without_bos(self, text: str) -> str:
        if self._printed_bos > 1:
            raise SpecError(
                "bos=never: the chat template opens every turn with the BOS",
                fix="use bos=auto, or chat=off",
                id="RCQ-USE-13",
            )
        return text.replace(self._tokenizer.bos_token, "", 1)

    def _render(self, user: str, answer_prefix: str) -> str:
        rendered: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": user}],
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=True,
            **TEMPLATE_KWARGS,
        )
        return rendered + answer_prefix

    def _encode(self, text: str, *, special: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # the flag says that text which spells a special token is to be split like any other text
        self._backend.encode_special_tokens = not special
        encoding = self._backend.encode(text, add_special_tokens=False)
        starts, end = [], 0
        for first, last in encoding.offsets:
            # some tokenizers trim the blank from the offsets of a word that carries it
            starts.append(end if end < first and not text[end:first].strip() else first)
            end = last
        return tuple(encoding.ids), tuple(starts)


def _pinned(template: str) -> str:
    """Return `template` with every date taken from the clock replaced by the fixed one."""
    return _CLOCK_CALL.sub(lambda call: repr(FIXED_DATE.strftime(call[2])), template)


def _sha256(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
