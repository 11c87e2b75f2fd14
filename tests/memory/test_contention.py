"""Waits give the processors up while other programs want them, and only then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from core.system.native.contention import CALM_S, LEAST_S, MANY, Contention
from core.system.native.openmp import entry

ROOT = Path(__file__).parents[2]


class Counts:
    def __init__(self) -> None:
        self.stops, self.computed_s = 1000, 5.0
        self.contention = Contention(lambda: self.stops, lambda: self.computed_s)

    def after(self, computed_s: float, stops: float) -> bool:
        self.computed_s += computed_s
        self.stops += int(stops)
        return self.contention.look()


def test_it_is_found_by_stops_and_over_after_a_calm() -> None:
    counts = Counts()
    assert not counts.after(0.1, 0.1 * MANY - 1)
    assert not counts.after(LEAST_S / 2, 3), "too little to tell"
    assert counts.after(0.1, 0.3 * MANY)
    assert counts.after(0.6 * CALM_S, 0), "not yet over"
    assert counts.after(0.05, 0.1 * MANY), "the calm begins anew"
    assert counts.after(0.6 * CALM_S, 0)
    assert not counts.after(0.6 * CALM_S, 0)
    assert not counts.after(0.1, 0)


def test_short_looks_add_up() -> None:
    counts = Counts()
    seen = [counts.after(LEAST_S / 3, 2) for _ in range(4)]
    assert seen[:2] == [False, False] and seen[-1]


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
