"""Auto: chooses in the user's place, setting by setting, until one is changed by hand.

The memory budget is the most that is safe when a model is loaded (`app.services.loader`). The cache policy begins as
the preset's; another one replaces it once the caches simulated beside the engine's (`app.services.regret`) show that it
surely hits more on the tokens just computed. What was chosen is kept for the model and its budget, and the next load
begins with it. Whether to prefetch is compared by the engine itself, token by token."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.services.model_manager import ModelManager
from app.services.regret import Regret
from app.services.remembered import Remembered
from core.errors import MoestroError
from core.memory.link import Link
from core.settings.presets import FIRST, preset
from core.settings.registry import variant

log = logging.getLogger("moestro.app")
KEPT, MOST = "auto_policies", 64  # store key; models and budgets of which a choice is kept
LEAST = 0.002  # of the requests, that another policy has to hit more


@dataclass(frozen=True, slots=True)
class Compared:
    """What the choice of a cache policy rests on: hit rates of simulated caches by policy's title on the same `tokens`,
    the best first, and what each would cost beside the `chosen` one in ms a token, if every miss were waited for over
    the link, which may be `emulated`; None = link unknown."""

    chosen: str
    tokens: int
    emulated: bool
    rates: list[tuple[str, float, float | None]]


class Auto:
    """One per application. `look` may be called from any thread."""

    def __init__(self, models: ModelManager, remembered: Remembered, regret: Regret) -> None:
        self._models, self._remembered, self._regret = models, remembered, regret
        self._lock = threading.Lock()

    def begun(self) -> None:
        """A model was loaded: begin with the policy that was chosen for it and its budget before, else the preset's."""
        if "eviction" in self._remembered.auto:
            kept = self._kept().get(self._key(), str(preset(FIRST).values["eviction"]))
            if str(self._models.settings["eviction"]) != kept:
                self._choose(kept)

    def look(self) -> None:
        """New figures may be there: choose another cache policy if it surely hits more."""
        with self._lock:
            if "eviction" not in self._remembered.auto:
                return
            view = self._view()
            if view is None or view["state"] != "ready" or not view["better"] or view["gain"] < LEAST:
                return
            best = str(view["best"])
            if self._choose(best):
                log.info(
                    "Auto: %s in place of %s, as it hits %.1f %% of the requests more (± %.1f) on the last %d tokens.",
                    view["best_title"],
                    view["title"],
                    100 * view["gain"],
                    100 * view["error"],
                    view["tokens"],
                )
                kept = {name: one for name, one in self._kept().items() if name != self._key()}
                self._remembered.put(KEPT, dict([*kept.items(), (self._key(), best)][-MOST:]))

    def compared(self) -> Compared | None:
        """What the choice of the cache policy rests on now; None before enough tokens."""
        view, shape = self._view(), self._models.shape
        if view is None or view["state"] != "ready" or shape is None:
            return None
        try:
            link = Link.read(self._models.manifest() or {})
        except (MoestroError, ValueError):
            link = None
        rates: list[tuple[str, float, float | None]] = []
        requests = shape.layers * shape.top_k
        for title, rate in view["rates"]:
            more = (view["alone"] - rate) * requests
            rates.append((title, rate, more * link.copy_ms(shape.expert_bytes) if link is not None else None))
        return Compared(str(view["title"]), int(view["tokens"]), link is not None and link.emulated, rates)

    def _choose(self, policy: str) -> bool:
        """Whether it was taken."""
        try:
            variant("eviction", policy)
        except MoestroError:  # of another version
            return False
        problem = self._models.change_many({"eviction": policy}, by_auto=True)
        if problem:
            log.warning("Auto could not choose %s: %s", policy, problem)
        return not problem

    def _view(self) -> dict[str, Any] | None:
        models = self._models
        return self._regret.view(
            models.load_id, models.settings, in_blocks=models.in_blocks, text_to_text=models.text_to_text
        )

    def _kept(self) -> Mapping[str, str]:
        return self._remembered.result(KEPT, lambda kept: {str(name): str(one) for name, one in kept.items()}) or {}

    def _key(self) -> str:
        """The model and its budget."""
        return f"{self._models.model_hash} {self._models.settings.cache.budget}"
