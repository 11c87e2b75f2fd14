"""`test`: runs the linters, the type checker and the tests. pytest's summary comes last; after it, in a run without a
browser, how many tests were skipped and how to get one.

The tests come in two layers. The first guards every change and takes some minutes; `--all` adds what is marked `long`,
`--long` runs that alone, `--minutes` only what of it should end in time."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from app.cli import browser
from app.cli.parser import CommandParser
from core.errors import MoestroError
from core.system.command import COMMAND

ROOT = Path(__file__).resolve().parents[2]
CHECKS = (("ruff", ("-m", "ruff", "check", ".")), ("ruff format", ("-m", "ruff", "format", "--check", ".")))
SLOW_CHECKS = (
    ("import-linter", ("-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-logo")),
    ("mypy", ("-m", "mypy", "--strict", "core", "app", "bench", "demo", "examples")),
)
WORKERS = 4
TESTS = ROOT / "tests"
DASHBOARD = TESTS / "browser"


def add_arguments(parser: CommandParser) -> None:
    """Options that pytest understands are passed on to it."""
    parser.passes_on = True
    parser.usage = f"{COMMAND} test [--all | --long | --fuzz MINUTES] [--minutes N] [anything pytest understands]"
    parser.add_argument("--all", action="store_true", help="also run the tests that take long (marked `long`)")
    parser.add_argument("--long", action="store_true", help="run what --all adds, and nothing else")
    parser.add_argument(
        "--minutes", type=float, help="begin no long test that would not end within so many minutes; it is named"
    )
    parser.add_argument(
        "--fuzz",
        type=float,
        metavar="MINUTES",
        help="instead of the tests, fuzz files and requests for so long; failures are kept in tests/fuzz/seeds, "
        "which every test run replays",
    )


def run(args: argparse.Namespace) -> int:
    """1 when a check or a test failed; every check runs in any case, so that one run shows all failures. Raises
    MoestroError where there are no tests."""
    if not TESTS.is_dir():
        raise MoestroError(
            "An installed copy comes without the tests. Clone the repository of Moestro, and run python launch.py test "
            "there."
        )
    if args.fuzz is not None:
        return call("fuzz", ("-m", "tests.fuzz", "--minutes", str(args.fuzz), *args.pytest))
    if drives_browser(args.pytest):
        found = browser.provide(lambda text: print(text, flush=True))
        if found is None and os.environ.get(browser.NEEDED) == "1":
            print(f"{browser.NEEDED}=1, but {browser.WITHOUT}. {browser.HOW}", file=sys.stderr)
            return 1
        if found is not None:
            os.environ[browser.NAMED] = found  # so that the tests do not look for it again
    with tempfile.TemporaryDirectory() as folder:
        count = Path(folder, "without browser")
        code = check(args, ("--count-without-browser", str(count)))
        if count.exists():
            skipped = count.read_text(encoding="utf-8")
            print(f"\n{skipped} tests of the dashboard were skipped: {browser.WITHOUT}.\n{browser.HOW}", flush=True)
    return code


def check(args: argparse.Namespace, more: tuple[str, ...]) -> int:
    """The checks and the tests, which get `more` options; returns the exit code."""
    command = ("-m", "pytest", *workers(args.pytest), *more, *layer(args), *args.pytest)
    if args.long:
        return call("pytest", command)
    failed = [name for name, check in CHECKS if call(name, check) != 0]
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(lambda: [name for name, check in SLOW_CHECKS if call(name, check, parallel=True) != 0])
        failed += slow.result() if args.pytest else []  # what was chosen may be over first; pytest comes last
        tests = call("pytest", command)
        failed += [] if args.pytest else slow.result()
    if not args.pytest and shutil.which("nvidia-smi"):  # the other tests hide the GPU from torch
        tests = call("pytest on the GPU", ("-m", "pytest", "-m", "gpu", *workers(["tests/gpu"]))) or tests
    if failed:
        print(f"\nFailed besides the tests: {', '.join(failed)} (see above).", flush=True)
    return 1 if failed or tests else 0


def drives_browser(chosen: list[str]) -> bool:
    """May these words for pytest choose a test of the dashboard? No, if they name other files or folders alone."""
    paths = [path.resolve() for word in chosen if (path := ROOT / word.partition("::")[0]).exists()]
    return not paths or any(path.is_relative_to(DASHBOARD) or DASHBOARD.is_relative_to(path) for path in paths)


def layer(args: argparse.Namespace) -> list[str]:
    """pytest options for the requested tests."""
    until = ["--until", str(time.time() + 60 * args.minutes)] if args.minutes is not None else []
    return [*(["--all"] if args.all else ["-m", "long"] if args.long else []), *until]


def workers(chosen: list[str]) -> list[str]:
    """pytest options: one worker per core, at most four, as each takes 20 s of a core to begin; files stay whole and in
    the order of `tests.selection`."""
    cores = os.cpu_count() or 1
    count = min(cores, WORKERS)
    if cores == 1 or any(word.startswith(("-n", "--numprocesses", "--pdb", "-s")) for word in chosen):
        return []
    return ["-n", str(count), "--dist", "loadfile", "--no-loadscope-reorder"]


def call(name: str, command: tuple[str, ...], parallel: bool = False) -> int:
    """Run one tool with this Python in the repository, with the Hugging Face hub offline; the output of a
    `parallel` one is shown at its end. Compiled modules are kept whatever the environment says: without them every
    worker compiles all tests, and every process that a test starts the whole project."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if parallel:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        print(f"\n== {name}\n{done.stdout}{done.stderr}", flush=True)
        return done.returncode
    print(f"\n== {name}", flush=True)
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # Ctrl-C reached the tool too, which reports its progress
