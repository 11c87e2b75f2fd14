"""Which blocks of which experts have slots: the one map from experts to slots, of whole and of split experts."""

from collections.abc import Sequence
from typing import Generic

from core.cache.pool import S
from core.types import Segment


class BlockTable(Generic[S]):
    """Experts of `blocks` blocks each, of which the first have slots: none, some or all. Mutated by CacheCore only.

    `whole`: by eid, all of its blocks; `slots`: by eid, those of its blocks, in order. `tops`: by layer, the blocks
    that stay when others need slots; all of them where experts are whole. `long`: experts that have more than their
    top, and so can be cut to it. `buffered`: experts that were completed in the prefetch buffer, the oldest first, and
    how many of their blocks the cache has.
    `changed`: collects the experts whose slots change, for an owner that follows them.
    """

    def __init__(self, layers: int, experts: int, blocks: int) -> None:
        self.experts, self.blocks = experts, blocks
        self.whole = [Segment(eid, range(blocks)) for eid in range(layers * experts)]
        self.slots: list[tuple[S, ...]] = [()] * (layers * experts)
        self.tops = [blocks] * layers
        self.long: set[int] = set()
        self.buffered: dict[int, int] = {}
        self.changed: set[int] | None = None
        self._shortest = blocks  # top that there ever was

    def lacking(self, eid: int) -> Segment:
        """The blocks without slots."""
        had = self.slots[eid]
        return Segment(eid, range(len(had), self.blocks)) if had else self.whole[eid]

    def complete(self, eid: int, slots: tuple[S, ...], *, buffered: bool = False) -> None:
        """Give the other blocks of an expert slots, in the buffer or in the cache."""
        had = self.slots[eid]
        self.slots[eid] = had + slots
        if buffered:
            self.buffered[eid] = len(had)
        self._note(eid)

    def unbuffer(self, eid: int) -> int:
        """The buffered blocks of an expert belong to the cache from now on -> the blocks that it had before."""
        had = self.buffered.pop(eid)
        self._note(eid)
        return had

    def cut(self, eid: int, kept: int) -> tuple[S, ...]:
        """Leave an expert its first `kept` blocks -> the slots of the others."""
        slots = self.slots[eid]
        self.slots[eid] = slots[:kept]
        self.buffered.pop(eid, None)
        self._note(eid)
        return slots[kept:]

    def split(self, tops: Sequence[int]) -> None:
        """Set the top of each layer, 0 to all blocks. No expert has other blocks because of it."""
        self.tops, self._shortest = list(tops), min(self._shortest, *tops)
        self.long = {eid for eid in range(len(self.slots)) if self._is_long(eid)}

    def moved(self) -> None:
        """The slots of any expert may be elsewhere in memory."""
        if self.changed is not None:
            self.changed.update(range(len(self.slots)))

    def sizes(self) -> dict[int, int]:
        """eid -> how many of its blocks the cache has, where it has any."""
        held = {eid: len(slots) for eid, slots in enumerate(self.slots) if slots} | self.buffered
        return {eid: size for eid, size in held.items() if size}

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds."""
        for eid, slots in enumerate(self.slots):
            assert not slots or self._shortest <= len(slots) <= self.blocks, "an expert with fewer blocks than any top"
            assert eid not in self.buffered or len(slots) == self.blocks, "an expert in the buffer that is not complete"
            assert self._is_long(eid) == (eid in self.long), "which experts can be cut is wrong"

    def _note(self, eid: int) -> None:
        if self.changed is not None:
            self.changed.add(eid)
        if self._is_long(eid):
            self.long.add(eid)
        else:
            self.long.discard(eid)

    def _is_long(self, eid: int) -> bool:
        return 0 < self.tops[eid // self.experts] < len(self.slots[eid]) and eid not in self.buffered
