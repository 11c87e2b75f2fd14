"""Owns the one engine: admits one user of it at a time, holds its settings, and what other threads read of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from app.services.answer_queue import AnswerQueue
from app.services.jobs import JobRunner
from app.services.loading import AnyPrompt, Loaded, Loading, OfLoaded
from app.services.remembered import KNOBS, Remembered, Start
from app.store import Store
from app.wording import model_id
from core.engine.arithmetic import REFERENCE
from core.engine.quality.report import Quality
from core.errors import BusyError, ClosingError, ModelError, MoestroError
from core.metrics.limit import Fewest, SpeedLimit
from core.policy.throttle import Tried
from core.profile import Profile
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.presets import FIRST
from core.system.process_memory import release_memory
from core.types import Frame, Memory, ModelShape

if TYPE_CHECKING:
    from core.engine import Engine

T = TypeVar("T")
log = logging.getLogger("moestro.app")
UNCLEAN = "The model was not unloaded cleanly (an error inside Moestro). Some memory may be in use until a restart."
NO_MODEL = "No model is loaded. Load one first, then ask again."


class ModelManager:
    """The engine's owner. Methods may be called from any thread.

    Two locks, taken in this order: `_lock` guards the use of the model; `_view` keeps the engine from being unloaded
    while another thread reads or changes it."""

    def __init__(
        self,
        store: Store,
        remembered: Remembered,
        jobs: JobRunner,
        answers: AnswerQueue,
        changed: Callable[[Settings], object] = lambda settings: None,
        unloaded: Callable[[], object] = lambda: None,
    ) -> None:
        """`changed` is called when settings have changed, `unloaded` when the user has unloaded the model."""
        self._store, self._remembered, self._jobs, self._answers = store, remembered, jobs, answers
        self._changed, self._unloaded = changed, unloaded
        self._settings = remembered.settings()  # of the next load, while no model is loaded
        self._loaded: Loaded | None = None
        self._closed = False
        self._lock, self._view = threading.RLock(), threading.RLock()

    @property
    def loaded(self) -> Loaded | None:
        """The loaded model, or None."""
        return self._loaded

    spec = OfLoaded[LoadSpec | None](lambda model: model.spec, None)
    """Its settings are those at load time; `settings` are the current ones."""
    load_id = OfLoaded[int | None](lambda model: model.load, None)
    """The store's id of the current load."""
    format = OfLoaded(lambda model: model.format, "")
    """Of the experts: a pack's own, or the chosen one."""
    text_to_text = OfLoaded(lambda model: model.engine.text_to_text, False)
    """Whether it writes one text for another."""
    on_gpu = OfLoaded(lambda model: model.engine.on_gpu, False)
    """Whether it computes on a GPU."""
    in_blocks = OfLoaded(lambda model: model.spec.blocks > 1, False)
    """Whether experts are cached in several blocks."""
    model = OfLoaded[str | None](lambda model: model.spec.model, None)
    """Its path, or "demo"."""
    model_id = OfLoaded[str | None](lambda model: model_id(model.spec.model), None)
    """As other programs know it."""
    model_hash = OfLoaded(lambda model: model.engine.model_hash, "")
    """As in profiles and traces."""
    shape = OfLoaded[ModelShape | None](lambda model: model.engine.shape, None)
    tried = OfLoaded(lambda model: model.engine.tried, Tried())
    """What its engine compared while answers were written."""
    context = OfLoaded[int | None](lambda model: model.engine.context, None)
    """Its maximum context in tokens."""
    weights = OfLoaded(lambda model: model.engine.weights, "")
    """The format that its weights were rounded to; "" = they are its own."""
    closeness = OfLoaded[float | None](lambda model: model.engine.closeness, 0.0)
    """Largest difference of its exact logits from transformers' own, as a share of the largest logit; 0.0 =
    bit-identical, None = not measured."""
    one_at_a_time = OfLoaded(lambda model: model.engine.one_at_a_time, "")
    """Why its prompts, or long ones, are answered one at a time; "" = no reason is known."""
    profile = OfLoaded[Profile | None](lambda model: model.engine.profile, None)
    """Its calibration profile."""

    @property
    def arithmetic(self) -> dict[str, Any]:
        """What computes the loaded model, why it is not what was chosen, and its distance from the reference, as plain
        values; without a model the reference."""
        return (loaded.engine.arithmetic if (loaded := self._loaded) is not None else REFERENCE).facts()

    @property
    def version(self) -> str:
        """Changes whenever `frame` would: identifies the load and the engine's own version."""
        with self._view:
            loaded = self._loaded
            return f"{loaded.load}.{loaded.engine.version}.{loaded.engine.moment}" if loaded is not None else "none"

    @property
    def quality(self) -> Quality | None:
        """Quality loss from lossy options, over the last scored answers; None before the first."""
        return self._viewed(lambda engine: engine.quality)

    @property
    def unscored(self) -> tuple[int, float]:
        """How many answers are yet to be scored, and the share of the first that was read for it."""
        return self._viewed(lambda engine: (engine.unscored, engine.scoring)) or (0, 0.0)

    def frame(self, layer: int = 0, points: int = 240, fewest: Fewest | None = None) -> Frame | None:
        """The data of the live deck, or None without a model. Raises MoestroError for a layer that does not exist."""

        def read(engine: Engine) -> Frame:
            if not 0 <= layer < engine.shape.layers:
                raise MoestroError(f"Layer {layer} does not exist: choose 0 to {engine.shape.layers - 1}.")
            return engine.frame(layer, points, fewest)

        return self._viewed(read)

    def limit(self, fewest: Fewest | None) -> SpeedLimit | None:
        """The share of the speed limit over the last decoded tokens; None while no model is loaded."""
        return self._viewed(lambda engine: engine.limit(fewest))

    def memory(self) -> Memory | None:
        """Device memory in use, or None while no model is loaded."""
        return self._viewed(lambda engine: engine.memory())

    def manifest(self) -> dict[str, object] | None:
        """What the loaded model's figures are measured on now, its link included; None while no model is loaded."""
        return self._viewed(lambda engine: engine.manifest())

    def count_tokens(self, prompt: AnyPrompt) -> int | None:
        """Tokens of a prompt; None while no model is loaded."""
        return self._viewed(lambda engine: engine.count_tokens(prompt) if prompt else 0)

    def _viewed(self, read: Callable[[Engine], T]) -> T | None:
        """What is read from the engine while it cannot be unloaded; None while no model is loaded."""
        with self._view:
            return read(self._loaded.engine) if self._loaded is not None else None

    # -- its users --------------------------------------------------------------------------------------------------

    def ready(self) -> Loaded:
        """The loaded model, ready for a request. Raises BusyError or ModelError."""
        if self._closed:
            raise ClosingError
        if (job := self._jobs.exclusive) is not None:
            raise BusyError(job.no_answer())
        if self._loaded is None:
            raise ModelError(NO_MODEL)
        return self._loaded

    @contextmanager
    def held(self) -> Iterator[Loaded]:
        """As `ready`, and no job takes the model until the end of the `with`."""
        with self._lock:
            yield self.ready()

    @contextmanager
    def idle(self, what: str) -> Iterator[None]:
        """Reserve the unused model until the end of the `with`, to do `what` with it, or to start a job that does.
        Raises BusyError."""
        with self._lock:
            if self._closed:
                raise ClosingError
            if (job := self._jobs.exclusive) is not None:
                raise BusyError(job.refusal(what))
            if self._answers.busy:
                raise BusyError(f"An answer is being written. Stop it or let it end, then {what}.")
            yield

    def shut(self) -> None:
        """Refuse everybody from now on."""
        with self._lock:
            self._closed = True

    # -- the one engine ----------------------------------------------------------------------------------------------

    def install(self, loaded: Loaded, moved: Mapping[str, object], start: Start) -> None:
        """Take a new engine in place of the old one; `moved` = settings changed while it was being loaded, `start` =
        what its load began with."""
        with self._lock, self._view:
            self.drop()
            self._loaded = loaded
            self._remembered.take(start)
            self._keep()
            if problem := self.change_many(moved):
                log.warning("a setting moved during the load was not taken: %s", problem)

    def unload(self) -> None:
        """Free the model's memory. Does nothing when none is loaded. Raises BusyError."""
        with self.idle("unload the model"):
            self.drop()
        self._unloaded()

    def drop(self) -> None:
        """Free the model's memory, even while it is used."""
        with self._lock, self._view:
            self._settings = self.settings
            loaded, self._loaded = self._loaded, None
            if loaded is None:
                return
            try:
                loaded.engine.unload()
            except Exception as error:
                log.exception("unexpected error while unloading")
                raise MoestroError(UNCLEAN) from error
            finally:
                self._note_end(loaded.load)
                del loaded
                release_memory()  # the parts of an engine refer to each other: only the collector frees them

    def _note_end(self, load: int) -> None:
        try:
            self._store.steps.end_load(load)
        except MoestroError as error:  # the memory is freed; the store corrects the record at its next start
            log.warning("could not note the end of a load: %s", error)

    @property
    def settings(self) -> Settings:
        """The live settings: the engine's own, or without a model those of the next load; in a job that changes them,
        those that will be restored."""
        job, loaded = self._jobs.exclusive, self._loaded
        if job is not None and job.settings is not None:
            return job.settings
        return loaded.engine.settings if loaded is not None else self._settings

    def start(self, model: str) -> Start:
        """What the load of a model begins with: in place of another one its own settings of the last time, if it had
        any; else the current ones."""
        if self._closed:  # the store, too, perhaps
            return Start(LoadSpec(model, settings=self.settings), frozenset(), FIRST)
        if (own := self._remembered.of(model)) is not None and self.model not in (None, model):
            return own
        spec = own.spec if own is not None else LoadSpec(model)
        return Start(replace(spec, settings=self.settings), self._remembered.auto, self._remembered.preset)

    def recall(self, model: str) -> None:
        """Without a loaded model or a job, a model's settings of the last time, if any, become the current ones."""
        with self._lock:
            own = self._remembered.of(model)
            if own is not None and self._loaded is None and self._jobs.exclusive is None:
                self._settings = own.spec.settings
                self._remembered.take(own)
                self._keep()
                self._changed(self._settings)

    def _keep(self) -> None:
        """The current settings are those of the next start, and of the loaded model's next load."""
        settings = self.settings
        self._remembered.put("settings", dict(settings))
        if self._loaded is not None:
            spec = replace(self._loaded.spec, settings=settings)
            self._remembered.keep(Start(spec, self._remembered.auto, self._remembered.preset))

    def change(self, name: str, value: object) -> str:
        """Change one live setting; returns the problem, or ""."""
        return self.change_many({name: value})

    def change_many(self, changes: Mapping[str, object], *, by_auto: bool = False, preset: str = "") -> str:
        """Change live settings, all or none, also while tokens stream, or without a model those of the next load;
        returns the problem, or "". What was not changed `by_auto` is left to the user from now on, until the first
        `preset` is chosen, whose values the changes then are."""
        with self._lock:
            job = self._jobs.exclusive
            if job is not None and (problem := job.no_change()):
                return problem
            try:
                with self._view:
                    new = self.settings.with_(changes)  # checks names and values, with uniform error messages
                    if self._loaded is not None:
                        new = self._loaded.engine.change(changes)
            except MoestroError as error:
                return str(error)
            except Exception:
                log.exception("unexpected error while changing %s", dict(changes))
                return "The setting was not changed because of an error inside Moestro. Its details are in the log."
            self._settings = new
            if isinstance(job, Loading):
                job.moved |= changes
        if not by_auto:
            self._remembered.auto = frozenset(KNOBS) if preset == FIRST else self._remembered.auto - changes.keys()
        self._remembered.preset = preset or self._remembered.preset
        self._keep()
        self._changed(new)
        return ""
