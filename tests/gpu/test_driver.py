"""Kernels launched through the driver of a real GPU: Triton's own bits in every format, in graphs, in any thread.

Run with `pytest -m gpu` on a machine with a GPU; elsewhere these are skipped. What compares with Triton's own launcher
needs the C compiler that this one needs.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.memory.codec import FORMATS, kernels
from core.memory.codec.base import Base
from core.memory.codec.kernels import ByTriton, SlotKernels, driver_launcher, lacking
from core.memory.cuda_driver import DriverError, open_driver
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests import kernel_cases as cases
from tests.checkpoints import make_checkpoint
from tests.loaded import unloading
from tests.tiny_tokenizer import save_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.hip is not None, reason="no CUDA device of NVIDIA's"
    ),
]
DEVICE = torch.device("cuda")
by_both = pytest.mark.skipif(bool(lacking()), reason=f"Triton's own launcher needs {lacking()}")


def launched(codec: Base) -> SlotKernels:
    return SlotKernels(codec, driver_launcher(DEVICE))


def everything(one: SlotKernels, slots: list[torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every launch there is, by what it computes."""
    table = torch.tensor([slot.data_ptr() for slot in slots], device=DEVICE)
    ids = torch.arange(len(slots), device=DEVICE).flip(0)
    found = {
        "each": one.multiply("down_proj", slots, x),
        "shared": one.multiply("down_proj", slots, x[:1]),
        "few": one.multiply("down_proj", slots[:3], x[1:4]),
        "ids": one.multiply_by_ids("down_proj", table, ids, x),
    }
    if not one.is_plain:
        found["dequantized"] = torch.cat([some.clone() for _, some in one.dequantized("down_proj", slots)])
    return found


@by_both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", list(FORMATS))
def test_the_bits_are_those_of_triton_s_own_launches(name: str, bias: bool, dtype: torch.dtype) -> None:
    for transposed in (False, True):
        inputs = cases.odd_inputs(name, long=True)
        experts = cases.matrices(19, 203, inputs, transposed, bias)
        codec = cases.codec_of(name, experts[0], dtype, DEVICE, transposed)
        slots = [slot.raw for slot in cases.slots_of(codec, experts)]
        x = torch.randn(19, inputs, device=DEVICE).to(dtype)
        ours, theirs = (everything(one, slots, x) for one in (launched(codec), SlotKernels(codec, ByTriton)))
        assert not [what for what, result in ours.items() if not torch.equal(result, theirs[what])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", list(FORMATS))
def test_products_are_right(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no compiler, and nothing to compare with."""
    monkeypatch.setattr(cases, "kernels_of", launched)
    for transposed in (False, True):
        long = cases.odd_inputs(name, long=True)
        assert cases.product_error(name, dtype, DEVICE, transposed, True, 203, long, count=19) < 1
    if name in cases.CODED:
        assert cases.dequantization_error(name, dtype, DEVICE, False, 203, count=19) < 1


@pytest.mark.parametrize("name", ["checkpoint", "int4-g64", "mxfp4"])
def test_a_graph_has_the_bits(name: str) -> None:
    experts = cases.matrices(8, 203, cases.odd_inputs(name, long=True), False, True)
    codec = cases.codec_of(name, experts[0], torch.bfloat16, DEVICE, False)
    slots, one = [slot.raw for slot in cases.slots_of(codec, experts)], launched(codec)
    table, ids = torch.tensor([slot.data_ptr() for slot in slots], device=DEVICE), torch.arange(8, device=DEVICE)
    x = torch.randn(8, codec.out_in("down_proj")[1], device=DEVICE).to(torch.bfloat16)

    def both() -> list[torch.Tensor]:
        return [one.multiply("down_proj", slots, x), one.multiply_by_ids("down_proj", table, ids, x)]

    both()  # loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        ids.copy_(torch.randperm(8))
        graph.replay()
        assert all(map(torch.equal, captured, both()))


def test_launches_go_to_the_current_stream() -> None:
    """Behind a kernel that takes long, on a stream of its own; the other stream does not wait for it."""
    experts = cases.matrices(2, 64, 64, False, False)
    codec = cases.codec_of("checkpoint", experts[0], torch.float32, DEVICE, False)
    slots, one = [slot.raw for slot in cases.slots_of(codec, experts)], launched(codec)
    x = torch.zeros(2, 64, device=DEVICE)
    want = one.multiply("down_proj", slots, torch.ones_like(x))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.fill_(1.0)
        got = one.multiply("down_proj", slots, x)
    stream.synchronize()
    assert torch.equal(got, want)


def test_a_thread_that_has_used_no_gpu_launches() -> None:
    experts = cases.matrices(4, 64, 64, False, False)
    codec = cases.codec_of("int8", experts[0], torch.float16, DEVICE, False)
    slots, one = [slot.raw for slot in cases.slots_of(codec, experts)], launched(codec)
    x = torch.randn(4, 64, device=DEVICE).to(torch.float16)
    want = one.multiply("down_proj", slots, x)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: one.multiply("down_proj", slots, x), range(64)))
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for got in found)


def test_errors_come_in_the_driver_s_words() -> None:
    torch.zeros(1, device=DEVICE)  # this thread has a context
    with pytest.raises(DriverError, match=r"CUDA error: [a-z ]+ \(cuModuleLoadData: \d+\)"):
        open_driver().handle("cuModuleLoadData", b"\x7fELF" + bytes(200))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model"), dtype=torch.bfloat16))


@pytest.mark.parametrize("dense", ["checkpoint", "int4-g32"])
@pytest.mark.parametrize("name", ["checkpoint", "int4-g32"])
def test_the_engine_launches_through_the_driver(
    model: Path, name: str, dense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the kernels, and agrees with itself without them; dense layers take them, too."""
    made: list[Any] = []
    launcher = driver_launcher(DEVICE)
    monkeypatch.setattr(kernels, "driver_launcher", lambda device: made.append(device) or launcher)
    spec = LoadSpec.checked(
        str(model), Settings({"budget": "50%"}), format=name, context=256, device="cuda", dense=dense
    )
    with unloading(Engine.load(spec)) as engine:
        assert cases.engine_error(engine) < 0.03 and made
