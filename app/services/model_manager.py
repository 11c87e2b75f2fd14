"""Keeps the one engine: loads and unloads it in a thread, holds its settings, and lets others look at it safely."""

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
TRACED = 192  # recorded tokens that a forecast of the hit rate rests on


class ModelManager:
    """The engine's owner.

    Two locks, taken in this order: `_lock` guards the owner's own fields; `_view` keeps the engine from being unloaded
    under someone who looks at it or changes it.
    """

    def __init__(self, store: Store, engine: type[EngineProtocol] | None, estimate: Estimate | None) -> None:
        self.store = store
        self._settings: Settings = self._known_settings(store.db.get("settings") or {})
        self.loading: Loading | None = None  # the load in progress, or how the last one ended
        self.load_id: int | None = None  # the store's id of the current load
        self._engine_type, self._estimate = engine, estimate
        self._engine: EngineProtocol | None = None
        self._spec: LoadSpec | None = None
        self._format = ""  # the loaded experts' own: a pack's, or the one that was chosen
        self._effective: dict[str, Any] = {}  # settings in force at the last recorded pass
        self._moved: dict[str, object] = {}  # settings changed while a model is being loaded
        self._owed: dict[str, object] = {}  # to be remembered, and not saved yet
        self._lock, self._view = threading.RLock(), threading.RLock()
        self._thread: threading.Thread | None = None
        self._find_profile: Profiles | None = None  # for the host: what is known of a model that is being loaded

    # -- what is loaded ----------------------------------------------------------------------------------------------

    @property
    def model(self) -> str | None:
        """The name of the loaded model, or None."""
        spec = self.spec
        return spec.model if spec is not None else None

    @property
    def spec(self) -> LoadSpec | None:
        """What is loaded and how, or None. Its settings are those of the load; `settings` are those of now."""
        return self._spec if self._engine is not None else None

    @property
    def format(self) -> str:
        """How the loaded model's experts are kept: a pack's own format, or the one chosen; "" while none is loaded."""
        return self._format if self._engine is not None else ""

    @property
    def shape(self) -> ModelShape | None:
        """Sizes of the loaded model, or None."""
        engine = self._engine
        return engine.shape if engine is not None else None

    @property
    def context(self) -> int | None:
        """The longest chat of the loaded model in tokens, or None."""
        engine = self._engine
        return engine.context if engine is not None else None

    @property
    def closeness(self) -> float:
        """How far exact logits of the loaded model may be from transformers' own, as a share of the largest; 0.0 = no
        bit differs, or none is loaded."""
        engine = self._engine
        return engine.closeness if engine is not None else 0.0

    @property
    def settings(self) -> Settings:
        """The live settings: the engine's own, or with no model loaded those of the next load."""
        engine = self._engine
        return engine.settings if engine is not None else self._settings

    @property
    def version(self) -> str:
        """Differs whenever a frame would: names the load and the engine's own version."""
        with self._view:
            return f"{self.load_id}.{self._engine.version}" if self._engine is not None else "none"

    def frame(self, layer: int = 0, points: int = 240) -> Frame | None:
        """What the live deck draws, or None while no model is loaded. Raises MoestroError for a layer there is not."""
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
        """A LoadSpec from a form's values, with the settings of now. Raises SettingError."""
        return LoadSpec.checked(model, self.settings, **choices)

    def last_spec(self) -> LoadSpec | None:
        """What was loaded last, in this start or an earlier one, with the settings of now; to be offered again."""
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
        """Does it fit, be it in the place of the model now loaded? Reads file headers only.

        Raises MoestroError when there is no such model.
        """
        return self._fit(spec)[0]

    def _fit(self, spec: LoadSpec) -> tuple[Fit, bool]:
        """The verdict, and whether it fits beside the model now loaded."""
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
        """Start loading. Raises BusyError; whatever else goes wrong is found in the returned `Loading`.

        What is wrong with the spec is found before the model now loaded is given up, and that one is kept until the new
        one is ready if both fit in memory.
        """
        with self._lock:
            self._require_idle("load a model")
            self.loading = loading = Loading(spec.model)
            self._moved = {}
            self._thread = threading.Thread(target=self._load, args=(spec, loading), name="moestro-load", daemon=True)
            self._thread.start()
            return loading

    def cancel_load(self) -> None:
        """Ask the load in progress to stop; its `state` tells when it has."""
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
        """For the host to refuse while answers use the engine."""

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
        except MoestroError as error:  # the memory is free, which is what was asked for; the store finds out at a start
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
        """Change one live setting; returns what is wrong, or ""."""
        return self.change_many({name: value})

    def change_many(self, changes: Mapping[str, object]) -> str:
        """Change live settings, all or none, also while tokens stream; returns what is wrong, or "".

        With no model loaded they wait for the next load.
        """
        with self._lock:
            try:
                with self._view:
                    new = self.settings.with_(changes)  # refuses unknown names and bad values in one voice
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
        """For the next start; what could not be saved is tried again with whatever is remembered next."""
        with self._lock:
            self._owed[key] = value
            try:
                with self.store.db.tx():
                    for name, each in self._owed.items():
                        self.store.db.put(name, each)
                self._owed = {}
            except MoestroError as error:  # acting on it matters more than remembering it
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
