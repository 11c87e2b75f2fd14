"""Steps that threads compute together."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.memory.codec.fast.steps import Steps, Work, named
from core.runtime.program import gather
from core.runtime.program.several import several
from tests.runtime.program.calls import call, needs_kernels

pytestmark = needs_kernels


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4), data=st.data())
def test_each_unit_of_each_step_is_computed(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    steps, table, indices = Steps(), torch.arange(1.0, 10.0)[:, None], torch.arange(9)
    works, outs = [], []
    for units, some in sizes:
        out = torch.zeros(units + 1, 1)
        given_ = named(gather.FIELDS, table=table.data_ptr(), indices=indices.data_ptr(), out=out.data_ptr())
        work = Work(gather.kernel(gather.Gather(1)), given_, units, some)
        works.append((work, steps.put(given_)))
        outs.append(out)
    whole = several(works)
    assert whole.units == sum(-(-units // some) for units, some in sizes)
    assert (whole.some < whole.units) == any(some < units for units, some in sizes), "for one thread if all are"
    fields = [f"{i}" for i in range(len(whole.arguments))]
    splits = data.draw(st.lists(st.integers(0, whole.units), max_size=3))
    call(whole.kernel, fields, whole.units, splits, **dict(zip(fields, whole.arguments, strict=True)))
    for (units, _), out in zip(sizes, outs, strict=True):
        assert out[:, 0].tolist() == [*range(1, units + 1), 0]
