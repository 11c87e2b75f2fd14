"""Errors of a GPU: told apart, answered with fewer experts where memory is short, and known to all that wait."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastapi import Request

from app.server.errors import moestro_error
from core.cache.lease import LeasedSegment
from core.engine import Engine, settings_controller
from core.errors import BudgetError, DeviceError, DeviceFullError, MoestroError
from core.memory.slot import Slot
from core.memory.transfer import Ticket, TransferEngine
from core.runtime.out_of_memory import faulted, shortage
from core.runtime.rows import ExpertRows
from core.settings.sampling import Sampling
from core.types import Segment
from tests.checkpoints import make_checkpoint
from tests.cuda.conftest import engine_on
from tests.fake_cuda import FakeCuda, installed
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.usefixtures("whole_trials")
PROMPT = "hello there, how are you"
ANSWER = Sampling(max_new_tokens=12)


class Refusing:
    """Expert products of which some find no memory: the calls numbered in `at`, from 0."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at: set[int] = set()
        self.calls = 0
        real = ExpertRows.compute

        def compute(rows: ExpertRows, batch: Sequence[LeasedSegment]) -> None:
            if rows._triples.tokens == 1:
                self.calls += 1
                if self.calls - 1 in self.at:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 1 B free.")
            real(rows, batch)

        patch.setattr(ExpertRows, "compute", compute)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    monkeypatch.setattr(settings_controller, "ROOM_BYTES", 1)  # a sixteenth of the slots, then
    return Refusing(monkeypatch)


@pytest.fixture
def engine(fake_cuda: FakeCuda, model: Path) -> Iterator[Engine]:
    with engine_on(model, {"budget": "70%", "eviction": "lru"}) as engine:
        yield engine


def text(engine: Engine, answer: Sampling = ANSWER) -> str:
    return "".join(piece.text for piece in engine.generate(PROMPT, answer))


def test_the_pass_is_made_again_with_fewer_slots(engine: Engine, refusing: Refusing) -> None:
    want, slots = text(engine), engine.expert_cache.slots
    refusing.at = {refusing.calls + 7}  # the second layer of the third token
    assert text(engine) == want
    assert engine.expert_cache.slots == slots - slots // 16
    sizes = engine.sizes.under(engine.settings)
    assert engine.settings.cache.budget.bytes == sizes.bytes(engine.expert_cache.slots)
    assert any("ran out of memory" in mark for _, mark in engine.frame().marks)
    engine.expert_cache.check_integrity()


@pytest.mark.long(0.1)
def test_it_is_told_how_to_go_on_when_that_does_not_help(engine: Engine, refusing: Refusing) -> None:
    want, slots = text(engine), engine.expert_cache.slots
    refusing.at = set(range(refusing.calls + 7, refusing.calls + 1000))
    with pytest.raises(BudgetError, match=r"no room for what it computes with \(CUDA out of memory.*Lower the context"):
        text(engine)
    refusing.at = set()
    assert engine.expert_cache.slots < slots and not engine.busy
    assert text(engine) == want
    engine.expert_cache.check_integrity()


@pytest.mark.long(0.1)
def test_with_the_fewest_slots_there_is_nothing_to_give_up(
    fake_cuda: FakeCuda, model: Path, refusing: Refusing
) -> None:
    with engine_on(model, {"budget": "25%", "eviction": "lru"}) as engine:
        want, slots = text(engine), engine.expert_cache.slots
        refusing.at = {refusing.calls + 4}
        with pytest.raises(BudgetError, match="ran out of memory"):
            text(engine)
        assert engine.expert_cache.slots == slots and text(engine) == want


@pytest.mark.long(0.1)
def test_a_copy_without_memory_is_made_again_too(engine: Engine, refusing: Refusing) -> None:
    want = text(engine)
    fetch, lock, left = engine.transfers._fetch, threading.Lock(), [1]

    def refuses_once(eid: int, slots: Sequence[torch.Tensor], first: int) -> int:
        with lock:
            if left and not left.pop() - 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has 1 B free.")
        return fetch(eid, slots, first)

    engine.transfers._fetch = refuses_once
    slots = engine.expert_cache.slots
    assert text(engine) == want
    assert not left and engine.expert_cache.slots < slots
    engine.expert_cache.check_integrity()


@pytest.mark.long(0.1)
def test_a_state_that_cannot_be_taken_back_is_not_computed_twice(
    fake_cuda: FakeCuda, tmp_path: Path, refusing: Refusing
) -> None:
    """Linear attention: what a pass added to its states stays there, but before the first pass there is nothing."""
    path = save_tokenizer(make_checkpoint("qwen3_next", tmp_path))
    with engine_on(path, {"budget": "70%", "eviction": "lru"}) as engine:
        want, slots = text(engine), engine.expert_cache.slots
        refuse_prompts(engine, times=1)
        assert text(engine) == want and engine.expert_cache.slots < slots
        refusing.at = {refusing.calls + 7}
        with pytest.raises(BudgetError, match="ran out of memory"):
            text(engine)
        assert text(engine) == want


