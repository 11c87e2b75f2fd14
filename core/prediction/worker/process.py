"""Starts a low-priority Python process running a module of this project, with pipes to and from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOW = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # no idle threads of numpy
FLAGS = getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0) | getattr(subprocess, "CREATE_NO_WINDOW", 0)


def python(module: str, *words: str) -> tuple[str, ...]:
    """The command that runs `module`."""
    return sys.executable, "-m", module, *words


def start(command: Sequence[str], *, answers: bool, files: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Run `command` with a pipe to its stdin and, with `answers`, one from its stdout; it inherits the open `files`.
    Raises OSError."""
    return subprocess.Popen(
        list(command),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        bufsize=-1 if answers else 0,
        stdout=subprocess.PIPE if answers else subprocess.DEVNULL,
        env={**os.environ, **LOW},
        creationflags=FLAGS,
        pass_fds=files,
    )


def behave(niceness: int = 19) -> None:
    """Call first in the process: ignores Ctrl-C, since the process ends with the application, and lowers its
    priority."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):  # on Windows it was started with a low priority
        os.nice(niceness)
