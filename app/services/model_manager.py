"""Owns the one engine: loads and unloads it in a thread, holds its settings, and gives other threads safe
access to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from app.services.engine_protocol import EngineProtocol, Estimate, Profiles
from app.services.progress import Loading
from app.store import Store
from core.errors import BudgetError, BusyError, MoestroError, SettingError
from core.settings.config import LOADING, LoadSpec, Settings
from core.settings.registry import Value
from core.types import Fit, Frame, Memory, ModelShape

log = logging.getLogger("moestro.app")
TRACED = 192  # recorded tokens that the hit rate forecast is based on


class ModelManager:
    """The engine's owner.

    Two locks, taken in this order: `_lock` guards the manager's own fields; `_view` keeps the engine from being
    unloaded while another thread reads or changes it.
    """

    def __init__(self, store: Store, engine: type[EngineProtocol] | None, estimate: Estimate | None) -> None:
        self.store = store
        self._settings: Settings = self._known_settings(store.db.get("settings") or {})
        self.loading: Loading | None = None  # the load in progress, or the outcome of the last one
        self.load_id: int | None = None  # the store's id of the current load
        self._engine_type, self._estimate = engine, estimate
        self._engine: EngineProtocol | None = None
        self._spec: LoadSpec | None = None
        self._format = ""  # of the loaded experts: a pack's own, or the chosen one
        self._effective: dict[str, Any] = {}  # settings in force at the last recorded pass
        self._moved: dict[str, object] = {}  # settings changed while a model is being loaded
        self._owed: dict[str, object] = {}  # values to be stored for the next start, not saved yet
        self._lock, self._view = threading.RLock(), threading.RLock()
        self._thread: threading.Thread | None = None
        self._find_profile: Profiles | None = None  # set by the host: finds the profile of a model being loaded

    # -- what is loaded ----------------------------------------------------------------------------------------------

    @property
    def model(self) -> str | None:
        """The name of the loaded model, or None."""
        spec = self.spec
        return spec.model if spec is not None else None

    @property
    def spec(self) -> LoadSpec | None:
        """The LoadSpec of the loaded model, or None. Its settings are those at load time; `settings` are the current
        ones.
        """
        return self._spec if self._engine is not None else None

    @property
    def format(self) -> str:
        """The loaded model's expert format: a pack's own, or the chosen one; "" while none is loaded."""
        return self._format if self._engine is not None else ""

    @property
    def shape(self) -> ModelShape | None:
        """Sizes of the loaded model, or None."""
        engine = self._engine
        return engine.shape if engine is not None else None

    @property
    def context(self) -> int | None:
        """The loaded model's maximum context in tokens, or None."""
        engine = self._engine
        return engine.context if engine is not None else None

    @property
    def closeness(self) -> float:
        """Largest difference of the loaded model's exact logits from transformers' own, as a share of the largest
        logit; 0.0 = bit-identical, or no model loaded.
        """
        engine = self._engine
        return engine.closeness if engine is not None else 0.0

    @property
    def settings(self) -> Settings:
        """The live settings: the engine's own, or without a model those of the next load."""
        engine = self._engine
        return engine.settings if engine is not None else self._settings

    @property
    def version(self) -> str:
        """Changes whenever `frame` would: identifies the load and the engine's own version."""
        with self._view:
            return f"{self.load_id}.{self._engine.version}" if self._engine is not None else "none"

    def frame(self, layer: int = 0, points: int = 240) -> Frame | None:
        """The data of the live deck, or None while no model is loaded. Raises MoestroError for a layer that does not
        exist.
        """
        with self._view:
            if self._engine is None:
                return None
            if not 0 <= layer < self._engine.shape.layers:
                raise MoestroError(f"Layer {layer} does not exist: choose 0 to {self._engine.shape.layers - 1}.")
            return self._engine.frame(layer, points)

    def memory(self) -> Memory | None:
        """Device memory in use, or None while no model is loaded."""
        with self._view:
            return self._engine.memory() if self._engine is not None else None

    # -- loading -----------------------------------------------------------------------------------------------------

    def plan(self, model: str, **choices: object) -> LoadSpec:
        """A LoadSpec from a form's values, with the current settings. Raises SettingError."""
        return LoadSpec.checked(model, self.settings, **choices)

    def last_spec(self) -> LoadSpec | None:
        """The spec of the last load, in this process or an earlier one, with the current settings; offered again by the
        form.
        """
        kept: dict[str, object] = dict(self.store.db.get("spec") or {})
        model = kept.pop("model", None)
        if model is None:
            return None
        choices: dict[str, object] = {}
        for param in LOADING:
            if param.name in kept:
                value = str(kept[param.name]) if param.type == "choice" else kept[param.name]
                try:
                    choices[param.name] = param.check(value)
                except (SettingError, TypeError, ValueError) as error:
                    log.warning("forgot a loading choice of an earlier version: %s", error)
        return self.plan(str(model), **choices)

    def estimate(self, spec: LoadSpec) -> Fit:
        """Estimate whether a spec fits, possibly in place of the loaded model. Reads file headers only.

        Raises MoestroError when there is no such model.
        """
        return self._fit(spec)[0]

    def _fit(self, spec: LoadSpec) -> tuple[Fit, bool]:
        """The estimate, and whether it fits beside the loaded model."""
        if self._estimate is not None:
            fit = self._estimate(spec)
            return fit, fit.fits
        from core.capacity.fit import estimate

        trace = self.store.steps.trace(spec.model, TRACED)
        fit = estimate(spec, trace=trace)
        memory = None if fit.fits else self.memory()
        if memory is None:
            return fit, fit.fits
        return estimate(spec, memory, trace), False

    def load(self, spec: LoadSpec) -> Loading:
        """Start loading. Raises BusyError; any other problem is reported in the returned `Loading`.

        The spec is checked before the current model is unloaded; the current one is kept until the new one is ready if
        both fit in memory.
        """
        with self._lock:
            self._require_idle("load a model")
            self.loading = loading = Loading(spec.model)
            self._moved = {}
            self._thread = threading.Thread(target=self._load, args=(spec, loading), name="moestro-load", daemon=True)
            self._thread.start()
            return loading

    def cancel_load(self) -> None:
        """Ask the load in progress to stop; its `state` reports when it has."""
        if self.loading is not None:
            self.loading.cancelled.set()

    def unload(self) -> None:
        """Free the model's memory. Does nothing when none is loaded. Raises BusyError."""
        with self._lock:
            self._require_idle("unload the model")
            self._drop()

    @property
    def _is_loading(self) -> bool:
        return self.loading is not None and not self.loading.finished

    def _require_idle(self, what: str) -> None:
        if self.loading is not None and not self.loading.finished:
            raise BusyError(f"{self.loading.model} is being loaded. Wait for it or cancel it, then {what}.")
        self._refuse_if_writing(what)

    def _refuse_if_writing(self, what: str) -> None:
        """Overridden by the host: refuses while answers use the engine."""

    def _load(self, spec: LoadSpec, loading: Loading) -> None:
        before = self.model
        try:
            error = self._swap(spec, loading)
        except MoestroError as problem:
            log.info("%s was not loaded: %s", spec.model, problem)
            error = str(problem)
        except Exception:
            log.exception("unexpected error while loading %s", spec.model)
            error = f"{spec.model} could not be loaded because of an error inside Moestro. Its details are in the log."
        if loading.cancelled.is_set() and self._spec is not spec:
            state, error = "cancelled", ""
        else:
            state = "error" if error else "done"
        text = f"{spec.model} is ready" if state == "done" else "Cancelled" if state == "cancelled" else "Not loaded"
        if state != "done" and before is not None:
            fate = (
                f"{before} is still loaded."
                if self.model == before
                else f"{before} had been unloaded to make room: load it again to go on."
            )
            text, error = f"{text}. {fate}", error and f"{error} {fate}"
        loading.update(state=state, text=text, error=error, share=1.0 if state == "done" else loading.share)

    def _swap(self, spec: LoadSpec, loading: Loading) -> str:
        fit, beside = self._fit(spec)
        if fit.problem:
            raise BudgetError(fit.problem)
        if loading.cancelled.is_set():
            return ""
        if self._engine is not None and not beside:
            loading.update(text=f"Unloading {self.model}")
            self._drop()
        engine = self._type().load(spec, loading.progress, loading.cancelled, profile=self._find_profile)
        try:
            if loading.cancelled.is_set():
                engine.unload()
                return ""
            load = self.store.steps.add_load(
                spec.model, {**spec.describe(), "format": fit.format}, engine.settings, engine.shape, engine.manifest()
            )
        except BaseException:
            engine.unload()
            raise
        with self._lock, self._view:
            self._drop()
            self._engine, self._spec, self.load_id, self._format = engine, spec, load, fit.format
            self._effective = dict(engine.settings)
            moved, self._moved = self._moved, {}
            if problem := self.change_many(moved):
                log.warning("a setting moved during the load was not taken: %s", problem)
        self.remember("spec", spec.describe())
        self.remember("settings", dict(self.settings))
        return ""

    def _drop(self) -> None:
        with self._lock, self._view:
            self._settings = self.settings
            engine, self._engine = self._engine, None
            load, self.load_id, self._spec = self.load_id, None, None
            try:
                if engine is not None:
                    engine.unload()
            except Exception as error:
                log.exception("unexpected error while unloading")
                raise MoestroError(
                    "The model was not unloaded cleanly because of an error inside Moestro. Some of its "
                    "memory may stay in use until Moestro is started again."
                ) from error
            finally:
                if load is not None:
                    self._note_end(load)

    def _note_end(self, load: int) -> None:
        try:
            self.store.steps.end_load(load)
        except MoestroError as error:  # the memory is freed, as asked; the store corrects the record at its next start
            log.warning("could not note the end of a load: %s", error)

    def _type(self) -> type[EngineProtocol]:
        if self._engine_type is None:
            from core.engine import Engine

            self._engine_type = Engine
        return self._engine_type

    def _close_model(self, timeout: float = 60.0) -> None:
        if self._thread is not None:
            self._thread.join(timeout)
        self._drop()

    # -- settings ----------------------------------------------------------------------------------------------------

    def change(self, name: str, value: object) -> str:
        """Change one live setting; returns the problem, or ""."""
        return self.change_many({name: value})

    def change_many(self, changes: Mapping[str, object]) -> str:
        """Change live settings, all or none, also while tokens stream; returns the problem, or "".

        Without a model they apply to the next load.
        """
        with self._lock:
            try:
                with self._view:
                    new = self.settings.with_(changes)  # checks names and values, with uniform error messages
                    if self._engine is not None:
                        new = self._engine.change(changes)
            except MoestroError as error:
                return str(error)
            except Exception:
                log.exception("unexpected error while changing %s", dict(changes))
                return "The setting was not changed because of an error inside Moestro. Its details are in the log."
            self._settings = new
            if self._is_loading:
                self._moved |= changes
        self.remember("settings", dict(new))
        return ""

    def remember(self, key: str, value: object) -> None:
        """Store a value for the next start; a failed save is retried at the next call."""
        with self._lock:
            self._owed[key] = value
            try:
                with self.store.db.tx():
                    for name, each in self._owed.items():
                        self.store.db.put(name, each)
                self._owed = {}
            except MoestroError as error:  # applying it matters more than storing it
                log.warning("could not remember %s for the next start: %s", ", ".join(self._owed), error)

    @staticmethod
    def _known_settings(kept: Mapping[str, Value]) -> Settings:
        settings = Settings()
        for name, value in kept.items():
            try:
                settings = settings.with_({name: value})
            except (SettingError, TypeError, ValueError) as error:
                log.warning("forgot a setting of an earlier version: %s", error)
        return settings
