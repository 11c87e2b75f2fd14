"""A profile's trained networks, put to work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from core.policy.predict.nets import estimator, path
from core.policy.predict.nets.estimator import Estimator
from core.policy.predict.nets.path import WINDOW, RoutingPath, State
from core.profile import Profile


def estimator_of(profile: Profile | None, device: torch.device) -> Estimator:
    """The profile's estimator in fp32 on `device`; it must be there."""
    assert profile is not None
    return estimator.from_tensors(profile.nets, profile.settings).to(device)


def path_of(profile: Profile | None) -> RoutingPath:
    """The profile's routing-path predictor on the CPU; it must be there."""
    assert profile is not None
    return path.from_tensors(profile.nets, profile.settings)


class PathAtWork:
    """core.policy.predict.base.PathNet over the network: the prompt is what comes in passes of several tokens."""

    def __init__(self, net: RoutingPath) -> None:
        self._net = net
        self._prompt: list[int] = []
        self._state: State | None = None

    def restart(self) -> None:
        self._prompt, self._state = [], None

    @torch.inference_mode()
    def follow(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """[L, E]: 1 - product over the tokens of (1 - p)."""
        if torch.get_num_threads() > 1:        # of the thread that asks: the one that computes needs the rest
            torch.set_num_threads(1)
        if self._state is None or len(tokens) > 1:
            self._prompt = [*self._prompt, *tokens][-WINDOW:]
            read = self._net.encode(torch.tensor([self._prompt]))
            self._state = read if self._state is None else State(self._state.own, read.prompt, None)
        idle = torch.zeros(self._net.layers, self._net.experts)            # log of how likely nobody asks
        for at in range(0, len(tokens), WINDOW):
            logits, self._state = self._net.decode(torch.tensor([tokens[at : at + WINDOW]]), self._state)
            idle += torch.nn.functional.logsigmoid(-logits[0]).sum(0)
        told: npt.NDArray[np.float32] = -torch.expm1(idle).numpy()
        return told
