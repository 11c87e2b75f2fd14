"""Evaluates the loaded model under lossy modes in a thread independent of any browser tab; stores the last result."""

from __future__ import annotations

import logging
from typing import Any

from app.services.analysis.quality import Answer, Asked, Evaluate, measure
from app.services.engine_protocol import EngineProtocol
from app.services.job import Job, Thread, outcome
from app.store import Store
from core.errors import BusyError, MoestroError
from core.settings.config import Settings

log = logging.getLogger("moestro.app")
UNEXPECTED = "The evaluation broke off because of an error inside Moestro. Its details are in the log."
KEPT = "quality"  # store key of the last result


class Evaluation(Job):
    """An evaluation in progress, or the outcome of the last one."""

    def __init__(self, model: str) -> None:
        super().__init__("Reading what is asked")
        self.model = model


class Evaluator:
    """Runs one evaluation at a time in its own thread. Methods return at once and may be called from any thread."""

    def __init__(self, store: Store, work: Evaluate = measure) -> None:
        self.store, self._work = store, work
        self.job: Evaluation | None = None
        self.answer: Answer | None = self._remembered()
        self.settings: Settings | None = None  # the user's settings, while an evaluation changes the engine's
        self._thread = Thread()

    @property
    def busy(self) -> bool:
        """Whether an evaluation is running; it has the engine to itself."""
        return self.job is not None and not self.job.finished

    @property
    def stamp(self) -> str:
        """Changes with the state that the page shows."""
        job, answer = self.job, self.answer
        return f"{id(job)} {job.state if job else ''} {id(answer)} {len(answer.rows) if answer else 0}"

    def start(self, engine: EngineProtocol, model: str, asked: Asked) -> Evaluation:
        """Start an evaluation. The caller ensures exclusive use of the engine while `busy`. Raises BusyError or
        SettingError; later errors are reported in the returned job.
        """
        if self.busy:
            raise BusyError("The model is being evaluated already.")
        asked.check()
        self.settings = engine.settings
        self.job = job = Evaluation(model)
        self._thread.run("evaluate", self._run, job, engine, asked)
        return job

    def cancel(self) -> None:
        """Ask the running evaluation to stop; rows measured so far are kept."""
        if self.job is not None:
            self.job.cancelled.set()

    def close(self, timeout: float = 60.0) -> None:
        """Stop the running evaluation and wait for its end."""
        self.cancel()
        self._thread.join(timeout)

    def _run(self, job: Evaluation, engine: EngineProtocol, asked: Asked) -> None:
        def found(answer: Answer) -> None:
            self.answer = answer

        def work() -> dict[str, Any]:
            self._work(engine, asked, found, job.progress, job.cancelled)
            return {}

        fields = outcome(job, work, "Evaluated", "Not evaluated", job.model, UNEXPECTED)
        self.settings = None
        self._remember()
        job.end(**fields)

    def _remember(self) -> None:
        try:
            if self.answer is not None:
                self.store.db.put(KEPT, self.answer.dump())
        except MoestroError as error:
            log.warning("the evaluation could not be kept for the next start: %s", error)

    def _remembered(self) -> Answer | None:
        kept = self.store.db.get(KEPT)
        try:
            return Answer.read(kept) if kept else None
        except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            log.warning("forgot an evaluation of an earlier version: %s", error)
            return None
