"""Threads that compute steps in the background: the same results, whoever computes, and faults that become errors."""

import ctypes
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from core.errors import HostError
from core.memory.codec.fast import background
from core.memory.codec.fast import background_code as code
from core.memory.codec.fast.background import Background
from core.memory.codec.fast.steps import Steps, Work
from core.system.native.compile import address, compiled, supported
from core.system.native.ir import Code

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
UNITS = 64
NUMBERS = torch.zeros(UNITS, dtype=torch.int64)


def counting() -> int:
    made = Code("void @counting(ptr %arguments, i64 %from, i64 %to)")
    out = made.load("ptr", "%arguments", 8)
    with made.loop("%from", "%to") as each:
        at = made.at(out, each.index, 8)
        made.store("i64", made.add(made.load("i64", at, 8), 1), at, 8)
    return address(compiled(made)["counting"])


@pytest.fixture(params=[1, 3])
def team(request: pytest.FixtureRequest) -> Iterator[Background]:
    team = Background(request.param)
    yield team
    team.close()


def steps_of(out: torch.Tensor, count: int, some: int = 4) -> Steps:
    steps, kernel = Steps(), counting()
    for _ in range(count):
        steps.add(Work(kernel, [out.data_ptr()], len(out), some))
    return steps


def test_every_unit_of_every_step_is_computed_once(team: Background) -> None:
    out = torch.zeros(UNITS, dtype=torch.int64)
    steps = steps_of(out, 5)
    for n in range(1, 400):
        team.post(steps)
        if n % 3 == 0:
            time.sleep(1e-4)  # the team has begun by then
        if n % 100 == 0:
            time.sleep(5e-3)  # the team sleeps
        team.join()
        assert (out == 5 * n).all()


def test_the_time_is_that_of_what_the_team_computed(team: Background) -> None:
    out = torch.zeros(1 << 18, dtype=torch.int64)
    steps, seen = steps_of(out, 20, some=1 << 15), []
    for _ in range(20):
        team.post(steps)
        time.sleep(0.03)
        began = time.perf_counter()
        team.join()
        seen.append(team.took_s)
        assert time.perf_counter() - began < 1
    assert all(0 < one < 1 for one in seen)


def test_what_is_cancelled_is_no_longer_computed(team: Background) -> None:
    out = torch.zeros(UNITS, dtype=torch.int64)
    steps = steps_of(out, 3)
    for _ in range(50):
        team.post(steps)
        team.cancel()
        before = out.clone()
        time.sleep(1e-4)
        assert torch.equal(out, before)
    team.cancel()  # of nothing


def test_the_threads_end_when_it_is_closed() -> None:
    before = {*threading.enumerate()}
    team = Background(3)
    out = torch.zeros(UNITS, dtype=torch.int64)
    steps = steps_of(out, 2)
    for _ in range(20):
        team.post(steps)
        time.sleep(1e-4)
        team.join()
    own = [one for one in {*threading.enumerate()} - before if one.name in ("moestro-rows", "moestro-host")]
    assert own
    team.close()
    for one in own:
        one.join(20)
    assert not any(one.is_alive() for one in own)


def test_a_thread_that_has_ended_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "_lead", lambda self: None)
    team = Background(1)
    team._leader.join()
    with pytest.raises(HostError, match=r"it has ended.*miss_placement"):
        team.post(steps_of(NUMBERS, 2))
    team.close()


def test_a_thread_that_ended_while_it_computed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "_lead", taking)
    team = Background(1)
    team.post(steps_of(NUMBERS, 2))
    team._leader.join()
    with pytest.raises(HostError, match="it has ended"):
        team.join()
    with pytest.raises(HostError, match="it has ended"):
        team.post(steps_of(NUMBERS, 2))


def test_a_thread_that_is_never_done_is_an_error_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "TIMEOUT_S", 0.2)
    over = threading.Event()

    def hanging(self: Background) -> None:
        taking(self)
        over.wait(30)

    monkeypatch.setattr(Background, "_lead", hanging)
    team = Background(1)
    try:
        team.post(steps_of(NUMBERS, 2))
        while team._state.value != code.TAKEN:
            time.sleep(1e-3)
        began = time.monotonic()
        with pytest.raises(HostError, match=r"did not finish within 0\.2 seconds"):
            team.join()
        assert 0.1 < time.monotonic() - began < 5
        team.close()  # waits no longer than that
    finally:
        over.set()


def taking(team: Background) -> None:
    team._called.wait()
    ctypes.c_int64.from_address(team._at).value = code.TAKEN
