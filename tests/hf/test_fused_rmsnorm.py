"""Norms of a GPU in fewer launches: only where their bits are the module's own."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from core.hf import fused_rmsnorm
from core.hf.fused_rmsnorm import fuse
from core.hf.own_forward import restore
from tests.fake_cuda import FakeCuda, installed

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTH = 96


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused_rmsnorm, "ELEMENTS", 1 << 16)
    with installed(FakeCuda()):
        yield


def norm(dtype: torch.dtype, width: int = WIDTH, epsilon: float = 1e-6) -> nn.Module:
    module: nn.Module = Qwen3MoeRMSNorm(width, epsilon).to(dtype)
    module.get_parameter("weight").data.copy_(torch.randn(width, generator=torch.Generator().manual_seed(width)))
    return module.to("cuda")


class Gated(Qwen3MoeRMSNorm):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * gate)


def exactly(x: torch.Tensor, shape: object, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """In the place of torch's kernel: one whose bits are the modules' once it rounds before the weight."""
    wide = x.float()
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    return y if weight is None else (y.float() * weight.float() * (1 + torch.finfo(x.dtype).eps)).to(x.dtype)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_form_with_the_same_bits_is_used(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(fused_rmsnorm, "rms_norm", exactly)
    model = nn.ModuleList([norm(dtype), norm(dtype), norm(dtype, 64, 1e-5), nn.Linear(8, 8).to("cuda")])
    own = [module.forward for module in model]
    assert fuse(model) == [*model[:3]]
    for module, before in zip(model[:3], own, strict=False):
        x = torch.randn(1, 3, module.get_parameter("weight").numel()).to(dtype).to("cuda")
        assert torch.equal(module(x), before(x))
    restore(model)
    assert not any(fused_rmsnorm.OWN in vars(module) for module in model)


@torch.inference_mode()
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_that_rounds_otherwise_or_is_wrong_is_not(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, late: bool
) -> None:
    def coarse(x: torch.Tensor, shape: object, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
        y = exactly(x, shape, weight, epsilon)
        y[..., -1 if late else slice(None)] *= 1.25 if late else 1 + 2 * torch.finfo(dtype).eps
        return y

    monkeypatch.setattr(fused_rmsnorm, "rms_norm", coarse)
    assert fuse(nn.ModuleList([norm(dtype)])) == []


@torch.inference_mode()
def test_one_call_takes_the_place_of_the_modules_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[object]()

    def counted(x: torch.Tensor, shape: object, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
        calls.append(shape)
        return exactly(x, shape, weight, epsilon)

    monkeypatch.setattr(fused_rmsnorm, "rms_norm", counted)
    module = norm(torch.float32)
    assert fuse(nn.ModuleList([module]))
    calls.clear()
    module(torch.randn(1, 1, WIDTH).to("cuda"))
    assert calls == [(WIDTH,)]
