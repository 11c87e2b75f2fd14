"""Only the thread that computes has torch's threads beside it: counted by the system, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.system.native.openmp import entry

ROOT = Path(__file__).parents[2]
PREAMBLE = """
import json, os, threading, time
import torch
from core.system.native import openmp
torch.set_num_threads(3)
big = torch.empty(1 << 22, dtype=torch.uint8)  # torch shares a copy of it among threads
def native():
    return len(os.listdir("/proc/self/task")) - threading.active_count()
def share():
    torch.empty_like(big).copy_(big)
first = native()
def within(work):  # natives more than before while a thread that has done `work` lives on
    while native() != first:  # the thread before, and its own, are still ending
        time.sleep(0.001)
    done, over, before = threading.Event(), threading.Event(), native()
    thread = threading.Thread(target=lambda: (work(), done.set(), over.wait()))
    thread.start()
    done.wait()
    more = native() - before
    over.set()
    thread.join()
    return more
"""
BY_ITSELF = """
by_itself = {
    "shared": within(share),
    "alone": within(lambda: (openmp.single_thread(), share())),
    "rested": within(lambda: (share(), openmp.stop_workers())),
    "again": within(lambda: (share(), openmp.stop_workers(), share())),
    "others": torch.get_num_threads(),
}
"""
COPYING = """
from core.memory.arena import Slot
from core.memory.ticket import Ticket
from core.memory.transfer import TransferEngine
from core.types import Segment
copied = threading.Event()
def fetch(eid, raws, first=0):
    raws[0].copy_(big)
    copied.set()
    return 0
while native() != first:
    time.sleep(0.001)
before, link = native(), TransferEngine(torch.device("cpu"), fetch)
slot = Slot(0, torch.empty_like(big))
ticket = link.submit(Ticket(Segment(0, range(1)), [slot], len(big), True, "decode"))
copied.wait()  # by the link's thread: nobody has waited for the ticket, who would have made the copy himself
link.wait(ticket)
copying = native() - before
link.close()
"""
USING = """
from core.engine.model_access import ModelAccess
access, seen = ModelAccess(lambda: None, lambda: None, lambda: None), []
def use():
    while native() != first:
        time.sleep(0.001)
    before = native()
    with access.owned("busy"):
        share()
        seen.append(native() - before)
    seen.append(native() - before)
    access.apply_if_idle()
use()
"""
FORKED = """
share()
child = os.fork()
if not child:
    os._exit(len(os.listdir("/proc/self/task")))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    shown = 'print(json.dumps({"by itself": by_itself, "copying": copying, "using": seen}))'
    run = subprocess.run(
        [sys.executable, "-c", PREAMBLE + BY_ITSELF + COPYING + USING + shown],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    result: dict[str, Any] = json.loads(run.stdout)
    return result


@pytest.mark.long(0.2)
@pytest.mark.skipif(not entry(), reason="torch uses another runtime than GNU's OpenMP")
class TestTorchsThreads:
    def test_a_thread_has_none_alone_and_none_after_it_rested(self, found: dict[str, Any]) -> None:
        assert found["by itself"] == {"shared": 2, "alone": 0, "rested": 0, "again": 2, "others": 3}

    def test_the_thread_that_copies_experts_has_none(self, found: dict[str, Any]) -> None:
        assert found["copying"] == 0

    def test_whoever_used_a_model_has_none_afterwards(self, found: dict[str, Any]) -> None:
        assert found["using"] == [2, 0]


@pytest.mark.long(0.1)  # of the system's threads, as all above
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_forked_process_has_torchs_other_pool_before_it_starts_a_thread() -> None:
    """Of threads that begin together without it, in one process of five some stop with "Invalid thread pool!"."""
    run = subprocess.run(
        [sys.executable, "-c", PREAMBLE + FORKED], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout == "3\n"
