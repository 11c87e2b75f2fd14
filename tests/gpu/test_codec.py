"""Expert formats on a real GPU: slots on the device, blobs on the host, with the same numbers as on a CPU."""

import pytest
import torch

from core.memory.codec import FORMATS, Numbers, make_codec
from core.memory.codec.measure import specs_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CPU, DEVICE = torch.device("cpu"), torch.device("cuda")
HALF = Numbers(torch.bfloat16, torch.float16, torch.float16)
INNER, HIDDEN = 512, 256


def parts_of(transposed: bool) -> dict[str, torch.Tensor]:
    """A gated expert with biases."""
    rng = torch.Generator().manual_seed(3)
    shapes = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    weights = {name: torch.randn(shape, generator=rng) * 0.1 for name, shape in shapes.items()}
    biases = {f"{name}_bias": torch.randn(shape[0], generator=rng) for name, shape in shapes.items()}
    return {name: w.t().contiguous() if transposed else w for name, w in weights.items()} | biases


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_numbers_are_those_of_a_cpu(name: str, transposed: bool) -> None:
    parts = parts_of(transposed)
    specs = specs_of(parts)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        codec = make_codec(name, specs=specs, dtype=dtype, device=DEVICE, is_transposed=transposed, stored=HALF)
        blob = codec.encode(parts)
        slot = torch.empty(codec.slot_bytes, dtype=torch.uint8, device=DEVICE)
        codec.place(blob.pin_memory(), slot)
        views = codec.views(slot)
        here = make_codec(name, specs=specs, dtype=torch.float32, device=CPU, is_transposed=transposed, stored=HALF)
        raw = torch.empty(here.slot_bytes, dtype=torch.uint8)
        here.place(blob, raw)
        for part, width in (("gate_up_proj", HIDDEN), ("down_proj", INNER)):
            x = torch.randn(5, width).to(DEVICE, dtype)
            weight = codec.dequantize(views, part).double()
            want = x.double() @ (weight if transposed else weight.t())
            assert relative(codec.linear(views, part, x), want) < 1e-2
            assert relative(codec.dequantize(views, part).cpu(), here.dequantize(here.views(raw), part)) < 3e-3
        assert views.plain["down_proj_bias"].device.type == "cuda"
