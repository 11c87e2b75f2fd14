"""Messages of requests, as the chat template takes them: text alone, in the roles that templates know."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from app.server.errors import ApiError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # part -> its field


class ChatMessage(BaseModel):
    """One message of a chat in OpenAI's form."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


def text_of(content: Any, where: str) -> str:
    """The text of a message: a string, or a list of text parts, which become lines. Raises ApiError for what is not
    text, naming it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where}: give a text, or a list of text parts.", where)
    return "\n".join(part_text(part, f"{where}.{number}") for number, part in enumerate(content))


def part_text(part: Any, where: str) -> str:
    """The text of one part of a message. Raises ApiError."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in TEXTS and isinstance(text := part.get(TEXTS[kind]), str):
        return text
    named = f"a part of type {kind[:40]!r}" if isinstance(kind, str) and kind not in TEXTS else "this part"
    raise ApiError(f"{where}: {named} cannot be read. Messages are text: {{'type': 'text', 'text': ...}}.", where)


def chat_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """OpenAI's messages as the template takes them. Raises ApiError."""
    return [_message(one, f"messages.{number}") for number, one in enumerate(messages)]


def _message(given: ChatMessage, where: str) -> dict[str, Any]:
    role = ROLES.get(given.role)
    if role is None:
        raise ApiError(
            f"{where}.role: there are the roles {', '.join(ROLES)}, not {given.role[:40]!r}.", f"{where}.role"
        )
    calls = given.tool_calls if role == "assistant" else None
    if given.content is None and not calls:
        raise ApiError(f"{where}.content: Field required.", f"{where}.content")
    text = "" if given.content is None else text_of(given.content, f"{where}.content")
    message: dict[str, Any] = {"role": role, "content": text}
    if calls:
        message["tool_calls"] = [call_of(one, f"{where}.tool_calls.{number}") for number, one in enumerate(calls)]
    if role == "tool":
        message |= {"tool_call_id": given.tool_call_id or ""} | ({"name": given.name} if given.name else {})
    return message


def call_of(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A tool call of an earlier answer, with its arguments as an object, as templates write them. Raises ApiError."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{where}.function: give an object with name and arguments.", f"{where}.function")
    return called(call.get("id"), function["name"], function.get("arguments"))


def called(id: Any, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call as templates take it; `arguments` = an object, or JSON of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            pass  # what the model once wrote, however it is
    return {
        "id": id if isinstance(id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }
