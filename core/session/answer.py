"""One answer: turns a chat into token ids, ids into text, and computes the statistics shown under it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from core.errors import ContextError
from core.hf import chat_template
from core.metrics import reduced, share
from core.session.length import TextLimit
from core.types import AnswerStats, Memory, Piece, StepRecord

QUICK_CHARS = 50_000  # a text up to this length is tokenised whatever the context: that is fast, and the count is exact


@dataclass(frozen=True, slots=True)
class Ids:
    """A prompt as token ids, used unchanged."""

    ids: Sequence[int]


class Prompt:
    """The model's tokenizer, chat template and end-of-sequence tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, generation_config: Any) -> None:
        self.tokenizer = tokenizer
        ends = [tokenizer.eos_token_id, generation_config.eos_token_id]
        self.ends = {i for end in ends for i in (end if isinstance(end, list) else [end]) if isinstance(i, int)}

    @cached_property
    def limit(self) -> TextLimit:
        """The most text that a number of tokens can hold."""
        return TextLimit.of(self.tokenizer)

    def text(self, messages: Sequence[Mapping[str, str]] | str) -> str:
        """The text to tokenise: a chat through the model's template, plain text unchanged. Raises ModelError when the
        template fails."""
        if isinstance(messages, str):
            return messages
        if self.tokenizer.chat_template is None:
            return "\n\n".join(m["content"] for m in messages)
        return chat_template.prompt_of(self.tokenizer, messages)

    def tokens(self, messages: Sequence[Mapping[str, str]] | str | Ids, context: int | None = None) -> list[int]:
        """Token ids of a chat or of a plain text. Raises ContextError, before tokenising, for a text that `context`
        tokens could never hold."""
        if isinstance(messages, Ids):
            return list(messages.ids)
        text = self.text(messages)
        if context is not None:
            self._check(text, context)
        ids: list[int] = self.tokenizer(text, add_special_tokens=isinstance(messages, str)).input_ids
        return ids

    def check(self, messages: Sequence[Mapping[str, str]] | str, context: int) -> None:
        """Raises ContextError when the number of characters alone shows that the text is too long. Takes almost no time
        otherwise."""
        parts = [messages] if isinstance(messages, str) else [m["content"] for m in messages]
        if sum(map(len, parts)) > QUICK_CHARS:
            self._check(self.text(messages), context)

    def _check(self, text: str, context: int) -> None:
        if len(text) > QUICK_CHARS:
            self.limit.check(text, context)

    def encode(self, messages: Sequence[Mapping[str, str]] | str | Ids, context: int) -> list[int]:
        """Token ids with room for at least one more. Raises ContextError for an empty or too long prompt."""
        ids = self.tokens(messages, context)
        if not ids:
            raise ContextError("The message is empty. Write something to answer.")
        if len(ids) >= context:
            raise ContextError(
                f"The chat has {len(ids)} tokens, but the context holds {context}. Start a new chat, "
                "shorten the message, or load the model with a longer context."
            )
        return ids


class AnswerBuilder:
    """Collects tokens, text and counts of one answer. Times are perf_counter seconds."""

    def __init__(
        self, prompt: Prompt, ids: Sequence[int], limit: int, submitted_s: float, *, limited_by_context: bool
    ) -> None:
        self._prompt, self._prompt_tokens, self._limit = prompt, len(ids), limit
        self._limited_by_context, self._submitted_s = limited_by_context, submitted_s
        self._decoder = DecodeStream(skip_special_tokens=True)
        self.tokens: list[int] = []  # generated so far
        self._text: str | None = None
        self._first_s = 0.0
        self._ended = False
        self.steps: list[StepRecord] = []

    def count(self, step: StepRecord) -> None:
        """Add the record of a forward pass made for this answer."""
        self.steps.append(step)

    def take(self, token: int) -> bool:
        """Add a sampled token; True for an end token, which ends the answer and is not part of it."""
        self._first_s = self._first_s or time.perf_counter()
        if token in self._prompt.ends:
            self._ended = True
            return True
        self.tokens.append(token)
        self._text = self._decoder.step(self._prompt.tokenizer._tokenizer, token)
        return False

    def piece(self) -> Piece:
        """The newest token for streaming; its text may be empty while a character is incomplete."""
        fresh = self.steps[-1] if self.steps and self.steps[-1].phase == "decode" else None
        return Piece("token", text=self._text or "", token=self.tokens[-1], step=fresh)

    @property
    def full(self) -> bool:
        """Whether the limit of new tokens is reached."""
        return len(self.tokens) >= self._limit

    @property
    def last_step(self) -> StepRecord | None:
        """The decode pass that ended the answer without a token to show; None when every pass was sent with its
        token."""
        return self.steps[-1] if self._ended and self.steps[-1].phase == "decode" else None

    def stats(
        self, *, cancelled: bool, memory: Memory, seed: int, audit: int = 0, closeness: float = 0.0
    ) -> AnswerStats:
        """The statistics of the line under the answer. `audit` = the number under which its quality will be
        reported."""
        decode = [s for s in self.steps if s.phase == "decode"]
        tpot_ms = sum(s.total_ms for s in decode) / len(decode) if decode else 0.0
        reason: Literal["stop", "length", "context", "cancelled"] = "stop"
        if not self._ended:
            reason = "cancelled" if cancelled else "context" if self._limited_by_context else "length"

        figures = reduced(self.steps)
        named = {one.name for one in fields(AnswerStats)}
        return AnswerStats(
            prompt_tokens=self._prompt_tokens,
            new_tokens=len(self.tokens),
            ttft_ms=(self._first_s - self._submitted_s) * 1e3 if self._first_s else 0.0,
            tpot_ms=tpot_ms,
            tok_s=1e3 / tpot_ms if tpot_ms else 0.0,
            prefill_hit_rate=share([s for s in self.steps if s.phase == "prefill"], "hits", "requests"),
            budget_bytes=memory.budget,
            device_bytes_peak=memory.peak,
            reason=reason,
            seed=seed,
            audit=audit,
            closeness=closeness,
            more={name: value for name, value in figures.items() if name not in named},
            **{name: value for name, value in figures.items() if name in named},
        )
