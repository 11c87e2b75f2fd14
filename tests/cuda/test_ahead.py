"""The end of a token behind the launch of the next one, on the fake GPU: what order things have, and what becomes of a
token that was launched and is not wanted."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from core.cache.address_table import AddressTable
from core.engine import Engine
from core.errors import MoestroError
from core.runtime.device_decode import DeviceDecode
from core.runtime.device_step import DeviceStep
from core.runtime.recorder import Recorder
from core.settings.sampling import Sampling
from tests.cuda.conftest import engine_on
from tests.cuda.test_device_decode import Case
from tests.decoded import PROMPT
from tests.fake_cuda import FakeCuda, installed
from tests.fake_cuda.faults import LOST
from tests.fake_cuda.graphs import FakeGraph

GRAPH, HOST = (Case("lru").settings(way) for way in ("graph", "host"))
NOTED = (
    (FakeGraph, "replay"),
    (AddressTable, "request"),
    (Recorder, "end"),
    (DeviceStep, "drop"),
    (DeviceDecode, "taken"),
)
LAST = 12  # tokens, of which the first four come from a prompt and from passes that a graph is compared with


@contextmanager
def noted(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of what is called, in order."""
    log = list[str]()
    for kind, name in NOTED:
        real = getattr(kind, name)

        def call(self: object, *args: object, _real: object = real, _name: str = name, **values: object) -> object:
            log.append(_name)
            return _real(self, *args, **values)  # type: ignore[operator]

        patch.setattr(kind, name, call)
    yield log


def said(engine: Engine, log: list[str] | None = None, tokens: int = LAST, **choices: object) -> list[int]:
    """The likeliest tokens of an answer; `log` gets "draw" for each."""
    found = list[int]()

    def greedy(_: Sequence[int], row: torch.Tensor) -> int:
        found.append(int(row[0].argmax()))
        if log is not None:
            log.append("draw")
        return found[-1]

    list(engine.generate(PROMPT, Sampling(max_new_tokens=tokens), draw=greedy, **choices))  # type: ignore[arg-type]
    engine.expert_cache.check_integrity()
    return found


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[int]:
    """What the host leads to."""
    with installed(FakeCuda(), kernels=True), engine_on(model, HOST) as engine:
        return said(engine)


def test_a_tokens_end_is_behind_the_launch_of_the_next_one(
    model: Path, fake_kernels: FakeCuda, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each token but the last: it is drawn, the next one is launched, and then it is requested and recorded; and the
    next pass launches nothing."""
    with engine_on(model, GRAPH) as engine, noted(monkeypatch) as log:
        assert said(engine, log) == wanted
    text = " ".join(log)
    ahead, last = "draw replay request end taken ", "draw request end"
    assert text.endswith(ahead * 6 + last), text
    assert "drop" not in log


def test_a_slot_that_the_launched_token_reads_is_not_overwritten(model: Path) -> None:
    """Copies for one token wait for the next one: without the fence they race with it."""
    with installed(FakeCuda(), kernels=True) as fake, engine_on(model, GRAPH) as engine:
        said(engine, tokens=40)
        assert not fake.races.found
        with pytest.MonkeyPatch.context() as patch:
            settle = DeviceStep.settle
            patch.setattr(DeviceStep, "settle", lambda self, launched: settle(self, launched=False))
            said(engine, tokens=40)
    assert fake.races.found


def test_a_token_that_is_not_wanted_leaves_nothing(
    model: Path, fake_kernels: FakeCuda, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel, and settings that change, when the next token was launched: it is waited for, not recorded, and not in
    the KV that is kept; answers go on as if it had not been."""
    with engine_on(model, GRAPH) as engine, noted(monkeypatch) as log:
        said(engine)
        log.clear()
        cancel, tokens = threading.Event(), 0
        for piece in engine.generate(PROMPT, Sampling(max_new_tokens=LAST), cancel, reuse=True):
            tokens += piece.kind == "token"
            if tokens == 8:
                cancel.set()
        assert tokens == 8 and log[-4:] == ["replay", "request", "end", "drop"] and log.count("drop") == 1
        assert said(engine, reuse=True) == wanted  # from what that answer has left
        found = list[int]()

        def greedy(_: Sequence[int], row: torch.Tensor) -> int:
            found.append(int(row[0].argmax()))
            return found[-1]

        for piece in engine.generate(PROMPT, Sampling(max_new_tokens=LAST), draw=greedy):
            if piece.kind == "token" and len(found) == 8:
                engine.change({"budget": "50%"})
        assert found == wanted and log.count("drop") == 2


def test_an_error_of_a_launched_token_is_the_answers(model: Path) -> None:
    with installed(FakeCuda(), kernels=True) as fake, engine_on(model, GRAPH) as engine:
        said(engine)
        replays = list[None]()

        def lost(call: str) -> bool:
            if call == "graph.replay":
                replays.append(None)
            return len(replays) == 6

        fake.faults.lose_device(lost)
        with pytest.raises(MoestroError, match=LOST[:20]):
            said(engine)
        fake.faults.mend()
