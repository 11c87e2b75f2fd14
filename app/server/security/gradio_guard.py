"""In front of Gradio: allows only the routes that the dashboard uses, and only uploaded files in events.

Gradio serves many routes that the dashboard does not use: a reverse proxy, downloads by address, a call API, editors. A
file named by an event is copied to a served folder. Gradio checks the file only after its own `launch()`, which an
application that mounts it never calls, so `mark_launched` sets that state. An address in place of a path would be
downloaded; that is refused here too."""

import json
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.server.bodies import UPLOAD, replayed
from app.server.errors import ApiError, refusal
from app.server.security.events import NO_EVENT, Events, uploaded

EVENTS = "/gradio_api/run/predict"
ROUTES = {
    "/",
    "/config",
    "/config/",
    "/theme.css",
    "/favicon.ico",
    "/robots.txt",
    "/manifest.json",
    EVENTS,
    UPLOAD,
    "/gradio_api/upload_progress",
    "/gradio_api/app_id",
}  # requested by a page whose event the server did not get: once they answer, it reloads
FOLDERS = ("/assets/", "/static/")
LONGEST = 255  # characters of the path of a file in them; file systems fail on far longer ones
FILE = "/gradio_api/file="
IDLE_S = 60.0


def mark_launched(blocks: Any) -> None:
    """Make Gradio check the files that an event of `blocks` names. Raises RuntimeError if that cannot be switched
    on."""
    if not hasattr(blocks, "has_launched"):
        raise RuntimeError("This version of Gradio does not say when it checks files; install one below 7.")
    blocks.has_launched = True


def rest_queue(blocks: Any) -> None:
    """Have Gradio's event queue look for work once in `IDLE_S`: nothing is ever queued, as every event of the dashboard
    goes around the queue and its routes are not served. By default it looks a thousand times a second, which costs an
    idle server more than everything else. Raises RuntimeError if `blocks` has events that need the queue."""
    if any(event.queue for event in blocks.fns.values() if event.fn is not None):
        raise RuntimeError("An event of the page is queued, but Gradio's queue rests: give it queue=False.")
    blocks._queue.sleep_when_free = blocks._queue.progress_update_sleep_when_free = IDLE_S


def guard(app: FastAPI, events: Events) -> None:
    """Put a `GradioGuard` in front of the most recently mounted Gradio application, whose events are given."""
    mounted: Any = app.routes[-1]
    mounted.app.add_middleware(GradioGuard, events=events)


class GradioGuard:
    """404 for Gradio routes that the dashboard does not use, 400 for an event that names a file not uploaded, or that
    the page would not send."""

    def __init__(self, app: ASGIApp, events: Events) -> None:
        self.app, self._events = app, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif not served(scope["path"]):
            await PlainTextResponse("There is no such page.", 404)(scope, receive, send)
        else:
            await (self._event if scope["path"] == EVENTS else self.app)(scope, receive, send)

    async def _event(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on an event that the page could have sent, written anew: Gradio reads the very values checked here."""
        if not is_json(Headers(scope=scope).get("content-type", "")):
            error = ApiError(f"{NO_EVENT} It is sent as application/json.", status=415)
            await refusal(scope, error)(scope, receive, send)
            return
        try:
            event = json.loads(await Request(scope, receive).body(), parse_constant=_refuse)
            wrong = self._wrong(event)
        except (ValueError, RecursionError):
            wrong = NO_EVENT
        if wrong:
            await refusal(scope, ApiError(wrong))(scope, receive, send)
            return
        await self.app(scope, replayed(json.dumps(event).encode(), receive), send)

    def _wrong(self, event: object) -> str:
        if not all(uploaded(path) for path in named_files(event)):
            return "Only a file that was uploaded can be used."
        return self._events.wrong(event)


def is_json(content_type: str) -> bool:
    """Whether a Content-Type header names JSON, as FastAPI decides it."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number.")


def served(path: str) -> bool:
    """Whether the dashboard uses this Gradio route."""
    if path.startswith(FILE):
        return uploaded(path.removeprefix(FILE))
    return path in ROUTES or (path.startswith(FOLDERS) and len(path) <= LONGEST)


def named_files(value: object) -> Iterator[str]:
    """Paths of all files in an event's value, at any depth."""
    rest = [value]
    while rest:
        match rest.pop():
            case dict() as entries:
                if isinstance(path := entries.get("path"), str):
                    yield path
                rest += entries.values()
            case list() as entries:
                rest += entries
