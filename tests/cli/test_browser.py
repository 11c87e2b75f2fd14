"""The browser of the dashboard's tests: where it is looked for, how one is got, and what a run without one says."""

import io
import os
import platform
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app import cli
from app.cli import browser, test
from app.start import installer
from tests import selection

SHELL, FFMPEG = "chrome-headless-shell-linux64/chrome-headless-shell", "ffmpeg-linux"  # as Playwright's archives have


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without a browser; the folder is its PATH."""
    path = tmp_path / "path"
    path.mkdir()
    for name in (browser.NAMED, browser.NEEDED, "PROGRAMFILES", "PROGRAMFILES(X86)", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(browser, "DOWNLOADED", tmp_path / "downloaded")
    monkeypatch.setattr(browser, "ON_MACOS", ())
    return path


def program(path: Path, text: str = "#!/bin/sh\nexit 1\n") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(os.name != "posix", reason="programs have other names")
def test_browsers_are_looked_for_in_their_usual_places(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(browser.candidates()) == [] and browser.find() is None
    own = program(tmp_path / "downloaded" / "chromium_headless_shell-1" / "linux" / "headless_shell")
    edge = program(tmp_path / "Program Files" / "Microsoft" / "Edge" / "Application" / "msedge.exe")
    chrome, chromium = program(bare / "google-chrome"), program(bare / "chromium")
    monkeypatch.setenv("PROGRAMFILES", str(tmp_path / "Program Files"))
    assert list(browser.candidates()) == [chromium, chrome, edge, own]
    monkeypatch.setattr(browser, "starts", lambda path: path == edge)
    assert browser.find() == edge
    monkeypatch.setenv(browser.NAMED, "another")
    assert browser.find() == "another"


@pytest.mark.long(0.1)
@pytest.mark.skipif(os.name != "posix", reason="needs a program that is a script")
def test_a_browser_that_does_not_start_is_none(bare: Path) -> None:
    assert not browser.starts(program(bare / "chromium"))


@pytest.mark.parametrize(
    ("there", "download", "package", "steps"),
    [
        ("", "", True, ["download"]),
        ("chromium", "", True, []),
        ("", "no network", True, ["download", "debian"]),
        ("", "no network", False, ["download", "debian"]),
    ],
)
def test_one_that_is_there_comes_before_a_download_and_that_before_a_package(
    monkeypatch: pytest.MonkeyPatch, there: str, download: str, package: bool, steps: list[str]
) -> None:
    did, said, found = list[str](), list[str](), [there] if there else []

    def downloads() -> str:
        did.append("download")
        found.extend([] if download else ["downloaded"])
        return download

    def installs(*packages: str) -> bool:
        did.append("debian")
        found.extend(["packaged"] if package else [])
        return package

    monkeypatch.setattr(browser, "find", lambda: found[0] if found else None)
    monkeypatch.setattr(browser, "download", downloads)
    monkeypatch.setattr(installer, "debian", installs)
    assert browser.provide(said.append) == (found[0] if found else None)
    assert did == steps
    assert said[-1] == f"Browser: {found[0] if found else browser.WITHOUT}"
    assert sum(download in line for line in said if download) == (1 if download else 0)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes | None]]:
    """Where Playwright downloads from: what it answers next, None = nothing is there. The last answer stays."""
    answers: list[bytes | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers[0]
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("PLAYWRIGHT_DOWNLOAD_HOST", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("PATH", os.defpath)
    yield answers
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.long(0.1)
@pytest.mark.skipif(platform.system() != "Linux", reason="the archive is one for Linux")
def test_playwrights_own_browser_is_kept_in_the_environment(host: list[bytes | None]) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(SHELL, "a browser")
        archive.writestr(FFMPEG, "which Playwright gets as well")
    host.append(file.getvalue())
    assert browser.download() == ""
    assert {Path(path).read_text(encoding="utf-8") for path in browser.downloaded()} == {"a browser"}


@pytest.mark.long(0.1)
def test_a_download_that_fails_does_so_at_once(host: list[bytes | None]) -> None:
    host.append(None)
    assert "404" in browser.download()
    assert browser.downloaded() == []


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tools that a run calls, in place of the tools; pytest writes that tests were skipped."""
    called = list[str]()

    def call(name: str, command: tuple[str, ...], parallel: bool = False) -> int:
        called.append(name)
        if name == "pytest":
            Path(command[command.index("--count-without-browser") + 1]).write_text("7", encoding="utf-8")
        print(f"from {name}")
        return 0

    monkeypatch.setattr(test, "call", call)
    return called


def test_what_was_skipped_and_why_comes_last(
    checks: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(browser, "provide", lambda say: None)
    assert test.run(cli.parse(["test"])) == 0
    last = f"\n\n7 tests of the dashboard were skipped: {browser.WITHOUT}.\n{browser.HOW}\n"
    assert capsys.readouterr().out.endswith(last)
    assert {"mypy", "pytest"} <= set(checks)


def test_a_machine_that_must_have_a_browser_fails_without(
    checks: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(browser, "provide", lambda say: None)
    monkeypatch.setenv(browser.NEEDED, "1")
    assert test.run(cli.parse(["test"])) == 1
    assert browser.HOW in capsys.readouterr().err and checks == []


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("", True),
        ("-k slot", True),
        ("tests", True),
        ("tests/browser/test_chat.py::test_it", True),
        ("tests/policy tests/browser", True),
        ("tests/policy -x", False),
        ("tests/cli/test_cli.py::test_it", False),
    ],
)
def test_no_browser_is_got_for_other_tests(words: str, needed: bool) -> None:
    assert test.drives_browser(words.split()) is needed


def test_tests_without_a_browser_are_counted_and_no_others(tmp_path: Path) -> None:
    without, other = (
        ("tests/browser/test_a.py", 9, "Skipped: no browser"),
        ("tests/gpu/test_b.py", 9, "Skipped: no GPU"),
    )
    file = tmp_path / "count"

    def summarise(*skipped: tuple[str, int, str]) -> None:
        stats = {"skipped": [SimpleNamespace(longrepr=one) for one in skipped]}
        config: Any = SimpleNamespace(getoption=lambda name: str(file))
        selection.pytest_terminal_summary(SimpleNamespace(stats=stats), config)

    summarise(other)
    assert not file.exists()
    summarise(without, other, without)
    assert file.read_text(encoding="utf-8") == "2"
