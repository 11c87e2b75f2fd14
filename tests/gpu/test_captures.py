"""Captures that fail on a real GPU: torch's allocator is as before, and the next capture is a graph."""

import gc
from collections.abc import Callable

import pytest
import torch

from core.runtime.graph_pool import GraphPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")


def out_of_memory(x: torch.Tensor) -> None:
    torch.empty(1 << 44, dtype=torch.uint8, device=DEVICE)


def number_asked_for(x: torch.Tensor) -> None:
    float(x[0, 0])


def mistake(x: torch.Tensor) -> None:
    raise ValueError("a mistake")


def settled() -> int:
    """Bytes that torch keeps of the device, with nothing to spare."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(DEVICE)


@torch.inference_mode()
@pytest.mark.parametrize("fault", [out_of_memory, number_asked_for, mistake])
def test_nothing_is_left_of_a_capture_that_fails(fault: Callable[[torch.Tensor], None]) -> None:
    x = torch.randn(512, 512, device=DEVICE)
    want, pool, left = x @ x, GraphPool(DEVICE), list[int]()

    def fails() -> torch.Tensor:
        y = x @ x
        fault(x)
        return y

    def why() -> str:
        try:
            pool.capture(fails)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}; {error.__context__!r}"
        return "nothing"

    before = settled()
    for _ in range(3):
        said = why()
        assert said != "nothing" and pool.failed, said
        pool.give_back()
        assert torch.cuda.current_stream(DEVICE) == torch.cuda.default_stream(DEVICE), said
        left.append(settled())
        pools = [one["segment_pool_id"] for one in torch.cuda.memory_snapshot()]
        assert all(tuple(one) == (0, 0) for one in pools), f"torch {torch.__version__}, {said}: {pools}"
    assert left == [before] * 3, f"torch {torch.__version__}, {said}"
    assert torch.equal(x @ x, want)
    graph, got = pool.capture(lambda: x @ x)
    graph.replay()
    assert torch.allclose(got, want)
    del graph, got
    pool.give_back()
    assert settled() <= before
