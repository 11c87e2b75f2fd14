"""Tokens led by a real GPU and their graphs: the bits of tokens led by the host, also after a capture that fails."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from core.memory.codec import FORMATS
from core.memory.host_memory import HostMemory
from core.runtime.graph_pool import GraphPool
from tests import kernel_cases as cases
from tests.checkpoints import make_checkpoint
from tests.decoded import Run, answer
from tests.loaded import loaded
from tests.tiny_tokenizer import save_tokenizer

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", list(FORMATS))
def test_by_ids_the_bits_are_those_by_addresses(name: str, transposed: bool, dtype: torch.dtype) -> None:
    experts = cases.matrices(6, 203, cases.odd_inputs(name, long=True), transposed, bias=True)
    codec = cases.codec_of(name, experts[0], dtype, DEVICE, transposed)
    slots, kernels = cases.slots_of(codec, experts), cases.kernels_of(codec)
    memory = HostMemory(len(experts), codec.slot_bytes, True)
    try:
        for row, slot in zip(memory.rows, slots, strict=True):
            row.copy_(slot.raw.cpu())
        near = [slot.raw.data_ptr() for slot in slots]
        home = memory.device_addresses()
        mixed = torch.tensor([*near[:3], *home[3:]], device=DEVICE)
        ids = torch.tensor([4, 0, 3, 2], device=DEVICE)
        x = torch.randn(4, codec.out_in("down_proj")[1], device=DEVICE).to(dtype)
        for states in (x, x[:1]):
            want = kernels.multiply("down_proj", [slots[e].raw for e in ids.tolist()], states)
            assert torch.equal(kernels.multiply_by_ids("down_proj", mixed, ids, states), want)
    finally:
        torch.cuda.synchronize()
        memory.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model"), num_experts=16, dtype=torch.bfloat16)
    return save_tokenizer(made)


def run(model: Path, decode: str, name: str, scope: str, said: Sequence[Sequence[int]] = ((), ())) -> list[Run]:
    """Two answers, of the likeliest tokens or `said` ones."""
    chosen = {"budget": "45%", "eviction": "lru", "scope": scope, "predictor": "none", "gpu_decode": decode}
    with loaded(model, chosen, format=name, context=256, device="cuda") as engine:
        assert (reason := engine.parts.device_decode.reason) == "", reason
        runs = [answer(engine, 60, seed, text) for seed, text in enumerate(said)]
        if (step := engine.parts.device_decode.step) is not None:
            step.table.check()
        if (graphs := engine.parts.device_decode.graphs) is not None:
            said = [text for _, text in engine.frame().marks if "gpu_decode" in text]
            found = f"{graphs.reason!r} after {graphs.replays} replays and {said}; {engine.memory()}"
            assert graphs.reason == "" and graphs.replays > 60, found
        return runs


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("name", ["checkpoint", "int4-g32", "mxfp4"])
def test_the_same_bits_and_cache_as_led_by_the_host(model: Path, name: str, scope: str) -> None:
    for host, device in zip(*(run(model, decode, name, scope) for decode in ("host", "device")), strict=True):
        assert torch.equal(host.logits, device.logits)
        assert host.resident == device.resident


@pytest.mark.parametrize("name", ["checkpoint", "int4-g32"])
def test_graphs_are_close_to_tokens_led_by_the_host(model: Path, name: str) -> None:
    """Attention over masked positions is summed in another order, after which a near tie of a router may go the other
    way: the same text is said in both, and most of its tokens are compared."""
    hosts = run(model, "host", name, "layer")
    graphs = run(model, "graph", name, "layer", [host.logits.argmax(1).tolist() for host in hosts])
    for host, graph in zip(hosts, graphs, strict=True):
        off = (host.logits - graph.logits).norm(dim=1) / host.logits.norm(dim=1)
        assert float(off.median()) < 0.02, f"off by {off.tolist()}"
