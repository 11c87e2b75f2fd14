"""The web application: the dashboard, live frames, exports and health. Only this machine's own pages may talk to it."""

from __future__ import annotations

import logging
import shutil
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from urllib.parse import urlsplit

import psutil
from fastapi import FastAPI, Response
from fastapi.responses import FileResponse, PlainTextResponse
from starlette.background import BackgroundTask
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app import completions, errors, export, frames, traces
from app.analysis import lab, whatif
from app.bodies import Bodies, RowId
from app.host import Host
from core import __version__
from core.errors import MoestroError

log = logging.getLogger("moestro.app")
EVERYWHERE = ("0.0.0.0", "::", "")


def build_app(host: Host, ui: Callable[[FastAPI], object] | None = None, address: str = "127.0.0.1") -> FastAPI:
    """The application over a host. `ui` mounts the dashboard on it; `address` is what the server binds to.

    Requests are answered for this machine's own names and `address` only, and none that another site's page makes.
    """
    app = FastAPI(title="Moestro", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Bodies)
    app.add_middleware(SameOrigin)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=trusted(address), www_redirect=False)
    errors.add_handlers(app)
    exports = host.store.folder / "exports"
    shutil.rmtree(exports, ignore_errors=True)  # of a server that was killed while sending one

    @app.get("/healthz")
    async def health() -> dict[str, object]:  # on the loop: it answers though every thread is taken
        loading, job = host.loading, host.importer.job
        return {"status": "ok", "model": host.model, "busy": host.busy, "waiting": host.waiting, "version": __version__,
                "loading": loading.share if loading is not None and not loading.finished else None,
                "importing": job.share if job is not None and not job.finished else None}

    @app.get("/live/frame")
    def frame(layer: RowId = 0, since: str = "") -> Response:
        busy = host.busy
        # Taken before the frame: at worst it is sent once more.
        version = f"{host.version}.{layer}.{int(busy)}.{host.regret.version}"
        headers = {"x-version": version, "cache-control": "no-store"}
        if since == version:
            return Response(status_code=204, headers=headers)
        model = host.model
        quality = host.quality
        data = frames.encode(host.frame(layer), model=model, version=version, busy=busy,
                             quality=asdict(quality) if quality is not None else None,
                             regret=host.regret.view(host.load_id, host.settings))
        return Response(data, media_type="application/octet-stream", headers=headers)

    @app.get("/export/session.zip")
    def session(load: RowId | None = None) -> Response:
        load = load if load is not None else host.load_id
        if load is None:
            loads = host.store.steps.loads()
            if not loads:
                return PlainTextResponse("Nothing has been recorded yet. Load a model and ask it something.", 404)
            load = loads[-1].id
        return send(f"moestro-session-{load}", load=load)

    @app.get("/export/whatif.csv")
    def compared() -> Response:
        table = host.analyst.table
        return sheet("moestro-whatif.csv", None if table is None else whatif.to_csv(table))

    @app.get("/export/predictors.csv")
    def tested() -> Response:
        found = host.analyst.lab
        return sheet("moestro-predictors.csv", None if found is None else lab.to_csv(found))

    @app.get("/export/quality.csv")
    def evaluated() -> Response:
        answer = host.evaluator.answer
        return sheet("moestro-quality.csv", None if answer is None else answer.csv(), "evaluated")

    @app.get("/export/{chat}.zip")
    def chat(chat: RowId) -> Response:
        return send(f"moestro-chat-{chat}", chat=chat)

    def send(name: str, chat: int | None = None, load: int | None = None) -> Response:
        path = exports / f"{name}-{time.time_ns()}.zip"
        try:
            export.write(host.store, path, chat=chat, load=load)
        except MoestroError as error:
            status = 404 if isinstance(error, export.NothingThere) else 507
            return PlainTextResponse(str(error), status)  # a link leads here: what the browser then shows is this text
        return FileResponse(path, filename=f"{name}.zip", media_type="application/zip",
                            background=BackgroundTask(path.unlink, missing_ok=True))

    app.include_router(traces.router(host.store))
    def sheet(name: str, text: str | None, done: str = "simulated") -> Response:
        if text is None:
            return PlainTextResponse(f"Nothing has been {done} yet. Do so in the tab Analysis.", 404)
        return Response(text, media_type="text/csv", headers={
            "content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"})

    app.include_router(completions.router(host))
    if ui is not None:
        ui(app)
    return app


def trusted(address: str) -> list[str]:
    """Names by which this server may be called: its own machine's, and the address it was told to bind to."""
    names = ["127.0.0.1", "localhost"]
    if address in EVERYWHERE:
        names += [one.address for card in psutil.net_if_addrs().values() for one in card if ":" not in one.address]
        names.append(socket.gethostname())
    elif address not in names:
        names.append(address)
    return names


class SameOrigin:
    """Refuses what a page of another origin asks for; a plain link to the dashboard may still be followed."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not allowed(scope["headers"]):
            log.warning("refused a request of another site's page for %s", scope["path"])
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await PlainTextResponse("This request came from a page that is not Moestro's.", 403)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def allowed(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Is the request from our own page, or from no page at all? Header names are lower case."""
    found = {name: value.decode("latin-1") for name, value in headers}
    origin = found.get(b"origin")
    if origin is not None:
        return urlsplit(origin).netloc.lower() == found.get(b"host", "").lower() != ""
    return found.get(b"sec-fetch-site") not in ("cross-site", "same-site") or found.get(b"sec-fetch-mode") == "navigate"
