"""`test`: the linters, the type checker and the tests, cheapest first; pytest's closing line stands last."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HELP = "Run the linters, the type checker and the tests. What is not listed below goes to pytest."
ROOT = Path(__file__).resolve().parents[2]
CHECKS = (
    ("ruff", ("-m", "ruff", "check", ".")),
    ("ruff format", ("-m", "ruff", "format", "--check", ".")),
    ("import-linter", ("-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-logo")),
    ("mypy", ("-m", "mypy", "--strict", "core", "app", "bench", "demo")),
)
WORKERS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What pytest understands is passed on as it is."""
    parser.usage = "launch.py test [--all | --fuzz MINUTES] [anything pytest understands]"
    parser.add_argument("--all", action="store_true", help="also run the tests that take minutes (marked `long`)")
    parser.add_argument(
        "--fuzz",
        type=float,
        metavar="MINUTES",
        help="in place of the tests, damage files and requests at random for so long; what goes wrong is kept in "
        "tests/fuzz/seeds and replayed by every test run from then on",
    )


def run(args: argparse.Namespace) -> int:
    """1 when a check or a test failed; every check is run either way, so that one run shows all there is to mend."""
    if args.fuzz is not None:
        return call("fuzz", ("-m", "tests.fuzz", "--minutes", str(args.fuzz), *args.pytest))
    failed = [name for name, command in CHECKS if call(name, command) != 0]
    if failed:
        print(f"\nFailed before the tests: {', '.join(failed)} (see above).", flush=True)
    tests = call("pytest", ("-m", "pytest", *workers(args.pytest), *(("--all",) if args.all else ()), *args.pytest))
    return 1 if failed or tests else 0


def workers(chosen: list[str]) -> list[str]:
    """One pytest worker a core, at most four; a file's tests stay together because they share what is slow to start."""
    count = min(os.cpu_count() or 1, WORKERS)
    if count == 1 or any(word.startswith(("-n", "--numprocesses", "--pdb", "-s")) for word in chosen):
        return []
    return ["-n", str(count), "--dist", "loadfile"]


def call(name: str, command: tuple[str, ...]) -> int:
    """Run one tool with this Python in the repository; nothing in the tests may reach the network."""
    print(f"\n== {name}", flush=True)
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False"}
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, env=offline) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # the tool has heard it too, and says how far it came
