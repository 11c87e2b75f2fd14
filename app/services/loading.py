"""A loaded model, what is read of one, and the job that loads one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from app.services.jobs import ModelJob
from app.store.home import DISTANCES, KERNELS, PACES, PRODUCTS, data_dir
from app.wording import short_name
from core.errors import MoestroError
from core.settings.loading import LoadSpec
from core.types import Begun, Chat, Fit

if TYPE_CHECKING:
    from app.services.model_manager import ModelManager
    from core.engine import Engine

T = TypeVar("T")
Estimate = Callable[[LoadSpec], Fit]
AnyPrompt = Sequence[Mapping[str, Any]] | str | Chat | Begun  # with tools a Chat; Begun: an answer to continue


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model."""

    engine: Engine
    spec: LoadSpec  # its settings are those at load time
    load: int  # the store's id of this load
    format: str  # of its experts: a pack's own, or the chosen one
    effective: dict[str, Any]  # settings in force at the last recorded pass; the thread that writes answers updates it


class OfLoaded(Generic[T]):
    """What is read of the loaded model; `without` one a constant."""

    def __init__(self, read: Callable[[Loaded], T], without: T) -> None:
        self._read, self._without = read, without

    def __get__(self, models: ModelManager | None, of: type[ModelManager]) -> T:
        if models is None:  # of the class
            return self._without
        return self._read(loaded) if (loaded := models.loaded) is not None else self._without


def engine_type() -> type[Engine]:
    """The engine, which keeps what it compiles, times and compares in the user's data folder. Imported here, so that
    no command imports torch before it needs it."""
    from core.engine import Engine, arithmetic, kept_pace
    from core.memory.codec.fast import choice
    from core.system.native import kept_code

    kept_code.keep_in(data_dir() / KERNELS)
    choice.keep_in(data_dir() / PRODUCTS)
    arithmetic.keep_in(data_dir() / DISTANCES)
    kept_pace.keep_in(data_dir() / PACES)
    return Engine


class Loading(ModelJob):
    """A model being loaded, or the outcome of the last load. `fate`: what became of the model loaded before, when this
    load failed; "" = there was none."""

    name, doing, tab = "load", "loaded", ""
    undone = "Not loaded"

    def __init__(self, model: str) -> None:
        super().__init__("Checking that it fits", model)
        self.fate = ""
        self.moved: dict[str, object] = {}  # settings changed during the load, for the new engine
        self.short = short_name(model)
        self.done = f"{self.short} is ready"
        self.unexpected = (
            f"{self.short} could not be loaded because of an error inside Moestro. Its details are in the log."
        )

    def refusal(self, what: str) -> str:
        return f"{self.short} is being loaded. Wait for it or cancel it, then {what}."

    def no_answer(self) -> str:
        return f"{self.short} is still being loaded. Ask again when it is ready."

    def outcome(self, error: Exception | None) -> dict[str, Any]:
        fields = super().outcome(error)
        if error is not None and self.fate:
            fields["text"] = f"{fields['text']}. {self.fate}"
            if "error" in fields:
                fields["error"] = f"{fields['error']} {self.fate}"
        return fields

    def go_on(self) -> None:
        """Raises MoestroError when it was cancelled."""
        if self.cancelled.is_set():
            raise MoestroError("Cancelled.")
