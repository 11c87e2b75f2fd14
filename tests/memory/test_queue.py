"""The order of copies under anything that can happen to it, against a list that is sorted anew each time."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from core.memory.slot import Slot
from core.memory.ticket import CANCELLED, STARTED, Queue, Ticket
from core.types import Segment

NOTHING: Any = None
PRIORITY = st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])
STEP = st.tuples(
    st.sampled_from(["demand", "prefetch", "pop", "remove", "promote", "rank"]), PRIORITY, st.integers(0, 99)
)


def ticket(number: int, demand: bool, priority: float = 0.0) -> Ticket:
    one = Ticket(Segment(number, range(1)), [Slot(number, NOTHING)], 1, demand, "decode")
    one.priority = priority
    return one


class Sorted:
    """What a queue should do, in the words of its docstring."""

    def __init__(self) -> None:
        self.demands: list[Ticket] = []
        self.prefetches: list[Ticket] = []  # in the order of submission

    def order(self) -> list[Ticket]:
        return [*self.demands, *sorted(self.prefetches, key=lambda t: -t.priority)]

    def drop(self, one: Ticket) -> None:
        (self.demands if one in self.demands else self.prefetches).remove(one)


@given(st.lists(STEP, max_size=60))
def test_demands_in_order_then_prefetches_by_priority(steps: list[tuple[str, float, int]]) -> None:
    queue, model = Queue(), Sorted()
    for number, (what, priority, pick) in enumerate(steps):
        waiting = model.order()
        one = waiting[pick % len(waiting)] if waiting else None
        if what in ("demand", "prefetch"):
            fresh = ticket(number, what == "demand", priority)
            queue.push(fresh)
            (model.demands if what == "demand" else model.prefetches).append(fresh)
        elif what == "pop" and one is not None:
            first = queue.pop()
            assert first is waiting[0]
            first.state = STARTED
            model.drop(first)
        elif what == "remove" and one is not None:
            queue.remove(one)
            one.state = CANCELLED
            model.drop(one)
        elif what == "promote" and one in model.prefetches:
            assert one is not None
            queue.promote(one)
            model.drop(one)
            model.demands.append(one)
        elif what == "rank" and one is not None:
            changes = [(t, (priority + i * 0.3) % 1.1) for i, t in enumerate(waiting)]
            demanded = {t: t.priority for t in model.demands}
            queue.rank(changes)
            assert all(t.priority == before for t, before in demanded.items())
        assert len(queue) == len(model.order())
        assert [*queue.demand, *reversed(queue.prefetch)] == model.order()


def test_what_started_keeps_its_priority() -> None:
    queue, one, other = Queue(), ticket(0, False, 0.5), ticket(1, False, 0.4)
    queue.push(one)
    queue.push(other)
    assert queue.pop() is one
    one.state = STARTED
    queue.rank([(one, 0.1), (other, 0.9)])
    assert (one.priority, other.priority) == (0.5, 0.9) and queue.pop() is other and not len(queue)
