"""Rotary embeddings in one launch on a real GPU: every bit is that of the model's own function, and it is captured."""

import logging
from collections.abc import Sequence

import pytest
import torch

from core.hf import fused_rotary, rotary
from core.hf.rotary import Rotation
from core.memory.codec import kernels
from tests.hf.rotary_cases import DTYPES, FUNCTIONS, ON_GPU, Function, bits, drawn, identical
from tests.logged import Logged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def _nothing_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    if not fused_rotary.available(torch.device("cuda")):
        pytest.skip("there is no Triton")
    monkeypatch.setattr(rotary, "_tried", {})


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_every_bit_is_the_functions_own(function: Function, dtype: torch.dtype, caplog: Logged) -> None:
    own = function.own
    with caplog.at_level(logging.INFO, rotary.log.name):
        for sizes in ON_GPU:
            rotation = Rotation(own)
            rotation(*drawn(function, sizes, dtype, "cuda"))
            kernel = [*rotation._tried.values()][-1]
            assert isinstance(kernel, fused_rotary.FusedRotation), f"{sizes}: {caplog.text}"
            assert kernel.form == function.form(sizes.width, dtype), sizes
            for seed in range(1, 9):
                states = drawn(function, sizes, dtype, "cuda", seed)
                got, want = rotation(*states), own(*states)
                assert identical(got, want), f"{sizes}, seed {seed}: {difference(got, want)}"


def difference(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> str:
    """Strides, and the first numbers that differ."""
    found = []
    for one, other in zip(got, want, strict=True):
        at = (bits(one) != bits(other)).nonzero()
        numbers = [(where, float(one[tuple(where)]), float(other[tuple(where)])) for where in at[:3].tolist()]
        found.append(f"{one.stride()} for {other.stride()}, {len(at)} of {one.numel()} differ, first {numbers}")
    return "; ".join(found)


@torch.inference_mode()
def test_triton_launches_it_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are launched through the driver."""
    function = FUNCTIONS["qwen3_moe"]
    monkeypatch.setattr(kernels, "launcher_of", lambda device: kernels.ByTriton)
    fused_rotary._starter.cache_clear()
    try:
        for dtype in DTYPES:
            rotation = Rotation(function.own)
            states = drawn(function, ON_GPU[0], dtype, "cuda")
            assert identical(rotation(*states), function.own(*states))
            (kernel,) = rotation._tried.values()
            assert isinstance(kernel, fused_rotary.FusedRotation), "its trial failed"
            rotation._tried.clear()
    finally:
        fused_rotary._starter.cache_clear()


@torch.inference_mode()
def test_one_launch_that_a_graph_captures() -> None:
    from torch.profiler import ProfilerActivity, profile

    function = FUNCTIONS["qwen3_moe"]
    rotation, states = Rotation(function.own), drawn(function, ON_GPU[0], torch.bfloat16, "cuda")
    rotation(*states)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        rotation(*states)
        torch.cuda.synchronize()
    assert sum(row.count for row in profiled.key_averages() if "LaunchKernel" in row.key) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = rotation(*states)
    for one, other in zip(states, drawn(function, ON_GPU[0], torch.bfloat16, "cuda", 3), strict=True):
        one.copy_(other)
    graph.replay()
    assert identical(got, function.own(*states))