def refuse_prompts(engine: Engine, times: int) -> None:
    """The last layer of the next prompts finds no memory."""
    left, last = [None] * times, engine.wiring.math[-1]
    prompt = last.prompt

    def refuses(*args: object) -> torch.Tensor:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 1 B free.")
        return prompt.multiply(*args)  # type: ignore[arg-type]

    last.prompt = replace(prompt, multiply=refuses)


@pytest.mark.long(0.1)
def test_other_errors_stay_what_they_are(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = engine.expert_cache.slots

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("a mistake")

    for math in engine.wiring.math:
        monkeypatch.setattr(math, "token", replace(math.token, multiply=broken))
    with pytest.raises(RuntimeError, match="a mistake"):
        text(engine)
    assert engine.expert_cache.slots == slots


@pytest.mark.long(0.1)
def test_a_device_that_others_have_filled_ends_the_answer_in_words(fake_cuda: FakeCuda, model: Path) -> None:
    with engine_on(model, {"budget": "70%"}) as engine:
        want = text(engine)
        pieces = engine.generate(PROMPT, ANSWER)
        next(piece for piece in pieces if piece.kind == "token")
        fake_cuda.memory.full = True
        with pytest.raises(DeviceFullError, match="ran out of memory"):
            list(pieces)
        fake_cuda.memory.full = False
        assert not engine.busy and text(engine) == want
        engine.expert_cache.check_integrity()


GPU = torch.device("cuda")
SOON = 30  # seconds that no test takes


def ticket(eid: int, *, demand: bool = True) -> Ticket:
    slot = Slot(eid, torch.zeros(64, dtype=torch.uint8, device=GPU))
    return Ticket(Segment(eid, range(1)), [slot], 64, demand, "decode")


def within(work: Callable[[], object]) -> BaseException | None:
    """What `work` raises; it must come to an end."""
    raised: list[BaseException] = []

    def done() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=done, daemon=True)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive(), "it waits for a copy that nobody makes"
    return raised[0] if raised else None


@pytest.mark.parametrize("call", ["event.synchronize", "event.record", "stream.wait_event"])
def test_every_copy_fails_when_a_copy_thread_meets_an_error(call: str) -> None:
    with installed(FakeCuda()) as fake:
        held, entered = threading.Event(), threading.Event()

        def fetch(eid: int, slots: Sequence[torch.Tensor], first: int) -> int:
            entered.set()
            held.wait(SOON)
            return 0

        link = TransferEngine(GPU, fetch)
        first, *more, late = ticket(1), *(ticket(eid, demand=eid % 2 == 0) for eid in range(2, 6)), ticket(9)
        first.slots[0].fence = fake.functions()["Event"]()
        fake.faults.lose_in_worker(call)
        copies = [link.submit(one) for one in (first, *more)]
        if call == "event.synchronize":  # after the second copy
            assert entered.wait(SOON)
        held.set()
        errors = [within(lambda one=one: link.wait(one)) for one in copies]  # type: ignore[misc]
        assert all(error is None or isinstance(error, DeviceError | RuntimeError) for error in errors), errors
        assert isinstance(errors[-1], DeviceError) and "illegal memory access" in str(errors[-1])
        link.submit(late)
        assert isinstance(within(lambda: link.wait(late)), DeviceError)
        assert within(lambda: link.settle(late)) is None and within(link.close) is None
        assert not link.cancel(copies[-1])


@pytest.mark.parametrize("error", [DeviceError.of(RuntimeError("CUDA error: lost\nmore")), DeviceFullError("full")])
def test_a_client_is_told_that_it_is_not_to_blame(error: MoestroError) -> None:
    response = moestro_error(Request({"type": "http", "path": "/v1/completions", "headers": []}), error)
    assert response.status_code == 503 and "more" not in bytes(response.body).decode()


@pytest.mark.parametrize("who", layered(["worker", "computing thread"], quick=lambda who: who == "worker"))
def test_an_answer_ends_with_an_error_the_user_can_read(model: Path, who: str) -> None:
    """Prefetches are the worker's, demands for what is pinned the computing thread's own."""
    settings: dict[str, object] = {"budget": "45%", "eviction": "lru", "predictor": "all_next"}
    with installed(FakeCuda()) as fake:
        try:
            with engine_on(model, settings) as engine:
                if who == "worker":
                    fake.faults.lose_in_worker("event.synchronize")
                else:
                    fake.faults.lose_device(lambda call: call == "event.record")
                with pytest.raises(DeviceError, match="start Moestro again"):
                    list(engine.generate("hello", Sampling(max_new_tokens=64)))
                assert not engine.busy
                fake.faults.mend()
        finally:
            fake.faults.mend()


@pytest.mark.parametrize(
    ("error", "short", "fault"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, True),
        (RuntimeError("CUDA error: out of memory (CUDA_ERROR_OUT_OF_MEMORY: 2)"), True, True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True, True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False, True),
        (RuntimeError("CUDA error: device lost\nmore"), False, True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False, False),
    ],
)
def test_what_an_error_says(error: RuntimeError, short: bool, fault: bool) -> None:
    assert bool(shortage(error)) == short and faulted(error) == fault
