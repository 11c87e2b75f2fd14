"""An error that CUDA reports to a copy thread reaches whoever waits for a copy, and nobody waits forever."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from fastapi import Request

from app.server.errors import moestro_error
from core.errors import DeviceError, DeviceFullError, MoestroError
from core.memory.codec import SlotParts
from core.memory.slot import Slot
from core.memory.transfer import Ticket, TransferEngine
from core.settings.sampling import Sampling
from core.types import Segment
from tests.cuda.conftest import engine_on
from tests.fake_cuda import FakeCuda, installed
from tests.selection import layered

GPU = torch.device("cuda")
SOON = 30  # seconds that no test takes


def ticket(eid: int, *, demand: bool = True) -> Ticket:
    slot = Slot(eid, torch.zeros(64, dtype=torch.uint8, device=GPU), SlotParts({}, {}))
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
