"""A server that needs no model: it keeps every request, and answers with the shortest valid one of the API asked for.

A request with tools is answered with calls first, so that a client also sends what it makes of their results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

MODEL, ANSWER = "demo", "It keeps what was asked for."
RESULT = re.compile('"role":"tool"|"type":"function_call_output"|"type":"tool_result"')  # of a tool that has run
MOST_REQUESTS = 40  # of one program; every further one is refused, as some ask for ever
USAGE = {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}
RESPONSE_USAGE = {"input_tokens": 9, "output_tokens": 7, "total_tokens": 16}
Event = tuple[str, Any]


class Canned(ThreadingHTTPServer):
    """Listens on a free port of this machine. `calls` = name of a tool -> the arguments it is called with; those that a
    program offers are called one after the other, each once."""

    daemon_threads = True

    def __init__(self, calls: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls, self.seen = calls, list[dict[str, Any]]()

    def call(self, body: Mapping[str, Any]) -> tuple[str, str] | None:
        """Name and arguments (JSON) of the tool to call next, or None to answer with text."""
        said = json.dumps(body.get("messages", body.get("input")), separators=(",", ":"))
        offered = [one.get("name") or one.get("function", {}).get("name") for one in body.get("tools") or ()]
        known, done = [name for name in self.calls if name in offered], len(RESULT.findall(said))
        return (known[done], json.dumps(self.calls[known[done]])) if done < len(known) else None


class Handler(BaseHTTPRequestHandler):
    """Keeps a request and answers it."""

    server: Canned
    protocol_version = "HTTP/1.1"

    def _take(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = raw.decode(errors="replace")
        if len(self.server.seen) >= MOST_REQUESTS:
            self._send({"error": {"message": "that is enough", "type": "invalid_request_error"}}, 400)
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append({"method": self.command, "path": self.path, "headers": headers, "body": body})
        self._answer(urlsplit(self.path).path.removeprefix("/v1"), body)

    do_GET = do_POST = do_HEAD = do_PUT = do_OPTIONS = _take

    def _answer(self, path: str, body: Any) -> None:
        if self.command == "GET" and path.startswith("/models"):
            one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "local", "max_model_len": 32768}
            self._send(one if path != "/models" else {"object": "list", "data": [one]})
        elif path == "/messages/count_tokens":
            self._send({"input_tokens": 9})
        elif self.command != "POST" or path not in FORMS or not isinstance(body, dict):
            self._send({"error": {"message": f"there is no {path}", "type": "invalid_request_error"}}, 404)
        else:
            events, whole = FORMS[path](self.server.call(body))
            if body.get("stream"):
                self._bytes("".join(_written(events)).encode(), "text/event-stream", 200)
            else:
                self._send(whole)

    def _send(self, value: Any, status: int = 200) -> None:
        self._bytes(json.dumps(value).encode(), "application/json", status)

    def _bytes(self, data: bytes, kind: str, status: int) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: the requests are kept."""


def _written(events: list[Event]) -> Iterator[str]:
    for name, value in events:
        told = value if isinstance(value, str) else json.dumps({"type": name, **value} if name else value)
        yield (f"event: {name}\n" if name else "") + f"data: {told}\n\n"


def chat(call: tuple[str, str] | None) -> tuple[list[Event], dict[str, Any]]:
    """Of OpenAI's chat completions: the events of a stream, and the whole answer."""
    head, finish = {"id": "chatcmpl-1", "created": 0, "model": MODEL}, "tool_calls" if call else "stop"
    message: dict[str, Any] = {"role": "assistant", "content": None if call else ANSWER}
    if call:
        function = {"name": call[0], "arguments": call[1]}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    whole = {"index": 0, "message": message, "finish_reason": finish}
    delta = {**message, "tool_calls": [{**one, "index": 0} for one in message.get("tool_calls", ())]}
    chunks = [
        [{"index": 0, "delta": delta if call else message, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": finish}],
    ]
    events: list[Event] = [("", {**head, "object": "chat.completion.chunk", "choices": one}) for one in chunks]
    events += [("", {**head, "object": "chat.completion.chunk", "choices": [], "usage": USAGE}), ("", "[DONE]")]
    return events, {**head, "object": "chat.completion", "choices": [whole], "usage": USAGE}


def completion(call: tuple[str, str] | None) -> tuple[list[Event], dict[str, Any]]:
    """Of OpenAI's completions."""
    whole = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "text": ANSWER, "finish_reason": "stop"}],
    }
    return [("", whole), ("", "[DONE]")], {**whole, "usage": USAGE}


def response(call: tuple[str, str] | None) -> tuple[list[Event], dict[str, Any]]:
    """Of OpenAI's responses."""
    if call:
        item: dict[str, Any] = {"id": "fc_1", "type": "function_call", "call_id": "call_1", "name": call[0]}
        item |= {"arguments": call[1], "status": "completed"}
    else:
        part = {"type": "output_text", "text": ANSWER, "annotations": []}
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    whole = {"id": "resp_1", "object": "response", "created_at": 0, "model": MODEL, "status": "completed"}
    whole |= {"output": [item], "usage": RESPONSE_USAGE}
    whole |= {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    told: list[Event] = [("response.created", {"response": begun})]
    told.append(("response.output_item.added", {"output_index": 0, "item": {**item, "status": "in_progress"}}))
    if not call:
        at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        told.append(("response.content_part.added", {**at, "part": {**item["content"][0], "text": ""}}))
        told.append(("response.output_text.delta", {**at, "delta": ANSWER}))
    told.append(("response.output_item.done", {"output_index": 0, "item": item}))
    told.append(("response.completed", {"response": whole}))
    return [(name, {**value, "sequence_number": number}) for number, (name, value) in enumerate(told)], whole


def message(call: tuple[str, str] | None) -> tuple[list[Event], dict[str, Any]]:
    """Of Anthropic's messages."""
    usage = {"input_tokens": 9, "output_tokens": 7}
    if call:
        block: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": call[0], "input": {}}
        delta = {"type": "input_json_delta", "partial_json": call[1]}
        full = {**block, "input": json.loads(call[1])}
    else:
        block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": ANSWER}
        full = {"type": "text", "text": ANSWER}
    reason = {"stop_reason": "tool_use" if call else "end_turn", "stop_sequence": None}
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL}
    begun = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    events: list[Event] = [
        ("message_start", {"message": begun}),
        ("content_block_start", {"index": 0, "content_block": block}),
        ("content_block_delta", {"index": 0, "delta": delta}),
        ("content_block_stop", {"index": 0}),
        ("message_delta", {"delta": reason, "usage": {"output_tokens": 7}}),
        ("message_stop", {}),
    ]
    return events, {**head, "content": [full], **reason, "usage": usage}


FORMS = {"/chat/completions": chat, "/completions": completion, "/responses": response, "/messages": message}
