"""The web application: dashboard, live data, exports, health and the API. Accepts requests from its own pages only."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import PlainTextResponse

from app.server import errors, exports, live_state, prometheus
from app.server.bodies import Bodies
from app.server.security.access import Access
from app.server.security.gate import Gate
from app.server.security.headers import SecurityHeaders
from app.server.v1 import routes
from app.services.host import Host
from core import __version__
from core.system.template_worker import RENDERER


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """When the server stops, no thread of a request stays behind in a chat template that never ends."""
    yield
    RENDERER.interrupt()


def build_app(host: Host, ui: Callable[[FastAPI], object] | None = None, access: Access | None = None) -> FastAPI:
    """The application over a host. `ui` mounts the dashboard on it; `access` = allowed clients, by default this machine
    only.

    Answers requests for the server's own host names only, and none made by another site's page."""
    app = FastAPI(
        title="Moestro", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, lifespan=_lifespan
    )
    app.add_middleware(errors.Unforeseen)
    app.add_middleware(Bodies)
    app.add_middleware(Gate, access=access or Access())
    app.add_middleware(SecurityHeaders)
    errors.add_handlers(app)
    for part in (_health, live_state.router, exports.router, routes.router):
        app.include_router(part(host))
    if ui is not None:
        ui(app)
    return app


def _health(host: Host) -> APIRouter:
    """/healthz, /metrics and /limit, for programs that watch the server."""
    routes = APIRouter()

    @routes.get("/healthz")
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

    @routes.get("/metrics")
    def metrics() -> Response:
        return PlainTextResponse(prometheus.text(host), media_type=prometheus.KIND)

    @routes.get("/limit")
    def limit() -> dict[str, Any]:
        found = host.limit()
        return {"model": host.models.model_id, **(found.facts() if found is not None else {})}

    return routes
