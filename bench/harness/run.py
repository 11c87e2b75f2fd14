"""A suite, and one run of it: its options, its engines, its rounds, and the head of its result."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch

from app.services import probes
from core.engine import Engine
from core.engine.manifest import device_name, versions
from core.errors import MoestroError
from core.settings.config import Settings
from core.settings.loading import LoadSpec

K = TypeVar("K")
T = TypeVar("T")
Result = dict[str, Any]
RESIDENT: Mapping[str, object] = {"budget": "all", "link": "own"}  # nothing is fetched, nothing emulated
LATENCY_US = 10.0  # of an emulated link


class Suite(NamedTuple):
    """A measurement. The keyword parameters of `measure` are its options; it returns its figures as plain data, and
    `table` shows the whole result. `small`: values of options for a smoke test."""

    measure: Callable[..., Result]
    table: Callable[[Result], Sequence[str]]
    small: Mapping[str, Any] = {}

    @property
    def options(self) -> dict[str, Any]:
        """Name -> default."""
        _, *parameters = inspect.signature(self.measure).parameters.values()
        return {one.name: one.default for one in parameters}

    def run(
        self,
        *,
        say: Callable[[str], None] = lambda text: None,
        small: bool = False,
        keep: Path | None = None,
        so_far: Callable[[Result], None] = lambda found: None,
        **given: Any,
    ) -> Result:
        """The result: what was measured on, the options, the figures. `keep`: a folder that stays, for what is large or
        lets an interrupted run continue; None: a temporary one. `so_far` is called with a result that is not complete
        yet, by suites that may be stopped."""
        options = {**self.options, **(self.small if small else {}), **given}
        with Run(say, small, keep, so_far) as run:
            found = self.measure(run, **options)
            plain = {
                name: value for name, value in options.items() if value is None or isinstance(value, (str, int, float))
            }
            return {**plain, **run.about, **found}


class Run:
    """What a suite gets. Engines end, and a temporary folder goes, with it."""

    def __init__(
        self, say: Callable[[str], None], small: bool, keep: Path | None, so_far: Callable[[Result], None]
    ) -> None:
        self.say, self.small, self.so_far = say, small, so_far
        self.about, self.threads = machine(torch.device("cpu")), torch.get_num_threads()
        self._keep, self._stack = keep, ExitStack()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def folder(self, stays: bool = True) -> Path:
        """Where files may be written: the folder that stays if there is one, else a temporary one."""
        if self._keep is None or not stays:
            return Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._keep.mkdir(parents=True, exist_ok=True)
        return self._keep

    @contextmanager
    def loaded(
        self, model: str, settings: Mapping[str, object] = RESIDENT, *, endless: bool = False, **load: Any
    ) -> Iterator[Engine]:
        """An engine. The first one of a run is in the head of the result. `endless`: answers end at their limit only,
        so that all have the same number of tokens."""
        self.say(f"loading {Path(model).name}")
        engine = Engine.load(LoadSpec.checked(model, Settings(dict(settings)), **load))
        try:
            if endless:
                engine.prompt.ends = set()
            if "model" not in self.about:
                self.about |= {**machine(engine.device), **subject(engine)}
            yield engine
        finally:
            engine.unload()

    def engine(self, model: str, settings: Mapping[str, object] = RESIDENT, **more: Any) -> Engine:
        """The same, until the run ends."""
        return self.open(self.loaded(model, settings, **more))

    def open(self, what: AbstractContextManager[T]) -> T:
        """What is used until the run ends."""
        return self._stack.enter_context(what)

    def rounds(self, count: int, *, warm: bool = True, what: str = "") -> Iterator[int]:
        """1 to `count`, after 0 if `warm`, which is a warm-up and to be discarded."""
        before = f"{what}: " if what else ""
        for number in range(0 if warm else 1, count + 1):
            self.say(f"{before}round {number} of {count}" if number else f"{before}warming up")
            yield number

    def by_turns(
        self,
        variants: Sequence[K],
        measure: Callable[[K, int], T],
        rounds: int,
        *,
        warm: bool = True,
        alternate: bool = True,
        what: str = "",
    ) -> dict[K, list[T]]:
        """What `measure(variant, round)` gives, each variant once a round, every other round backwards if `alternate`:
        variant -> a value for each round."""
        found: dict[K, list[T]] = {variant: [] for variant in variants}
        for number in self.rounds(rounds, warm=warm, what=what):
            for variant in variants if number % 2 or not alternate else variants[::-1]:
                one = measure(variant, number)
                if number:
                    found[variant].append(one)
        return found


def chosen(what: str, asked: str, known: Iterable[str]) -> list[str]:
    """Of a list with commas. Raises MoestroError for an unknown one."""
    names = [name.strip() for name in asked.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise MoestroError(f"There is no {what} {', '.join(unknown)} here. Choose of {', '.join(known)}.")
    return names


def numbers(asked: str, default: Sequence[int]) -> list[int]:
    """Of a list with commas, "" = the default. Raises MoestroError for what is not a whole number above 0."""
    words = [word.strip() for word in asked.split(",") if word.strip()]
    if wrong := [word for word in words if not word.isdecimal() or not int(word)]:
        raise MoestroError(f"{', '.join(wrong)} is not a whole number above 0.")
    return [int(word) for word in words] or [*default]


def machine(device: torch.device) -> Result:
    """What figures were measured on."""
    return {
        "machine": probes.machine(),
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def subject(engine: Engine) -> Result:
    """The model, its shape, the arithmetic that computes it, and the threads that decode it."""
    shape = engine.shape
    return {
        "model": Path(engine.model_name).name,
        "model_hash": engine.model_hash,
        "layers": shape.layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "arithmetic": engine.arithmetic.name,
        "decode_threads": engine.manifest()["decode_threads"],
    }
