"""The lines of answers: in OpenAI's form of a batch's output, or plain. Says which bytes are one."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from app.services.batch.lines import Line

PLAIN = ["id", "text", "finish_reason", "prompt_tokens", "answer_tokens"]
OPENAI, RESPONSE = ["id", "custom_id", "response", "error"], ["status_code", "request_id", "body"]
BEGIN = b'{"id": "'  # of every record
ID = re.compile(re.escape(BEGIN) + rb'(?:[^"\\]|\\.)*')
SECOND = (b'", "custom_id": ', b'", "text": ', b'", "error": ')  # what follows the first id


def answered(line: Line, body: Mapping[str, Any]) -> dict[str, Any]:
    """The record of an answer; `body` as the API gives it."""
    if line.plain:
        choice, usage = body["choices"][0], body.get("usage") or {}
        message = choice.get("message") or {}
        return {
            "id": line.id,
            "text": message.get("content") if message else choice.get("text"),
            **({"reasoning": message["reasoning_content"]} if message.get("reasoning_content") else {}),
            "finish_reason": choice.get("finish_reason"),
            "prompt_tokens": usage.get("prompt_tokens"),
            "answer_tokens": usage.get("completion_tokens"),
        }
    response = {"status_code": 200, "request_id": body.get("id"), "body": body}
    return {"id": _request(line.id), "custom_id": line.id, "response": response, "error": None}


def refused(line: Line, message: str, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The record of a prompt without an answer. `error`: the API's own object."""
    if line.plain:
        return {"id": line.id, "error": message}
    body = {"error": dict(error)} if error else {"error": {"message": message, "type": "invalid_request_error"}}
    code = str(body["error"].get("code") or body["error"].get("type") or 400)
    response = {"status_code": 400, "request_id": None, "body": body}
    why = {"code": code, "message": message}
    return {"id": _request(line.id), "custom_id": line.id, "response": response, "error": why}


def failed(record: Mapping[str, Any]) -> bool:
    """Whether it says why there is no answer."""
    return record.get("error") is not None


def unread(record: Mapping[str, Any]) -> bool:
    """Whether it says that its line held no prompt."""
    why, id = record.get("error"), id_of(record)
    message = why["message"] if isinstance(why, Mapping) else why
    return message is not None and id.startswith("line-") and str(message).startswith(f"Line {id[5:]}: ")


def id_of(record: Mapping[str, Any]) -> str:
    """The id of its prompt."""
    return str(record["custom_id"] if "custom_id" in record else record["id"])


def encoded(record: Mapping[str, Any]) -> bytes:
    """A record as its line of the file."""
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def decoded(line: bytes) -> dict[str, Any] | None:
    """The record of a line that `encoded` wrote, byte for byte; None for every other line."""
    try:
        found = json.loads(line)
        ours = isinstance(found, dict) and _is_record(found) and encoded(found) == line
    except (ValueError, RecursionError):
        return None
    return found if ours else None


def is_torn(tail: bytes) -> bool:
    """Whether bytes without a newline can be what a run that was killed, or a power cut, left of a record."""
    head = ID.match(tail)
    if head is None:
        return BEGIN.startswith(tail) or not tail.strip(b"\0")
    rest = tail[head.end() :]
    return rest == b"\\" or any(rest.startswith(key) or key.startswith(rest) for key in SECOND)


def _is_record(found: Mapping[str, Any]) -> bool:
    keys = list(found)
    if keys == OPENAI:
        custom_id, response, error = found["custom_id"], found["response"], found["error"]
        return (
            isinstance(custom_id, str)
            and found["id"] == _request(custom_id)
            and isinstance(response, dict)
            and list(response) == RESPONSE
            and (error is None or (isinstance(error, dict) and list(error) == ["code", "message"]))
        )
    if not isinstance(found.get("id"), str):
        return False
    if keys == ["id", "error"]:
        return isinstance(found["error"], str)
    return [key for key in keys if key != "reasoning"] == PLAIN and isinstance(found["text"], str | None)


def _request(id: str) -> str:
    """OpenAI's id of a request in a batch: here it follows from the prompt's."""
    return f"batch_req_{hashlib.sha256(id.encode()).hexdigest()[:24]}"
