"""Substitutes are chosen on a GPU as on a CPU: the batch there against Algorithm 1 in plain Python."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from core.policy.substitute import batch, plain
from core.settings.registry import create, variants
from tests.policy.substitutes import LAYERS, drawn, gates

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("name", [v.name for v in variants("substitute")])
def test_a_gpu_chooses_as_algorithm_1_does(name: str) -> None:
    cuda = torch.device("cuda")
    for seed in range(40):
        question, known, _ = drawn(seed, 64, 16, 4)
        rules, here = gates(seed + 1, 16), {}
        for device in (torch.device("cpu"), cuda):
            substitute = create("substitute", name, {})
            substitute.prepare(known, LAYERS, 16, device)
            there = {f.name: getattr(question, f.name) for f in fields(question)}
            asked = replace(question, **{n: t.to(device) for n, t in there.items() if isinstance(t, torch.Tensor)})
            protected = None if rules.protected is None else rules.protected.to(device)
            select = batch.select if device.type == "cuda" else plain.select
            here[device.type] = select(asked, replace(rules, protected=protected), substitute)
        one, many = here["cpu"], here["cuda"]
        for name_ in ("ids", "action", "why"):
            assert torch.equal(getattr(one, name_), getattr(many, name_).cpu()), (seed, name_)
        assert one.delta == many.delta and many.ids.device.type == "cuda"
