"""The shadows' process: what it imports, how it ends, what it understands; and one that is slow, or stuck."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from app.services import regret, regret_feed, regret_process
from app.services.regret import Regret
from app.services.regret_feed import Step, arrays, imitated
from app.services.regret_process import Lost, Process
from core.settings.config import Settings
from core.types import StepRecord
from tests.app.conftest import WAIT_S
from tests.fake_models import SHAPE

ROOT = Path(__file__).resolve().parents[2]


Told = dict[str, Any]


def told(meter: Regret, load: int | None, settings: Any, until: Callable[[Told], bool]) -> Told:
    version = -1
    while True:
        view = meter.view(load, settings)
        assert view is not None
        if until(view):
            return view
        before, version = version, meter.wait(version, WAIT_S)
        assert version != before, f"nothing happened: {view}"


def passes(count: int) -> list[StepRecord]:
    random = np.random.default_rng(3)
    layer = np.repeat(np.arange(SHAPE.layers, dtype=np.int16), SHAPE.top_k)
    found = []
    for index in range(count):
        ids = random.random((SHAPE.layers, 1, SHAPE.experts)).argsort(-1)[..., : SHAPE.top_k].astype(np.int16)
        times, outcomes = (0.0, 1.0, 1.0, 0.0, 0.0, 0.0), np.zeros(len(layer), np.uint8)
        pairs = ids, layer, ids.ravel(), outcomes
        found.append(StepRecord(index, "decode", 1, *times, *pairs, slots=SHAPE.total // 2))
    return found


def test_the_process_is_modest_and_ends_with_whoever_started_it() -> None:
    process = Process()
    assert process.ask({"report": False})["report"] is None
    told = psutil.Process(process.pid)
    if os.name == "posix":
        assert told.nice() == 19
    process._worker.pipe.close()  # as when the application is killed
    assert told.wait(WAIT_S) == 0
    process.end()
    with pytest.raises(Lost):
        process.ask({"report": True})


def test_the_process_needs_no_torch() -> None:
    code = (
        "import sys; from app.services.regret_process import ShadowServer; ShadowServer(); "
        "sys.exit(len({'torch', 'transformers'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.long(0.1)
def test_a_policy_of_the_users_own_has_no_shadow_and_no_other_is_advised_for_it() -> None:
    server = regret_process.ShadowServer()
    fed = [Step(1, SHAPE, Settings(), step) for step in passes(40)]
    setup = {**asdict(imitated(fed[0])), "policies": {"lru": {}, "fifo": {}, "mine": {}}}
    assert server.answer({"setup": setup, "window": 64}, {})["problem"] == ""
    report = server.answer({"report": True}, arrays(fed))["report"]
    assert list(report["rates"]) == ["lru", "fifo"]
    for own in (1.0, 0.0):  # what an engine hits that prefetches is not what a shadow would
        told = regret.ranked("mine", {**report, "own": own}, prefetch=True)
        assert (told["own"], told["alone"], told["better"]) == (own, own, False)


class Stuck(Process):
    """A process that never answers."""

    def __init__(self) -> None:
        self.killed, self.asked = threading.Event(), threading.Event()

    def ask(self, head: Any, passes: Any = None) -> Any:
        self.asked.set()
        assert self.killed.wait(WAIT_S)
        raise Lost("killed")

    def kill(self) -> None:
        self.killed.set()

    def end(self) -> None:
        self.killed.set()


class Slow(Process):
    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def ask(self, head: Any, passes: Any = None) -> Any:
        self.asked.set()
        assert self.go.wait(WAIT_S)
        return super().ask(head, passes)


@pytest.mark.long(0.1)
def test_a_process_that_falls_behind_delays_nobody_and_the_oldest_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr(regret_feed, "WINDOW", 4096)
    meter, settings = Regret(start=lambda: slow), Settings()
    steps = passes(regret.QUEUE + 300)
    meter.add(1, SHAPE, settings, steps[0])
    assert slow.asked.wait(WAIT_S)
    for step in steps[1:]:
        meter.add(1, SHAPE, settings, step)  # it answers nothing, and yet this returns
    slow.go.set()
    view = told(meter, 1, settings, lambda view: view["tokens"] == regret.QUEUE + 1)
    assert view["left_out"] == 299
    meter.close()


def test_a_stuck_process_does_not_keep_the_application_from_closing() -> None:
    stuck = Stuck()
    meter, others = Regret(start=lambda: stuck), set(threading.enumerate())
    meter.add(1, SHAPE, Settings(), passes(1)[0])
    assert stuck.asked.wait(WAIT_S)
    meter.close(WAIT_S)
    assert stuck.killed.is_set()
    assert not any(thread.name == "moestro-regret" for thread in set(threading.enumerate()) - others)
