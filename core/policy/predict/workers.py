"""Creates workers by the name of their task."""

from collections.abc import Callable

from core.policy.predict.map_search import MapSearch
from core.policy.predict.path_reader import PathReader
from core.policy.predict.worker import Worker, WorkerTask

WORKERS: dict[str, Callable[[WorkerTask], Worker]] = {"maps": MapSearch, "path": PathReader}


def make_worker(task: WorkerTask) -> Worker:
    """The worker for `task`."""
    return WORKERS[task.name](task)
