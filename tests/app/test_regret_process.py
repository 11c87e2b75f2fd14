"""The shadows' process: what it imports, how it ends, and the messages it understands."""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import pytest

from app.services import regret, regret_process
from app.services.regret_feed import Step, arrays, imitated
from app.services.regret_process import Lost, Process
from core.settings.config import Settings
from core.types import StepRecord
from tests.app.conftest import WAIT_S
from tests.fake_models import SHAPE

ROOT = Path(__file__).resolve().parents[2]


def passes(count: int) -> list[StepRecord]:
    random = np.random.default_rng(3)
    layer = np.repeat(np.arange(SHAPE.layers, dtype=np.int16), SHAPE.top_k)
    found = []
    for index in range(count):
        ids = random.random((SHAPE.layers, 1, SHAPE.experts)).argsort(-1)[..., : SHAPE.top_k].astype(np.int16)
        found.append(
            StepRecord(
                index,
                "decode",
                1,
                0.0,
                1.0,
                1.0,
                0.0,
                0.0,
                0.0,
                ids,
                layer,
                ids.ravel(),
                np.zeros(len(layer), np.uint8),
                slots=SHAPE.total // 2,
            )
        )
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
