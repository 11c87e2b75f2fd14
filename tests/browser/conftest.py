"""A real Chromium against a real server in its own process. Every page is watched: no outside request, no error."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser.dashboard import Dashboard

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
START_S = 120
Open = Callable[..., Dashboard]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of this folder; without a browser it is skipped only when that was asked for."""
    for item in items:
        if Path(str(item.path)).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.browser)
            if os.environ.get("MOESTRO_NO_BROWSER") == "1":
                item.add_marker(pytest.mark.skip(reason="MOESTRO_NO_BROWSER=1"))


def find_chromium() -> str:
    """MOESTRO_CHROMIUM, or the first Chromium on the path."""
    named = os.environ.get("MOESTRO_CHROMIUM")
    found = named or next((path for name in NAMES if (path := shutil.which(name))), None)
    if not found:
        pytest.fail(
            "No Chromium was found for the dashboard's tests. Install one (Debian: apt-get install chromium), "
            "name it in MOESTRO_CHROMIUM, or set MOESTRO_NO_BROWSER=1 to skip these tests."
        )
    return found


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a dashboard with its own data folder, its model loaded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = tmp_path_factory.mktemp("home")
    url, log = f"http://127.0.0.1:{port}", home / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.browser.server", str(port)],
            cwd=ROOT,
            stdout=out,
            stderr=out,
            env={**os.environ, "MOESTRO_HOME": str(home)},
        )
    try:
        _await_model(process, url, log)
        yield url
        process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
        process.wait(30)
        if os.name == "posix":
            assert process.returncode == 0, log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        process.kill()
        process.wait()


def _await_model(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended: {log.read_text()}"
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=5) as reply:
                if b'"model":null' not in reply.read():
                    return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            pass
        time.sleep(0.1)
    pytest.fail(f"the server was not ready within {START_S} s: {log.read_text()}")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def profile(chromium: Any) -> Callable[..., Any]:
    """A browser profile for each kind of screen, kept for the session: its cache makes later pages quick."""

    @cache
    def get(width: int, height: int, scheme: str) -> Any:
        return chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True
        )

    return get


@pytest.fixture
def open_page(profile: Callable[..., Any], server: str) -> Iterator[Open]:
    """Open the dashboard as a new user; at the end, assert that every page kept to itself and was calm."""
    pages: list[Any] = []
    outside: list[str] = []
    errors: list[str] = []

    def watch(page: Any) -> None:
        page.on(
            "request",
            lambda r: outside.append(r.url) if urlsplit(r.url).hostname not in (None, "127.0.0.1", "") else None,
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda m: errors.append(f"{m.text} {m.location}") if m.type == "error" else None)

    def open_(path: str = "/", width: int = 1366, height: int = 768, scheme: str = "dark") -> Dashboard:
        page = profile(width, height, scheme).new_page()
        page.set_default_timeout(30_000)
        pages.append(page)
        watch(page)
        return Dashboard(page, server).goto(path)

    yield open_
    for page in pages:
        page.evaluate("localStorage.clear()")
        page.close()
    assert not outside, f"requests left this machine: {outside}"
    assert not errors, f"the page reported errors: {errors}"


@pytest.fixture
def dashboard(open_page: Open) -> Iterator[Dashboard]:
    """One page on a desktop screen with the model loaded; whatever it still writes is stopped afterwards."""
    page = open_page()
    yield page
    page.rest()
