"""Dense layers kept as codes on a GPU: rounded and unpacked a piece at a time, with a peak that the budget counts."""

import pytest
import torch
from torch import nn

from core.hf.quantized_linear import WEIGHT, QuantizedLinear
from core.memory.codec import PartSpec, grouped, make_codec
from core.memory.codec.grouped import Grouped
from core.memory.codec.kernels import portable
from tests.fake_cuda import FakeCuda
from tests.selection import layered

OUT, IN = 4096, 512
CHUNK = 1 << 16
FORMATS = layered(["int4-g64", "int8", "int3", "nf4"], quick="nf4".__eq__)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "CUDA_CHUNK", CHUNK)


def codec_of(format: str) -> Grouped:
    specs = {WEIGHT: PartSpec((OUT, IN), torch.bfloat16)}
    codec = make_codec(format, specs=specs, dtype=torch.bfloat16, device=torch.device("cuda"))
    assert isinstance(codec, Grouped)
    return codec


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_a_layer_takes_little_more_than_its_codes(fake_cuda: FakeCuda, format: str) -> None:
    linear = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    codec = codec_of(format)
    before = fake_cuda.memory.allocated
    fake_cuda.memory.reset_peak()
    layer = QuantizedLinear(linear, codec)
    peak = fake_cuda.memory.most_allocated - before - codec.slot_bytes
    assert peak <= 64 * CHUNK < 4 * OUT * IN  # all of it in fp32 would be the latter, several times over
    want = portable(codec).encode({WEIGHT: linear.weight.detach()})  # in pieces of another size: the same codes
    assert torch.equal(layer._raw.cpu(), want)


@pytest.mark.parametrize("format", FORMATS)
def test_unpacking_a_layer_takes_what_is_counted(fake_cuda: FakeCuda, format: str) -> None:
    linear = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    codec = codec_of(format)
    layer = QuantizedLinear(linear, codec)
    x = torch.randn(4, IN, dtype=torch.bfloat16, device="cuda")
    layer(x)  # tables are made once
    before = fake_cuda.memory.allocated
    fake_cuda.memory.reset_peak()
    with torch.inference_mode():
        weight = layer.weight
    assert fake_cuda.memory.most_allocated - before <= codec.unpacked_bytes
    plain = portable(codec)
    assert torch.equal(weight.cpu(), plain.dequantize(plain.views(layer._raw.cpu()), WEIGHT))
