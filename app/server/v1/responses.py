"""OpenAI's responses. Nothing is stored: each request brings the whole conversation."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from app.server.errors import ApiError
from app.server.v1.chat import MOST_MESSAGES, chat_reply
from app.server.v1.contents import ROLES, called, text_of
from app.server.v1.fields import REFUSED, Body, longest, with_schema
from app.server.v1.reply import Reply
from app.server.v1.response_form import ResponseForm
from app.server.v1.tools import offered, with_tools
from app.services.host import Host
from core.settings.sampling import Sampling

STATELESS = "nothing is stored; send the whole conversation as input"


class ResponsesBody(Body):
    """A request for a response."""

    refused: ClassVar[Mapping[str, tuple[str, Sequence[Any]]]] = {
        **REFUSED,
        "previous_response_id": (STATELESS, ()),
        "conversation": (STATELESS, ()),
        "background": (STATELESS, ()),
        "prompt": ("there are no stored prompts here", ()),
        "top_logprobs": ("log probabilities are reported by chat completions", (0,)),
        "max_tool_calls": ("this server runs no tools", ()),
    }
    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def sampling(self, base: Sampling) -> Sampling:
        """The host's sampling settings, overridden by those of the request. Raises ApiError."""
        return self.drawn(base, {"max_new_tokens": longest("max_output_tokens", self.max_output_tokens)})

    def chat(self) -> list[dict[str, Any]]:
        """The messages as templates take them. Raises ApiError."""
        chat = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*chat, {"role": "user", "content": self.input}]
        if not isinstance(self.input, list) or len(self.input) > MOST_MESSAGES:
            raise ApiError(f"input: give a text, or a list of at most {MOST_MESSAGES} items.", "input")
        for number, item in enumerate(self.input):
            _add(chat, item, f"input.{number}")
        return chat


def reply(host: Host, body: ResponsesBody) -> Reply:
    """The answer to a request. Raises MoestroError."""
    body.take(host)
    sampling, messages = body.sampling(host.chats.sampling), body.chat()
    offer = offered(host, messages, "input", body.tools, body.tool_choice)
    form = (body.text or {}).get("format")
    sampling = with_schema(sampling, "text.format", form)
    sampling = with_tools(sampling, offer, body.max_output_tokens, body.parallel_tool_calls)
    request_fields = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "text": {"format": form or {"type": "text"}},
    }
    response = ResponseForm(host.models.model_id, request_fields)
    return chat_reply(host, messages, offer, sampling, response, stream=bool(body.stream))


def _add(chat: list[dict[str, Any]], item: Any, where: str) -> None:
    """Add an item of the input: a message, or a call of an earlier answer, which becomes part of its message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = ROLES.get(str(item.get("role")))
        if role is None or role == "tool":
            raise ApiError(f"{where}.role: there are system, developer, user and assistant.", f"{where}.role")
        chat.append({"role": role, "content": text_of(item.get("content"), f"{where}.content")})
    elif kind == "function_call":
        if not isinstance(item.get("name"), str):
            raise ApiError(f"{where}.name: Field required.", f"{where}.name")
        call = called(item.get("call_id"), item["name"], item.get("arguments"))
        if not chat or chat[-1]["role"] != "assistant":
            chat.append({"role": "assistant", "content": ""})
        chat[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = text_of(item.get("output"), f"{where}.output")
        chat.append({"role": "tool", "content": content, "tool_call_id": str(item.get("call_id") or "")})
    elif kind != "reasoning":  # which templates leave out of earlier answers
        raise ApiError(
            f"{where}: an item of type {str(kind)[:40]!r} cannot be read. There are message, function_call, "
            "function_call_output and reasoning.",
            where,
        )
