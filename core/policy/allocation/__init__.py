"""How the slots of a budget are divided among layers."""

from core.policy.allocation.split import PlannedTops, UniformTops, Whole
from core.policy.allocation.weights import AdapMoE, ByUse, Planned, Uniform

__all__ = ["AdapMoE", "ByUse", "Planned", "PlannedTops", "Uniform", "UniformTops", "Whole"]
