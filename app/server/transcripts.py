"""The routes that serve a chat as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response

from app.server.json_values import RowId
from app.services.exports import transcript
from app.services.exports.archive import NothingThere
from app.store import Store


def router(store: Store) -> APIRouter:
    """/export/{chat}.md and /export/{chat}.json."""
    routes = APIRouter()

    @routes.get("/export/{chat}.md")
    def text(chat: RowId) -> Response:
        return send(chat, "md", "text/markdown; charset=utf-8", transcript.markdown)

    @routes.get("/export/{chat}.json")
    def data(chat: RowId) -> Response:
        return send(chat, "json", "application/json", transcript.as_json)

    def send(chat: int, ending: str, kind: str, written: Callable[[Store, int], str]) -> Response:
        try:
            body = written(store, chat)
        except NothingThere as error:
            return PlainTextResponse(str(error), 404)  # opened through a link: the browser shows this text
        headers = {"content-disposition": f'attachment; filename="moestro-chat-{chat}.{ending}"'}
        return Response(body, media_type=kind, headers={**headers, "cache-control": "no-store"})

    return routes
