"""Limits request bodies: their size, and JSON values that all later code can handle."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import anyio
from anyio import to_thread
from pydantic import Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.errors import problem

MB = 1 << 20
GRADIO = "/gradio_api/"
MOST_BYTES = 16 * MB  # of any request except those of the Gradio page
MOST_UPLOADED = 65 * MB  # of those: an upload of 64 MB (Gradio's own limit) and its multipart framing
MOST_DEPTH = 100  # nesting of lists and objects
MOST_WHOLE = 2**63  # integers are smaller than this: ids and seeds, here and in the database
DRAIN_S, DRAIN_BYTES = 10.0, 512 * MB  # limits of reading on after a refusal, so that the client receives the reply
# What needs a full check: lone surrogates, long numbers, and anything that is not plain UTF-8.
SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|\d{19}|\xed[\xa0-\xbf]|\x00|^\xff\xfe|^\xfe\xff")

RowId = Annotated[int, Field(ge=0, lt=MOST_WHOLE)]
"""A number under which the store has something, as a route takes it from an address."""


class Bodies:
    """Middleware that refuses bodies that are too large (413), and JSON with lone surrogates, numbers beyond 63 bits,
    or too many levels (400).
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if "content-length" not in headers and "transfer-encoding" not in headers:
            await self.app(scope, receive, send)
            return
        is_upload = scope["path"] == f"{GRADIO}upload"
        most = MOST_UPLOADED if scope["path"].startswith(GRADIO) else MOST_BYTES
        counted = _counted(receive, most)
        try:
            declared = headers.get("content-length", "")
            if declared.isdecimal() and int(declared) > most:
                raise _TooLarge(most, more=True)
            if is_upload:
                await self.app(scope, counted, send)
                return
            body = await _read(counted)
        except _TooLarge as error:
            if error.more:
                with anyio.move_on_after(DRAIN_S):
                    await _drain(receive)
            answer = refusal(scope, 413, error.detail, "too_large")
            answer.headers["connection"] = "close"
            await answer(scope, receive, send)
            return
        if body is None:  # the client has disconnected
            return
        if "json" in headers.get("content-type", "json") and (wrong := await _wrong(body)):
            await refusal(scope, 400, wrong)(scope, receive, send)
            return
        await self.app(scope, _again(body, receive), send)


def refusal(scope: Scope, status: int, message: str, code: str | None = None) -> JSONResponse:
    """An error in the client's format: Gradio's page shows a plain text."""
    if scope["path"].startswith(GRADIO):
        return JSONResponse({"error": message}, status)
    return problem(status, message, code=code)


class _TooLarge(HTTPException):  # FastAPI and Gradio pass this type on; others become "bad body"
    def __init__(self, most: int, more: bool) -> None:
        self.more = more  # part of the body has not been read
        super().__init__(413, f"The request is larger than {most // MB} MB, and no more is read. Send less.")


def _counted(receive: Receive, most: int) -> Receive:
    taken = 0

    async def counted() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > most:
            raise _TooLarge(most, bool(message.get("more_body")))
        return message

    return counted


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None when the client disconnects before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _drain(receive: Receive) -> None:
    left = DRAIN_BYTES
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


def _again(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """A `receive` for the wrapped application: replays the body that was read, then passes on later messages."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


async def _wrong(body: bytes) -> str:
    """The problem of a JSON body, or "". The few that need a full check are checked in a thread."""
    deep = body.count(b"[") + body.count(b"{") > MOST_DEPTH
    if not deep and SUSPECT.search(body) is None:
        return ""
    return await to_thread.run_sync(wrong_with, body)


def wrong_with(body: bytes) -> str:
    """Why a JSON body cannot be processed, or "". Invalid JSON is left to later code to report."""
    try:
        value = json.loads(body, parse_int=_whole)
        if _depth(value) > MOST_DEPTH:
            raise RecursionError
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        return f"The request has more than {MOST_DEPTH} lists and objects inside one another. Send it flatter."
    except OverflowError:
        return "The request holds a whole number beyond 63 bits. Ids and seeds are smaller than that."
    except UnicodeEncodeError:
        return (
            "The request contains an unpaired surrogate, which is not a character and cannot be stored or "
            "read by a model. Send whole characters."
        )
    except ValueError:
        return ""
    return ""


def _whole(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) >= MOST_WHOLE:
        raise OverflowError
    return int(digits)


def _depth(value: Any) -> int:
    """Nesting of lists and objects, counted only as far as needed."""
    level, depth = [value], 0
    while level and depth <= MOST_DEPTH:
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (list, dict))]
        depth += bool(inner)
        level = [one for group in inner for one in group if isinstance(one, (list, dict))]
    return depth
