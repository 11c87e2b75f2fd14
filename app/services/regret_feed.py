"""The protocol with the shadow caches' process: send a setup, warm-up passes, counted passes; request figures."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from app.services.regret_process import Process
from core.policy.allocation.slot_allocation import AllocationProfile, place
from core.settings.config import Settings, general
from core.settings.param import Value
from core.settings.registry import variants
from core.simulate.regret import Setup
from core.types import ModelShape, StepRecord

WINDOW = 512  # last tokens that are compared
RECENT = 1024  # tokens kept for warming new shadow caches
BATCH = 64  # passes per message; bounds the delay of a stop
# largest share of the process's time spent on the bound: the costlier it is, the more rarely it is computed
SHARE = 0.1
ASIDE = frozenset(name for name, param in general().items() if not param.resets_comparison)


@dataclass(frozen=True, slots=True)
class Step:
    """A pass of the engine, with the settings in force when it was computed."""

    load: int
    shape: ModelShape
    settings: Settings
    record: StepRecord
    profile: AllocationProfile | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """Figures of passes computed under the same settings `of` (see `in_force`). `report`: the fields of
    core.simulate.regret.RegretReport; None = none yet. `left_out`: passes dropped because the process fell behind.
    `until`: the index of the last pass."""

    of: tuple[object, ...]
    report: dict[str, Any] | None = None
    left_out: int = 0
    until: int = -1


class Feed:
    """Used by one thread. `start` creates a process; its figures go to `publish`. Methods raise Lost when the process
    is gone; call `let_go` then, and the next `take` starts another."""

    def __init__(self, start: Callable[[], Process], publish: Callable[[Compared], None]) -> None:
        self._start, self._publish = start, publish
        self.process: Process | None = None
        self._setup: tuple[object, ...] = ()
        self._of: tuple[object, ...] = ()
        self._recent: deque[Step] = deque()
        self._tokens = 0  # in `_recent`
        self._owed, self._next_s = False, 0.0
        self._left_out, self._until = 0, -1

    @property
    def due_s(self) -> float | None:
        """Seconds until `report` is due; None = nothing new to report."""
        return max(0.0, self._next_s - time.perf_counter()) if self._owed else None

    def take(self, steps: Sequence[Step], left_out: int = 0) -> None:
        """Feed passes in order. Those before the last change of setup, and those without routing, are not counted."""
        self._left_out += left_out
        steps = [step for step in steps if step.record.ids.size]
        groups = [(setup, list(group)) for setup, group in groupby(steps, setup_of)]
        for number, (setup, group) in enumerate(groups, 1):
            if number == len(groups):
                if setup != self._setup or self.process is None:
                    self._begin(group[0])
                for of, part in groupby(group, in_force):
                    self._count(of, list(part))
            for step in group:
                self._remember(step)

    def report(self) -> None:
        """Request the figures and publish them."""
        answer = self._ask({"report": True})
        self._next_s = time.perf_counter() + answer["spent_s"] * (1 / SHARE - 1)
        self._owed = False
        self._publish(Compared(self._of, answer["report"], self._left_out, self._until))

    def let_go(self) -> None:
        """End the process, if there is one."""
        process, self.process = self.process, None
        self._setup, self._owed = (), False
        if process is not None:
            process.end()

    def forget(self) -> None:
        """End the process and discard the kept passes."""
        self.let_go()
        self._recent.clear()
        self._tokens = self._left_out = 0

    def _begin(self, step: Step) -> None:
        """Create new shadow caches, warmed with the kept passes of this model."""
        self._keep_to(step.load)
        if self.process is None:
            self.process = self._start()
        self._ask({"setup": asdict(imitated(step)), "window": WINDOW})
        recent = list(self._recent)
        for at in range(0, len(recent), BATCH):
            self._ask({"warm": True}, arrays(recent[at : at + BATCH]))
        self._setup, self._of, self._left_out = setup_of(step), (), 0

    def _count(self, of: tuple[object, ...], steps: Sequence[Step]) -> None:
        forget = of != self._of
        for at in range(0, len(steps), BATCH):
            self._ask({"forget": forget and at == 0}, arrays(steps[at : at + BATCH]))
        if forget:
            self._of = of
            self._publish(Compared(of, None, self._left_out))
        self._owed, self._until = True, steps[-1].record.index

    def _keep_to(self, load: int) -> None:
        """Discard kept passes of other loads."""
        if self._recent and self._recent[-1].load != load:
            self._recent.clear()
            self._tokens = 0

    def _remember(self, step: Step) -> None:
        self._keep_to(step.load)
        self._recent.append(step)
        self._tokens += step.record.tokens
        while self._tokens > RECENT and len(self._recent) > 1:
            self._tokens -= self._recent.popleft().record.tokens

    def _ask(self, head: dict[str, Any], passes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        assert self.process is not None
        return self.process.ask(head, passes)


def setup_of(step: Step) -> tuple[object, ...]:
    """The settings that determine the shadow caches; a change starts new ones."""
    cache = step.settings.cache
    return (
        step.load,
        step.record.slots,
        id(step.profile),
        (cache.scope, cache.layer_slots, cache.pins, cache.bypass),
        policies(step.settings),
    )


def in_force(step: Step) -> tuple[object, ...]:
    """Key of a pass: the engine's figures of two passes may be summed only if their keys are equal."""
    return choices(step.load, step.settings)


def choices(load: int | None, settings: Settings) -> tuple[object, ...]:
    """The same key, from settings."""
    return load, *((name, settings[name]) for name in settings if name not in ASIDE)


def imitated(step: Step) -> Setup:
    """The setup of the shadow caches. Raises SettingError where the engine would."""
    shape, settings = step.shape, step.settings
    slots = step.record.slots * shape.layers // shape.cached_layers  # without those of a head
    placed = place(settings.cache, shape.layers, shape.experts, shape.top_k, step.profile)
    return Setup(
        shape.layers,
        shape.experts,
        shape.top_k,
        slots,
        settings.cache.scope,
        policies(settings),
        placed.sizes(slots),
        sorted(placed.pinned),
        placed.usual.tolist() if placed.usual.any() else [],
        placed.aside(slots),
    )


def policies(settings: Settings) -> dict[str, dict[str, Value]]:
    """Every registered eviction policy with its current parameters."""
    return {v.name: dict(settings.choice("eviction", v.name).params) for v in variants("eviction")}


def arrays(steps: Sequence[Step]) -> dict[str, Any]:
    """The passes as arrays for the process."""
    records = [step.record for step in steps]
    return {
        "ids": np.concatenate([one.ids.transpose(1, 0, 2) for one in records]),
        "sizes": np.array([one.tokens for one in records], np.int32),
        "decode": np.array([one.phase == "decode" for one in records]),
        "hits": np.array([one.hits for one in records], np.int32),
        "requests": np.array([one.requests for one in records], np.int32),
    }
