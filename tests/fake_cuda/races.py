"""Accesses to watched memory that nothing orders: a copy into a slot that a kernel still reads, a kernel that reads a
slot before its copy is over, a row of pinned memory that is overwritten while it is copied from."""

from bisect import bisect_right, insort
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.fake_cuda.clocks import Clock, Clocks


class Access(NamedTuple):
    """One access: by a thread or stream `who`, at its `tick`."""

    writes: bool
    who: str
    tick: int
    what: str


@dataclass(slots=True)
class Region:
    """Watched bytes of one `kind`, and the accesses that a later one must follow: the last write, and each stream's and
    thread's last read since."""

    start: int
    size: int
    kind: str
    past: list[Access] = field(default_factory=list)


class Races:
    """`found` describes each pair of accesses that nothing orders; `counts`, by kind of region, how many there were."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._starts: list[int] = []
        self._regions: dict[int, Region] = {}
        self.found: list[str] = []
        self.counts: Counter[str] = Counter()

    def watch(self, start: int, size: int, kind: str) -> None:
        """Watch these bytes, as new ones: what was known of them before is forgotten."""
        with self._clocks.lock:
            if start not in self._regions:
                insort(self._starts, start)
            self._regions[start] = Region(start, size, kind)

    def region(self, address: int) -> Region | None:
        """The watched region around an address."""
        with self._clocks.lock:
            at = bisect_right(self._starts, address) - 1
            region = self._regions[self._starts[at]] if at >= 0 else None
            return region if region is not None and address < region.start + region.size else None

    def by_stream(self, region: Region, *, writes: bool, what: str) -> None:
        """Work of the current stream reads or writes a region."""
        with self._clocks.lock:
            stream = self._clocks.current()
            self._note(region, Access(writes, stream.name, stream.issue(), what), stream.clock)

    def by_host(self, region: Region, *, writes: bool, what: str) -> None:
        """The calling thread reads or writes a region itself."""
        with self._clocks.lock:
            who, tick = self._clocks.touch()
            self._note(region, Access(writes, who, tick, what), self._clocks.host)

    def freed(self, start: int) -> None:
        """A region's memory is given back. torch gives it to whoever asks next in the default stream, so all accesses
        must be over, or lie before what that stream does next."""
        with self._clocks.lock:
            region = self._regions.pop(start, None)
            if region is None:
                return
            self._starts.remove(start)
            for past in region.past:
                if not (_knows(self._clocks.host, past) or _knows(self._clocks.default.clock, past)):
                    self.found.append(f"{region.kind} freed before {past.what} by {past.who} was over")

    def _note(self, region: Region, new: Access, clock: Clock) -> None:
        self.counts[region.kind] += 1
        for past in region.past:
            if (new.writes or past.writes) and not _knows(clock, past):
                self.found.append(
                    f"{region.kind}: {_verb(new)} {new.what} by {new.who}, which nothing orders after "
                    f"{_verb(past)} {past.what} by {past.who}"
                )
        kept = [] if new.writes else [past for past in region.past if past.writes or past.who != new.who]
        region.past = [*kept, new]


def _knows(clock: Clock, past: Access) -> bool:
    return clock.get(past.who, 0) >= past.tick


def _verb(access: Access) -> str:
    return "written in" if access.writes else "read in"
