"""The inverse of an estimate: the memory that a model needs for a time per token, before it is loaded."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from app.services.plan_basis import Known
from app.services.planner import least_experts
from core.errors import SettingError
from core.memory.link import Link
from core.policy.allocation.expert_split import LayerTimes
from core.policy.allocation.slot_allocation import prefetch_buffer
from core.profile import Profile
from core.settings.loading import LoadSpec
from core.types import Fit

UNKNOWN = (
    "There are no hit curves and times of this model yet. Load it, open the Calibrate tab, and measure “Hit curves” "
    "and “Measured times”."
)
KEPT = 8  # answers, as the form asks again with each of its changes


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
        profile's times were measured. Raises SettingError when nothing is known or no memory suffices.
        """
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
            known = Known(profile, curves, times, shape.total, buffer, spec.blocks, "from calibration", None)
            experts, total, plan = least_experts(known, tpot_ms)
            self._kept[key] = found = experts, total, plan.tpot_ms
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        experts, total, predicted_ms = found
        needed = fit.dense + fit.kv + fit.workspace + experts * shape.expert_bytes
        return LeastMemory(needed, experts, total, predicted_ms, profile.model_hash)
