"""Builds the gates of BuddyMoE section 3.1 for every layer from settings and a profile."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from core.policy.substitute import Gates, Substitute, super_experts
from core.policy.substitute.entropy import TEMPERATURES
from core.profile import Profile
from core.settings.lossy import LossySettings
from core.types import ModelShape

NEVER = -1.0  # a threshold that no entropy is at or below
ALWAYS = 2.0  # a threshold that no share or margin reaches


def gates_of(
    settings: LossySettings,
    substitute: Substitute | None,
    shape: ModelShape,
    profile: Profile | None,
    device: torch.device,
) -> list[Gates]:
    """One per layer. Requires settings with `miss` other than "wait" and a profile that has what they need."""
    return [
        Gates(
            tau=tau,
            temperature=settings.gate_temperature,
            margin=settings.gate_margin if settings.gate_margin < 1 else ALWAYS,
            beta=settings.beta if settings.batch_gate == "fixed" else ALWAYS,
            rho=settings.rho,
            rho_order=settings.rho_order,
            protected=protected,
            order=tuple(settings.miss.split("_")),
            drop_share=settings.drop_share,
        )
        for tau, protected in zip(
            _taus(settings, shape, profile), _protected(settings, shape, profile, device), strict=True
        )
    ]


def thresholds(gates: Sequence[Gates], layers: int) -> list[float]:
    """[L] entropy at or below which nothing is replaced; NaN for layers without an entropy gate."""
    return [gate.tau if gate.tau > NEVER else math.nan for gate in gates] or [math.nan] * layers


def _taus(settings: LossySettings, shape: ModelShape, profile: Profile | None) -> list[float]:
    if settings.gate == "percentile":
        assert profile is not None and profile.tae is not None
        at, temperature = round(settings.gate_percentile), settings.gate_temperature
        if temperature == 1.0:
            found: list[float] = profile.tae[:, at].tolist()
            return found
        assert profile.tae_tempered is not None
        return [float(np.interp(temperature, TEMPERATURES, row)) for row in profile.tae_tempered[:, :, at]]
    return [settings.gate_tau if settings.gate == "tau" else NEVER] * shape.layers


def _protected(
    settings: LossySettings, shape: ModelShape, profile: Profile | None, device: torch.device
) -> list[torch.Tensor | None]:
    norms = profile.norms if profile is not None else None
    eids = settings.protect.eids(shape.layers, shape.experts, norms, "protect")
    protected = np.zeros((shape.layers, shape.experts), np.bool_)
    protected.flat[sorted(eids)] = True
    if settings.protect_super and profile is not None and profile.peaks is not None:
        protected |= super_experts.mask(profile.peaks)
    return [torch.from_numpy(row).to(device) if row.any() else None for row in protected]
