"""Long jobs (loading, importing, calibrating, evaluating, analysing): their state, and the one runner of them all."""

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

from app.services.progress import Live
from core.errors import BusyError, ClosingError, MoestroError
from core.settings.config import Settings

log = logging.getLogger("moestro.app")
State = Literal["running", "done", "error", "cancelled"]
J = TypeVar("J", bound="Job")


class Job(Live):
    """A job in progress, or the outcome of the last one of its kind. Each kind is a subclass, with its texts."""

    name: str  # of its thread
    done: str  # short texts of its outcome
    undone: str
    unexpected: str  # shown for an error that is no MoestroError

    def __init__(self, text: str, about: str) -> None:
        """`about` = what it works on, for the log."""
        super().__init__()
        self.state: State = "running"
        self.text, self.about = text, about
        self.share = 0.0
        self.left_s: float | None = None  # estimated remaining seconds
        self._began_s = time.monotonic()

    @property
    def finished(self) -> bool:
        return self.state != "running"

    @property
    @abstractmethod
    def already(self) -> str:
        """Why another one cannot start while this one runs."""

    def progress(self, text: str, share: float) -> None:
        """Record the progress, and estimate the remaining time."""
        took, share = time.monotonic() - self._began_s, min(1.0, max(0.0, share))
        left = took / share * (1 - share) if share > 0.03 and took > 1 else None
        self.update(text=text, share=share, left_s=left)

    def outcome(self, error: Exception | None) -> dict[str, Any]:
        """The fields to publish when its work has ended, or has raised `error`."""
        if error is None:
            return {"state": "done", "text": self.done, "share": 1.0}
        if self.cancelled.is_set():
            return {"state": "cancelled", "text": "Cancelled"}
        known = isinstance(error, MoestroError)
        return {"state": "error", "text": self.undone, "error": str(error) if known else self.unexpected}


class ModelJob(Job):
    """A job that has the model to itself: until it ends the model answers nothing and is not changed or unloaded."""

    doing: str  # what is done to the model, as "being ..."
    tab: str  # where it can be cancelled
    settings: Settings | None = None  # the user's own, while the job itself changes the engine's; they come back

    def __init__(self, text: str, model: str) -> None:
        super().__init__(text, model)
        self.model = model

    @property
    def already(self) -> str:
        return f"The model is being {self.doing} already."

    def refusal(self, what: str) -> str:
        """Why `what` cannot be done now."""
        return f"The model is being {self.doing}. Wait for it or cancel it (tab {self.tab}), then {what}."

    def no_answer(self) -> str:
        """Why no answer can be started now."""
        return (
            f"The model is being {self.doing} ({self.share:.0%}). Wait for it, or cancel it in the tab {self.tab}, "
            "then ask again."
        )

    def no_change(self) -> str:
        """Why no setting can be changed now; "" = they can."""
        if self.settings is None:
            return ""
        return (
            f"The model is being {self.doing}, which changes the settings itself. Wait for it, or cancel it in the tab "
            f"{self.tab}."
        )


class JobRunner:
    """Runs jobs in threads of their own: at most one of a kind at a time, and one that has the model to itself.

    Methods return at once and may be called from any thread. The last job of each kind stays available."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[type[Job], Job] = {}
        self._threads: dict[type[Job], threading.Thread] = {}
        self._closed = False

    def start(self, job: J, work: Callable[[], object]) -> J:
        """Run `work` as this job: what it raises is logged, and becomes the job's outcome. Raises BusyError."""
        kind = type(job)
        with self._lock:
            if self._closed:
                raise ClosingError
            for other in self._last.values():
                if not other.finished and (
                    type(other) is kind or (isinstance(job, ModelJob) and isinstance(other, ModelJob))
                ):
                    raise BusyError(other.already)
            self._last[kind] = job
            thread = threading.Thread(target=_run, args=(job, work), name=f"moestro-{job.name}", daemon=True)
            self._threads[kind] = thread
            thread.start()
        return job

    def recall(self, job: Job) -> None:
        """Make this ended job of an earlier process the last one of its kind."""
        with self._lock:
            self._last[type(job)] = job

    def last(self, kind: type[J]) -> J | None:
        """The job of this kind that runs, or else the last one that ended."""
        with self._lock:
            found = self._last.get(kind)
        assert found is None or isinstance(found, kind)
        return found

    def running(self, kind: type[J]) -> J | None:
        """The job of this kind that runs, or None."""
        found = self.last(kind)
        return found if found is not None and not found.finished else None

    @property
    def exclusive(self) -> ModelJob | None:
        """The running job that has the model to itself, or None."""
        with self._lock:
            jobs = list(self._last.values())
        return next((job for job in jobs if isinstance(job, ModelJob) and not job.finished), None)

    def cancel(self, kind: type[Job]) -> None:
        """Ask the running job of this kind to stop; its `state` says when it has."""
        if (job := self.last(kind)) is not None:
            job.cancelled.set()

    def close(self, timeout: float = 60.0) -> None:
        """Stop all jobs, and wait until they have ended; no more can be started."""
        with self._lock:
            self._closed = True
            jobs, threads = list(self._last.values()), list(self._threads.values())
        for job in jobs:
            job.cancelled.set()
        until_s = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                log.error("%s did not stop within its time", thread.name)


class JobOwner(Generic[J]):
    """What does jobs of one kind, one at a time."""

    kind: type[J]

    def __init__(self, jobs: JobRunner) -> None:
        self._jobs = jobs

    @property
    def job(self) -> J | None:
        """The running job, or the last one."""
        return self._jobs.last(self.kind)

    def cancel(self) -> None:
        """Ask the running job to stop; its `state` says when it has."""
        self._jobs.cancel(self.kind)


def _run(job: Job, work: Callable[[], object]) -> None:
    """What a job's thread does."""
    problem = None
    try:
        work()
    except Exception as error:
        problem = error
    fields = job.outcome(problem)
    if problem is not None and fields["state"] == "error":
        if isinstance(problem, MoestroError):
            log.info("%s: %s: %s", job.about, job.undone, problem)
        else:
            log.error("%s: %s: unexpected error", job.about, job.undone, exc_info=problem)
    job.update(left_s=None, **fields)
