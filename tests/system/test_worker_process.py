"""A worker process: its messages, what it is spared, and that it ends with whoever started it, whatever it is doing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest

from core.system.worker_process import LOW, WorkerProcess

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 30


def echo(pipe: Connection) -> None:
    while True:
        pipe.send(pipe.recv())


def about_itself(pipe: Connection) -> None:
    main = sys.modules["__main__"]
    nice = os.nice(0) if os.name == "posix" else None
    pipe.send((os.getpid(), getattr(main, "__file__", None), {name: os.environ.get(name) for name in LOW}, nice))
    pipe.recv()


def busy_for_ever(pipe: Connection) -> None:
    pipe.send(os.getpid())
    while True:
        pass


def test_messages_arrive_as_they_were_sent() -> None:
    process = WorkerProcess(echo)
    sent = {
        "ids": np.arange(12, dtype=np.int16).reshape(3, 2, 2),
        "decode": np.array([True, False]),
        "none": np.zeros((0, 4), np.float32),
    }
    process.pipe.send(({"warm": True, "n": 1.5}, sent))
    process.pipe.send(({"report": True}, {}))
    head, found = process.pipe.recv()
    assert head == {"warm": True, "n": 1.5}
    assert {name: (a.dtype, a.tolist()) for name, a in found.items()} == {
        name: (a.dtype, a.tolist()) for name, a in sent.items()
    }
    assert process.pipe.recv() == ({"report": True}, {})
    process.kill()
    with pytest.raises(EOFError):
        process.pipe.recv()
    process.end()
    process.end()
    assert process.pid is None


def test_it_is_modest_and_does_not_import_the_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: os.environ.get(name) for name in LOW}
    main = sys.modules["__main__"]
    process = WorkerProcess(about_itself, niceness=7)
    pid, file, environment, nice = process.pipe.recv()
    assert (pid, file, environment) == (process.pid, None, LOW)
    assert nice in (None, max(7, psutil.Process().nice()))
    assert {name: os.environ.get(name) for name in LOW} == before
    assert sys.modules["__main__"] is main
    process.end()


def test_it_ends_when_its_parent_is_killed_however_busy_it_is(tmp_path: Path) -> None:
    """The parent is a script that starts its worker without a guard, and imports nothing twice."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(ROOT)!r})
            from core.system.worker_process import WorkerProcess
            from tests.system.test_worker_process import busy_for_ever
            process = WorkerProcess(busy_for_ever)
            print(process.pipe.recv(), flush=True)
            sys.stdin.read()
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None and parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait(WAIT_S)
    child.wait(WAIT_S)
    assert parent.stdout.read() == ""
    parent.stdin.close()
    parent.stdout.close()
