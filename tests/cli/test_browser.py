"""The browser of the dashboard's tests: where it is looked for, how one is got, and what a run without one says."""

import io
import itertools
import os
import platform
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app import cli
from app.cli import browser, test
from app.start import installer
from tests import selection
from tests.selection import GPU, by_turns, covering

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
def test_browsers_are_looked_for_in_usual_places(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_skipped_last(checks: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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


ROOT = Path(__file__).resolve().parents[2]


def test_tests_that_need_a_gpu_are_where_they_are_looked_for() -> None:
    others = [file for file in (ROOT / "tests").rglob("test_*.py") if not file.is_relative_to(GPU)]
    mark = "pytest.mark." + "gpu"
    assert [file.name for file in others if mark in file.read_text(encoding="utf-8")] == []
    assert all(mark in file.read_text(encoding="utf-8") for file in GPU.glob("test_*.py"))


NEEDED = ("torch", "transformers", "numpy", "safetensors", "psutil", "pandas", "pytest")
REFUSING = """
import sys
from importlib.machinery import PathFinder

REFUSED = frozenset({refused})


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in REFUSED else PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def required(names: Iterable[str]) -> set[str]:
    found, left = set[str](), [*names]
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        found.add(name)
        try:
            wanted = map(Requirement, metadata.requires(name) or ())
        except metadata.PackageNotFoundError:  # such as what only another platform has
            continue
        left += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.long(0.2)
def test_those_need_no_more_than_the_engine_and_pytest(tmp_path: Path) -> None:
    """Every other package that is installed here cannot be imported."""
    allowed = required(NEEDED)
    refused = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not any(canonicalize_name(owner) in allowed for owner in owners)
    } - {path.name for path in ROOT.iterdir()}
    assert {"hypothesis", "gradio", "pynvml", "llvmlite", "xdist", "fastapi"} <= refused
    (tmp_path / "sitecustomize.py").write_text(REFUSING.format(refused=sorted(refused)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--collect-only"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line} == {
        file.relative_to(ROOT).as_posix() for file in GPU.glob("test_*.py")
    }


def test_cases_that_are_not_long_cover_every_pair_of_values() -> None:
    cases = covering("ab", (0, 1), [True, False], range(3))
    quick = [case.values for case in cases if not case.marks]
    assert len(cases) == 24 and len(quick) < 12
    for (i, one), (j, other) in itertools.combinations(enumerate(("ab", (0, 1), [True, False], range(3))), 2):
        assert {(case[i], case[j]) for case in quick} == {*itertools.product(one, other)}
    assert len([case for case in covering("ab", (0, 1), [True, False], together=1) if not case.marks]) == 2
    assert [case.values for case in by_turns("abc", (0, 1)) if not case.marks] == [("a", 0), ("b", 1), ("c", 0)]
