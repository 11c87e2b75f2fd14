"""What a server of the OpenAI API replies, read up to a limit, and what is malformed in it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.services.batch.lines import Kind
from core.system.reading import BadJson, parse_json

MOST_BYTES, MOST_ERROR_BYTES = 32 << 20, 64 << 10  # of a reply, and of one that says why there is no answer
MOST_TEXT = 2000  # characters of a message


class Malformed(Exception):
    """A problem of a reply, worded as the end of a sentence about it."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Message(_Part):
    content: str | None  # None: it called a tool, or did not come further than its reasoning
    reasoning_content: str | None = None


class _ChatChoice(_Part):
    message: _Message
    finish_reason: str | None = None


class _TextChoice(_Part):
    text: str
    finish_reason: str | None = None


class _Usage(_Part):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chat(_Part):
    choices: list[_ChatChoice] = Field(min_length=1)
    usage: _Usage | None = None


class _Text(_Part):
    choices: list[_TextChoice] = Field(min_length=1)
    usage: _Usage | None = None


FORMS: dict[Kind, type[BaseModel]] = {"chat": _Chat, "text": _Text}


@dataclass(frozen=True, slots=True)
class Reply:
    """`cut`: why `body` is not whole; "" when it is."""

    status: int
    headers: httpx.Headers
    body: bytes
    cut: str = ""

    def answer(self, kind: Kind) -> dict[str, Any]:
        """The body of an answer, as the API has it. Raises Malformed."""
        if self.headers.get("content-encoding", "identity") != "identity":
            raise Malformed("it is compressed, which was not requested")
        if len(self.body) > MOST_BYTES:
            raise Malformed(f"it is larger than {MOST_BYTES >> 20} MB")
        if not self.body.strip():
            raise Malformed("it is empty")
        try:
            found = parse_json(self.body)
        except BadJson as error:
            raise Malformed(str(error)) from None
        if not isinstance(found, dict):
            raise Malformed("it is not a JSON object")
        try:
            FORMS[kind].model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            raise Malformed(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        return found

    @property
    def error(self) -> dict[str, Any] | None:
        """The object under "error"."""
        if len(self.body) > MOST_ERROR_BYTES:
            return None
        try:
            found = parse_json(self.body)
        except BadJson:
            return None
        error = found.get("error") if isinstance(found, dict) else None
        return error if isinstance(error, dict) else None

    @property
    def message(self) -> str:
        """Why there is no answer, in the server's words."""
        error = self.error
        text = str(error.get("message") or "") if error else self.body[: 4 * MOST_TEXT].decode("utf-8", "replace")
        return text[:MOST_TEXT].strip() or f"The server answered with status {self.status}."


def post(client: httpx.Client, url: str, body: bytes, timeout_s: float) -> Reply:
    """Send a request. Raises httpx.RequestError when no reply began."""
    until_s, parts, size = time.monotonic() + timeout_s, list[bytes](), 0
    with client.stream("POST", url, content=body) as response:
        cut = ""
        try:
            for part in response.iter_raw():
                parts.append(part)
                size += len(part)
                if size > MOST_BYTES:
                    break
                if time.monotonic() > until_s:
                    raise httpx.ReadTimeout(f"it took longer than {timeout_s:g} s")
        except httpx.RequestError as error:
            cut = str(error) or type(error).__name__
        return Reply(response.status_code, response.headers, b"".join(parts), cut)
