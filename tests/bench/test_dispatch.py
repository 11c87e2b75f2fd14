"""bench dispatch: what it subtracts, and all of it on tiny models."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import dispatch
from core.hf.rotary import OWN, replace
from core.runtime.product import Product, by_expert
from tests.checkpoints import random_model


def test_experts_are_constants_inside_and_what_they_were_afterwards() -> None:
    own = Product(lambda slots, x, counts=None, places=None: x + 1, by_expert)
    math = SimpleNamespace(token=own)
    with dispatch._stubbed([math]):  # type: ignore[list-item]
        state = torch.ones(1, 4)
        assert math.token.multiply([1, 2, 3], state) is state and math.combine(state, None, None) is state
        assert math.token.batches is by_expert
    assert math.token is own and "combine" not in vars(math), "the class's own is seen again"


def test_a_model_rotates_by_its_own_code_inside() -> None:
    model = random_model("qwen3_moe")
    replaced = replace(model)
    forwards = [vars(module).get(OWN) for module in model.modules()]
    with dispatch.own_rotation(model):
        assert replaced and not any(OWN in vars(module) for module in replaced)
    assert [one is None for one in forwards] == [vars(module).get(OWN) is None for module in model.modules()]


@pytest.mark.long(0.3)
def test_it_runs() -> None:
    found: Any = json.loads(json.dumps(dispatch.run(small=True, say=lambda text: None)))
    assert list(found["experts"]) == ["16", "64"] and found["growth"] > 0
    for one in found["experts"].values():
        assert one["model"] > one["router"] > 0 and one["step"] > 0 and "own_rotation" in one
        assert one["reading"] > 0
        assert {"gate", "random"} <= one["predictors"].keys()
    assert found["demo"]["token_us"] > 0 < found["demo"]["own_rotation_us"]
    assert "goals" in dispatch.table(found)
