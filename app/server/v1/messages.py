"""Anthropic's messages."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from app.server.errors import ApiError
from app.server.v1.chat import MOST_MESSAGES, asked_of, chat_reply
from app.server.v1.contents import called, part_text, text_of
from app.server.v1.fields import REFUSED, Body, longest, with_schema, with_stop
from app.server.v1.parts import Call, Part
from app.server.v1.reply import Reply, data
from app.server.v1.result import Result, Usage
from app.server.v1.tools import Offer, offered, with_tools
from app.services.host import Host
from core.settings.sampling import Sampling
from core.types import TokenLogprob

LEFT_OUT = ("thinking", "redacted_thinking")  # of earlier answers: templates leave it out, too


class Turn(BaseModel):
    """One message in Anthropic's form."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any


class MessagesBody(Body):
    """A request for a message."""

    refused: ClassVar[Mapping[str, tuple[str, Sequence[Any]]]] = {
        **REFUSED,
        "container": ("this server runs no code", ()),
        "mcp_servers": ("this server reaches no others", ()),
    }
    messages: list[Turn] = Field(max_length=MOST_MESSAGES)
    system: Any = None
    max_tokens: int | None = None
    stop_sequences: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None

    def sampling(self, base: Sampling) -> Sampling:
        """The host's sampling settings, overridden by those of the request. Raises ApiError."""
        drawn = self.drawn(base, {"max_new_tokens": longest("max_tokens", self.max_tokens)})
        return with_stop(drawn, "stop_sequences", self.stop_sequences)

    def chat(self) -> list[dict[str, Any]]:
        """The messages as templates take them. Raises ApiError."""
        system = (
            [] if self.system in (None, "", []) else [{"role": "system", "content": text_of(self.system, "system")}]
        )
        return [*system, *(one for n, turn in enumerate(self.messages) for one in _turn(turn, f"messages.{n}"))]


def prompt(host: Host, body: MessagesBody) -> tuple[list[dict[str, Any]], Offer]:
    """Messages and tools as templates take them. Raises ApiError."""
    body.take(host)
    messages = body.chat()
    return messages, offered(host, messages, "messages", body.tools, body.tool_choice)


def reply(host: Host, body: MessagesBody) -> Reply:
    """The answer to a request. Raises MoestroError."""
    messages, offer = prompt(host, body)
    sampling = with_schema(body.sampling(host.chats.sampling), "output_format", body.output_format)
    sampling = with_schema(sampling, "output_config.format", (body.output_config or {}).get("format"))
    form = MessageForm(host.models.model_id, sampling.stop)
    choice = body.tool_choice if isinstance(body.tool_choice, Mapping) else {}
    single = choice.get("disable_parallel_tool_use")
    sampling = with_tools(sampling, offer, body.max_tokens, None if single is None else not single)
    return chat_reply(host, messages, offer, sampling, form, stream=bool(body.stream))


def count(host: Host, body: MessagesBody) -> dict[str, int]:
    """The tokens of a request's prompt. Raises MoestroError."""
    messages, offer = prompt(host, body)
    chat = asked_of(messages, offer.tools, Sampling())
    host.models.ready().engine.check_length(chat)
    return {"input_tokens": host.models.count_tokens(chat) or 0}


def _turn(turn: Turn, where: str) -> list[dict[str, Any]]:
    """The messages that one of Anthropic's becomes: results of tools are messages of their own."""
    if turn.role not in ("user", "assistant", "system"):
        raise ApiError(f"{where}.role: there are user and assistant, not {turn.role[:40]!r}.", f"{where}.role")
    where = f"{where}.content"
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if not isinstance(turn.content, list):
        raise ApiError(f"{where}: give a text, or a list of blocks.", where)
    texts, calls, results = list[Any](), list[dict[str, Any]](), list[dict[str, Any]]()
    for number, block in enumerate(turn.content):
        kind, at = block.get("type") if isinstance(block, dict) else None, f"{where}.{number}"
        if kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise ApiError(f"{at}.name: Field required.", f"{at}.name")
            calls.append(called(block.get("id"), block["name"], block.get("input")))
        elif kind == "tool_result":
            content = text_of(block.get("content") or "", f"{at}.content")
            results.append({"role": "tool", "content": content, "tool_call_id": str(block.get("tool_use_id") or "")})
        elif kind not in LEFT_OUT:
            texts.append(part_text(block, at))
    if not texts and not calls and results:
        return results
    message: dict[str, Any] = {"role": turn.role, "content": "\n".join(texts)}
    return [*results, message | ({"tool_calls": calls} if calls else {})]


class MessageForm:
    """A message, whole or in events: https://docs.anthropic.com/en/api/messages-streaming."""

    def __init__(self, model: str | None, stops: Sequence[str]) -> None:
        """`stops` = the texts that the request ends its answer at."""
        self._model, self._stops, self._id = model, stops, f"msg_{uuid.uuid4().hex}"
        self._index, self._open = -1, ""

    def opening(self) -> Iterable[str]:
        return ()

    def reading(self, usage: Usage) -> Iterable[str]:
        yield _event("message_start", message=self._message([], None, None, usage))
        yield _event("ping")

    def part(self, part: Part, logprobs: Sequence[TokenLogprob]) -> Iterable[str]:
        if part.call is not None:
            yield from self._begin("tool_use", {**_called(part.call), "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": part.call.arguments})
            yield from self._end()
        elif part.kind == "reasoning":
            yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": part.text})
        else:
            yield from self._begin("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part.text})

    def closing(self, result: Result) -> Iterable[str]:
        yield from self._end()
        reason, stop = self._reason(result)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield _event("message_delta", delta=delta, usage=_usage(result.usage), moestro=result.facts)
        yield _event("message_stop")

    def failing(self, error: ApiError) -> Iterable[str]:
        yield data(error.anthropic(), "error")

    def whole(self, result: Result) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if result.reasoning:
            content.append({"type": "thinking", "thinking": result.reasoning, "signature": ""})
        if result.content.strip() or not result.calls:
            content.append({"type": "text", "text": result.content})
        content += [{**_called(one), "input": _input(one)} for one in result.calls]
        return {**self._message(content, *self._reason(result), result.usage), "moestro": result.facts}

    def _message(self, content: list[Any], reason: str | None, stop: str | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(usage),
        }

    def _reason(self, result: Result) -> tuple[str, str | None]:
        if result.stop and result.stop in self._stops:
            return "stop_sequence", result.stop
        return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[result.finish], None

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterable[str]:
        """A block of a kind, unless it is open."""
        if self._open == kind:
            return
        yield from self._end()
        self._index, self._open = self._index + 1, kind
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end(self) -> Iterable[str]:
        if self._open:
            self._open = ""
            yield _event("content_block_stop", index=self._index)


def _event(name: str, /, **fields: Any) -> str:
    return data({"type": name, **fields}, name)


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.answer,
    }


def _called(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _input(call: Call) -> Any:
    found = called("", call.name, call.arguments)["function"]["arguments"]
    return found if isinstance(found, dict) else {"text": found}
