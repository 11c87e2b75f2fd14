"""Work in other processes: it comes back in its place, raises here, and is stopped when asked."""

from __future__ import annotations

import os
import threading

import psutil
import pytest

from core.errors import MoestroError, TraceError
from core.system.tasks import Stopped, Task, here, run
from tests.system.pieces import die, refuse, times_two, wait_for_ever


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


def test_processes_end_with_the_iterator() -> None:
    pids = run([Task(os.getpid), Task(wait_for_ever)], 2)
    _, pid = next(pids)
    pids.close()  # type: ignore[attr-defined]  # it is a generator
    assert not psutil.pid_exists(pid)
