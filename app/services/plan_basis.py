"""What plans of the loaded model's cache follow from: hit curves and the worth of predictions, of the session or of
calibration; times, a budget."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

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
from core.profile.trace.ranking import NONE, PassRankings, Ranking
from core.settings.config import Settings
from core.simulate.curves import routed_curves
from core.types import StepRecord

NEEDED = (
    "A plan follows from hit curves and measured times. Calibrate the model with “Hit curves” and “Measured times” "
    "ticked, then plan again."
)
MOST = 5000  # decoded tokens kept, with their rankings: those of one of MoEpic's periods (section 4.1)
MOST_BYTES = 80 << 20  # of their ids, at most, and of their rankings
ENOUGH = 500  # decoded tokens of a session that its own hit curves are taken from; with predictions, P and PH, too


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


class Routed(NamedTuple):
    """Decoded tokens of one load, oldest first."""

    ids: npt.NDArray[np.int16]  # [T, L, k] their experts
    ranked: Ranking  # [R, L, E] what was predicted for the last R of them, NONE after a ranking's last expert


class RoutedTokens:
    """The routing of the session's decoded tokens, and what was predicted for them, of one load at a time. `add` is
    called by the thread that writes answers, and only appends; the rest by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._load: int | None = None
        self._ids: deque[npt.NDArray[np.int16]] = deque()
        self._ranked: deque[Ranking] = deque()  # of the last ones, without a gap
        self._passes: PassRankings | None = None  # None: the last pass recorded no predictions
        self._ranked_load: int | None = None  # of these
        self._tokens = 0  # since the load, those forgotten included

    def add(self, load: int, step: StepRecord, experts: int) -> None:
        """A pass of a load over a model of so many `experts` a layer: kept if it decoded one token. The first one of
        another load forgets what was kept; one without recorded predictions or with another predictor forgets the
        rankings."""
        if not step.ids.size:
            return
        decoded = step.phase == "decode" and step.tokens == 1
        ranking = self._ranking(load, step, experts)
        if not decoded:
            return
        ids = np.array(step.ids[:, 0], np.int16)
        with self._lock:
            if load != self._load or (self._ids and self._ids[0].shape != ids.shape):
                self._load, self._tokens = load, 0
                self._ids = deque(maxlen=max(1, min(MOST, MOST_BYTES // ids.nbytes)))
            self._ids.append(ids)
            self._tokens += 1
            if ranking is None:
                self._ranked.clear()
            else:
                self._ranked.append(ranking)

    def _ranking(self, load: int, step: StepRecord, experts: int) -> Ranking | None:
        """[L, E] what was predicted for a pass; None = that was not recorded."""
        if step.ranked is None:
            self._passes = None
            return None
        changed = any(name.startswith("predictor") for name in step.changes)
        if self._passes is None or changed or load != self._ranked_load:
            layers = step.ids.shape[0]
            self._passes, self._ranked_load = PassRankings(layers, experts), load
            with self._lock:
                self._ranked = deque(maxlen=max(1, min(MOST, MOST_BYTES // (2 * layers * experts))))
        ranking: Ranking = self._passes.take(step.ranked)[0]
        return ranking

    def tokens(self, load: int | None) -> int:
        """Tokens decoded since that load, those no longer kept included."""
        with self._lock:
            return self._tokens if load == self._load else 0

    def snapshot(self, load: int | None) -> Routed | None:
        """What is kept of that load; None when there is nothing."""
        with self._lock:
            kept, ranked = (list(self._ids), list(self._ranked)) if load == self._load else ([], [])
        if not kept:
            return None
        return Routed(np.stack(kept), np.stack(ranked) if ranked else np.zeros((0, kept[0].shape[0], 0), np.int16))


class SessionCurves(NamedTuple):
    """Curves of a session, and what they are from, in the user's words."""

    curves: Curves
    basis: str


class Basis:
    """Gathers it. Methods may be called from any thread."""

    def __init__(self, models: ModelManager, routed: RoutedTokens) -> None:
        self._models, self._routed = models, routed
        self._lock = threading.Lock()
        self._session: tuple[tuple[int | None, int, int], SessionCurves] | None = None

    def known(self, wanted: Callable[[], bool] = lambda: True) -> Known | None:
        """For the budget, the link and the settings in force; None as soon as it is not `wanted` any more.

        Raises SettingError when there is nothing to plan from, BusyError or ModelError without a free model."""
        loaded = self._models.ready()
        profile, engine = loaded.engine.profile, loaded.engine
        if profile is None or profile.times is None:
            raise SettingError(NEEDED)
        found = self._session_curves(loaded, profile, wanted)
        if not wanted():
            return None
        curves = found.curves if found is not None else profile.curves()
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
            found.basis if found is not None else "from calibration",
            loaded.load,
        )

    def _session_curves(self, loaded: Loaded, profile: Profile, wanted: Callable[[], bool]) -> SessionCurves | None:
        """Of the session's own tokens, if there are enough. What predictions are worth is the profile's where too few
        of them have a recorded prediction."""
        tokens = self._routed.tokens(loaded.load)
        if tokens < ENOUGH:
            return None
        kept, key = self._session, (loaded.load, tokens, id(profile))
        if kept is not None and kept[0] == key:
            return kept[1]
        with self._lock:  # one replay at a time
            routed = self._routed.snapshot(loaded.load)
            if routed is None:
                return None
            predicted = int((routed.ranked != NONE).any((1, 2)).sum()) >= ENOUGH
            curves = routed_curves(routed.ids, profile.experts, routed.ranked if predicted else None, wanted)
            if curves is None:
                return None
            basis = f"from {count(curves.tokens)} tokens of this session"
            found = SessionCurves(curves, f"{basis} and what was predicted for the last {count(len(routed.ranked))}")
            if not predicted:
                found = SessionCurves(_with_predictions(curves, profile), basis)
            self._session = key, found
            return found


def _with_predictions(curves: Curves, profile: Profile) -> Curves:
    """These hit rates with the predictions that calibration measured, or that its recall stands for."""
    measured = profile.curves()
    if measured is not None:
        return replace(measured, hit=curves.hit, tokens=curves.tokens)
    return curves if profile.gate_recall is None else curves.with_recall(profile.gate_recall)
