"""A real Chromium against a real server in its own process. Every page is watched: no outside request, no error."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from app.cli import browser
from tests.browser.dashboard import Dashboard
from tests.selection import NO_BROWSER

ROOT = Path(__file__).resolve().parents[2]
START_S = 120
# Menus and panels are there at once, instead of flying in.
NO_ANIMATIONS = """const { animate } = Element.prototype; Element.prototype.animate = function (...how) {
    const animation = animate.apply(this, how); animation.finish(); return animation; };"""
Open = Callable[..., Dashboard]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of this folder."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.browser)


class Server:
    """A dashboard in a process of its own, with its data in `home`; it can be killed and started again on its port."""

    def __init__(self, home: Path, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.environment = environment
        self.home, self.log, self.url = home, home / "server.log", f"http://127.0.0.1:{self.port}"

    def start(self) -> Server:
        """Returns when the model is loaded."""
        self.home.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.browser.server", str(self.port)]
        with self.log.open("a") as out:
            environment = {**os.environ, "MOESTRO_HOME": str(self.home), "HF_HUB_CACHE": str(self.home / "hub")}
            environment |= self.environment
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=environment)
        end = time.monotonic() + START_S
        while not self._ready():
            assert self.process.poll() is None, f"the server ended: {self.log.read_text()}"
            assert time.monotonic() < end, f"the server was not ready within {START_S} s: {self.log.read_text()}"
            time.sleep(0.1)
        return self

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=5) as reply:
                return b'"model":null' not in reply.read()
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    @contextmanager
    def running(self) -> Iterator[Server]:
        """Inside, it is started; it ends as Ctrl-C ends it, or is killed where a test failed."""
        try:
            yield self.start()
            self.end()
        finally:
            self.kill()

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End it as Ctrl-C does: quietly, and with nothing in its log that a user should not see."""
        self.process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
        self.process.wait(30)
        assert os.name != "posix" or self.process.returncode == 0, self.log.read_text()
        assert "Traceback" not in self.log.read_text(), self.log.read_text()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The dashboard that most tests share."""
    with Server(tmp_path_factory.mktemp("home")).running() as shared:
        yield shared


@pytest.fixture
def real_server(tmp_path: Path) -> Iterator[Server]:
    """A dashboard of the real engine, with an empty home, for one test."""
    with Server(tmp_path / "home", MOESTRO_TEST_ENGINE="real").running() as own:
        yield own


@pytest.fixture(scope="package")
def profile() -> Iterator[Any]:
    """One browser profile for all of these tests: its cache makes every page after the first quick. It ends with them,
    as the event loop that it keeps running would be in the way of other tests that a worker runs afterwards. Without a
    browser they are skipped, or fail where one has to be there."""
    path = browser.find()
    if path is None and os.environ.get(browser.NEEDED) == "1":
        pytest.fail(f"{browser.WITHOUT}. {browser.HOW}")
    if path is None:
        pytest.skip(NO_BROWSER)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=browser.ARGS)
        context = chromium.new_context(accept_downloads=True)
        context.add_init_script(NO_ANIMATIONS)
        yield context
        chromium.close()


class Pages:
    """Opens pages of the dashboard and watches them: no outside request, no error."""

    def __init__(self, profile: Any, server: Server) -> None:
        self._profile, self._server = profile, server
        self._pages: list[Any] = []
        self._outside: list[str] = []
        self._errors: list[str] = []

    def open(
        self, path: str = "/", width: int = 1366, height: int = 768, scheme: str = "dark", url: str = ""
    ) -> Dashboard:
        """As a new user."""
        page = self._profile.new_page()
        self._pages.append(page)
        page.set_default_timeout(90_000)  # of a machine that may be busy with other tests
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.on("request", self._note_request)
        page.on("pageerror", lambda error: self._errors.append(str(error)))
        if not url:  # the server of another address may be meant to fail
            page.on("console", self._note_console)
        return Dashboard(page, url or self._server.url).goto(path)

    def close(self) -> None:
        for page in self._pages:
            page.evaluate("localStorage.clear()")
            page.close()
        self._pages.clear()

    def check(self) -> None:
        """That since the last check every page kept to itself and was calm."""
        outside, errors = self._outside[:], self._errors[:]
        self._outside.clear()
        self._errors.clear()
        assert not outside, f"requests left this machine: {outside}"
        assert not errors, f"the page reported errors: {errors}"

    def _note_request(self, request: Any) -> None:
        if urlsplit(request.url).hostname not in (None, "", "127.0.0.1"):
            self._outside.append(request.url)

    def _note_console(self, message: Any) -> None:
        if message.type == "error":
            self._errors.append(f"{message.text} {message.location}")


@pytest.fixture
def open_page(profile: Any, server: Server) -> Iterator[Open]:
    """Open the dashboard as a new user."""
    pages = Pages(profile, server)
    yield pages.open
    pages.close()
    pages.check()


@pytest.fixture(scope="package")
def shared_pages(profile: Any, server: Server) -> Iterator[tuple[Pages, list[Dashboard]]]:
    """The page that most tests share, once it is open, and what watches it."""
    pages = Pages(profile, server)
    yield pages, []
    pages.close()


@pytest.fixture
def dashboard(shared_pages: tuple[Pages, list[Dashboard]], request: pytest.FixtureRequest) -> Iterator[Dashboard]:
    """A page on a desktop screen with the model loaded; whatever it still writes is stopped afterwards. It is shared,
    as opening a page takes longer than most tests: what a test leaves beside what `Dashboard.anew` puts back, the next
    one finds. After a failure it is opened again."""
    pages, opened = shared_pages
    failed = request.session.testsfailed
    if opened:
        opened[0].anew()
    else:
        opened.append(pages.open())
    yield opened[0]
    try:
        opened[0].rest()  # also after a failure: what is still being written would keep every later test waiting
    finally:
        if request.session.testsfailed > failed:
            opened.clear()
            pages.close()
    pages.check()
