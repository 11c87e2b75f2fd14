"""Pairs of rows and experts sorted by expert, with the slots of these, against a scalar loop."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from core.memory.codec.fast.products import GIVEN
from core.memory.codec.fast.steps import named, single
from core.runtime.program import group
from tests.runtime.program.calls import needs_kernels

pytestmark = needs_kernels
ROOM, OUT, WIDE, HIDDEN, FIRST = 1 << 20, 1 << 30, 96, 64, 3


@given(st.data())
def test_it_is_a_loop_over_pairs(data: st.DataObject) -> None:
    experts, rows = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    chosen = data.draw(st.integers(1, min(4, experts)))
    ids = [data.draw(st.permutations(range(experts)))[:chosen] for _ in range(rows)]
    slots = data.draw(st.lists(st.integers(0, 5), min_size=experts, max_size=experts))
    pairs, never = rows * chosen, -7
    table = torch.tensor([never] * FIRST + slots)
    cell, stop = torch.tensor([table.data_ptr()]), torch.tensor([0])
    numbers = torch.arange(pairs)
    to = {name: torch.full((pairs,), never) for name in ("slots", "rows", "pairs")}
    products = {name: torch.full((pairs, GIVEN), never) for name in ("up", "down")}
    read = {"ids": torch.tensor(ids), "table": cell, "stop": stop, "numbers": numbers}
    arguments = named(group.FIELDS, count=rows, first=FIRST, room=ROOM, out=OUT, **read, **to, **products)
    single(group.kernel(experts, chosen, WIDE, HIDDEN), arguments, 1)

    flat = [expert for row in ids for expert in row]
    order = list(dict.fromkeys(flat))
    places = sorted(range(pairs), key=lambda pair: (order.index(flat[pair]), pair))
    assert to["pairs"].tolist() == [places.index(pair) for pair in range(pairs)]
    assert to["rows"].tolist() == [pair // chosen for pair in places]
    assert to["slots"].tolist()[: len(order)] == [slots[expert] for expert in order]
    assert stop.item() == any(slots[expert] == 0 for expert in order)
    for name, first, into, size in (("up", to["rows"], ROOM, WIDE), ("down", numbers, OUT, HIDDEN)):
        done = 0
        for at, expert in enumerate(order):
            count = flat.count(expert)
            wanted = [never, first.data_ptr() + 8 * done, count, into + size * done, never]
            assert products[name][at].tolist() == wanted
            done += count
        assert products[name][len(order) :, 2].tolist() == [0] * (pairs - len(order))
