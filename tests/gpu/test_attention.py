"""A decoded token's attention by our kernels on a real GPU: close to the formula, the same bits wherever the number of
positions is, and captured in a graph that is replayed at another length."""

import pytest
import torch

from core.hf.attention_launch import AttentionKernels, Shape, exact, tried

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")
SHAPES = [(32, 4, 128, 128), (64, 8, 64, 64), (128, 128, 192, 128), (6, 2, 80, 80), (8, 1, 256, 256)]


def made_for(shape: tuple[int, int, int, int], dtype: torch.dtype) -> AttentionKernels:
    made = tried(Shape(*shape, dtype, shape[2] ** -0.5), DEVICE)
    if made is None and torch.cuda.get_device_capability() < (8, 0) and dtype == torch.bfloat16:
        pytest.skip("this GPU does not compute in bfloat16")
    assert made is not None, "the trial failed; run with --log-level=INFO for the reason"
    return made


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_close_to_the_formula(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    made, (heads, shared, width, values) = made_for(shape, dtype), shape
    for kept in (1, 15, 128, 129, 1000, 4100):
        q = torch.randn(1, heads, 1, width, device=DEVICE).to(dtype)
        k, v = (torch.randn(1, shared, kept, of, device=DEVICE).to(dtype) for of in (width, values))
        want = exact(q, k, v, width**-0.5)
        got = made(q, k, v, None)
        assert float((got[0, 0].float() - want).norm() / want.norm()) < max(1e-5, 4 * torch.finfo(dtype).eps), kept
        room = torch.full((1, shared, kept + 200, width), float("nan"), device=DEVICE, dtype=dtype)
        other = torch.full((1, shared, kept + 200, values), float("nan"), device=DEVICE, dtype=dtype)
        room[:, :, :kept], other[:, :, :kept] = k, v
        last = torch.tensor([kept - 1], device=DEVICE)
        assert torch.equal(made(q, room, other, last), got), kept


@torch.inference_mode()
def test_a_graph_is_replayed_at_another_length() -> None:
    made = made_for(SHAPES[0], torch.bfloat16)
    q = torch.randn(1, 32, 1, 128, device=DEVICE).to(torch.bfloat16)
    k, v = (torch.randn(1, 4, 1024, 128, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    last = torch.tensor([299], device=DEVICE)
    made(q, k, v, last)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        got = made(q, k, v, last)
    for count in (300, 1, 1024, 513):
        last.fill_(count - 1)
        graph.replay()
        assert torch.equal(got, made(q, k[:, :, :count], v[:, :, :count], None)), count
