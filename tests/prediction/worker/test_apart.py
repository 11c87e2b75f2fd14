"""A worker in a process of its own answers as it does here, through shared memory, and leaves nothing behind."""

import ctypes
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.policy.predict.map_search import followed, opened
from core.policy.predict.path_messages import Share, asked
from core.policy.predict.worker import InlineWorker, WorkerTask
from core.policy.predict.workers import make_worker
from core.runtime.prediction.worker.process_worker import MOST, NICENESS, ProcessWorker
from core.runtime.prediction.worker.ring import COUNTS, FRAME, Ring
from core.system.worker_process import SPAWN, WorkerProcess
from tests.logged import Logged
from tests.policy.views import HIDDEN, drawn_path
from tests.prediction.worker.deaf import deaf, failing
from tests.selection import examples

LAYERS, EXPERTS, WAIT_S = 4, 6, 30
ROOT = Path(__file__).resolve().parents[3]


def maps(**sizes: int) -> tuple[WorkerTask, list[bytes]]:
    """A search, and two passes for it."""
    random = np.random.default_rng(0)
    task = WorkerTask(
        "maps",
        {
            "layers": LAYERS,
            "experts": EXPERTS,
            "top_k": 2,
            "distance": 2,
            "capacity": 8,
            "semantic": 1,
            "dynamic": 1,
            "learn": 1,
            **sizes,
        },
        {
            "maps": random.dirichlet(np.ones(EXPERTS), (5, LAYERS)).astype(np.float16),
            "map_keys": random.standard_normal((5, HIDDEN)).astype(np.float16),
        },
    )
    heard = []
    for number in range(2):
        heard.append(opened(number, 1) + random.standard_normal(HIDDEN).astype("<f4").tobytes())
        heard += [
            followed(number, layer) + random.dirichlet(np.ones(EXPERTS)).astype("<f4").tobytes()
            for layer in range(LAYERS)
        ]
    return task, heard


def path() -> tuple[WorkerTask, list[bytes]]:
    """A network, and a request for it."""
    return WorkerTask("path", *drawn_path(LAYERS, EXPERTS)), [
        asked(0, [Share(1, True, [3, 4, 60])]),
        asked(1, [Share(1, False, [5])]),
    ]


@pytest.fixture(scope="module")
def searching() -> Iterator[ProcessWorker]:
    apart = ProcessWorker(maps()[0])
    yield apart
    apart.close()


def process_of(apart: ProcessWorker) -> psutil.Process:
    """Its process, while it runs."""
    end_s = time.monotonic() + WAIT_S
    while apart.pid is None and time.monotonic() < end_s:
        time.sleep(0.01)
    assert apart.pid is not None
    return psutil.Process(apart.pid)


@pytest.mark.long(0.1)
@pytest.mark.parametrize("case", [maps, path])
def test_the_answers_are_those_that_it_gives_here(case: Any) -> None:
    task, heard = case()
    apart, here = ProcessWorker(task), InlineWorker(make_worker(task))
    try:
        for message in heard:  # some of it before the process has started
            apart.give(message)
            here.give(message)
        assert (apart.wait(), apart.behind, apart.ready) == (here.wait(), 0, True)
        for message in heard:
            apart.give(message)
            here.give(message)
            assert apart.wait() == here.wait()
    finally:
        apart.close()


def test_it_is_modest_and_needs_no_torch(searching: ProcessWorker) -> None:
    searching.give(maps()[1][0])
    assert searching.wait()
    if sys.platform != "win32":
        assert process_of(searching).nice() == max(NICENESS, psutil.Process().nice())
    code = "import sys, core.runtime.prediction.worker.main; sys.exit(len({'torch', 'transformers'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_what_would_fill_the_pipe_is_dropped() -> None:
    apart = ProcessWorker(maps()[0], deaf)
    for _ in range(MOST + 10):
        apart.give(b"anything")
    assert apart.behind == MOST
    assert apart.take() == []
    process = process_of(apart)
    apart.close()
    assert not process.is_running()


