"""Compares two settings on one question with the loaded model, in a thread of its own; stores the last result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.services.jobs import JobOwner, JobRunner, ModelJob
from app.services.model_manager import ModelManager
from app.services.remembered import Remembered
from core.measure.evaluate.sides import ROUNDS, TOKENS, Sides, check
from core.settings.config import Settings
from core.settings.migration import migrated
from core.settings.presets import PRESETS, preset

if TYPE_CHECKING:
    from core.engine import Engine

RESULT, KEPT = "beside", "beside settings"  # store keys of the last result, and of the settings kept for a comparison
NOW, AS_KEPT, PLAIN = "now", "kept", "plain"  # choices of a side beside the presets
TITLES = {NOW: "The sidebar", AS_KEPT: "Kept settings", PLAIN: "Plain LRU, no prefetching"}


@dataclass(frozen=True, slots=True)
class SidesQuestion:
    """What is asked, of which two sides: NOW, AS_KEPT, PLAIN, or the name of a preset."""

    text: str
    a: str
    b: str
    tokens: int = TOKENS
    rounds: int = ROUNDS


Compare = Callable[..., Sides]  # `compare`, or what stands in for it


def compare(*given: Any, **more: Any) -> Sides:
    """`core.measure.evaluate.beside.beside`, which is imported once it is needed."""
    from core.measure.evaluate.beside import beside

    return beside(*given, **more)


class Comparison(ModelJob):
    """A comparison in progress, or the outcome of the last one."""

    name, doing, tab = "beside", "compared under two settings", "Analysis"
    done, undone = "Compared", "Not compared"
    unexpected = "The comparison broke off because of an error inside Moestro. Its details are in the log."

    def __init__(self, model: str, settings: Settings) -> None:
        super().__init__("A answers", model)
        self.settings = settings


class Comparer(JobOwner[Comparison]):
    """Compares the loaded model with itself. Methods return at once and may be called from any thread."""

    kind = Comparison

    def __init__(self, remembered: Remembered, models: ModelManager, jobs: JobRunner, work: Compare) -> None:
        super().__init__(jobs)
        self._remembered, self._models, self._work = remembered, models, work
        self.answer: Sides | None = remembered.result(RESULT, Sides.read)
        self.kept: Settings | None = remembered.result(KEPT, _settings)

    @property
    def stamp(self) -> str:
        """Changes with the state that the page shows."""
        job = self.job
        return f"{id(job)} {job.state if job else ''} {id(self.answer)} {id(self.kept)}"

    def choices(self) -> list[tuple[str, str]]:
        """What a side can be: titles and names."""
        own = [NOW, AS_KEPT, PLAIN] if self.kept is not None else [NOW, PLAIN]
        return [*((TITLES[name], name) for name in own), *((one.title, one.name) for one in PRESETS)]

    def keep(self) -> None:
        """Keep the settings in force, to be compared later."""
        self.kept = self._models.settings
        self._remembered.put(KEPT, dict(self.kept))

    def start(self, question: SidesQuestion) -> Comparison:
        """Start; no answers are written until it ends. Raises MoestroError for what is wrong at once; later errors are
        reported in the returned job."""
        with self._models.idle("compare settings"):
            model = self._models.ready()
            check(question.text, question.tokens, question.rounds)
            sides = [self._side(name) for name in (question.a, question.b)]
            job = Comparison(model.spec.model, model.engine.settings)
            return self._jobs.start(job, lambda: self._run(job, model.engine, question, *sides))

    def _side(self, name: str) -> Settings:
        """The settings of a side. Presets have the memory budget in force, and so has PLAIN, which is what no preset
        has changed."""
        now = self._models.settings
        if name in (NOW, AS_KEPT):
            return self.kept if name == AS_KEPT and self.kept is not None else now
        names = {key for one in PRESETS for key in one.values}
        values = {key: Settings()[key] for key in names} if name == PLAIN else preset(name).values
        return now.with_({key: value for key, value in values.items() if key != "budget"})

    def _run(self, job: Comparison, engine: Engine, question: SidesQuestion, a: Settings, b: Settings) -> None:
        first, second = (TITLES.get(name) or preset(name).title for name in (question.a, question.b))
        self.answer = self._work(
            engine,
            question.text,
            a,
            b,
            names=(first, second),
            tokens=question.tokens,
            rounds=question.rounds,
            progress=job.progress,
            cancel=job.cancelled,
        )
        self._remembered.put(RESULT, self.answer.dump())


def _settings(kept: Mapping[str, Any]) -> Settings:
    return Settings(migrated(kept))
