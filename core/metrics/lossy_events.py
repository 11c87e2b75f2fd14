"""Data types of lossy computing (docs/architecture.md): what was done instead of waiting for an expert, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

TAE_BINS = 32  # bins of the gate entropy histogram


class Action(IntEnum):
    """What was done about one selected expert of one token."""

    EXACT = 0  # computed; nothing was missing
    WAIT = 1  # missing: waited for
    SUBSTITUTE = 2  # missing: another expert computed in its place
    DROP = 3  # missing: skipped
    PREDICTED = 4  # the token used the predicted routing in this layer, which has another expert here


class Why(IntEnum):
    """Why a missing expert was waited for although a lossy option was allowed (BuddyMoE section 3.1)."""

    ALLOWED = 0
    TAE = 1  # the token's gate weights are too peaked
    MARGIN = 2  # its first choice is too far ahead of its second
    BETA = 3  # too many of the layer's experts are missing, or the transfer budget can load them
    RHO = 4  # it could have been replaced, but rho was spent on others of the token's experts
    PROTECTED = 5  # the expert may never be replaced
    NO_CANDIDATE = 6  # no substitute is resident
    SHARE = 7  # it carries too much of the token's gate weight to be dropped


CHOICE = np.dtype(
    [("layer", "<i2"), ("token", "<i4"), ("expert", "<i2"), ("to", "<i2"), ("action", "u1"), ("why", "u1")]
)
"""One row per (token of the pass, layer, expert that was missing or not computed); `to` = -1: nothing in its place."""


@dataclass(slots=True)
class Lossy:
    """What lossy options did in one forward pass over T tokens."""

    choices: npt.NDArray[Any]  # [n] of CHOICE: what was chosen for each missing expert, and why
    delta: npt.NDArray[np.float32]  # [L] share of the layer's distinct requested experts that were missing
    beta: npt.NDArray[np.float32]  # [L] the batch gate that delta was compared with; NaN where there was none
    tae: npt.NDArray[np.float16]  # [L, T] entropy of the tokens' gate weights, 0..1; NaN where not computed
    reweighed: int = 0  # assignments to the router's own experts, with predicted weights

    def count(self, action: Action) -> int:
        """Number of (token, layer, expert) assignments with this action."""
        return int((self.choices["action"] == action).sum())

    @property
    def changed(self) -> int:
        """Number of assignments whose result is not the router's."""
        return int((self.choices["action"] >= Action.SUBSTITUTE).sum())


@dataclass(slots=True)
class LossyLook:
    """Summary of what lossy options did over the window, for the deck."""

    rate: float  # share of (token, layer, expert) assignments changed
    per_layer: npt.NDArray[np.float32]  # [L, 3] share of its assignments substituted, dropped, predicted
    tae: npt.NDArray[np.uint32]  # [L, TAE_BINS] tokens by the entropy of their gate weights, 0..1
    threshold: npt.NDArray[np.float32]  # [L] at or below it nothing is replaced; NaN without an entropy gate
    delta: npt.NDArray[np.float32]  # [N] mean over layers, for the passes of the timelines; NaN where none
    beta: npt.NDArray[np.float32]  # [N] the batch gate, likewise
    buddies: npt.NDArray[np.float32] | None  # [E, E] of the requested layer: score of j in place of i; 0 never
    assignments: int = 0  # that `rate` is of
