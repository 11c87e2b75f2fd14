"""Makes the policy that a setting names."""

from __future__ import annotations

from collections.abc import Callable

from core.policy.eviction.base import Eviction, ExpertIndex
from core.settings.param import Choice
from core.settings.registry import create

MakePolicy = Callable[[ExpertIndex], Eviction]


def policy_maker(eviction: Choice) -> MakePolicy:
    """A function that makes a fresh policy over the experts it is given."""

    def make(expert_index: ExpertIndex) -> Eviction:
        policy: Eviction = create("eviction", *eviction, expert_index=expert_index)
        return policy

    return make
