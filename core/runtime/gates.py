"""Builds the gates of METHODS section 1 for every layer from settings and a profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from core.policy.substitute import Gates
from core.profile import Profile
from core.settings.pins import Pins
from core.settings.registry import Value
from core.types import ModelShape

NEVER = -1.0  # a threshold that no entropy is at or below
ALWAYS = 2.0  # a threshold that no share or margin reaches


def gates_of(
    settings: Mapping[str, Value], shape: ModelShape, profile: Profile | None, device: torch.device
) -> list[Gates]:
    """One per layer. Requires settings with `miss` other than "wait" and a profile that has what they need."""
    way, margin = str(settings["miss"]), float(settings["gate_margin"])
    buddy = settings["substitute"] == "buddy"
    return [
        Gates(
            tau=tau,
            temperature=temperature(settings),
            margin=margin if margin < 1 else ALWAYS,
            beta=float(settings["beta"]) if settings["batch_gate"] == "fixed" else ALWAYS,
            rho=int(settings["rho"]),
            unique=not buddy or bool(settings["substitute.buddy.unique"]),
            discount=float(settings["substitute.buddy.discount"]) if buddy else 0.0,
            protected=protected,
            order=tuple(way.split("_")),
            drop_share=float(settings["drop_share"]),
        )
        for tau, protected in zip(
            _taus(settings, shape, profile), _protected(settings, shape, profile, device), strict=True
        )
    ]


def temperature(settings: Mapping[str, Value]) -> float:
    """The temperature of the entropy; 1 for the percentile gate, since a profile's percentiles are of unscaled gate
    weights."""
    return float(settings["gate_temperature"]) if settings["gate"] != "percentile" else 1.0


def thresholds(gates: Sequence[Gates], layers: int) -> list[float]:
    """[L] entropy at or below which nothing is replaced; NaN for layers without an entropy gate."""
    return [gate.tau if gate.tau > NEVER else math.nan for gate in gates] or [math.nan] * layers


def _taus(settings: Mapping[str, Value], shape: ModelShape, profile: Profile | None) -> list[float]:
    if settings["gate"] == "percentile":
        assert profile is not None and profile.tae is not None
        at = round(float(settings["gate_percentile"]))
        found: list[float] = profile.tae[:, at].tolist()
        return found
    return [float(settings["gate_tau"]) if settings["gate"] == "tau" else NEVER] * shape.layers


def _protected(
    settings: Mapping[str, Value], shape: ModelShape, profile: Profile | None, device: torch.device
) -> list[torch.Tensor | None]:
    norms = profile.norms if profile is not None else None
    eids = Pins.parse(str(settings["protect"]), "protect").eids(shape.layers, shape.experts, norms, "protect")
    if not eids:
        return [None] * shape.layers
    mask = torch.zeros(shape.total, dtype=torch.bool)
    mask[sorted(eids)] = True
    return list(mask.view(shape.layers, shape.experts).to(device))
