"""The lines of answers: in OpenAI's form of a batch's output, or plain."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from app.batch.lines import Line


def answered(line: Line, body: Mapping[str, Any]) -> dict[str, Any]:
    """The record of an answer; `body` as the API gives it."""
    if line.plain:
        choice, usage = body["choices"][0], body.get("usage") or {}
        message = choice.get("message", {})
        return {
            "id": line.id,
            "text": message.get("content") if "message" in choice else choice.get("text"),
            **({"reasoning": message["reasoning_content"]} if message.get("reasoning_content") else {}),
            "finish_reason": choice.get("finish_reason"),
            "prompt_tokens": usage.get("prompt_tokens"),
            "answer_tokens": usage.get("completion_tokens"),
        }
    return {**_head(line), "response": {"status_code": 200, "request_id": body.get("id"), "body": body}, "error": None}


def refused(line: Line, message: str, status: int = 400, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The record of a prompt without an answer. `error`: the server's own object."""
    if line.plain:
        return {"id": line.id, "error": message}
    body = {"error": dict(error)} if error else {"error": {"message": message, "type": "invalid_request_error"}}
    code = str(body["error"].get("code") or body["error"].get("type") or status)
    response = {"status_code": status, "request_id": None, "body": body}
    return {**_head(line), "response": response, "error": {"code": code, "message": message}}


def _head(line: Line) -> dict[str, Any]:
    return {"id": f"batch_req_{hashlib.sha256(line.id.encode()).hexdigest()[:24]}", "custom_id": line.id}
