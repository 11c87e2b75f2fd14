"""Plans the loaded model's cache with MoEpic's configurator, puts a plan into force, and takes it back.

The inverse, too: the memory that a model needs for a time per token, before it is loaded."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from app.services.model_manager import ModelManager
from app.services.plan_basis import NEEDED, Basis, Known
from core.errors import ProfileError, SettingError
from core.memory.link import Link
from core.policy.allocation.cache_plan import CachePlan
from core.policy.allocation.configurator import WHOLE, in_whole_blocks, least_budget, plan_adapmoe, plan_even, plans
from core.policy.allocation.expert_split import LayerTimes
from core.policy.allocation.slot_allocation import prefetch_buffer
from core.profile import Profile, profile_path, save
from core.settings.loading import LoadSpec
from core.settings.param import Value
from core.types import Fit

TOKENS = 240  # last forward passes that a measurement is taken from
KEPT = 16  # plans that can be taken back, one after the other
UNKNOWN = (
    "There are no hit curves and times of this model yet. Load it, open the Calibrate tab, and measure “Hit curves” "
    "and “Measured times”."
)
REMEMBERED = 8  # answers, as the form asks again with each of its changes


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """`plan`, and what the same model expects of other divisions of the same memory; `now` is the one in use. `known`:
    what it follows from."""

    plan: CachePlan
    now: CachePlan
    others: Mapping[str, CachePlan]
    known: Known


@dataclass(frozen=True, slots=True, eq=False)
class Used:
    """A plan in force: what was before it, and the last forward pass before it. `idle`: the replanner chose it."""

    proposal: Proposal
    before: CachePlan | None
    settings: Mapping[str, Value]
    step: int
    idle: bool = False


@dataclass(slots=True)
class History:
    """The plans put into force under one load, the last one in force."""

    load: int | None = None
    used: list[Used] = field(default_factory=list)


class Planner:
    """Of the loaded model. Methods may be called from any thread, and raise MoestroError; planning takes its time."""

    def __init__(self, folder: Path, models: ModelManager, basis: Basis) -> None:
        """`folder`: of the data, where profiles are stored."""
        self._folder, self._models, self._basis = folder, models, basis
        self._history = History()

    @property
    def used(self) -> Used | None:
        """The plan that was put into force last and can be taken back; None after another load."""
        history = self._history
        return history.used[-1] if history.used and history.load == self._models.load_id else None

    def propose(self) -> Proposal:
        """Plan for the budget, the link and the settings in force."""
        found = self.propose_while(lambda: True)
        assert found is not None
        return found

    def propose_while(self, wanted: Callable[[], bool]) -> Proposal | None:
        """The same; None as soon as it is not `wanted` any more, which is called often."""
        known = self._basis.known(wanted)
        if known is None:
            return None
        curves, times, rest = known.curves, known.times, known.rest
        steps = list[CachePlan]()
        for step in plans(curves, times, rest, theta=known.theta, least=known.least):
            steps = [step]
            if not wanted():
                return None
        plan = steps[-1]
        if known.blocks > 1:
            plan = in_whole_blocks(curves, times, plan, rest, known.blocks)
        others = {"Even, whole experts": plan_even(curves, times, rest, WHOLE)}
        if known.blocks > 1:
            others["Even, halves"] = plan_even(curves, times, rest, 0.5)
        others["AdapMoE, whole experts"] = plan_adapmoe(curves, times, rest)
        return Proposal(plan, known.in_force(self._models.settings), others, known)

    def use(self, proposal: Proposal, *, idle: bool = False) -> None:
        """Keep the plan in the profile, and divide and split by it from the next forward pass on."""
        models = self._models
        loaded, settings = models.ready(), models.settings
        if proposal.known.load != models.load_id:
            raise SettingError("This plan is of a model that is not loaded any more. Plan again.")
        changes: dict[str, Value] = {"layer_slots": "moepic", "scope": "layer"}
        if proposal.known.blocks > 1:
            changes["split"] = "moepic"
        before = Used(
            proposal,
            None if loaded.engine.profile is None else loaded.engine.profile.plan,
            {name: settings[name] for name in changes},
            int(max(loaded.engine.frame(points=1).columns["step"], default=-1)),
            idle,
        )
        self._keep(proposal.plan)
        if problem := models.change_many(changes):
            self._keep(before.before)
            raise SettingError(problem)
        if self._history.load != models.load_id:
            self._history = History(models.load_id)
        self._history.used = [*self._history.used, before][-KEPT:]

    def undo(self) -> None:
        """What was before the plan."""
        used = self.used
        if used is None:
            raise SettingError("No plan was put into use since this model was loaded.")
        if problem := self._models.change_many(used.settings):
            raise SettingError(problem)
        self._keep(used.before)
        self._history.used.pop()

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


def least_experts(known: Known, tpot_ms: float) -> tuple[int, int, CachePlan]:
    """The fewest experts, buffer included, that a token is predicted to take no more than `tpot_ms` with, of how many
    there are, and their plan. Raises SettingError when no budget suffices."""
    plan = least_budget(known.curves, known.times, tpot_ms, theta=known.theta, least=known.least)
    total = known.curves.layers * known.curves.experts
    return min(total, math.ceil(plan.budget - 1e-6) + known.buffer), total, plan


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """`bytes` in all, of which `experts` of `total` experts are resident or the prefetch buffer, are predicted to take
    `tpot_ms` a token; `model_hash`: of the profile."""

    bytes: int
    experts: int
    total: int
    tpot_ms: float
    model_hash: str


class MemoryFinder:
    """Remembers the last answers. May be used by any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], tuple[int, int, float]] = OrderedDict()

    def least(
        self, spec: LoadSpec, fit: Fit, tpot_ms: float, profile: Profile | None, link: Link | None
    ) -> LeastMemory:
        """The least memory for a token in `tpot_ms`, by MoEpic's latency model. `link` None: as fast as when the
        profile's times were measured. Raises SettingError when nothing is known or no memory suffices."""
        curves = profile.curves() if profile is not None else None
        if profile is None or curves is None or profile.times is None:
            raise SettingError(UNKNOWN)
        shape = fit.shape
        if (curves.layers, curves.experts) != (shape.layers, shape.experts):
            raise SettingError(UNKNOWN)
        load_ms = link.copy_ms(shape.expert_bytes) if link is not None else profile.times["load"]
        buffer = prefetch_buffer(spec.settings.cache.buffer, shape.top_k, spec.blocks)
        key = (profile.model_hash, profile.created, load_ms, buffer, spec.blocks, tpot_ms)
        found = self._kept.get(key)
        if found is None:
            times = LayerTimes.of({**profile.times, "load": load_ms})
            own = shape.layers * shape.experts  # without those of a head
            known = Known(profile, curves, times, own, buffer, spec.blocks, "from calibration", None)
            experts, total, plan = least_experts(known, tpot_ms)
            self._kept[key] = found = experts, total, plan.tpot_ms
            while len(self._kept) > REMEMBERED:
                self._kept.popitem(last=False)
        experts, total, predicted_ms = found
        cached = -(-experts * shape.cached_layers // shape.layers)  # with those of a head
        needed = fit.dense + fit.kv + fit.workspace + cached * shape.expert_bytes
        return LeastMemory(needed, experts, total, predicted_ms, profile.model_hash)
