"""What an eviction policy is. The cache owns when something must leave; the policy says which."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar, Protocol


class Eviction(Protocol):
    """Orders the residents of one pool of slots. Knows ids only; every choice is deterministic.

    The cache calls `admit` when an expert gets a slot, `use` for every request of a resident, `remove` when it leaves,
    and `victim` when a slot is needed. `now` counts forward passes.
    """

    keeps: ClassVar[bool] = True  # False: an expert leaves as soon as the step that used it is over

    def admit(self, eid: int, now: int) -> None:
        """`eid` was given a slot; it is not resident before."""

    def use(self, eid: int, now: int) -> None:
        """The resident `eid` was requested."""

    def remove(self, eid: int) -> None:
        """`eid` has left."""

    def victim(self, blocked: Container[int]) -> int | None:
        """The resident that should leave next and is not in `blocked`; None when every resident is blocked."""
