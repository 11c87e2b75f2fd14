"""Evaluates the loaded model under lossy modes in a thread independent of any browser tab; stores the last result."""

from __future__ import annotations

import logging

from app.services.analysis.quality import Evaluate, QualityForm, QualityResult, measure
from app.services.engine_protocol import EngineProtocol
from app.services.jobs import JobRunner, ModelJob
from app.services.model_manager import ModelManager
from app.store import Store
from core.errors import MoestroError
from core.settings.config import Settings

log = logging.getLogger("moestro.app")
KEPT = "quality"  # store key of the last result


class Evaluation(ModelJob):
    """An evaluation in progress, or the outcome of the last one."""

    name, doing, tab = "evaluate", "evaluated", "Analysis"
    done, undone = "Evaluated", "Not evaluated"
    unexpected = "The evaluation broke off because of an error inside Moestro. Its details are in the log."

    def __init__(self, model: str, settings: Settings) -> None:
        super().__init__("Reading the questions", model)
        self.settings = settings


class Evaluator:
    """Evaluates the loaded model. Methods return at once and may be called from any thread."""

    def __init__(self, store: Store, models: ModelManager, jobs: JobRunner, work: Evaluate = measure) -> None:
        self.store, self._models, self._jobs, self._work = store, models, jobs, work
        self.answer: QualityResult | None = self._remembered()

    @property
    def job(self) -> Evaluation | None:
        """The running evaluation, or the last one."""
        return self._jobs.last(Evaluation)

    @property
    def busy(self) -> bool:
        """Whether an evaluation is running; it has the engine to itself."""
        return self._jobs.running(Evaluation) is not None

    @property
    def stamp(self) -> str:
        """Changes with the state that the page shows."""
        job, answer = self.job, self.answer
        return f"{id(job)} {job.state if job else ''} {id(answer)} {len(answer.rows) if answer else 0}"

    def start(self, form: QualityForm) -> Evaluation:
        """Start evaluating the loaded model under several modes; no answers are written until it ends. Raises
        MoestroError for what is wrong at once; later errors are reported in the returned job.
        """
        with self._models.idle("evaluate it"):
            model = self._models.ready()
            form.check()
            job = Evaluation(model.spec.model, model.engine.settings)
            return self._jobs.start(job, lambda: self._run(job, model.engine, form))

    def cancel(self) -> None:
        """Ask the running evaluation to stop; rows measured so far are kept."""
        self._jobs.cancel(Evaluation)

    def _run(self, job: Evaluation, engine: EngineProtocol, form: QualityForm) -> None:
        def found(answer: QualityResult) -> None:
            self.answer = answer

        try:
            self._work(engine, form, found, job.progress, job.cancelled)
        finally:
            self._remember()

    def _remember(self) -> None:
        try:
            if self.answer is not None:
                self.store.db.put(KEPT, self.answer.dump())
        except MoestroError as error:
            log.warning("the evaluation could not be kept for the next start: %s", error)

    def _remembered(self) -> QualityResult | None:
        kept = self.store.db.get(KEPT)
        try:
            return QualityResult.read(kept) if kept else None
        except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            log.warning("forgot an evaluation of an earlier version: %s", error)
            return None
