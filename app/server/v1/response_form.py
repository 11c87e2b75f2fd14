"""How an answer is written in the form of OpenAI's responses: items with parts, each begun, filled and ended by events.

https://platform.openai.com/docs/api-reference/responses-streaming"""

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.server.errors import ApiError
from app.server.v1.parts import Call, Part
from app.server.v1.reply import data
from app.server.v1.result import Result, Usage
from core.types import TokenLogprob


class ResponseForm:
    """A response, whole or in events. `request_fields` = fields of the request that are repeated."""

    def __init__(self, model: str | None, request_fields: Mapping[str, Any]) -> None:
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **request_fields,
        }
        self._number = 0
        self._done: list[dict[str, Any]] = []  # items that have ended
        self._item: dict[str, Any] | None = None  # the one that text is added to
        self._text: list[str] = []

    def opening(self) -> Iterable[str]:
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def reading(self, usage: Usage) -> Iterable[str]:
        return ()

    def part(self, part: Part, logprobs: Sequence[TokenLogprob]) -> Iterable[str]:
        if part.call is not None:
            yield from self._end()
            yield from self._call(part.call)
            return
        kind = "reasoning" if part.kind == "reasoning" else "message"
        if self._item is None or self._item["type"] != kind:
            yield from self._end()
            yield from self._begin(kind)
        self._text.append(part.text)
        yield self._event(f"response.{_part_of(kind)}.delta", **self._place(), delta=part.text, **_more(kind))

    def closing(self, result: Result) -> Iterable[str]:
        yield from self._end()
        if not self._done:
            yield from self._begin("message")
            yield from self._end()
        whole = self._ended(result, self._done)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failing(self, error: ApiError) -> Iterable[str]:
        whole = error.openai()
        short = {"code": error.code or whole["type"], "message": whole["message"]}
        yield self._event("response.failed", response={**self._response("failed", self._done), "error": short})
        yield self._event("error", **short, param=error.param, error=whole)

    def whole(self, result: Result) -> dict[str, Any]:
        items = [_item("reasoning", result.reasoning)] if result.reasoning else []
        if result.content.strip() or not result.calls:
            items.append(_item("message", result.content))
        return self._ended(result, [*items, *map(_called, result.calls)])

    # ------------------------------------------------------------------ the response

    def _response(self, status: str, output: Sequence[Any]) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "output": list(output),
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "metadata": {},
            "usage": None,
        }

    def _ended(self, result: Result, output: Sequence[Any]) -> dict[str, Any]:
        cut = result.finish == "length"
        return {
            **self._response("incomplete" if cut else "completed", output),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": _usage(result.usage),
            "moestro": result.facts,
        }

    # ------------------------------------------------------------------ events

    def _event(self, name: str, /, **fields: Any) -> str:
        self._number += 1
        return data({"type": name, "sequence_number": self._number - 1, **fields}, name)

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._done), "content_index": 0}

    def _begin(self, kind: str) -> Iterable[str]:
        """An item whose text follows."""
        self._item, self._text = _item(kind, ""), []
        begun = {**self._item, "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=len(self._done), item=begun)
        yield self._event("response.content_part.added", **self._place(), part=self._item["content"][0])

    def _end(self) -> Iterable[str]:
        """The item that is open, if one is."""
        if self._item is None:
            return
        kind, text = self._item["type"], "".join(self._text)
        item = {**_item(kind, text), "id": self._item["id"]}
        yield self._event(f"response.{_part_of(kind)}.done", **self._place(), text=text, **_more(kind))
        yield self._event("response.content_part.done", **self._place(), part=item["content"][0])
        yield self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._item = None

    def _call(self, call: Call) -> Iterable[str]:
        item, at = _called(call), {"output_index": len(self._done)}
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", **at, item=begun)
        named = {"item_id": item["id"], **at}
        yield self._event("response.function_call_arguments.delta", **named, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **named, name=call.name, arguments=call.arguments)
        yield self._event("response.output_item.done", **at, item=item)
        self._done.append(item)


def _part_of(kind: str) -> str:
    return "reasoning_text" if kind == "reasoning" else "output_text"


def _more(kind: str) -> dict[str, Any]:
    """The other fields of events of an item's text."""
    return {} if kind == "reasoning" else {"logprobs": []}


def _item(kind: str, text: str) -> dict[str, Any]:
    """An item with one part: a message, or the reasoning before it."""
    if kind == "reasoning":
        part: dict[str, Any] = {"type": "reasoning_text", "text": text}
        return {"id": f"rs_{uuid.uuid4().hex}", "type": kind, "summary": [], "content": [part], "status": "completed"}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": kind,
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _called(call: Call) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id.removeprefix('call_')}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.answer,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.answer,
    }
