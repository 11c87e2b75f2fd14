"""An eviction policy of one's own, complete: the oldest expert is evicted first, but every use makes it younger."""

from typing import Annotated

from core.policy.eviction.base import Eviction, ExpertIndex, Ids
from core.settings.param import Param
from core.settings.registry import register

NAME = "second_chance"
Chances = Annotated[int, Param("How many passes later.", title="Chances", low=1, high=1000, step=1, unit="passes")]


@register(
    "eviction",
    NAME,
    title="Second chance",
    help="The oldest expert is evicted first; each use makes it count as younger.",
    source="after Corbato 1968",
)
class SecondChance(Eviction):
    """Score: the pass in which the expert was admitted, plus `chances` for each use since then."""

    def __init__(self, expert_index: ExpertIndex, chances: Chances = 1) -> None:
        super().__init__(expert_index)  # self.score [experts], infinite for experts that are not resident
        self._chances = chances

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = now

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] += self._chances
