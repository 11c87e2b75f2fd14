"""What plans of the loaded model's cache follow from: hit curves of the session or of calibration, times, a budget."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from app.services.loading import Loaded
from app.services.model_manager import ModelManager
from app.wording import count
from core.errors import SettingError
from core.policy.allocation.cache_plan import CachePlan
from core.policy.allocation.configurator import WHOLE, plan_given
from core.policy.allocation.curves import Curves
from core.policy.allocation.expert_split import LayerTimes
from core.policy.allocation.slot_allocation import place, prefetch_buffer
from core.policy.allocation.slots import shares
from core.profile import Profile
from core.settings.config import Settings
from core.simulate.curves import routed_hits
from core.types import StepRecord

NEEDED = (
    "A plan follows from hit curves and measured times. Calibrate the model with “Hit curves” and “Measured times” "
    "ticked, then plan again."
)
MOST = 100_000  # decoded tokens kept: the last ones
MOST_BYTES = 80 << 20  # of their ids, at most
ENOUGH = 500  # decoded tokens of a session that its own hit curves are taken from


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What plans follow from. `experts` of the budget, of which `buffer` are no layer's; each in `blocks`. `basis`: of
    the hit curves, in the user's words; `load`: of the model."""

    profile: Profile
    curves: Curves
    times: LayerTimes
    experts: int
    buffer: int
    blocks: int
    basis: str
    load: int | None

    @property
    def rest(self) -> int:
        """Experts that the layers share."""
        return max(0, self.experts - self.buffer)

    @property
    def theta(self) -> float | None:
        """The one part that is possible, None where any is."""
        return WHOLE if self.blocks == 1 else None

    @property
    def least(self) -> float:
        """Experts that a layer cannot do without: split ones are computed in the buffer."""
        return float(self.curves.top_k) if self.blocks == 1 else 0.0

    def in_force(self, settings: Settings) -> CachePlan:
        """What the latency model expects of the division and split by these settings. Raises SettingError."""
        curves, blocks = self.curves, self.blocks
        layers, total = curves.layers, self.experts * blocks
        placed = place(settings.cache, layers, curves.experts, curves.top_k, self.profile, blocks)
        sizes = placed.sizes(total) if placed.scope == "layer" else shares(total - placed.aside(total), layers)
        tops = placed.tops if blocks > 1 else (1,) * layers
        plan = self.profile.plan
        rounds = plan.rounds if plan is not None else 0
        slots = [min(size / blocks, float(curves.experts)) for size in sizes]
        return plan_given(curves, self.times, slots, [top / blocks for top in tops], rounds)


class RoutedTokens:
    """The routing of the session's decoded tokens, of one load at a time. `add` is called by the thread that writes
    answers, and only appends; the rest by any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._load: int | None = None
        self._ids: deque[npt.NDArray[np.int16]] = deque()
        self._tokens = 0  # since the load, those forgotten included

    def add(self, load: int, step: StepRecord) -> None:
        """A pass of a load: kept if it decoded one token. The first one of another load forgets what was kept."""
        if step.phase != "decode" or step.tokens != 1 or not step.ids.size:
            return
        ids = np.array(step.ids[:, 0], np.int16)
        with self._lock:
            if load != self._load or (self._ids and self._ids[0].shape != ids.shape):
                self._load, self._tokens = load, 0
                self._ids = deque(maxlen=max(1, min(MOST, MOST_BYTES // ids.nbytes)))
            self._ids.append(ids)
            self._tokens += 1

    def tokens(self, load: int | None) -> int:
        """Tokens decoded since that load, those no longer kept included."""
        with self._lock:
            return self._tokens if load == self._load else 0

    def snapshot(self, load: int | None) -> npt.NDArray[Any] | None:
        """The kept experts [T, L, k] of that load, oldest first; None when there are none."""
        with self._lock:
            kept = list(self._ids) if load == self._load else []
        return np.stack(kept) if kept else None


class Basis:
    """Gathers it. Methods may be called from any thread."""

    def __init__(self, models: ModelManager, routed: RoutedTokens) -> None:
        self._models, self._routed = models, routed
        self._lock = threading.Lock()
        self._session: tuple[tuple[int | None, int, int], Curves] | None = None

    def known(self, wanted: Callable[[], bool] = lambda: True) -> Known | None:
        """For the budget, the link and the settings in force; None as soon as it is not `wanted` any more.

        Raises SettingError when there is nothing to plan from, BusyError or ModelError without a free model.
        """
        loaded = self._models.ready()
        profile, engine = loaded.engine.profile, loaded.engine
        if profile is None or profile.times is None:
            raise SettingError(NEEDED)
        found = self._session_curves(loaded, profile, wanted)
        if not wanted():
            return None
        curves = found or profile.curves()
        if curves is None:
            raise SettingError(NEEDED)
        frame, settings = engine.frame(points=1), engine.settings
        shape, blocks = frame.shape, loaded.spec.blocks
        load_ms = shape.expert_bytes / max(frame.link_limit_gbps, 1e-3) / 1e6
        load_ms += settings.link.latency_us / 1e3 if frame.emulated else 0.0
        return Known(
            profile,
            curves,
            LayerTimes.of({**profile.times, "load": load_ms}),
            frame.memory.experts // shape.expert_bytes,
            prefetch_buffer(settings.cache.buffer, shape.top_k, blocks),
            blocks,
            f"from {count(curves.tokens)} tokens of this session" if found is not None else "from calibration",
            loaded.load,
        )

    def _session_curves(self, loaded: Loaded, profile: Profile, wanted: Callable[[], bool]) -> Curves | None:
        """Of the session's own tokens, if there are enough. What predictions are worth is not recorded: that is the
        profile's."""
        tokens = self._routed.tokens(loaded.load)
        if tokens < ENOUGH:
            return None
        kept, key = self._session, (loaded.load, tokens, id(profile))
        if kept is not None and kept[0] == key:
            return kept[1]
        with self._lock:  # one replay at a time
            ids = self._routed.snapshot(loaded.load)
            found = routed_hits(ids, profile.experts, wanted) if ids is not None else None
            if found is None:
                return None
            curves = _with_predictions(*found, profile)
            self._session = key, curves
            return curves


def _with_predictions(hit: np.ndarray[tuple[int, ...], np.dtype[np.float64]], tokens: int, profile: Profile) -> Curves:
    """These hit rates with the predictions that calibration measured, or that its recall stands for."""
    layers, sizes = hit.shape
    measured = profile.curves()
    if measured is not None:
        return replace(measured, hit=hit, tokens=tokens)
    curves = Curves(profile.top_k, tokens, hit, np.zeros((layers, 0)), np.zeros((layers, sizes, 0)))
    return curves if profile.gate_recall is None else curves.with_recall(profile.gate_recall)
