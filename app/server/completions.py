"""The part of the OpenAI API that chat clients use: /v1/models and /v1/chat/completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Literal

import anyio
from anyio import CancelScope, to_thread
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from app.server.errors import API, TOO_LONG, form, problem
from app.server.following import client_gone, news_of
from app.services.host import Host
from app.services.progress import Answer
from core.settings.sampling import Sampling

MOST_MESSAGES = 4096
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class Said(BaseModel):
    """One message of the prompt."""

    role: Literal["system", "user", "assistant"]
    content: str


class Request(BaseModel):
    """The supported fields of a request; other fields are refused, not ignored."""

    model_config = {"extra": "forbid"}

    messages: list[Said] = Field(max_length=MOST_MESSAGES)
    model: str | None = None
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    user: str | None = None

    def sampling(self, base: Sampling) -> Sampling:
        """The host's sampling settings, overridden by those of the request. Raises SettingError."""
        longest = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        asked = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed, "max_new_tokens": longest}
        return Sampling.checked(**{**base.settings, **{k: v for k, v in asked.items() if v is not None}})


def router(host: Host) -> APIRouter:
    """The routes over a host. Answers share the queue with those of the dashboard."""
    routes = APIRouter(prefix=API)

    @routes.get("/models")
    async def models() -> dict[str, object]:
        model = host.models.model
        listed = [] if model is None else [{"id": model, "object": "model", "created": 0, "owned_by": "local"}]
        return {"object": "list", "data": listed}

    @routes.post("/chat/completions")
    async def complete(request: Request) -> Response:
        prompt = [{"role": one.role, "content": one.content} for one in request.messages]
        answer = await to_thread.run_sync(lambda: host.chats.complete(prompt, request.sampling(host.chats.sampling)))
        return Completion(host, answer, stream=request.stream)

    @routes.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    async def unknown(rest: str) -> Response:
        return problem(
            404,
            f"There is no {API}/{rest[:80]} that is asked in this way. There are GET {API}/models and "
            f"POST {API}/chat/completions.",
        )

    return routes


class Completion(Response):
    """Sends an answer as a stream or as a whole. It holds no thread while waiting; when the client disconnects, the
    answer is stopped, queued or not, streaming or not.
    """

    def __init__(self, host: Host, answer: Answer, stream: bool) -> None:
        super().__init__()
        self._host, self._answer, self._stream = host, answer, stream
        self._head: dict[str, object] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": host.models.model,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_when_gone, receive, tasks.cancel_scope)
                if self._stream:
                    await self._send_events(send)
                else:
                    await (await self._whole())(scope, receive, send)
                tasks.cancel_scope.cancel()
        finally:
            if not self._answer.finished:
                self._host.chats.stop_answer(self._answer)

    async def _whole(self) -> Response:
        answer = self._answer
        async for _ in pieces(answer):
            pass
        if answer.error:
            return problem(_status(answer), answer.error, code=TOO_LONG if answer.refused else None)
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "finish_reason": _reason(answer)}
        return JSONResponse(
            {
                **self._head,
                "object": "chat.completion",
                "seed": _seed(answer),
                "usage": _usage(answer),
                "choices": [choice],
            }
        )

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        async for event in self._events():
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[str]:
        def event(delta: dict[str, str], reason: str | None = None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            return json.dumps({**self._head, "object": "chat.completion.chunk", "choices": [choice]})

        answer = self._answer
        yield event({"role": "assistant", "content": ""})
        async for text in pieces(answer):
            yield event({"content": text})
        if answer.error:
            yield json.dumps({"error": form(_status(answer), answer.error, code=TOO_LONG if answer.refused else None)})
        else:
            self._head["seed"] = _seed(answer)
            yield event({}, _reason(answer))
        yield "[DONE]"


async def _cancel_when_gone(receive: Receive, scope: CancelScope) -> None:
    await client_gone(receive)
    scope.cancel()


async def pieces(answer: Answer) -> AsyncIterator[str]:
    """The text of an answer piece by piece until its end."""
    shown = 0
    with news_of(answer) as news:
        while True:
            news.clear()
            finished = answer.finished  # read before the text, so that the text is complete when this is true
            text = answer.text
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)
            if finished:
                return
            await news.wait()


def _status(answer: Answer) -> int:
    return 400 if answer.refused else 500


def _reason(answer: Answer) -> str:
    return "length" if answer.stats is not None and answer.stats.reason in ("length", "context") else "stop"


def _seed(answer: Answer) -> int | None:
    """The seed that reproduces this answer; None for one that was stopped before it began."""
    return answer.stats.seed if answer.stats is not None else None


def _usage(answer: Answer) -> dict[str, int]:
    asked = answer.stats.prompt_tokens if answer.stats is not None else answer.prefill_total
    return {"prompt_tokens": asked, "completion_tokens": answer.n_tokens, "total_tokens": asked + answer.n_tokens}
