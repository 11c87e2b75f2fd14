"""The routes that serve recorded routing as trace files."""

from __future__ import annotations

import time

from fastapi import APIRouter
from fastapi.responses import FileResponse, PlainTextResponse, Response
from starlette.background import BackgroundTask

from app.server.json_values import RowId
from app.services.exports.archive import NothingThere
from app.services.exports.traces import find, write
from app.store import Store
from core.errors import MoestroError


def router(store: Store) -> APIRouter:
    """/export/{chat}.trace?load=, and /export/session.trace?load= with the last load by default."""
    routes, exports = APIRouter(), store.folder / "exports"

    @routes.get("/export/session.trace")
    def session(load: RowId | None = None) -> Response:
        loads = store.steps.loads() if load is None else []
        return send("moestro-session", None, loads[-1].id if loads else load)

    @routes.get("/export/{chat}.trace")
    def one(chat: RowId, load: RowId | None = None) -> Response:
        return send(f"moestro-chat-{chat}", chat, load)

    def send(name: str, chat: int | None, load: int | None) -> Response:
        path = exports / f"{name}-{time.time_ns()}.trace"
        try:
            write(find(store, chat, load), path)
        except MoestroError as error:
            status = 404 if isinstance(error, NothingThere) else 507
            return PlainTextResponse(str(error), status)  # opened through a link: the browser shows this text
        return FileResponse(
            path,
            filename=f"{name}.trace",
            media_type="application/octet-stream",
            background=BackgroundTask(path.unlink, missing_ok=True),
        )

    return routes
