"""Norms in native code: the bits of the modules they stand for, and only where they are those."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from core.hf import fast_rmsnorm
from core.hf.fast_rmsnorm import MOST, patch_rmsnorms, restore
from core.system.native.compile import widths
from tests.selection import layered

pytestmark = pytest.mark.skipif(not widths(), reason="this CPU has no AVX2")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _nothing_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_rmsnorm, "_tried", {})
    monkeypatch.setattr(fast_rmsnorm, "ELEMENTS", 1 << 16)  # as in a load, not in a test


def norm(width: int, dtype: torch.dtype, epsilon: float = 1e-6) -> nn.Module:
    module: nn.Module = Qwen3MoeRMSNorm(width, epsilon).to(dtype)
    module.get_parameter("weight").data.copy_(torch.randn(width, generator=torch.Generator().manual_seed(width)))
    return module


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", layered([64, 96, 1024, 2880], quick=lambda width: width in (96, 2880)))
def test_every_bit_is_the_modules(width: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(norm(width, dtype), nn.Linear(width, 8), norm(width, dtype, 1e-5))
    own = [model[0].forward, model[2].forward]
    assert patch_rmsnorms(model) == [model[0], model[2]]
    random = torch.Generator().manual_seed(1)
    for shape in ((1, 1, width), (1, 1, 6, width), (5, width), (width,), (MOST // width + 1, width)):
        for size in (1e-4, 1.0, 300.0):
            x = (torch.randn(shape, generator=random) * size).to(dtype)
            for module, before in zip((model[0], model[2]), own, strict=True):
                assert torch.equal(module(x), before(x)), (shape, size)
    wide = torch.randn(4, 2 * width, generator=random).to(dtype)[:, :width]  # not contiguous: its own forward
    assert torch.equal(model[0](wide), own[0](wide))
    for odd in (float("inf"), float("nan"), 0.0):
        x = torch.full((1, 1, width), odd, dtype=dtype)
        assert torch.equal(model[0](x).isnan(), own[0](x).isnan())


def test_what_computes_something_else_is_left_alone() -> None:
    """gemma adds one to its weights; another module has an epsilon and a weight but is no norm; odd widths."""
    other = nn.Module()
    other.weight = nn.Parameter(torch.ones(64))
    other.eps = 1e-6
    model = nn.ModuleList([Gemma2RMSNorm(64), other, norm(40, torch.float32), nn.LayerNorm(64), nn.Linear(64, 64)])
    assert patch_rmsnorms(model) == []
    assert not any(fast_rmsnorm.OWN in vars(module) for module in model)


@torch.inference_mode()
def test_a_wrong_answer_in_the_trial_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    square, finish = fast_rmsnorm._functions(fast_rmsnorm.Form(64, 1e-6, torch.bfloat16))

    def late(x: int, out: int, n: int) -> None:
        square(x, out, n - 16)

    monkeypatch.setattr(fast_rmsnorm, "_functions", lambda form: (late, finish))
    assert patch_rmsnorms(nn.ModuleList([norm(64, torch.bfloat16)])) == []


def test_it_is_taken_back_and_gradients_pass() -> None:
    model = nn.ModuleList([norm(64, torch.float32)])
    found = patch_rmsnorms(model)
    x = torch.randn(2, 64, requires_grad=True)
    model[0](x).sum().backward()
    assert x.grad is not None and patch_rmsnorms(model) == []
    restore(found)
    assert fast_rmsnorm.OWN not in vars(model[0])
    assert patch_rmsnorms(model) == found
