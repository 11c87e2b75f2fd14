"""Random replacement: the baseline for policies that use the past."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from core.policy.eviction.base import Eviction, ExpertIndex, Floats, Ids
from core.settings.registry import register

WORD = 0xFFFFFFFF


@register(
    "eviction",
    "random",
    title="Random",
    help="A random resident leaves. What a policy must beat.",
    source="control; MoEpic section 4.4, table 3 (without LCP)",
)
class RandomEviction(Eviction):
    """Score: a hash of the expert, the pass and the layer being computed, independent of the order of calls.

    There is one sequence and no seed to choose another: a control has to repeat, and a trace has draws enough."""

    time_dependent: ClassVar[bool] = True

    def __init__(self, expert_index: ExpertIndex) -> None:
        super().__init__(expert_index)
        self._hash = _mixed(expert_index.eid.astype(np.uint32))
        self._own = self._hash ^ _of_layer(expert_index.layer_of)  # where every layer is computed for itself

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = 0.0

    def scores(self, part: slice, now: int, layer: Ids) -> Floats:
        salt = _scalar(now * 2 + 1)
        own = self._own[part] if layer is self.expert_index.layer_of else self._hash[part] ^ _of_layer(layer)
        return self.score[part] + _mixed(own ^ np.uint32(salt))


def _mixed(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Mix each word: its high bits then depend on all of its bits."""
    words = words * np.uint32(0x85EBCA6B)
    words ^= words >> np.uint32(15)
    words *= np.uint32(0xC2B2AE35)
    return words


def _of_layer(layer: Ids) -> npt.NDArray[np.uint32]:
    return np.asarray(layer * 0x9E3779B1 & WORD, np.uint32)


def _scalar(number: int) -> int:
    """A hash of one number of any size, folded to 32 bits."""
    word = (number ^ number >> 32) & WORD
    word = (word ^ word >> 16) * 0x85EBCA6B & WORD
    word = (word ^ word >> 13) * 0xC2B2AE35 & WORD
    return word ^ word >> 16
