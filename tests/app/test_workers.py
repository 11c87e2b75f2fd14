"""Work in other processes: it comes back in its place, raises here, and is stopped when asked."""

from __future__ import annotations

import os
import threading

import pytest

from app.services.analysis import workers
from core.errors import MoestroError, TraceError
from tests.app.pieces import die, refuse, times_two, wait_for_ever


def test_work_is_done_in_other_processes_and_comes_back_in_its_place() -> None:
    found: dict[int, int] = {}
    workers.run([workers.Task(times_two, (n,)) for n in range(5)], threading.Event(), found.__setitem__, 2)
    assert found == {n: 2 * n for n in range(5)}
    pids: list[int] = []
    workers.run([workers.Task(os.getpid)], threading.Event(), lambda at, pid: pids.append(pid))
    assert pids != [os.getpid()]


def test_what_goes_wrong_there_is_raised_here() -> None:
    with pytest.raises(TraceError, match="7 is not a trace"):
        workers.run([workers.Task(refuse, (7,))], threading.Event(), lambda at, result: None)
    with pytest.raises(MoestroError, match="simulation process died"):
        workers.run([workers.Task(die)], threading.Event(), lambda at, result: None)


def test_work_that_would_never_end_is_stopped() -> None:
    cancel = threading.Event()
    first = workers.Task(times_two, (1,))
    with pytest.raises(workers.Stopped):
        workers.run([first, workers.Task(wait_for_ever)], cancel, lambda at, result: cancel.set(), 1)
