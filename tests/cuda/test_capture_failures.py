"""Captures of a token that fail: tokens are computed as without graphs, all memory comes back, and nothing that is
allocated later fails, whatever torch undoes by itself. And what keeps them from failing: room within the budget."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from core.engine import Engine
from core.runtime import token_graph
from core.runtime.device_step import DeviceStep
from core.runtime.graph_pool import ROOM
from core.settings.sampling import Sampling
from tests.cuda.conftest import engine_on
from tests.cuda.test_device_decode import Case
from tests.cuda.test_token_graph import graphs_of
from tests.decoded import PROMPT
from tests.fake_cuda import FakeCuda, installed
from tests.fake_cuda.graphs import Undoes
from tests.fake_cuda.memory import MIB, SHARED
from tests.selection import layered

SETTINGS = Case("lru").settings("graph")
ALL = 48  # slots of the model
Fault = Callable[[], object]


def answer(engine: Engine, tokens: int) -> torch.Tensor:
    """Its logits [tokens, V]."""
    logits: list[torch.Tensor] = []

    def greedy(_: object, row: torch.Tensor) -> int:
        logits.append(row[0].float().cpu())
        return int(row.argmax())

    list(engine.generate(PROMPT, Sampling(max_new_tokens=tokens), draw=greedy))
    return torch.stack(logits)


def out_of_memory() -> None:
    torch.empty(2 << 30, dtype=torch.uint8, device="cuda")


def number_asked_for() -> None:
    float(torch.zeros(1, device="cuda"))


class Failing:
    """In captures the second layer fails, from the capture numbered `first` on."""

    def __init__(self, patch: pytest.MonkeyPatch, fault: Fault, first: int = 0) -> None:
        self.captures = 0
        real = DeviceStep.__call__

        def layer(step: DeviceStep, at: int, *given: torch.Tensor) -> torch.Tensor:
            if at == 1 and torch.cuda.is_current_stream_capturing():
                self.captures += 1
                if self.captures > first:
                    fault()
            return real(step, at, *given)

        patch.setattr(DeviceStep, "__call__", layer)


@pytest.fixture(scope="module")
def led(model: Path) -> torch.Tensor:
    """Logits of tokens that no graph computed."""
    with installed(FakeCuda(), kernels=True), engine_on(model, Case("lru").settings("device")) as engine:
        return answer(engine, 24)


@pytest.fixture
def gpu(fake_kernels: FakeCuda) -> Iterator[FakeCuda]:
    """Whose library of products takes as much as on an H100; at the end all memory has come back."""
    fake_kernels.tensors.product_bytes = 32 * MIB
    yield fake_kernels
    assert fake_kernels.memory.reserved == fake_kernels.memory.allocated == fake_kernels.pinned.used == 0


def is_as_before(engine: Engine, gpu: FakeCuda) -> None:
    """Nothing of a capture is left, and memory can be had."""
    assert not gpu.memory.captured
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    assert all(one["segment_pool_id"] == SHARED for one in gpu.memory.snapshot())
    assert gpu.memory.reserved <= engine.memory().used <= engine.memory().budget
    torch.empty(gpu.memory.available, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    for budget in ("30%", "100%"):
        engine.change({"budget": budget})
        answer(engine, 2)
        assert gpu.memory.reserved <= engine.memory().used <= engine.memory().budget


@pytest.mark.parametrize("undoes", layered(list(Undoes), quick=lambda undoes: undoes is Undoes.NOTHING))
@pytest.mark.parametrize(
    "fault", layered([out_of_memory, number_asked_for], quick=lambda fault: fault is out_of_memory)
)
def test_tokens_go_on_without_graphs(
    fault: Fault, undoes: Undoes, model: Path, led: torch.Tensor, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.captures.undoes = undoes
    failing = Failing(monkeypatch, fault)
    with engine_on(model, SETTINGS) as engine:
        assert torch.equal(answer(engine, 8), led[:8])
        assert failing.captures == 1 and graphs_of(engine).replays == 0
        assert ("no room for" in graphs_of(engine).reason) == (fault is out_of_memory)
        is_as_before(engine, gpu)


@pytest.mark.long(0.2)
@pytest.mark.parametrize("undoes", list(Undoes))
@pytest.mark.parametrize("fault", [out_of_memory, number_asked_for])
def test_a_second_length_that_fails_takes_the_first_with_it(
    fault: Fault, undoes: Undoes, model: Path, led: torch.Tensor, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_graph, "SHORTEST", 16)
    gpu.captures.undoes = undoes
    failing = Failing(monkeypatch, fault, first=1)
    with engine_on(model, SETTINGS) as engine:
        logits = answer(engine, 24)
        assert float((logits - led).abs().max()) < 1e-5 * float(led.abs().max())
        assert failing.captures == 2 and graphs_of(engine).replays > 0 and graphs_of(engine).reason
        is_as_before(engine, gpu)


@pytest.mark.long(0.2)
def test_after_an_error_that_is_nobodys_it_is_captured_again(model: Path, led: torch.Tensor, gpu: FakeCuda) -> None:
    def mistake() -> None:
        raise ValueError("a mistake")

    with engine_on(model, SETTINGS) as engine:
        with pytest.MonkeyPatch.context() as patch:
            Failing(patch, mistake)
            with pytest.raises(ValueError, match="a mistake"):
                answer(engine, 4)
        logits = answer(engine, 24)
        assert float((logits - led).abs().max()) < 1e-5 * float(led.abs().max())
        assert graphs_of(engine).replays > 0
        engine.change({"gpu_decode": "device"})
        answer(engine, 2)
        is_as_before(engine, gpu)


@pytest.mark.long(0.2)
def test_without_it_they_would_exceed_the_budget(model: Path, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.capacity.sizes.ROOM", 0)
    with engine_on(model, SETTINGS) as engine:
        answer(engine, 4)
        assert "more memory than the budget leaves" in graphs_of(engine).reason
        assert all(one["segment_pool_id"] == SHARED for one in gpu.memory.snapshot())


@pytest.mark.long(0.2)
def test_slots_make_room_and_get_it_back(model: Path, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget in bytes."""
    monkeypatch.setattr("core.capacity.sizes.ROOM", 64 * MIB)
    with engine_on(model, {**SETTINGS, "budget": "100%", "gpu_decode": "device"}) as engine:
        fewer = ALL // 4
        bytes_ = engine.sizes.bytes(ALL) + ROOM - fewer * engine.sizes.slot
        engine.change({"budget": str(bytes_)})
        for decode, slots in (("device", ALL), ("graph", ALL - fewer), ("host", ALL), ("graph", ALL - fewer)):
            engine.change({"gpu_decode": decode})
            answer(engine, 6)
            assert engine.expert_cache.slots == slots and engine.settings.cache.budget.bytes == bytes_
            assert gpu.memory.reserved <= engine.memory().used <= engine.memory().budget == bytes_
        assert graphs_of(engine).replays > 0


@pytest.mark.long(0.2)
def test_a_card_that_others_fill_is_not_captured_on(model: Path, led: torch.Tensor, gpu: FakeCuda) -> None:
    with engine_on(model, SETTINGS) as engine:
        gpu.memory.taken = gpu.memory.available - ROOM // 2
        assert torch.equal(answer(engine, 24), led)
        assert "of free memory" in graphs_of(engine).reason
        gpu.memory.taken = 0
        is_as_before(engine, gpu)
