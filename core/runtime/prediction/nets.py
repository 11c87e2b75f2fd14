"""Loads a profile's trained networks for inference."""

from __future__ import annotations

import torch

from core.policy.predict.nets import estimator
from core.policy.predict.nets.estimator import Estimator
from core.profile import Profile


def estimator_of(profile: Profile | None, device: torch.device) -> Estimator:
    """The profile's estimator in fp32 on `device`; the profile must contain one."""
    assert profile is not None
    return estimator.from_tensors(profile.nets, profile.settings).to(device)
