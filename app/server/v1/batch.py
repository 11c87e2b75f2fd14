"""Answers a batch with the engine: many prompts at a time, each with its own settings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from app.server.errors import TOO_LONG, ApiError, field_error
from app.server.v1.chat import ChatBody, ChatForm, asked_of
from app.server.v1.completion import CompletionBody, CompletionForm
from app.server.v1.contents import chat_of
from app.server.v1.fields import with_schema
from app.server.v1.parts import Parts
from app.server.v1.result import result
from app.services.batch.lines import Line
from app.services.batch.records import answered, refused
from app.services.progress import Answer
from core.engine.batch_request import BatchRequest
from core.errors import MoestroError
from core.policy.batching import Scheduler
from core.settings.sampling import Sampling
from core.types import Begun, StepRecord, TokenLogprob

if TYPE_CHECKING:
    from core.engine import Engine

Put = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Pending:
    """A line whose answer is being computed."""

    line: Line
    logprobs: bool
    begun: bool = False  # it continues an answer
    answer: Answer = field(default_factory=lambda: Answer(None, None))
    tokens: list[TokenLogprob] = field(default_factory=list)


class ByEngine:
    """`model` = its name in answers; `base`: the sampling settings of lines without their own. With a `scheduler` two
    batches of `at_once` are at work, `pipelined` four. When `cancel` is set, what is being written is given up.
    `on_step` is called with each pass."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        base: Sampling,
        at_once: int,
        scheduler: Scheduler | None = None,
        cancel: threading.Event | None = None,
        on_step: Callable[[StepRecord], None] = lambda step: None,
        *,
        pipelined: bool = False,
    ) -> None:
        self._scheduler, self._cancel, self._on_step, self._pipelined = scheduler, cancel, on_step, pipelined
        self._engine, self._model, self._base, self._at_once = engine, model, base, at_once

    def run(self, lines: Iterable[Line], put: Put) -> Iterator[int]:
        """Answer lines until there are no more, and `put` each one's record. Yields the tokens of each pass."""
        pending: dict[int, Pending] = {}

        def requests() -> Iterator[BatchRequest]:
            for line in lines:
                try:
                    one, request = self._request(line)
                except MoestroError as error:
                    put(_refused(line, error))
                    continue
                pending[line.number] = one
                yield request

        passes = 0
        for piece in self._engine.generate_many(
            requests(), self._at_once, self._cancel, scheduler=self._scheduler, pipelined=self._pipelined
        ):
            number = int(str(piece.key))
            one = pending[number]
            if piece.piece is not None and (step := piece.piece.step) is not None and step.index >= passes:
                passes = step.index + 1
                self._on_step(step)
            if piece.error:
                pending.pop(number)
                put(_refused(one.line, ApiError(piece.error, code=TOO_LONG if piece.too_long else None)))
            elif piece.piece is not None:
                got = piece.piece
                one.tokens += [got.logprob] if got.logprob is not None else []
                one.answer.update(text=one.answer.text + got.text, n_tokens=one.answer.n_tokens + (got.kind == "token"))
                if got.stats is not None:
                    pending.pop(number)
                    if got.stats.reason == "cancelled":
                        continue
                    one.answer.update(stats=got.stats)
                    put(self._record(one))
                yield int(got.kind == "token")

    def _request(self, line: Line) -> tuple[Pending, BatchRequest]:
        """Raises MoestroError for a field that cannot be honoured."""
        kind = ChatBody if line.kind == "chat" else CompletionBody
        try:
            body: Any = kind.model_validate(line.body)
        except ValidationError as error:
            first = error.errors()[0]
            raise field_error(first, first["loc"]) from None
        body.check()
        sampling = body.sampling(self._base)
        if isinstance(body, CompletionBody):
            return Pending(line, body.logprobs is not None), BatchRequest(line.number, body.text(), sampling)
        if body.tools:
            raise ApiError("tools are not offered to a batch. Leave them out.", "tools")
        messages: Any = chat_of(body.messages)
        if not messages or not any(str(one["content"]).strip() for one in messages):
            raise ApiError("The message is empty. Write something to answer.", "messages")
        sampling = with_schema(sampling, "response_format", body.response_format)
        asked: Any = asked_of(messages, (), sampling if body.goes_on else None)
        pending = Pending(line, bool(body.logprobs), isinstance(asked, Begun))
        return pending, BatchRequest(line.number, asked, sampling)

    def _record(self, one: Pending) -> dict[str, Any]:
        model, line = self._model, one.line
        one.answer.update(logprobs=tuple(one.tokens))
        if line.kind == "text":
            parts = Parts()
            found = result(one.answer, [*parts.feed(one.answer.text), *parts.end()], self._engine.count_tokens)
            return answered(line, CompletionForm(model, one.logprobs, False).whole(found))
        parts = Parts(opened=self._engine.opens_reasoning and not one.begun)
        found = result(one.answer, [*parts.feed(one.answer.text), *parts.end()], self._engine.count_tokens)
        return answered(line, ChatForm(model, one.logprobs, False).whole(found))


def _refused(line: Line, error: MoestroError) -> dict[str, Any]:
    known = error if isinstance(error, ApiError) else ApiError(str(error))
    return refused(line, str(known), error=known.openai())
