"""Owns the one engine: admits one user of it at a time, holds its settings, and what other threads read of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from app.services.answer_queue import AnswerQueue
from app.services.jobs import JobRunner
from app.services.loading import AnyPrompt, Loaded, Loading
from app.services.remembered import Remembered
from app.store import Store
from app.wording import model_id
from core.engine.arithmetic import REFERENCE
from core.engine.quality.report import Quality
from core.errors import BusyError, ClosingError, ModelError, MoestroError
from core.profile import Profile
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.system.process_memory import release_memory
from core.types import Frame, Memory, ModelShape

if TYPE_CHECKING:
    from core.engine import Engine

T = TypeVar("T")
log = logging.getLogger("moestro.app")
UNCLEAN = """The model was not unloaded cleanly because of an error inside Moestro. Some of its memory may stay in use \
until Moestro is started again."""
NO_MODEL = "No model is loaded. Load one first, then ask again."


class ModelManager:
    """The engine's owner. Methods may be called from any thread.

    Two locks, taken in this order: `_lock` guards the use of the model; `_view` keeps the engine from being unloaded
    while another thread reads or changes it.
    """

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

    @property
    def spec(self) -> LoadSpec | None:
        """The LoadSpec of the loaded model, with its settings at load time. `settings` are the current ones."""
        return loaded.spec if (loaded := self._loaded) is not None else None

    @property
    def in_blocks(self) -> bool:
        """Whether the loaded model's experts are cached in several blocks."""
        return (spec := self.spec) is not None and spec.blocks > 1

    @property
    def text_to_text(self) -> bool:
        """Whether the loaded model writes one text for another."""
        return (loaded := self._loaded) is not None and loaded.engine.text_to_text

    @property
    def on_gpu(self) -> bool:
        """Whether the loaded model computes on a GPU."""
        return (loaded := self._loaded) is not None and loaded.engine.on_gpu

    @property
    def model(self) -> str | None:
        """The path of the loaded model, "demo", or None."""
        return spec.model if (spec := self.spec) is not None else None

    @property
    def model_id(self) -> str | None:
        """The loaded model as other programs know it, or None."""
        return model_id(name) if (name := self.model) is not None else None

    @property
    def load_id(self) -> int | None:
        """The store's id of the current load."""
        return loaded.load if (loaded := self._loaded) is not None else None

    @property
    def format(self) -> str:
        """The loaded model's expert format: a pack's own, or the chosen one; "" while none is loaded."""
        return loaded.format if (loaded := self._loaded) is not None else ""

    @property
    def shape(self) -> ModelShape | None:
        """Sizes of the loaded model, or None."""
        return loaded.engine.shape if (loaded := self._loaded) is not None else None

    @property
    def prefetch_compared(self) -> tuple[float, float, int, bool] | None:
        """As the engine's; None without a model."""
        return loaded.engine.prefetch_compared if (loaded := self._loaded) is not None else None

    @property
    def context(self) -> int | None:
        """The loaded model's maximum context in tokens, or None."""
        return loaded.engine.context if (loaded := self._loaded) is not None else None

    @property
    def weights(self) -> str:
        """The format that the loaded model's weights were rounded to; "" = they are its own, or no model is loaded."""
        return loaded.engine.weights if (loaded := self._loaded) is not None else ""

    @property
    def closeness(self) -> float | None:
        """Largest difference of the loaded model's exact logits from transformers' own, as a share of the largest
        logit; 0.0 = bit-identical, or no model loaded, None = not measured."""
        return loaded.engine.closeness if (loaded := self._loaded) is not None else 0.0

    @property
    def arithmetic(self) -> dict[str, Any]:
        """What computes the loaded model, why it is not what was chosen, and its distance from the reference, as plain
        values; without a model the reference."""
        return (loaded.engine.arithmetic if (loaded := self._loaded) is not None else REFERENCE).facts()

    @property
    def one_at_a_time(self) -> str:
        """Why the loaded model's prompts, or long ones, are answered one at a time; "" = no reason is known, or no
        model is loaded."""
        return loaded.engine.one_at_a_time if (loaded := self._loaded) is not None else ""

    @property
    def profile(self) -> Profile | None:
        """The loaded model's calibration profile, or None."""
        return loaded.engine.profile if (loaded := self._loaded) is not None else None

    @property
    def model_hash(self) -> str:
        """Hash of the loaded model as in profiles and traces; "" while none is loaded."""
        return loaded.engine.model_hash if (loaded := self._loaded) is not None else ""

    @property
    def version(self) -> str:
        """Changes whenever `frame` would: identifies the load and the engine's own version."""
        with self._view:
            return f"{self._loaded.load}.{self._loaded.engine.version}" if self._loaded is not None else "none"

    @property
    def quality(self) -> Quality | None:
        """Quality loss from lossy options, over the last scored answers; None before the first."""
        return self._viewed(lambda engine: engine.quality)

    def frame(self, layer: int = 0, points: int = 240) -> Frame | None:
        """The data of the live deck, or None without a model. Raises MoestroError for a layer that does not exist."""

        def read(engine: Engine) -> Frame:
            if not 0 <= layer < engine.shape.layers:
                raise MoestroError(f"Layer {layer} does not exist: choose 0 to {engine.shape.layers - 1}.")
            return engine.frame(layer, points)

        return self._viewed(read)

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

    def install(self, loaded: Loaded, moved: Mapping[str, object]) -> None:
        """Take a new engine in place of the old one; `moved` = settings changed while it was being loaded."""
        with self._lock, self._view:
            self.drop()
            self._loaded = loaded
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

    # -- settings ----------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The live settings: the engine's own, or without a model those of the next load; in a job that changes them,
        those that will be restored."""
        job, loaded = self._jobs.exclusive, self._loaded
        if job is not None and job.settings is not None:
            return job.settings
        return loaded.engine.settings if loaded is not None else self._settings

    def change(self, name: str, value: object) -> str:
        """Change one live setting; returns the problem, or ""."""
        return self.change_many({name: value})

    def change_many(self, changes: Mapping[str, object], *, by_auto: bool = False) -> str:
        """Change live settings, all or none, also while tokens stream, or without a model those of the next load;
        returns the problem, or "". What was not changed `by_auto` is left to the user from now on."""
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
            self._remembered.auto -= changes.keys()
        self._remembered.put("settings", dict(new))
        self._changed(new)
        return ""
