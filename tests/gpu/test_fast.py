"""The fast arithmetic on a real GPU: every kernel has the bits of this machine's CPU, and so have whole models."""

from contextlib import nullcontext

import pytest
import torch

from core.memory.codec.kernels import launcher_of
from core.runtime.program.gpu.launching import launcher_for
from core.system.native.compile import supported
from tests.memory import interpreted_layer as layers
from tests.memory import interpreted_mixers as mixers
from tests.memory import interpreted_program as programs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not supported(), reason="no kernels for this CPU"),
]


def test_a_layer_beside_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rotation, attention, routers, dense products and activations, delta nets and latents, with odd numbers
    too."""
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setattr(layers, "ON", layers.On(device, launcher_of(device)))
    assert not {case: count for case, count in (layers.found("all") | mixers.found("all")).items() if count}


@pytest.mark.parametrize("arch", programs.CASES)
def test_whole_models(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all experts in slots and with half of them, in pieces and token by token; some pieces by tensor cores."""
    programs.few_are_tiled(monkeypatch)
    launcher_for(torch.device("cuda"))
    differ = programs.compared(arch, programs.CUTS, nullcontext)
    assert not {case: count for case, count in differ.items() if count}


@pytest.mark.parametrize("decode", ["device", "graph"])
@pytest.mark.parametrize("placement", ["wait", "host"])
def test_tokens_that_the_gpu_leads(decode: str, placement: str) -> None:
    """Missing experts are read over the link, or computed by the host within the token."""
    launcher_for(torch.device("cuda"))
    settings = {"gpu_decode": decode, "miss_placement": placement}
    differ = programs.compared("qwen3_moe", programs.LAST, nullcontext, settings, num_experts=8)
    assert not {case: count for case, count in differ.items() if count}
