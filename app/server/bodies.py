"""Reads request bodies: how large and how slow one may be, and how many bytes all of them may take up at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server import json_values
from app.server.errors import GRADIO, ApiError, refusal

KB, MB = 1 << 10, 1 << 20
UPLOAD = f"{GRADIO}upload"
MOST_BYTES = 16 * MB  # of any body except that of an upload
MOST_UPLOADED = 65 * MB  # of an upload: 64 MB (Gradio's own limit) and its multipart framing
MOST_TOGETHER = 64 * MB  # of all bodies in memory, what each has beyond SMALL
SMALL = 64 * KB  # a body up to this size is always read, so that large ones do not keep the page from working
PIECE, PIECE_S = MB, 30.0  # so much of a body, or its end, arrives in so many seconds of waiting
RETRY_S = 5
DRAIN_S, DRAIN_BYTES = 10.0, 512 * MB  # limits of reading on after a refusal, so that the client receives the reply


class Bodies:
    """Middleware that refuses bodies that are too large (413), too slow (408) or too many (503), and those with JSON
    that later code could not take (400), whatever their content type says. What it passes on has been read, except for
    an upload, which goes to the disk as it arrives."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self._memory = app, InFlight(MOST_TOGETHER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        chunked = "transfer-encoding" in headers  # then a length that is given as well means nothing
        if not chunked and "content-length" not in headers:
            await self.app(scope, receive, send)
            return
        upload = scope["path"] == UPLOAD
        most, declared = MOST_UPLOADED if upload else MOST_BYTES, headers.get("content-length", "")
        incoming = Incoming(receive, most)
        with self._memory.share() as share:
            try:
                if upload and chunked:
                    raise ApiError("An upload has to say how large it is.", status=411)
                if not chunked and declared.isdecimal() and int(declared) > most:
                    raise too_large(most)
                if upload:
                    await self.app(scope, incoming.streamed, send)
                    return
                body = await read(incoming, share)
                if wrong := await json_values.wrong(body):
                    raise ApiError(wrong)
            except Disconnected:
                return
            except ApiError as error:
                ended = incoming.complete
                await incoming.drain()
                await refusal(scope, error, {} if ended else {"connection": "close"})(scope, receive, send)
                return
            await self.app(scope, replayed(body, receive), send)


class InFlight:
    """A cap on what many requests hold at once. For one event loop: nothing here waits or locks.

    `held`: bytes taken and not yet given back."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """What one request holds; given back at the end of the `with`."""
        share = Share(self)
        try:
            yield share
        finally:
            share.give(share.held)


class Share:
    """The bytes of one request."""

    def __init__(self, whole: InFlight) -> None:
        self._whole, self.held = whole, 0

    def take(self, count: int, elsewhere: int = 0) -> bool:
        """Hold `count` bytes more; False, and nothing is held, where they do not fit next to `elsewhere` bytes that
        count against the same cap."""
        if self._whole.held + elsewhere + count > self._whole.most:
            return False
        self._whole.held += count
        self.held += count
        return True

    def give(self, count: int) -> None:
        """Give back up to `count` of the bytes held."""
        count = min(count, self.held)
        self._whole.held -= count
        self.held -= count


class Disconnected(Exception):
    """The client has gone before the end of its body."""


class Incoming:
    """A body on its way. Raises ApiError for one that is larger than `most` bytes, or too slow."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most, self._taken = receive, most, 0
        self._piece, self._left_s = PIECE, PIECE_S  # until the next piece has to be here
        self.complete, self._slow = False, False

    async def next(self) -> bytes:
        """The next bytes. Raises Disconnected."""
        message = await self._timely()
        if message["type"] == "http.disconnect":
            self.complete = True
            raise Disconnected
        part: bytes = message.get("body", b"")
        self.complete = not message.get("more_body", False)
        self._taken += len(part)
        if self._taken > self._most:
            raise too_large(self._most)
        return part

    async def streamed(self) -> Message:
        """A `receive` for an application that reads the body itself. Gradio and FastAPI pass an HTTPException on."""
        if self.complete:
            return await self._receive()
        try:
            part = await self.next()
        except Disconnected:
            return {"type": "http.disconnect"}
        except ApiError as error:
            raise HTTPException(error.status, str(error), {"connection": "close"}) from None
        return {"type": "http.request", "body": part, "more_body": not self.complete}

    async def drain(self) -> None:
        """Read on and forget, as a client that is still sending does not see the reply."""
        left = DRAIN_BYTES
        with anyio.move_on_after(DRAIN_S):
            while left > 0 and not self.complete and not self._slow:
                message = await self._receive()
                left -= len(message.get("body", b""))
                self.complete = not message.get("more_body", False)

    async def _timely(self) -> Message:
        began_s = anyio.current_time()
        with anyio.move_on_after(self._left_s):
            message = await self._receive()
            self._left_s -= anyio.current_time() - began_s
            self._piece -= len(message.get("body", b""))
            if self._piece <= 0:
                self._piece, self._left_s = PIECE, PIECE_S
            return message
        self._slow = True
        raise ApiError(
            f"The body arrives too slowly: {PIECE // KB} kB of it, or its end, in {PIECE_S:g} s are needed.",
            code="too_slow",
            status=408,
        )


async def read(incoming: Incoming, share: Share) -> bytes:
    """The whole body; what of it is beyond SMALL is taken from the share as it arrives. Raises ApiError and
    Disconnected."""
    body = bytearray()  # no list of chunks: a client may make them as small as it likes
    while not incoming.complete:
        body += await incoming.next()
        if not share.take(max(0, len(body) - SMALL - share.held)):
            body.clear()
            share.give(share.held)
            raise ApiError(
                f"The server is reading as much as it can hold at once. Send this again in {RETRY_S} seconds.",
                code="too_many_bytes",
                status=503,
                retry_s=RETRY_S,
            )
    return bytes(body)


def too_large(most: int) -> ApiError:
    """The error for a body beyond `most` bytes."""
    return ApiError(
        f"The request is larger than {most // MB} MB, and no more is read. Send less.", code="too_large", status=413
    )


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` for an application behind one that has read the body: gives it once more, then what comes after."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again
