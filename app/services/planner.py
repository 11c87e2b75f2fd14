"""Plans the loaded model's cache with MoEpic's configurator, puts a plan into force, and takes it back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from app.services.model_manager import ModelManager
from core.errors import ProfileError, SettingError
from core.policy.allocation.cache_plan import CachePlan
from core.policy.allocation.configurator import WHOLE, least_budget, plan_adapmoe, plan_cache, plan_even
from core.policy.allocation.curves import Curves
from core.policy.allocation.expert_split import LayerTimes
from core.policy.allocation.slot_allocation import prefetch_buffer
from core.profile import Profile, profile_path, save
from core.settings.config import Settings
from core.settings.param import Value

NEEDED = (
    "A plan follows from hit curves and measured times. Calibrate the model with “Hit curves” and “Measured times” "
    "ticked, then plan again."
)
TOKENS = 240  # last forward passes that a measurement is taken from
NOTHING = 1e-9  # a part that is none, to the configurator


@dataclass(frozen=True, slots=True)
class Proposal:
    """`plan`, and beside it what the same model expects of other divisions of the same memory; `now` is the one in
    use. `experts` of the budget, of which `buffer` are no layer's; each in `blocks`. `load`: of the model it is of."""

    plan: CachePlan
    now: CachePlan
    others: Mapping[str, CachePlan]
    experts: int
    buffer: int
    blocks: int
    load: int | None


@dataclass(frozen=True, slots=True)
class Known:
    """What plans of the loaded model follow from. `experts` of the budget, of which `buffer` are no layer's."""

    profile: Profile
    curves: Curves
    times: LayerTimes
    experts: int
    buffer: int
    blocks: int

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


@dataclass(frozen=True, slots=True)
class Used:
    """A plan in force: what was before it, and the last forward pass before it."""

    proposal: Proposal
    before: CachePlan | None
    settings: Mapping[str, Value]
    step: int


class Planner:
    """Of the loaded model. Methods return at once and may be called from any thread; they raise MoestroError."""

    def __init__(self, folder: Path, models: ModelManager) -> None:
        """`folder`: of the data, where profiles are stored."""
        self._folder, self._models = folder, models
        self._used: tuple[int, Used] | None = None  # with the load that it is of

    @property
    def used(self) -> Used | None:
        """The plan that was put into force and can be taken back; None after another load."""
        return self._used[1] if self._used is not None and self._used[0] == self._models.load_id else None

    def propose(self) -> Proposal:
        """Plan for the budget, the link and the settings in force."""
        known = self._known()
        curves, times, rest, blocks = known.curves, known.times, known.rest, known.blocks
        others = {"Even, whole experts": plan_even(curves, times, rest, WHOLE)}
        if blocks > 1:
            others["Even, halves"] = plan_even(curves, times, rest, 0.5)
        others["AdapMoE, whole experts"] = plan_adapmoe(curves, times, rest)
        return Proposal(
            plan_cache(curves, times, rest, theta=known.theta, least=known.least),
            _now(known, self._models.settings),
            others,
            known.experts,
            known.buffer,
            blocks,
            self._models.load_id,
        )

    def least(self, tpot_ms: float) -> tuple[int, int, CachePlan]:
        """The fewest experts, buffer included, that a token is predicted to take no more than `tpot_ms` with, of how
        many there are, and their plan."""
        known = self._known()
        plan = least_budget(known.curves, known.times, tpot_ms, theta=known.theta, least=known.least)
        total = known.curves.layers * known.curves.experts
        return min(total, math.ceil(plan.budget - 1e-6) + known.buffer), total, plan

    def _known(self) -> Known:
        loaded = self._models.ready()
        profile, frame, settings = loaded.engine.profile, loaded.engine.frame(), loaded.engine.settings
        curves = profile.curves() if profile is not None else None
        if profile is None or curves is None or profile.times is None:
            raise SettingError(NEEDED)
        shape, blocks = frame.shape, self._models.spec.blocks if self._models.spec is not None else 1
        load_ms = shape.expert_bytes / max(frame.link_limit_gbps, 1e-3) / 1e6
        load_ms += settings.link.latency_us / 1e3 if frame.emulated else 0.0
        times = LayerTimes.of({**profile.times, "load": load_ms})
        buffer = prefetch_buffer(settings.cache.buffer, shape.top_k, blocks)
        return Known(profile, curves, times, frame.memory.experts // shape.expert_bytes, buffer, blocks)

    def use(self, proposal: Proposal) -> None:
        """Keep the plan in the profile, and divide and split by it from the next forward pass on."""
        models = self._models
        loaded, settings = models.ready(), models.settings
        if proposal.load != models.load_id:
            raise SettingError("This plan is of a model that is not loaded any more. Plan again.")
        changes: dict[str, Value] = {"layer_slots": "moepic"}
        if proposal.blocks > 1:
            changes["split"] = "moepic"
        before = Used(
            proposal,
            None if loaded.engine.profile is None else loaded.engine.profile.plan,
            {name: settings[name] for name in changes},
            int(max(loaded.engine.frame(points=1).columns["step"], default=-1)),
        )
        self._keep(proposal.plan)
        if problem := models.change_many(changes):
            self._keep(before.before)
            raise SettingError(problem)
        assert models.load_id is not None
        self._used = models.load_id, before

    def undo(self) -> None:
        """What was before the plan."""
        used = self.used
        if used is None:
            raise SettingError("No plan was put into use since this model was loaded.")
        if problem := self._models.change_many(used.settings):
            raise SettingError(problem)
        self._keep(used.before)
        self._used = None

    def waited_ms(self) -> tuple[float | None, float | None]:
        """Mean waiting for copies of a decoded token, of the last ones before the plan in force and of those since;
        None where there was no token."""
        used, loaded = self.used, self._models.loaded
        if used is None or loaded is None:
            return None, None
        columns = loaded.engine.frame(points=TOKENS).columns
        decoded = columns["decode"].astype(bool)
        late = columns["step"] > used.step
        found = [columns["stall_ms"][decoded & some] for some in (~late, late)]
        before, after = (float(np.mean(some)) if len(some) else None for some in found)
        return before, after

    def _keep(self, plan: CachePlan | None) -> None:
        engine = self._models.ready().engine
        if engine.profile is None:
            raise ProfileError(NEEDED)
        profile = replace(engine.profile, plan=plan)
        engine.use_profile(profile)
        save(profile, profile_path(self._folder, profile.model_hash))


def _now(known: Known, settings: Settings) -> CachePlan:
    """What the latency model expects of the division and split in force."""
    curves, times, experts, plan = known.curves, known.times, known.rest, known.profile.plan
    split, slots = settings.cache.split, settings.cache.layer_slots.name
    if known.blocks > 1 and split.name == "moepic" and slots == "moepic" and plan is not None:
        return plan
    if known.blocks > 1 and split.name == "uniform":
        return plan_even(curves, times, experts, float(split.params["theta"]) or NOTHING)
    return plan_adapmoe(curves, times, experts) if slots == "adapmoe" else plan_even(curves, times, experts, WHOLE)
