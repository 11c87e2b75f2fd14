"""The slots of a token's experts, and the end of a run where one is in none."""

import torch

from core.memory.codec.fast.steps import Steps, Work, named
from core.memory.codec.native.threads import acquire_team
from core.runtime.program import look
from tests.runtime.program.calls import needs_kernels

pytestmark = needs_kernels


def test_slots_are_looked_up_until_one_is_missing() -> None:
    steps, table = Steps(), torch.tensor([0, 0, 0, 11, 0, 13, 14])  # of the second layer: 11, none, 13, 14
    cell = steps.put([table.data_ptr()])
    given = {
        name: torch.tensor(ids) for name, ids in {"first": [0, 2], "second": [3, 0, 2], "third": [1, 0, 3]}.items()
    }
    slots = {name: torch.zeros(len(ids), dtype=torch.int64) for name, ids in given.items()}
    for name, ids in given.items():
        at = {"ids": ids.data_ptr(), "first": 3, "table": cell, "slots": slots[name].data_ptr(), "stop": steps.stop}
        steps.add(Work(look.kernel(len(ids)), named(look.FIELDS, **at), 1, 1))
    team = acquire_team()
    try:
        assert steps.run(team) == 3
        assert [one.tolist() for one in slots.values()] == [[11, 13], [14, 11, 13], [0, 11, 14]]
        assert steps.run(team, 0, 2) == 2
        given["second"][1] = 1
        assert steps.run(team) == 2, "the third step was not reached"
        assert slots["second"].tolist() == [14, 0, 13]
        table[4] = 12
        assert steps.run(team) == 3
        assert steps.run(team, 2) == 3
        table[3] = 0
        assert steps.run(team, 1) == 3
        assert steps.run(team) == 1
    finally:
        team.release()
