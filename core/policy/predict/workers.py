"""Creates workers by the name of their task."""

from __future__ import annotations

from collections.abc import Callable

from core.policy.predict.aside import Task, Worker
from core.policy.predict.map_search import MapSearch
from core.policy.predict.path_reader import PathReader

WORKERS: dict[str, Callable[[Task], Worker]] = {"maps": MapSearch, "path": PathReader}


def make_worker(task: Task) -> Worker:
    """The worker for `task`."""
    return WORKERS[task.name](task)
