"""The experts whose next request is a hit like the last: their leases, and where native code finds their slots."""

from array import array

from core.cache.lease import LeasedSegment


class Hits:
    """`leases`: eid -> the segment that a request for it leases, from when it is known to be complete until it loses a
    slot."""

    def __init__(self, experts: int) -> None:
        self.leases: list[LeasedSegment | None] = [None] * experts
        self._slots: array[int] | None = None  # once they were asked for

    @property
    def slots_at(self) -> int:
        """The address of the addresses of their slots, i64 by eid: 0 without a lease. Of whole experts."""
        if self._slots is None:
            self._slots = array("q", map(_slot_at, self.leases))
        return self._slots.buffer_info()[0]

    def keep(self, eid: int, leased: LeasedSegment) -> None:
        """Lease this segment from now on."""
        self.leases[eid] = leased
        if self._slots is not None:
            self._slots[eid] = _slot_at(leased)

    def drop(self, eid: int) -> None:
        """Its next request is not known to be a hit."""
        self.leases[eid] = None
        if self._slots is not None:
            self._slots[eid] = 0

    def clear(self) -> None:
        """Drop all."""
        for eid in range(len(self.leases)):
            self.drop(eid)


def _slot_at(leased: LeasedSegment | None) -> int:
    return leased.slot.at if leased is not None else 0
