"""Links that make an engine's timing repeatable, and a diary of what its cache does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from core.cache.expert_cache import ExpertCache
from core.cache.lease import Lease, LeasedSegment
from core.engine import Engine
from core.memory.ticket import QUEUED, Ticket
from core.memory.transfer import TransferEngine
from core.runtime.moe_step import MoEStep
from core.simulate.virtual_clock import VirtualLink

LAYER_S = 1.0  # virtual seconds of a layer


class Instant(TransferEngine):
    """The engine's own link without threads: every copy is over when `submit` returns."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.device, engine.loaded.store.fetch, workers=0)

    def submit(self, ticket: Ticket) -> Ticket:
        super().submit(ticket)
        self._steal(ticket)
        self._copy(ticket)
        return ticket


class Demanded(TransferEngine):
    """The engine's own link without threads: a copy is made by who waits for it, so no prefetch ever starts."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.device, engine.loaded.store.fetch, workers=0)


class Never(VirtualLink):
    """The simulator's counterpart: nobody serves the queue but who waits."""

    def _work(self) -> None:
        pass


class Counted(VirtualLink):
    """Virtual time under a real engine; real bytes are copied when a copy starts."""

    pace = None

    def __init__(self, engine: Engine, load_s: float) -> None:
        def fetch(ticket: Ticket) -> None:
            raws = [slot.raw for slot in ticket.slots]
            engine.loaded.store.fetch(ticket.eid, raws, ticket.segment.blocks.start)

        super().__init__(load_s, fetch)

    def fence(self) -> None:
        """None is needed."""

    def device_stall_s(self) -> tuple[float, float]:
        return 0.0, 0.0


@contextmanager
def written_down(link: Any) -> Iterator[list[tuple[Any, ...]]]:
    """Every copy that is queued or promoted on `link`, and every layer with what its requests met, in order."""
    events: list[tuple[Any, ...]] = []
    submit, promote, call = link.submit, link.promote, MoEStep.__call__
    acquire, lookup = ExpertCache.acquire, ExpertCache.lookup_all_hits

    def submitted(ticket: Ticket) -> Any:
        events.append(("demand" if ticket.demand else "prefetch", ticket.eid))
        return submit(ticket)

    def promoted(ticket: Ticket) -> Any:
        if ticket.state == QUEUED:
            events.append(("promote", ticket.eid))
        return promote(ticket)

    def acquired(self: ExpertCache, layer: int, wanted: Any) -> Lease:
        lease = acquire(self, layer, wanted)
        events.append((layer, *((held.expert, held.outcome.name) for held in lease.segments)))
        return lease

    def looked_up(self: ExpertCache, layer: int, wanted: Any) -> list[LeasedSegment] | None:
        segments = lookup(self, layer, wanted)
        if segments is not None:
            events.append((layer, *((held.expert, held.outcome.name) for held in segments)))
        return segments

    def reached(self: MoEStep, *args: Any) -> Any:
        if isinstance(link, Counted):
            link.advance(LAYER_S)
        return call(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "submit", submitted)
        patch.setattr(link, "promote", promoted)
        patch.setattr(ExpertCache, "acquire", acquired)
        patch.setattr(ExpertCache, "lookup_all_hits", looked_up)
        patch.setattr(MoEStep, "__call__", reached)
        yield events
