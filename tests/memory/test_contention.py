"""Waits give the processors up while other programs want them, and only then."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from core.system.native import openmp
from core.system.native.contention import CALM_S, LEAST_S, LOOK_S, MANY, REST_S, Contention, ThreadTimes, Watch
from core.system.native.openmp import entry

ROOT = Path(__file__).parents[2]
gnu = pytest.mark.skipif(not entry(), reason="torch uses another runtime than GNU's OpenMP")


class Machine:
    def __init__(self) -> None:
        self.times = 0.0, 0.0
        self.contention = Contention(lambda: self.times)

    def after(self, ran_s: float, waited_s: float) -> bool:
        self.times = ran_s, waited_s
        return self.contention.look()


def test_it_is_found_by_waiting_and_over_after_a_calm() -> None:
    machine, total = Machine(), 2 * LEAST_S
    assert not machine.after(total * (1 - MANY / 2), total * MANY / 2)
    assert not machine.after(0.0, LEAST_S / 4), "too little to tell"
    assert machine.after(total / 2, total / 2)
    assert machine.after(0.6 * CALM_S, 0), "not yet over"
    assert machine.after(total / 2, total / 2), "the calm begins anew"
    assert machine.after(0.6 * CALM_S, 0)
    assert machine.after(total * (1 - MANY / 2), total * MANY / 2), "neither calm nor its end"
    assert not machine.after(0.6 * CALM_S, 0)
    assert not machine.after(total, 0)


def test_short_looks_add_up() -> None:
    machine = Machine()
    seen = [machine.after(LEAST_S / 6, LEAST_S / 6) for _ in range(4)]
    assert seen[:2] == [False, False] and seen[-1]


def test_a_thread_that_others_stop_for_microseconds_waits_for_nothing() -> None:
    """A thread of ours that wakes fifty times a second stops one that spins as often: no other program wants it."""
    machine = Machine()
    assert not any(machine.after(0.04, 0.0004) for _ in range(200))


def test_times_are_those_of_the_threads_that_compute(tmp_path: Path) -> None:
    def write(thread: int, ran_s: float, waited_s: float) -> None:
        (tmp_path / str(thread)).mkdir(exist_ok=True)
        (tmp_path / str(thread) / "schedstat").write_text(f"{int(ran_s * 1e9)} {int(waited_s * 1e9)} 7\n")

    for thread in (1, 2, 3):
        write(thread, 10, 5)
    times = ThreadTimes(tmp_path)
    for thread in (1, 2, 1):
        times.add(thread)
    for thread, ran_s in ((1, 11), (2, 12), (3, 100)):
        write(thread, ran_s, 5.5)
    assert times.since() == pytest.approx((3, 1)), "the third does not compute"
    assert times.since() == (0, 0)
    (tmp_path / "2" / "schedstat").write_text("")
    write(1, 12, 5.5)
    assert times.since() == pytest.approx((1, 0)), "the second is over"
    write(2, 4, 4)
    assert times.since() == (0, 0), "its id was given to another one"
    times.add(2)
    write(2, 5, 6)
    assert times.since() == pytest.approx((1, 2))


def test_an_id_that_another_thread_has_now_is_that_ones(tmp_path: Path) -> None:
    counts = tmp_path / "1" / "schedstat"
    counts.parent.mkdir()
    counts.write_text("")
    times = ThreadTimes(tmp_path)
    times.add(1)
    counts.unlink()
    counts.write_text("7000000000 0 1")
    times.add(1)
    counts.write_text("8000000000 0 1")
    assert times.since() == pytest.approx((1, 0))


def run_for(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    time.sleep(0.01)  # the system counts when the thread leaves the processor


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts")
def test_a_thread_is_seen_to_run_until_it_is_over() -> None:
    times = ThreadTimes()
    times.add(threading.get_native_id())
    run_for(0.05)
    assert times.since()[0] >= 0.04
    other = threading.Thread(target=lambda: (times.add(threading.get_native_id()), run_for(0.05)))
    other.start()
    other.join()
    until = time.monotonic() + 20
    while Path(f"/proc/self/task/{other.native_id}").exists() and time.monotonic() < until:
        time.sleep(0.001)  # Python's thread is over a little before the system's
    assert times.since()[0] < 0.04


def test_where_the_system_does_not_count_nothing_is_found(tmp_path: Path) -> None:
    times = ThreadTimes(tmp_path / "none")
    times.add(threading.get_native_id())
    assert times.since() == (0, 0)


def test_the_watch_looks_now_and_then_and_forgets_what_is_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    crowds = list[str]()
    monkeypatch.setattr(openmp, "stop_spinning", lambda: crowds.append("begun"))
    ended = threading.Event()
    monkeypatch.setattr(openmp, "stop_workers", ended.set)
    clock, looks, busy = [100.0], list[float](), [True]

    class Times(ThreadTimes):
        def since(self) -> tuple[float, float]:
            looks.append(clock[0])
            return (LEAST_S, LEAST_S) if busy[0] else (2 * CALM_S, 0.0)

    watch = Watch(Times(), lambda: clock[0])
    watch.computing()
    assert watch.contended and len(looks) == 2, "what was before does not count"
    clock[0] += LOOK_S / 2
    assert watch.look() and len(looks) == 2, "not again so soon"
    busy[0] = False
    clock[0] += LOOK_S
    assert not watch.look() and ended.wait(10) and crowds == ["begun"]
    busy[0] = True
    clock[0] += LOOK_S * 1.5
    assert watch.look()
    watch.enabled = False
    clock[0] += LOOK_S * 1.5
    busy[0] = False
    assert not watch.look()
    watch.enabled, busy[0] = True, True
    clock[0] += LOOK_S * 1.5
    assert watch.look()
    ended.clear()
    clock[0] += REST_S + 1
    busy[0] = False
    assert not watch.look() and ended.wait(10)


WAITING = """
import time, torch
from core.system.native import openmp
torch.set_num_threads(2)
big = torch.empty(1 << 22, dtype=torch.uint8)
def waited():
    total = 0.0
    for _ in range(10):
        big.add_(1)
        before = time.process_time()
        time.sleep(0.02)  # the other thread waits for the next operation
        total += time.process_time() - before
    return total
