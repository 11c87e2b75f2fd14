"""Evaluates the loaded model under lossy modes in a thread independent of any browser tab; stores the last result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.services.analysis.quality import Evaluate, QualityForm, QualityResult, measure
from app.services.jobs import JobOwner, JobRunner, ModelJob
from app.services.model_manager import ModelManager
from app.services.remembered import Remembered
from core.settings.config import Settings

if TYPE_CHECKING:
    from core.engine import Engine

KEPT = "quality"  # store key of the last result


class Evaluation(ModelJob):
    """An evaluation in progress, or the outcome of the last one."""

    name, doing, tab = "evaluate", "evaluated", "Analysis"
    done, undone = "Evaluated", "Not evaluated"
    unexpected = "The evaluation broke off because of an error inside Moestro. Its details are in the log."

    def __init__(self, model: str, settings: Settings) -> None:
        super().__init__("Reading the questions", model)
        self.settings = settings


class Evaluator(JobOwner[Evaluation]):
    """Evaluates the loaded model. Methods return at once and may be called from any thread. Rows measured before an
    evaluation is cancelled are kept."""

    kind = Evaluation

    def __init__(self, remembered: Remembered, models: ModelManager, jobs: JobRunner, work: Evaluate = measure) -> None:
        super().__init__(jobs)
        self._remembered, self._models, self._work = remembered, models, work
        self.answer: QualityResult | None = remembered.result(KEPT, QualityResult.read)

    @property
    def stamp(self) -> str:
        """Changes with the state that the page shows."""
        job, answer = self.job, self.answer
        return f"{id(job)} {job.state if job else ''} {id(answer)} {len(answer.rows) if answer else 0}"

    def start(self, form: QualityForm) -> Evaluation:
        """Start evaluating the loaded model under several modes; no answers are written until it ends. Raises
        MoestroError for what is wrong at once; later errors are reported in the returned job."""
        with self._models.idle("evaluate it"):
            model = self._models.ready()
            form.check()
            job = Evaluation(model.spec.model, model.engine.settings)
            return self._jobs.start(job, lambda: self._run(job, model.engine, form))

    def _run(self, job: Evaluation, engine: Engine, form: QualityForm) -> None:
        def found(answer: QualityResult) -> None:
            self.answer = answer

        try:
            self._work(engine, form, found, job.progress, job.cancelled)
        finally:
            if self.answer is not None:
                self._remembered.put(KEPT, self.answer.dump())
