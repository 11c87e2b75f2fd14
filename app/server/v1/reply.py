"""Sends an answer, whole or as server-sent events, in the form of the requesting API."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

import anyio
from anyio import CancelScope
from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from app.server.errors import ApiError, refusal
from app.server.v1.parts import Part, Parts
from app.server.v1.result import Result, Usage, failed, failure, result
from app.services.host import Host
from app.services.progress import Answer, Live
from core.types import TokenLogprob

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
KEEP_ALIVE_S = 10.0  # of silence, after which a comment shows that the connection is alive


class Form(Protocol):
    """How one API writes an answer. Events are made by `event` and `data`."""

    def opening(self) -> Iterable[str]:
        """The events before it is read."""
        ...

    def reading(self, usage: Usage) -> Iterable[str]:
        """The events once it is known how many tokens the prompt has."""
        ...

    def part(self, part: Part, logprobs: Sequence[TokenLogprob]) -> Iterable[str]:
        """The events of the next part; `logprobs` of the tokens since the last one."""
        ...

    def closing(self, result: Result) -> Iterable[str]:
        """The events at the end."""
        ...

    def failing(self, error: ApiError) -> Iterable[str]:
        """The events instead of the end, after an error."""
        ...

    def whole(self, result: Result) -> dict[str, Any]:
        """The answer as one object."""
        ...


def data(value: object, name: str = "") -> str:
    """A server-sent event with a JSON value, and a name where the API has names."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(value)}\n\n"


def comment(text: str) -> str:
    """A line of a stream that is for people, and that clients skip."""
    return f": {text}\n\n"


class Reply(Response):
    """An answer on its way to a client. It holds no thread while it waits; when the client disconnects, the answer is
    stopped, queued or not, streaming or not."""

    def __init__(self, host: Host, answer: Answer, form: Form, parts: Parts | None, stream: bool) -> None:
        """`parts` = what finds the parts of the text; None: all of it is content."""
        super().__init__()
        self._host, self._answer, self._form, self._stream = host, answer, form, stream
        self._parts, self._all = parts, list[Part]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_when_gone, receive, tasks.cancel_scope)
                if self._stream:
                    await self._send_events(send)
                else:
                    await (await self._whole(scope))(scope, receive, send)
                tasks.cancel_scope.cancel()
        finally:
            if not self._answer.finished:
                self._host.chats.stop_answer(self._answer)

    async def _whole(self, scope: Scope) -> Response:
        answer = self._answer
        async for text, _ in news(answer):
            self._split(text)
        if failed(answer):
            return refusal(scope, failure(answer))
        return JSONResponse(self._form.whole(self._result()))

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        async for event in self._events():
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[str]:
        answer, sent, begun = self._answer, 0, False
        for event in self._form.opening():
            yield event
        async for text, silence in news(answer):
            if not begun and (answer.prefill_total or text or answer.finished) and not answer.error:
                begun = True
                for event in self._form.reading(replace(Usage.of(answer), answer=0)):
                    yield event
            if silence:
                yield comment(silence)
            for part in self._split(text):
                before, sent = sent, len(answer.logprobs)
                for event in self._form.part(part, answer.logprobs[before:sent]):
                    yield event
        form = self._form
        for event in form.failing(failure(answer)) if failed(answer) else form.closing(self._result()):
            yield event

    def _result(self) -> Result:
        return result(self._answer, self._all, self._host.models.count_tokens)

    def _split(self, text: str | None) -> list[Part]:
        """The parts of the next text; None = the answer has ended."""
        if self._parts is not None:
            found = self._parts.end() if text is None else self._parts.feed(text)
        else:
            found = [Part("content", text)] if text else []
        self._all += found
        return found


async def _cancel_when_gone(receive: Receive, scope: CancelScope) -> None:
    """The client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


@contextmanager
def news_of(live: Live) -> Iterator[asyncio.Event]:
    """An event of the running loop that every update of `live` sets. Clear it, read the fields, then wait for it."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        if not news.is_set():  # if set, its reader has yet to read the fields
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(news.set)

    live.watch(wake)
    try:
        yield news
    finally:
        live.unwatch(wake)


async def news(answer: Answer) -> AsyncIterator[tuple[str | None, str]]:
    """Of an answer: its next text, and its progress while there is none; at its end None for a text."""
    shown, done = 0, (0, 0)
    with news_of(answer) as changed:
        while True:
            changed.clear()
            finished = answer.finished  # read before the text, so that the text is complete when this is true
            text, read = answer.text, (answer.prefill_done, answer.prefill_total)
            if len(text) > shown:
                yield text[shown:], ""
                shown = len(text)
            elif read != done and not text:
                yield "", f"read {read[0]} of {read[1]} prompt tokens"
            done = read
            if finished:
                yield None, ""
                return
            with anyio.move_on_after(KEEP_ALIVE_S) as silent:
                await changed.wait()
            if silent.cancelled_caught:
                yield "", "keep-alive"
