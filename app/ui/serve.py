"""Starts the dashboard: host, web application and page on one port, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import anyio
import anyio.to_thread
import uvicorn
from fastapi import FastAPI

from app.server.security.access import Access
from app.services.host import Host
from app.store import Store
from app.store.check import Check
from app.wording import short_name
from core.errors import MoestroError
from core.settings.loading import LoadSpec
from core.settings.param import Value

# Before gradio is imported: nothing is reported, fetched or kept that the user did not ask for.
os.environ.update(
    GRADIO_ANALYTICS_ENABLED="False", GRADIO_RUN_HISTORY="False", HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1"
)
CLOSING_S = 1  # for what is still being sent when the server ends
OPEN_TO_OTHERS = (
    "Anyone on the network with the token can use the model, read the chats and change everything here. What is "
    "sent is not encrypted: do this only in a network that you trust. --address 127.0.0.1 keeps it to this machine."
)


@dataclass(frozen=True, slots=True)
class StartOptions:
    """What a start asks for by name: None and what is missing are as they were last time."""

    model: str | None = None
    loading: Mapping[str, Value] = field(default_factory=dict)
    settings: Mapping[str, Value] = field(default_factory=dict)


def serve(
    requested: StartOptions,
    access: Access | None = None,
    port: int = 7860,
    browser: bool = True,
    host: Host | None = None,
    ready: Callable[[Server], None] | None = None,
    check: Check | None = None,
) -> None:
    """Serve until interrupted. Loads the requested model at once; what `requested` leaves out is as it was last time.

    `access` has the allowed users: by default this machine alone. `port` must be free. `host` is the host to serve (a
    fresh one by default); it is closed at the end. `ready` is called with the server once it answers. Raises StoreError
    or BusyError when the user's data cannot be opened.
    """
    host, access = host or Host(Store(check=check)), access or Access()
    try:
        server = Server(
            host,
            uvicorn.Config(
                build(host, access),
                host=access.address,
                port=port,
                log_config=None,  # as all other loggers: see app.services.secret
                log_level="warning",
                timeout_graceful_shutdown=CLOSING_S,
                proxy_headers=False,  # there is no proxy; what a request claims about one is not believed
                server_header=False,
            ),
        )
        threading.Thread(target=_announce, args=(server, access, port, browser, ready), daemon=True).start()
        _load_at_start(host, requested)
        with _ends_quietly(), host.log.kept():
            server.run()
    finally:
        host.close()


class Server(uvicorn.Server):
    """When it ends, answers are stopped first, so that their streams end with an error and not in the middle."""

    def __init__(self, host: Host, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._host = host

    @property
    def model(self) -> str:
        """The name under which the API serves the model that is loaded, or is being loaded."""
        loading = self._host.loader.loading
        return short_name(self._host.models.model or (loading.model if loading is not None else "demo"))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await anyio.to_thread.run_sync(self._host.stop)
        await super().shutdown(sockets)


@contextmanager
def _ends_quietly() -> Iterator[None]:
    """Ctrl-C, SIGTERM and, on Windows, Ctrl-Break end the server and nothing more: uvicorn raises them anew when it is
    done."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    names = ("SIGTERM", "SIGBREAK") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def build(host: Host, access: Access | None = None) -> FastAPI:
    """The whole web application over a host: routes, our own assets, and the page."""
    from app.server.api import build_app

    return build_app(host, ui=lambda app: _mount(app, host), access=access)


def _mount(app: FastAPI, host: Host) -> None:
    from app.server.uploads import UploadLimit, prepare

    uploads = prepare(host.store.folder / "uploads")
    import gradio as gr

    from app.server.security import gradio_guard
    from app.server.security.events import Events
    from app.ui import theme
    from app.ui.page import create_ui

    theme.serve_assets(app)
    page = create_ui(host)
    gradio_guard.mark_launched(page)
    gr.mount_gradio_app(
        app,
        page,
        path="/",
        theme=theme.theme(),
        head=theme.head(),
        ssr_mode=False,
        run_history=False,
        footer_links=[],
        show_error=False,
        max_file_size="64mb",  # a trace for the tab Analysis
        enable_monitoring=False,
        mcp_server=False,
        pwa=False,
    )
    mounted: Any = app.routes[-1]
    mounted.app.add_middleware(UploadLimit, folder=uploads)
    gradio_guard.rest_queue(page)
    gradio_guard.guard(app, Events(page))


def _load_at_start(host: Host, requested: StartOptions) -> None:
    """Begin loading: the last model or the one `requested`, each as the last time, except for what is `requested`."""
    last = host.loader.last_spec() or LoadSpec()
    model = requested.model or last.model
    if model != last.model:
        host.models.recall(model)
    if problem := host.models.change_many(requested.settings):
        print(f"The settings were not changed: {problem}", flush=True)
    choices = {**(last.describe() if model == last.model else {}), **requested.loading}
    choices.pop("model", None)
    try:
        host.loader.load(host.loader.plan(model, **choices))
    except MoestroError as error:
        print(f"The model was not loaded: {error}", flush=True)


def _announce(server: Server, access: Access, port: int, browser: bool, ready: Callable[[Server], None] | None) -> None:
    pause = threading.Event()
    while not server.started:
        if server.should_exit or pause.wait(0.05):
            return
    urls = access.urls(port)
    print(f"Moestro is ready: {urls[0]}   (Ctrl-C ends it)", *urls[1:], sep="\n                  ", flush=True)
    if not access.local:
        print(OPEN_TO_OTHERS, flush=True)
    if ready is not None:
        ready(server)
    if browser:
        webbrowser.open(urls[0])
