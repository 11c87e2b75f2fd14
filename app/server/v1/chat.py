"""OpenAI's chat completions."""

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, Field

from app.server.errors import ApiError
from app.server.v1.contents import ChatMessage, chat_of
from app.server.v1.fields import Body, longest, with_schema, with_stop
from app.server.v1.parts import Call, Part, Parts, schemas
from app.server.v1.reply import Form, Reply, data
from app.server.v1.result import Result, Usage
from app.server.v1.tools import Offer, offered, with_tools
from app.services.host import Host
from app.services.loading import AnyPrompt
from core.settings.sampling import Sampling
from core.types import Begun, Chat, TokenLogprob

MOST_MESSAGES = 4096
MOST_LOGPROBS = 20


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class OpenAIBody(Body):
    """The fields that chat completions and completions share."""

    max_tokens: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Any = None
    stream_options: StreamOptions | None = None
    response_format: Any = None

    @property
    def usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampled(self, base: Sampling, field: str, limit: int | None) -> Sampling:
        """The host's sampling settings, overridden by those of the request. `limit` = the longest answer in tokens,
        which `field` gives. Raises ApiError."""
        names = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
        given: dict[str, tuple[str, Any]] = {name: (name, getattr(self, name)) for name in names}
        given["max_new_tokens"] = longest(field, limit)
        return with_stop(self.drawn(base, given), "stop", self.stop)


class ChatBody(OpenAIBody):
    """A request for a chat completion."""

    messages: list[ChatMessage] = Field(max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def goes_on(self) -> bool:
        """Whether a last message of the assistant is continued, and not answered. Raises ApiError."""
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                "add_generation_prompt: a message that is continued is not answered.", "add_generation_prompt"
            )
        return not self.add_generation_prompt if self.continue_final_message is None else self.continue_final_message

    @property
    def limit(self) -> int | None:
        """The longest answer in tokens, if the request says."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling(self, base: Sampling) -> Sampling:
        """As `sampled`, with the field that limits this request. Raises ApiError."""
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs: set logprobs to true as well.", "top_logprobs")
        drawn = self.sampled(base, field, self.limit)
        return replace(drawn, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


def reply(host: Host, body: ChatBody) -> Reply:
    """The answer to a request. Raises MoestroError."""
    body.take(host)
    sampling, messages = body.sampling(host.chats.sampling), chat_of(body.messages)
    offer = offered(host, messages, "messages", body.tools, body.tool_choice)
    sampling = with_schema(sampling, "response_format", body.response_format)
    sampling = with_tools(sampling, offer, body.limit, body.parallel_tool_calls)
    form = ChatForm(host.models.model_id, sampling.logprobs is not None, body.usage)
    if body.continue_final_message and begun_of(messages) is None:
        raise ApiError(
            "continue_final_message: the last message is a text of the assistant, without calls.", "messages"
        )
    return chat_reply(host, messages, offer, sampling, form, stream=bool(body.stream), goes_on=body.goes_on)


def begun_of(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The text of the last message if that is an answer, which is then continued; else None."""
    last = messages[-1] if messages else {}
    text = str(last.get("content") or "") if last.get("role") == "assistant" and not last.get("tool_calls") else ""
    return text if text.strip() else None


def asked_of(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], continued: Sampling | None
) -> AnyPrompt:
    """What the model is asked: to answer a chat or, where the last message is its own, to continue that with the
    settings `continued`. Raises ApiError for settings that keep an answer to a form from its first token."""
    begun = begun_of(messages) if continued is not None else None
    if continued is None or begun is None:
        return Chat(messages, tools) if tools else messages
    if continued.schema or continued.grammar:
        raise ApiError("messages: an answer that has begun cannot be kept to a form. End with the user's.", "messages")
    return Begun(Chat(messages[:-1], tools) if tools else messages[:-1], begun)


def chat_reply(
    host: Host,
    messages: list[dict[str, Any]],
    offer: Offer,
    sampling: Sampling,
    form: Form,
    *,
    stream: bool,
    goes_on: bool = True,
) -> Reply:
    """Queue a chat's answer; its reasoning, content and calls are found in the text. Raises MoestroError."""
    asked, loaded = asked_of(messages, offer.tools, sampling if goes_on else None), host.models.loaded
    answer = host.chats.complete(asked, sampling)
    opened = not isinstance(asked, Begun) and loaded is not None and loaded.engine.opens_reasoning
    return Reply(host, answer, form, Parts(opened=opened, tools=schemas(offer.tools)), stream)


class OpenAIForm:
    """What the streams of chat completions and completions share."""

    def reading(self, usage: Usage) -> Iterable[str]:
        return ()

    def failing(self, error: ApiError) -> Iterable[str]:
        yield data({"error": error.openai()})
        yield DONE


class ChatForm(OpenAIForm):
    """A chat completion, whole or in chunks."""

    def __init__(self, model: str | None, logprobs: bool, usage: bool) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._logprobs, self._usage, self._calls = logprobs, usage, 0

    def opening(self) -> Iterable[str]:
        yield self._chunk({"role": "assistant", "content": ""})

    def part(self, part: Part, logprobs: Sequence[TokenLogprob]) -> Iterable[str]:
        if part.call is not None:
            called = {"index": self._calls, **_called(part.call)}
            self._calls += 1
            yield self._chunk({"tool_calls": [called]})
            return
        field = "reasoning_content" if part.kind == "reasoning" else "content"
        yield self._chunk({field: part.text}, logprobs=logprobs)

    def closing(self, result: Result) -> Iterable[str]:
        yield self._chunk({}, result.finish, seed=result.seed, moestro=result.facts)
        if self._usage:
            yield self._chunk(None, usage=result.usage)
        yield DONE

    def whole(self, result: Result) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": result.content}
        if result.reasoning:
            message["reasoning_content"] = result.reasoning
        if result.calls:
            message["tool_calls"] = [_called(one) for one in result.calls]
            message["content"] = result.content if result.content.strip() else None
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": result.finish}
        if self._logprobs:
            choice["logprobs"] = {"content": [_logprob(one) for one in result.logprobs]}
        return {
            **self._head,
            "object": "chat.completion",
            "seed": result.seed,
            "usage": result.usage.openai(),
            "choices": [choice],
            "moestro": result.facts,
        }

    def _chunk(
        self,
        delta: dict[str, Any] | None,
        finish: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
        usage: Usage | None = None,
        **more: Any,
    ) -> str:
        """A chunk; without a delta it has no choice."""
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        if self._logprobs:
            choice["logprobs"] = {"content": [_logprob(one) for one in logprobs]} if logprobs else None
        found = {
            **self._head,
            "object": "chat.completion.chunk",
            **more,
            "choices": [choice] if delta is not None else [],
        }
        if self._usage:
            found["usage"] = usage.openai() if usage is not None else None
        return data(found)


DONE = "data: [DONE]\n\n"


def _called(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprob(one: TokenLogprob) -> dict[str, Any]:
    return {**_token(one.text, one.logprob), "top_logprobs": [_token(text, value) for text, value in one.top]}


def _token(text: str, logprob: float) -> dict[str, Any]:
    whole = "\ufffd" not in text  # else it is part of a character, whose bytes are not known here
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}
