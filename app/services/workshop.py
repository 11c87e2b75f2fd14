"""Long jobs with exclusive use of the loaded model: calibration, and evaluation under lossy modes."""

from __future__ import annotations

from collections.abc import Mapping

from app.services.analysis.quality import Asked, Evaluate, measure
from app.services.calibrator import Calibrate, Calibration, Calibrator, Reading
from app.services.engine_protocol import EngineProtocol, Estimate
from app.services.evaluator import Evaluation, Evaluator
from app.services.model_manager import ModelManager
from app.store import Store
from core.errors import BusyError, ModelError
from core.profile import Profile
from core.settings.config import Settings

NO_MODEL = "No model is loaded. Load one first, then ask again."
EVALUATED = (
    "The model is being evaluated, which turns the settings itself. Wait for it, or cancel it in the tab Analysis."
)


class Workshop(ModelManager):
    """The model manager (see `ModelManager`) extended by the jobs that need exclusive use of the engine."""

    def __init__(
        self,
        store: Store,
        engine: type[EngineProtocol] | None,
        estimate: Estimate | None,
        calibrating: Calibrate | None,
        evaluating: Evaluate | None,
    ) -> None:
        super().__init__(store, engine, estimate)
        self._closed = False
        self.calibrator = Calibrator(store, calibrating)
        self.evaluator = Evaluator(store, evaluating or measure)
        self._find_profile = self.calibrator.find

    @property
    def working(self) -> bool:
        """Whether such a job is running."""
        return self.calibrator.busy or self.evaluator.busy

    @property
    def settings(self) -> Settings:
        """The live settings; during an evaluation, those that will be restored afterwards."""
        return self.evaluator.settings or super().settings

    def change_many(self, changes: Mapping[str, object]) -> str:
        """Like the model manager's, but refused while an evaluation changes the settings."""
        return EVALUATED if self.evaluator.busy else super().change_many(changes)

    @property
    def profile(self) -> Profile | None:
        """The loaded model's calibration profile, or None."""
        engine = self._engine
        return engine.profile if engine is not None else None

    @property
    def model_hash(self) -> str:
        """Hash of the loaded model as in profiles and traces; "" while none is loaded."""
        engine = self._engine
        return engine.model_hash if engine is not None else ""

    def calibrate(self, reading: Reading) -> Calibration:
        """Start calibrating the loaded model; no answers are written meanwhile. Raises MoestroError."""
        with self._lock:
            self._require_idle("calibrate it")
            engine, _ = self._ready()
            return self.calibrator.start(engine, self.model or "", reading)

    def evaluate(self, asked: Asked) -> Evaluation:
        """Start evaluating the loaded model under several modes; no answers are written meanwhile. Raises
        MoestroError.
        """
        with self._lock:
            self._require_idle("evaluate it")
            engine, _ = self._ready()
            return self.evaluator.start(engine, self.model or "", asked)

    def delete_profile(self) -> None:
        """Remove the loaded model's profile. Raises MoestroError while a chosen option needs it."""
        with self._lock:
            self._require_idle("delete its profile")
            self.calibrator.delete(self._ready()[0])

    def _ready(self) -> tuple[EngineProtocol, int]:
        """The engine, ready for a request, and the store's id of its load. Raises BusyError or ModelError."""
        if self._closed:
            raise BusyError("Moestro is closing.")
        if self.loading is not None and not self.loading.finished:
            raise BusyError(f"{self.loading.model} is still being loaded. Ask again when it is ready.")
        if self._engine is None or self.load_id is None:
            raise ModelError(NO_MODEL)
        for job, what, tab in (
            (self.calibrator.job, "calibrated", "Calibrate"),
            (self.evaluator.job, "evaluated", "Analysis"),
        ):
            if job is not None and not job.finished:
                raise BusyError(
                    f"The model is being {what} ({job.share:.0%}). Wait for it, or cancel it in the tab "
                    f"{tab}, then ask again."
                )
        return self._engine, self.load_id

    def _refuse_if_writing(self, what: str) -> None:
        if self._closed:
            raise BusyError("Moestro is closing.")
        for busy, done, tab in (
            (self.calibrator.busy, "calibrated", "Calibrate"),
            (self.evaluator.busy, "evaluated", "Analysis"),
        ):
            if busy:
                raise BusyError(f"The model is being {done}. Wait for it or cancel it (tab {tab}), then {what}.")

    def _close_jobs(self) -> None:
        self.calibrator.close()
        self.evaluator.close()
