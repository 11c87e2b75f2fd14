"""`test`: runs the linters, the type checker and the tests, cheapest first; pytest's summary line comes last."""

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
    """Options that pytest understands are passed on to it."""
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
    """1 when a check or a test failed; every check runs in any case, so that one run shows all failures."""
    if args.fuzz is not None:
        return call("fuzz", ("-m", "tests.fuzz", "--minutes", str(args.fuzz), *args.pytest))
    failed = [name for name, command in CHECKS if call(name, command) != 0]
    if failed:
        print(f"\nFailed before the tests: {', '.join(failed)} (see above).", flush=True)
    tests = call("pytest", ("-m", "pytest", *workers(args.pytest), *(("--all",) if args.all else ()), *args.pytest))
    return 1 if failed or tests else 0


def workers(chosen: list[str]) -> list[str]:
    """pytest options: one worker per core, at most four; tests of a file run together because they share slow setup."""
    count = min(os.cpu_count() or 1, WORKERS)
    if count == 1 or any(word.startswith(("-n", "--numprocesses", "--pdb", "-s")) for word in chosen):
        return []
    return ["-n", str(count), "--dist", "loadfile"]


def call(name: str, command: tuple[str, ...]) -> int:
    """Run one tool with this Python in the repository, with the Hugging Face hub offline."""
    print(f"\n== {name}", flush=True)
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False"}
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, env=offline) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # Ctrl-C reached the tool too, which reports its progress
