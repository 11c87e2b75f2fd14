"""The web application: the dashboard, live frames, exports and health. Accepts requests from its own pages only."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, BinaryIO
from urllib.parse import quote

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse, PlainTextResponse, StreamingResponse
from starlette.background import BackgroundTask

from app.server import chat_list, errors, frames, prometheus, trace_files, transcripts
from app.server.bodies import Bodies
from app.server.json_values import RowId
from app.server.security.access import Access
from app.server.security.gate import Gate
from app.server.security.headers import SecurityHeaders
from app.server.v1 import routes
from app.services.analysis import lab, whatif_csv
from app.services.exports import archive
from app.services.host import Host
from app.store.private import clear
from core import __version__
from core.engine.quality.report import Quality
from core.errors import MoestroError
from core.system.template_worker import RENDERER

PART_BYTES = 256 << 10  # of a file that is sent


def _scored(quality: Quality | None) -> dict[str, Any] | None:
    """The figures of scored answers for the deck, with the verdict on their agreement."""
    if quality is None:
        return None
    figures, share = asdict(quality), quality.agreed
    if share is not None:
        figures |= {"agreed": share.hits, "low": share.low, "high": share.high, "verdict": share.verdict}
    return figures


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """When the server stops, no thread of a request stays behind in a chat template that never ends."""
    yield
    RENDERER.interrupt()


def download(file: BinaryIO, name: str) -> Response:
    """An open file of JSON lines as it is now, closed when it has been sent: it may grow while it is."""
    size = os.fstat(file.fileno()).st_size

    def parts() -> Iterator[bytes]:
        left = size
        with file:
            while part := file.read(min(PART_BYTES, left)):
                left -= len(part)
                yield part

    headers = {
        "content-disposition": f"attachment; filename*=utf-8''{quote(name, errors='replace')}",
        "content-length": str(size),
        "cache-control": "no-store",
    }
    return StreamingResponse(parts(), media_type="application/jsonl", headers=headers)


def build_app(host: Host, ui: Callable[[FastAPI], object] | None = None, access: Access | None = None) -> FastAPI:
    """The application over a host. `ui` mounts the dashboard on it; `access` = allowed clients, by default this machine
    only.

    Answers requests for the server's own host names only, and none made by another site's page.
    """
    app = FastAPI(
        title="Moestro", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, lifespan=_lifespan
    )
    app.add_middleware(errors.Unforeseen)
    app.add_middleware(Bodies)
    app.add_middleware(Gate, access=access or Access())
    app.add_middleware(SecurityHeaders)
    errors.add_handlers(app)
    exports = host.store.folder / "exports"
    clear(exports, "moestro-*.zip*", "moestro-*.trace*")  # left by a server that was killed while sending one

    @app.get("/healthz")
    async def health() -> dict[str, object]:  # on the event loop: it answers even when every thread is busy
        loading, job = host.loader.loading, host.importer.job
        return {
            "status": "ok",
            "model": host.models.model_id,
            "busy": host.busy,
            "waiting": host.chats.waiting,
            "one_at_a_time": host.models.one_at_a_time,
            **host.models.arithmetic,
            "version": __version__,
            "loading": loading.share if loading is not None and not loading.finished else None,
            "importing": job.share if job is not None and not job.finished else None,
        }

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(prometheus.text(host), media_type=prometheus.KIND)

    @app.get("/live/frame")
    def frame(layer: RowId = 0, since: str = "") -> Response:
        busy = host.busy
        # Read before the frame: at worst the frame is sent once more.
        version = f"{host.models.version}.{layer}.{int(busy)}.{host.regret.version}"
        headers = {"x-version": version, "cache-control": "no-store"}
        if since == version:
            return Response(status_code=204, headers=headers)
        model = host.models.model_id
        quality = host.models.quality
        data = frames.encode(
            host.models.frame(layer),
            model=model,
            version=version,
            busy=busy,
            quality=_scored(quality),
            regret=host.regret.view(
                host.models.load_id,
                host.models.settings,
                in_blocks=host.models.in_blocks,
                text_to_text=host.models.text_to_text,
            ),
        )
        return Response(data, media_type="application/octet-stream", headers=headers)

    @app.get("/export/session.zip")
    def session(load: RowId | None = None) -> Response:
        load = load if load is not None else host.models.load_id
        if load is None:
            loads = host.store.steps.loads()
            if not loads:
                return PlainTextResponse("Nothing has been recorded yet. Load a model and ask it something.", 404)
            load = loads[-1].id
        return send(f"moestro-session-{load}", load=load)

    @app.get("/export/whatif.csv")
    def compared() -> Response:
        table = host.analyst.table
        return sheet("moestro-whatif.csv", None if table is None else whatif_csv.to_csv(table))

    @app.get("/export/predictors.csv")
    def tested() -> Response:
        found = host.analyst.lab
        return sheet("moestro-predictors.csv", None if found is None else lab.to_csv(found))

    @app.get("/export/quality.csv")
    def evaluated() -> Response:
        answer = host.evaluator.answer
        return sheet("moestro-quality.csv", None if answer is None else answer.csv(), "evaluated")

    @app.get("/export/batch.jsonl")
    def answers() -> Response:
        """The answers of the last batch, as far as they are written."""
        job = host.batcher.job
        if job is None or job.answers is None:
            return PlainTextResponse("No batch has been answered since the start.", 404)
        try:
            file = job.answers.open()
        except MoestroError as error:
            return PlainTextResponse(str(error), 404)  # opened through a link: the browser shows this text
        return download(file, job.answers.path.name)

    @app.get("/export/{chat}.zip")
    def chat(chat: RowId) -> Response:
        return send(f"moestro-chat-{chat}", chat=chat)

    def send(name: str, chat: int | None = None, load: int | None = None) -> Response:
        path = exports / f"{name}-{time.time_ns()}.zip"
        try:
            archive.write(host.store, path, chat=chat, load=load)
        except MoestroError as error:
            status = 404 if isinstance(error, archive.NothingThere) else 507
            return PlainTextResponse(str(error), status)  # opened through a link: the browser shows this text
        return FileResponse(
            path,
            filename=f"{name}.zip",
            media_type="application/zip",
            background=BackgroundTask(path.unlink, missing_ok=True),
        )

    app.include_router(trace_files.router(host.store))
    app.include_router(transcripts.router(host.store))
    app.include_router(chat_list.router(host))

    def sheet(name: str, text: str | None, done: str = "simulated") -> Response:
        if text is None:
            return PlainTextResponse(f"Nothing has been {done} yet. Do so in the tab Analysis.", 404)
        return Response(
            text,
            media_type="text/csv",
            headers={"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"},
        )

    app.include_router(routes.router(host))
    if ui is not None:
        ui(app)
    return app
