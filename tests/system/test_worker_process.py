"""Work in other processes: messages, what they are spared, and that they end with whoever started them."""

import os
import subprocess
import sys
import textwrap
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest

from core.errors import MoestroError, TraceError
from core.system.tasks import Stopped, Task, here, run
from core.system.worker_process import LOW, WorkerProcess
from tests.system.pieces import die, refuse, times_two, wait_for_ever

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
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait(WAIT_S)
    child.wait(WAIT_S)
    assert parent.stdout.read() == ""
    parent.stdin.close()
    parent.stdout.close()


def test_work_is_done_in_other_processes_and_comes_back_in_its_place() -> None:
    tasks = [Task(times_two, (n,)) for n in range(5)]
    assert dict(run(tasks, 2)) == dict(here(tasks)) == {n: 2 * n for n in range(5)}
    assert [pid for _, pid in run([Task(os.getpid)])] != [os.getpid()]


def test_what_goes_wrong_there_is_raised_here() -> None:
    with pytest.raises(TraceError, match="7 is not a trace"):
        list(run([Task(refuse, (7,))]))
    with pytest.raises(MoestroError, match="simulation process died"):
        list(run([Task(die)]))


def test_work_that_would_never_end_is_stopped() -> None:
    cancel = threading.Event()
    results = run([Task(times_two, (1,)), Task(wait_for_ever)], 1, cancel)
    assert next(results) == (0, 2)
    cancel.set()
    with pytest.raises(Stopped):
        next(results)
    with pytest.raises(Stopped):
        list(here([Task(times_two, (1,))], cancel=cancel))


@pytest.mark.long(0.1)
def test_processes_end_with_the_iterator() -> None:
    pids = run([Task(os.getpid), Task(wait_for_ever)], 2)
    _, pid = next(pids)
    pids.close()  # type: ignore[attr-defined]  # it is a generator
    assert not psutil.pid_exists(pid)
