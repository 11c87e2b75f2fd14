"""No bit of a prompt's answer depends on which experts are resident: on a GPU experts of few rows and of many are
computed by different products, and which one it is must not depend on what else lies in a batch."""

from pathlib import Path

import pytest
import torch

from core.engine import Engine
from core.hf.cached_pass import cached_pass
from core.memory.codec import quantize
from tests.cuda.conftest import engine_on
from tests.fake_cuda import FakeCuda
from tests.selection import layered


@pytest.fixture(autouse=True)
def _codes_by_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the candidates for a group's scale and zero: which codes experts get matters to no test here, and on the fake
    GPU each candidate takes as long as an answer."""
    monkeypatch.setattr(quantize, "ENDS", dict.fromkeys(quantize.ENDS, (1.0,)))
    monkeypatch.setattr(quantize, "REFITS", dict.fromkeys(quantize.REFITS, 0))


@torch.inference_mode()
def logits(engine: Engine, tokens: int) -> torch.Tensor:
    ids = torch.randint(2, 40, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    return cached_pass(engine.model, ids.to("cuda"), engine.fresh_cache()).logits[0].cpu()


@pytest.mark.parametrize("name", layered(["checkpoint", "int4-g32"], quick=lambda name: name == "checkpoint"))
def test_residency_changes_no_bit_of_a_prompt(fake_kernels: FakeCuda, model: Path, name: str) -> None:
    found: dict[str, list[torch.Tensor]] = {}
    for budget in ("all", "50%"):
        with engine_on(model, {"budget": budget, "predictor": "none"}, format=name) as engine:
            assert engine.wiring.math[0].grouped is not None
            found[budget] = [logits(engine, tokens) for tokens in (20, 40)]  # 5 and 10 rows of an expert, more and less
    for want, got in zip(found["all"], found["50%"], strict=True):
        assert torch.equal(want, got), (len(want), (want - got).abs().max())
