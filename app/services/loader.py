"""Loads models, one at a time, in a thread independent of any browser tab."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from app.services.jobs import JobRunner
from app.services.loading import Estimate, Loaded, Loading, engine_type
from app.services.model_manager import ModelManager
from app.services.own_answers import OwnAnswers
from app.services.planner import LeastMemory, MemoryFinder
from app.services.profiles import StoredProfiles
from app.services.remembered import Remembered
from app.store import Store
from app.wording import short_name
from core.errors import BudgetError
from core.settings.loading import LoadSpec
from core.system.template_worker import RENDERER
from core.types import Fit

if TYPE_CHECKING:
    from core.engine import Engine

ALL = "100%"


class Loader:
    """Estimates and loads. Methods return at once and may be called from any thread."""

    def __init__(
        self,
        store: Store,
        remembered: Remembered,
        jobs: JobRunner,
        models: ModelManager,
        profiles: StoredProfiles,
        engine: type[Engine] | None = None,
        estimate: Estimate | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """`models` takes the loaded engine, and `begun` is called then. `engine`, `estimate`: core's own without."""
        self._store, self._remembered, self._jobs, self._models = store, remembered, jobs, models
        self._profiles, self._engine, self._estimate, self._begun = profiles, engine, estimate, begun
        self._own = OwnAnswers(store, models.manifest, profiles.known)
        self._finder = MemoryFinder()

    @property
    def loading(self) -> Loading | None:
        """The load in progress, or the last one."""
        return self._jobs.last(Loading)

    def plan(self, model: str, **choices: object) -> LoadSpec:
        """A LoadSpec from a form's values; what is left out is as in the model's last load. Raises SettingError."""
        LoadSpec.checked(model)
        begun = self._models.start(model).spec
        kept = {name: value for name, value in begun.describe().items() if name != "model"}
        return LoadSpec.checked(model, begun.settings, **{**kept, **choices})

    def last_spec(self) -> LoadSpec | None:
        """The spec of the last load, in this process or an earlier one, with the current settings; offered again by the
        form."""
        return self._remembered.spec(self._models.settings)

    def estimate(self, spec: LoadSpec) -> Fit:
        """Estimate whether a spec fits, possibly in place of the loaded model. Reads file headers only.

        Raises MoestroError when there is no such model."""
        return self._fit(spec)[1]

    def least_memory(self, spec: LoadSpec, tpot_ms: float) -> LeastMemory:
        """The least memory for a token in `tpot_ms`, predicted from the model's profile. Raises MoestroError when there
        is none, no memory suffices, or there is no such model."""
        spec, fit, _ = self._fit(spec)
        return self._finder.least(spec, fit, tpot_ms, *self._own.known(spec))

    def safe_budget(self, spec: LoadSpec) -> str:
        """The most memory that is safe for a model, in place of the loaded one; "" = not even the least fits. Raises
        MoestroError when there is no such model."""
        if self._estimate is not None:
            return self._estimate(spec).suggested
        from core.capacity.fit import estimate

        beside, memory = estimate(spec, forecast=False).suggested, self._models.memory()
        if memory is None or beside == ALL:
            return beside
        return estimate(spec, memory, forecast=False).suggested or beside

    def load(self, spec: LoadSpec) -> Loading:
        """Start loading. Raises BusyError; any other problem is reported in the returned `Loading`.

        The spec is checked before the current model is unloaded; the current one is kept until the new one is ready if
        both fit in memory."""
        with self._models.idle("load a model"):
            loading = Loading(spec.model)
            self._remembered.loaded(spec.model)
            return self._jobs.start(loading, lambda: self._load(spec, loading))

    def cancel(self) -> None:
        """Ask the load in progress to stop; its `state` reports when it has."""
        self._jobs.cancel(Loading)

    def _fit(self, spec: LoadSpec) -> tuple[LoadSpec, Fit, bool]:
        """The spec with the budget that it will have, the estimate, and whether it fits next to the loaded model."""
        start = self._models.start(spec.model)
        as_set = spec.settings.cache.budget == start.spec.settings.cache.budget
        if as_set and "budget" in start.auto and (budget := self.safe_budget(spec)):
            spec = replace(spec, settings=spec.settings.with_({"budget": budget}))
        if self._estimate is not None:
            fit = self._own.measured(spec, self._estimate(spec))
            return spec, fit, fit.fits
        from core.capacity.fit import estimate

        seen = self._own.seen(spec)
        fit = estimate(spec, seen=seen)
        memory = None if fit.fits else self._models.memory()
        both = memory is None
        if memory is not None:
            fit = estimate(spec, memory, seen)
        return spec, self._own.measured(spec, fit), both and fit.fits

    def _load(self, spec: LoadSpec, loading: Loading) -> None:
        before = self._models.model
        RENDERER.hold(loading)  # or it would end with the old model, and be started again for the new one
        try:
            self._swap(spec, loading)
        except Exception:
            if before is not None:
                loading.fate = (
                    f"{short_name(before)} is still loaded."
                    if self._models.model == before
                    else f"{short_name(before)} had been unloaded to make room: load it again to go on."
                )
            raise
        finally:
            RENDERER.release(loading)

    def _swap(self, spec: LoadSpec, loading: Loading) -> None:
        start = self._models.start(spec.model)
        spec, fit, both = self._fit(spec)
        if fit.problem:
            raise BudgetError(fit.problem)
        loading.go_on()
        if self._models.loaded is not None and not both:
            loading.update(text=f"Unloading {short_name(self._models.model or '')}")
            self._models.drop()
        engine = self._type().load(spec, loading.progress, loading.cancelled, profile=self._profiles.find)
        try:
            loading.go_on()
            load = self._store.steps.add_load(
                spec.model, {**spec.describe(), "format": fit.format}, engine.settings, engine.shape, engine.manifest()
            )
        except BaseException:
            engine.unload()
            raise
        self._remembered.put("spec", spec.describe())
        self._models.install(Loaded(engine, spec, load, fit.format, dict(engine.settings)), loading.moved, start)
        self._begun()

    def _type(self) -> type[Engine]:
        if self._engine is None:
            self._engine = engine_type()
        return self._engine
