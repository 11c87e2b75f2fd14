"""A worker that nobody trusts is stopped whatever it does, and whoever asks next gets an answer."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from core.system import limited_process
from core.system.limited_process import LimitedProcess, Limits, NotStarted, Stopped
from tests.selection import layered
from tests.system import untrusted

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60
LIMITS = Limits(cpu_s=0.2, wall_s=120.0, memory_bytes=200 << 20, reply_bytes=1 << 20)
SOON = replace(LIMITS, wall_s=0.3)
POSIX = pytest.mark.skipif(os.name != "posix", reason="messages come whole here, and signals are another matter")
CASES = [
    ("holds_the_lock", LIMITS, "did not end within 0.2 seconds"),
    ("asks_for_much", LIMITS, "takes more than 200 MiB of memory"),
    ("says_much", LIMITS, "makes more than 1 MiB of text"),
    ("loops", LIMITS, "did not end within 0.2 seconds"),
    ("sleeps", SOON, "did not end within 0.3 seconds"),
    ("announces_much", LIMITS, "makes more than 1 MiB of text"),
    ("says_half", SOON, "did not end within 0.3 seconds"),
    ("dies", LIMITS, "broke the process that ran it"),
    ("crashes", LIMITS, "broke the process that ran it"),
    ("closes_its_pipe", LIMITS, "broke the process that ran it"),
]
QUICK = ("asks_for_much", "says_half")
RAW = ("announces_much", "says_half", "closes_its_pipe")


@pytest.fixture(scope="module")
def process() -> Iterator[LimitedProcess]:
    """The one process of these tests, with a worker that is started again after each that was killed."""
    made = LimitedProcess(untrusted.prepare, LIMITS)
    made.hold(made)
    yield made
    made.release(made)
    assert made.pid is None


@pytest.fixture(autouse=True)
def _limits(process: LimitedProcess) -> Iterator[None]:
    yield
    process.limits = LIMITS


def ask(process: LimitedProcess, name: str) -> bytes:
    return process.ask(name.encode())


@pytest.mark.parametrize(("name", "limits", "why"), layered(CASES, quick=lambda case: case[0] in QUICK))
def test_a_worker_is_stopped_whatever_it_does(process: LimitedProcess, name: str, limits: Limits, why: str) -> None:
    if name in RAW and os.name != "posix":
        pytest.skip("messages come whole here")
    before = ask(process, "echo before")
    process.limits, own = limits, psutil.Process().memory_info().rss
    with pytest.raises(Stopped, match=f"^{why}$"):
        ask(process, name)
    assert psutil.Process().memory_info().rss - own < 30 << 20
    process.limits = LIMITS
    assert (before, ask(process, "echo after")) == (b"before", b"after")


@pytest.mark.skipif(os.name != "posix", reason="needs a limit of memory to be set without")
@pytest.mark.long(0.1)
def test_where_the_system_has_no_limit_of_memory_the_parent_looks() -> None:
    alone = LimitedProcess(untrusted.prepare, replace(LIMITS, memory_bytes=1 << 44))
    assert ask(alone, "echo here") == b"here"
    alone.limits = replace(LIMITS, cpu_s=WAIT_S)
    assert LIMITS.memory_bytes < untrusted.MUCH
    with pytest.raises(Stopped, match="takes more than 200 MiB of memory"):
        ask(alone, "takes_much")
    alone.release(alone)


def test_what_was_not_asked_for_is_no_answer_to_the_next(process: LimitedProcess) -> None:
    assert ask(process, "says_it_twice") == b"one more"
    assert process._worker is not None and process._worker.pipe.poll(WAIT_S)
    assert ask(process, "echo mine") == b"mine"


def test_a_worker_that_died_between_two_requests_is_started_again(process: LimitedProcess) -> None:
    assert ask(process, "echo one") == b"one"
    assert process.pid is not None
    psutil.Process(process.pid).kill()
    eventually_gone(process)
    assert ask(process, "echo two") == b"two"


@POSIX
@pytest.mark.long(0.1)
def test_a_worker_that_reads_nothing_is_stopped_while_it_is_sent_a_request(process: LimitedProcess) -> None:
    assert ask(process, "hears_nothing_more") == b"done"
    process.limits = SOON
    with pytest.raises(Stopped, match=r"did not end within 0.3 seconds"):
        process.ask(b"echo " + b"a" * (32 << 20))


def test_requests_of_many_threads_are_answered_one_after_the_other(process: LimitedProcess) -> None:
    asked = [f"{number} {'x' * number * 100}".encode() for number in range(200)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda text: process.ask(b"echo " + text), asked)) == asked


def test_an_interrupt_stops_what_runs_and_what_waits(process: LimitedProcess) -> None:
    assert ask(process, "echo ready") == b"ready"
    process.limits = replace(LIMITS, cpu_s=WAIT_S)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(ask, process, "sleeps") for _ in range(2)]
        end = time.monotonic() + WAIT_S
        while not (process._turn.locked() and all(one.running() for one in asked)):
            assert time.monotonic() < end
        while not all(one.done() for one in asked):
            process.interrupt()  # once more for a thread that runs but has not made its request yet
            wait(asked, 0.1)
            assert time.monotonic() < end
        for one in asked:
            with pytest.raises(Stopped, match="no longer needed"):
                one.result(WAIT_S)
    assert ask(process, "echo again") == b"again"


@POSIX
@pytest.mark.long(0.1)
def test_a_request_that_is_broken_off_leaves_no_answer_to_the_next(process: LimitedProcess) -> None:
    """As by Ctrl-C in the terminal."""
    assert ask(process, "echo ready") == b"ready"
    process.limits = replace(LIMITS, wall_s=WAIT_S)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(process, "sleeps")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ask(process, "echo again") == b"again"


def test_the_worker_ends_with_its_last_owner() -> None:
    alone, one, two = LimitedProcess(untrusted.prepare, LIMITS), object(), object()
    alone.hold(one)
    alone.hold(two)
    alone.start()
    worker = alone.pid
    assert worker is not None
    alone.release(one)
    alone.release(one)
    assert ask(alone, "echo still") == b"still" and alone.pid == worker
    alone.release(two)
    assert alone.pid is None and not psutil.pid_exists(worker)


def test_a_worker_that_cannot_start_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotStarted, match="ended while it started"):
        LimitedProcess(untrusted.fails, LIMITS).ask(b"echo")

    def refuse(*_: object, **__: object) -> None:
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(limited_process, "WorkerProcess", refuse)
    alone = LimitedProcess(untrusted.prepare, LIMITS)
    alone.start()
    with pytest.raises(NotStarted, match="temporarily unavailable"):
        alone.ask(b"echo")


PARENT = """
import sys
sys.path.insert(0, {root!r})
from core.system.limited_process import LimitedProcess, Limits
from tests.system import untrusted
process = LimitedProcess(untrusted.prepare, Limits(60.0, {wall_s}, 200 << 20, 1 << 20))
process.ask(b"cannot_be_asked_to_end")
print(process.pid, flush=True)
sys.stdin.readline()
{then}
"""


def parent(then: str, wall_s: float = 60.0) -> tuple[subprocess.Popen[str], psutil.Process]:
    script = textwrap.dedent(PARENT.format(root=str(ROOT), wall_s=wall_s, then=then))
    started = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdin is not None and started.stdout is not None
    with started.stdin, started.stdout:
        return started, psutil.Process(int(started.stdout.readline()))


def test_a_worker_that_cannot_be_asked_to_end_keeps_no_application_from_its_end() -> None:
    started, worker = parent("")
    assert started.wait(WAIT_S) == 0
    worker.wait(WAIT_S)


@pytest.mark.long(0.2)
def test_a_busy_worker_ends_after_an_application_that_was_killed() -> None:
    """No Python runs in it that could notice: its one thread holds the lock."""
    started, worker = parent("process.ask(b'holds_the_lock')", wall_s=8.0)
    end = time.monotonic() + WAIT_S
    while worker.status() != psutil.STATUS_RUNNING:
        assert time.monotonic() < end
        time.sleep(0.01)
    started.kill()
    started.wait(WAIT_S)
    worker.wait(WAIT_S)


def eventually_gone(process: LimitedProcess) -> None:
    end = time.monotonic() + WAIT_S
    while process.pid is not None:
        assert time.monotonic() < end
        time.sleep(0.002)