import os, threading
assert os.cpu_count() >= 2
spun = waited()
begun, over = threading.Event(), threading.Event()
def crowded():
    openmp.stop_spinning()
    begun.set()
    over.wait()
    openmp.stop_workers()
thread = threading.Thread(target=crowded)
thread.start()
begun.wait()
waited()
gave_up = waited()
over.set()
thread.join()
print(spun, gave_up, waited())
"""


@pytest.mark.long(0.1)
@gnu
def test_no_thread_of_torch_spins_in_a_crowd() -> None:
    spun, gave_up, again = map(float, python(WAITING).split())
    assert gave_up < 0.3 * min(spun, again), (spun, gave_up, again)


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


def python(code: str) -> str:
    """What it prints in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "3"}
    how: dict[str, Any] = dict(cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=120)
    return str(subprocess.run([sys.executable, "-c", code], **how).stdout)


@pytest.mark.long(0.2)
@gnu
def test_only_the_thread_that_computes_has_torchs_threads_beside_it() -> None:
    """None alone, none after it rested, none while experts are copied, and none after a model was used."""
    shown = 'print(json.dumps({"by itself": by_itself, "copying": copying, "using": seen}))'
    found = json.loads(python(PREAMBLE + BY_ITSELF + COPYING + USING + shown))
    assert found["by itself"] == {"shared": 2, "alone": 0, "rested": 0, "again": 2, "others": 3}
    assert found["copying"] == 0 and found["using"] == [2, 0]


@pytest.mark.long(0.1)  # of the system's threads, as all above
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_forked_process_has_torchs_other_pool_before_it_starts_a_thread() -> None:
    """Of threads that begin together without it, in one process of five some stop with "Invalid thread pool!"."""
    assert python(PREAMBLE + FORKED) == "3\n"
