"""The browser that the dashboard's tests drive: one that is there, or one that can be had.

Besides its executable they need the libraries that Debian's package depends on, fonts (Debian: fonts-dejavu-core), and
`--no-sandbox`: Chromium's sandbox runs neither as root nor in most containers. `find` starts each candidate as the
tests do, as some only say how to install a browser (Ubuntu's chromium-browser) and others lack libraries or fonts.

Playwright runs in processes of its own."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from app.start import installer
from core.system.process_tree import end_tree

NAMED = "MOESTRO_CHROMIUM"  # the path of a browser, which is used untried
NEEDED = "MOESTRO_NEEDS_BROWSER"  # 1: without a browser the run fails
WITHOUT = "no Chromium, Chrome or Edge was found that the dashboard's tests can start"
HOW = (
    "Install Chromium, Chrome or Edge (Debian: apt-get install chromium fonts-dejavu-core), or name one in "
    f"{NAMED}, and run the same command again. With {NEEDED}=1 a missing browser is a failure."
)
ARGS = (
    *(
        "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync"
    ).split(),
)
NAMES = (
    *(
        "chromium chromium-browser google-chrome google-chrome-stable chrome microsoft-edge microsoft-edge-stable "
        "msedge"
    ).split(),
)
ON_WINDOWS = (
    "Google/Chrome/Application/chrome.exe",
    "Microsoft/Edge/Application/msedge.exe",
    "Chromium/Application/chrome.exe",
)
ON_MACOS = tuple(f"{name}.app/Contents/MacOS/{name}" for name in ("Google Chrome", "Chromium", "Microsoft Edge"))
DOWNLOADED = installer.VENV / "browsers"
SHELLS = ("chrome-headless-shell", "headless_shell")  # what Playwright calls its executable
DEBIAN = ("chromium", "fonts-dejavu-core")
START_S, DOWNLOAD_S = 120, 300
TRY = """
import sys
from playwright.sync_api import sync_playwright
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=sys.argv[1], args=sys.argv[2:])
    page = browser.new_page()
    page.set_content("<span>some text</span>")
    width = page.evaluate("document.querySelector('span').offsetWidth")
    browser.close()
sys.exit(0 if width else "it has no fonts")
"""


def candidates() -> Iterator[str]:
    """The browsers that seem to be there, best first."""
    yield from filter(None, map(shutil.which, NAMES))
    folders = (os.environ.get(name) for name in ("PROGRAMFILES", "PROGRAMFILES(X86)", "LOCALAPPDATA"))
    usual = [Path(folder) / name for folder in folders if folder for name in ON_WINDOWS]
    usual += [folder / name for folder in (Path("/Applications"), Path.home() / "Applications") for name in ON_MACOS]
    yield from (str(path) for path in usual if path.is_file())
    yield from downloaded()


def downloaded() -> list[str]:
    """The executables of Playwright's own browser in `.venv`."""
    return [str(path) for path in DOWNLOADED.rglob("*") if path.stem in SHELLS and path.is_file()]


def find() -> str | None:
    """The path of a browser that starts and draws text, or that the environment names; None = there is none."""
    return os.environ.get(NAMED) or next((path for path in candidates() if starts(path)), None)


def starts(path: str) -> bool:
    """Does it start as in the tests, and draw text?"""
    try:
        tried = subprocess.run(
            [sys.executable, "-c", TRY, path, *ARGS], capture_output=True, timeout=START_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return tried.returncode == 0


def provide(say: Callable[[str], None]) -> str | None:
    """The path of a browser that is there, else of Playwright's, else of Debian's package; None = none can be had."""
    found = find()
    if found is None:
        say("Browser: none yet; downloading Playwright's Chromium into .venv")
        if problem := download():
            say(f"Browser: the download failed ({problem})")
        found = find()
    if found is None and installer.debian(*DEBIAN):
        found = find()
    say(f"Browser: {found or WITHOUT}")
    return found


def download() -> str:
    """Get Playwright's Chromium; returns why that failed, "" = it did not. The first error ends it, as Playwright would
    try several times more."""
    command = [sys.executable, "-m", "playwright", "install", "--only-shell", "chromium"]
    environment = os.environ | {"PLAYWRIGHT_BROWSERS_PATH": str(DOWNLOADED)}
    last = ""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        late = threading.Timer(DOWNLOAD_S, end_tree, (process,))
        late.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last = line.strip() or last
                if "Error:" in line:
                    return last
            process.wait()
        finally:
            late.cancel()
            end_tree(process)
    return f"{last or 'it printed nothing'}, status {process.returncode}" if process.returncode else ""
