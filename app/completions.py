"""The part of the OpenAI API that other programs use to chat: /v1/models and /v1/chat/completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from app.host import Host
from app.live import Answer
from core.config import Sampling

BEAT_S = 0.25  # how long a wait for news lasts before a gone client is noticed


class Said(BaseModel):
    """One message of the prompt."""

    role: Literal["system", "user", "assistant"]
    content: str


class Request(BaseModel):
    """What is understood of a request; other fields are refused, not ignored."""

    model_config = {"extra": "forbid"}

    messages: list[Said]
    model: str | None = None
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    user: str | None = None

    def sampling(self, base: Sampling) -> Sampling:
        """The host's sampling with what the request says in its place. Raises SettingError."""
        longest = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        asked = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed, "max_new_tokens": longest}
        return Sampling.checked(**{**asdict(base), **{k: v for k, v in asked.items() if v is not None}})


def router(host: Host) -> APIRouter:
    """Both routes over a host. Answers take their turn with those of the dashboard."""
    routes = APIRouter(prefix="/v1")

    @routes.get("/models")
    def models() -> dict[str, object]:
        model = host.model
        listed = [] if model is None else [{"id": model, "object": "model", "created": 0, "owned_by": "local"}]
        return {"object": "list", "data": listed}

    @routes.post("/chat/completions")
    async def complete(request: Request) -> Response:
        prompt = [{"role": one.role, "content": one.content} for one in request.messages]
        answer = await to_thread.run_sync(lambda: host.complete(prompt, request.sampling(host.sampling)))
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": host.model}
        if request.stream:
            return StreamingResponse(_events(host, answer, head), media_type="text/event-stream",
                                     headers={"cache-control": "no-store"})
        async for _ in _pieces(host, answer):
            pass
        if answer.error:
            status = 400 if answer.undone else 500
            return JSONResponse({"error": {"message": answer.error, "type": "server_error"}}, status)
        return JSONResponse({**head, "object": "chat.completion", "usage": _usage(answer), "choices": [
            {"index": 0, "message": {"role": "assistant", "content": answer.text}, "finish_reason": _reason(answer)}]})

    return routes


async def _events(host: Host, answer: Answer, head: dict[str, Any]) -> AsyncIterator[str]:
    def event(delta: dict[str, str], reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"

    yield event({"role": "assistant", "content": ""})
    async for text in _pieces(host, answer):
        yield event({"content": text})
    if answer.error:
        yield f"data: {json.dumps({'error': {'message': answer.error, 'type': 'server_error'}})}\n\n"
    else:
        yield event({}, _reason(answer))
    yield "data: [DONE]\n\n"


async def _pieces(host: Host, answer: Answer) -> AsyncIterator[str]:
    """Text as it comes; the answer is stopped when nobody reads on."""
    version, shown = -1, 0
    try:
        while True:
            finished = answer.finished  # read before the text: what is written until then is in it
            text = answer.text
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)
            if finished:
                return
            version = await to_thread.run_sync(answer.wait, version, BEAT_S)
    finally:
        if not answer.finished:
            host.stop_answer(answer)


def _reason(answer: Answer) -> str:
    return "length" if answer.stats is not None and answer.stats.reason in ("length", "context") else "stop"


def _usage(answer: Answer) -> dict[str, int]:
    asked = answer.stats.prompt_tokens if answer.stats is not None else answer.prefill_total
    return {"prompt_tokens": asked, "completion_tokens": answer.n_tokens, "total_tokens": asked + answer.n_tokens}
