"""Waits give the processors up while other programs want them, and only then."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from core.system.native import openmp
from core.system.native.contention import CALM_S, LEAST_S, LOOK_S, MANY, REST_S, Contention, ThreadTimes, Watch
from core.system.native.openmp import entry

ROOT = Path(__file__).parents[2]


class Machine:
    """Threads that run and wait as a test says."""

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
@pytest.mark.skipif(not entry(), reason="torch uses another runtime than GNU's OpenMP")
def test_no_thread_of_torch_spins_in_a_crowd() -> None:
    ended = subprocess.run([sys.executable, "-c", WAITING], cwd=ROOT, capture_output=True, text=True, check=True)
    spun, gave_up, again = map(float, ended.stdout.split())
    assert gave_up < 0.3 * min(spun, again), ended.stdout
