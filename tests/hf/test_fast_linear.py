"""Dense layers by our own products: the bits of the modules they stand for. The products themselves, with AVX2 alone
wherever the tests run, are those of tests/memory/test_avx2_alone.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from core.hf.fast_linear import dense_codecs, patch_linears
from core.hf.fast_rmsnorm import restore
from core.memory.codec.native.tile_products import by_onednn
from core.system.native.compile import widths

needs_order = pytest.mark.skipif(
    not widths() or by_onednn() or torch.backends.cpu.get_cpu_capability() != "AVX2",
    reason="torch adds up in another order here",
)


@needs_order
def test_layers_that_fit_are_replaced_and_restored() -> None:
    kept = [nn.Linear(256, 512), nn.Linear(250, 512, bias=False), nn.Linear(64, 64, bias=False)]
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False), *kept).bfloat16()
    model.append(nn.Linear(256, 512, bias=False))  # fp32
    replaced = patch_linears(model)
    assert replaced == [model[0], model[1]] and len(dense_codecs(model)) == 2
    assert patch_linears(model) == [], "once"
    with torch.inference_mode():
        x = torch.randn(1, 9, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight))
        model[0].weight.data = model[0].weight.data * 2  # a weight that moves is read where it is
        assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight))
    restore(replaced)
    assert dense_codecs(model) == [] and not any("forward" in vars(module) for module in model)


def test_nothing_is_replaced_where_torch_has_kernels_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.memory.codec.plain.by_onednn", lambda: True)
    assert patch_linears(nn.Sequential(nn.Linear(256, 512, bias=False)).bfloat16()) == []