def test_closing_ends_it_at_once_and_twice_is_once(caplog: Logged) -> None:
    apart = ProcessWorker(maps()[0])
    process = process_of(apart)
    apart.close()
    apart.close()
    assert not process.is_running()
    apart.give(b"more")
    assert apart.wait() == [] and not caplog.records
    ProcessWorker(maps()[0]).close()  # before it has started, too


def test_every_answer_is_announced_once_it_can_be_taken() -> None:
    """On a thread that hears of nothing else; what has no answer is not announced."""
    task, heard = maps()
    answers, threads, news = list[bytes](), set[threading.Thread](), threading.Condition()

    def on_answer() -> None:
        with news:
            answers.extend(apart.take())
            threads.add(threading.current_thread())
            news.notify_all()

    apart, here = ProcessWorker(task, on_answer=on_answer), InlineWorker(make_worker(task))
    try:
        for message in heard:
            apart.give(message)
            here.give(message)
        expected = here.wait()
        with news:
            assert news.wait_for(lambda: len(answers) == len(expected), WAIT_S)
        assert answers == expected and threads == {apart._thread}
    finally:
        apart.close()
    assert not apart._thread.is_alive()


def test_it_ends_with_whoever_started_it() -> None:
    code = (
        "import os, sys; from tests.prediction.worker.test_apart import *\n"
        "apart = ProcessWorker(maps()[0]); print(process_of(apart).pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    pid = int(done.stdout)
    end_s = time.monotonic() + WAIT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("executable", [sys.executable, "no/such/python"])
def test_one_that_does_not_start_is_said_once(executable: str, caplog: Logged) -> None:
    SPAWN.set_executable(executable)
    try:
        apart = ProcessWorker(maps()[0], failing)
        apart._thread.join(WAIT_S)
    finally:
        SPAWN.set_executable(sys.executable)
    if apart._process is not None:
        apart._process._process.join(WAIT_S)
    for _ in range(3):
        apart.give(b"anything")
    assert (apart.wait(), apart.behind, apart.ready) == ([], 0, True)
    assert ["worker process died" in record.getMessage() for record in caplog.records] == [True]
    apart.close()


@examples(40)
@given(st.lists(st.one_of(st.none(), st.binary(max_size=30)), max_size=60))
def test_what_is_put_comes_out_in_order_and_what_has_no_room_is_refused(moves: list[bytes | None]) -> None:
    """None: the reader takes one. Room for 64 bytes, so that it often goes round."""
    ring, held = Ring(memoryview(bytearray(COUNTS + 64))), list[bytes]()
    for move in moves:
        if move is None:
            assert ring.get() == (held.pop(0) if held else None)
        else:
            room = 64 - sum(len(one) + FRAME.size for one in held)
            assert ring.put(move) is (len(move) + FRAME.size <= room)
            held += [move] * (len(move) + FRAME.size <= room)
    assert [ring.get() for _ in held] == held
    assert ring.get() is None


@pytest.mark.parametrize("torn", [0, 4, FRAME.size, FRAME.size + 3])
def test_a_message_counts_only_when_all_of_it_has_arrived(torn: int) -> None:
    """The count is there, and a byte of the length, of the checksum or of the message is not yet."""
    memory = bytearray(COUNTS + 64)
    ring = Ring(memoryview(memory))
    ring.put(b"abcdef")
    whole = memory[COUNTS + torn]
    memory[COUNTS + torn] ^= 0xFF
    assert ring.get() is None
    memory[COUNTS + torn] = whole
    assert ring.get() == b"abcdef"


def read_and_answer(pipe: Connection, memory: Any) -> None:
    """In another process."""
    view = memoryview(memory).cast("B")
    pipe.send(struct.unpack("<q", view[:8]))
    view[8:16] = struct.pack("<q", 78)
    pipe.send("written")
    pipe.recv()


def test_memory_is_shared() -> None:
    ours = RawArray(ctypes.c_byte, 4096)
    view = memoryview(ours).cast("B")
    view[:8] = struct.pack("<q", 77)
    process = WorkerProcess(read_and_answer, ours)
    assert process.pipe.recv() == (77,)
    assert process.pipe.recv() == "written"
    assert struct.unpack("<q", view[8:16]) == (78,)
    process.end()
