"""Through any history of where misses are computed, on a CPU and on the fake GPU, answers keep their bits and budgets
are kept; threads of the host that end, hang, or never say that they are done are errors in words.

As `long`: twenty thousand tokens on either; a seed that fails, or the ones that are left, can be run by themselves.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.engine import Engine
from core.errors import HostError
from core.memory.codec.fast import background
from core.memory.codec.fast import background_code as code
from core.system.native.compile import supported
from tests.architectures.trial import random_model
from tests.engine.placement_history import ALL, DEVICES, HOSTED, History, answer, engine_on
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
EACH, LONG = 500, 20_000  # tokens of a seed, and of all


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placement_history")
    config = dict(hidden_size=128, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=4)
    random_model("qwen3_moe", **config).save_pretrained(folder)
    return save_tokenizer(folder)


@pytest.mark.parametrize(("device", "seed"), [("cpu", 0), ("cuda", 3)])
def test_a_random_history(device: str, seed: int, path: Path) -> None:
    with engine_on(device, path, seed) as engine:
        history = History(engine, device, seed)
        history.goes_on(80)
    assert history.seen["hosted"] and history.seen["copied"], history.seen
    assert history.seen["drafted" if device == "cpu" else "joined"], history.seen


@pytest.mark.long(0.5)
@pytest.mark.parametrize("seed", range(1, 1 + LONG // EACH))
@pytest.mark.parametrize("device", DEVICES)
def test_twenty_thousand_tokens(device: str, seed: int, path: Path) -> None:
    with engine_on(device, path, seed) as engine:
        history = History(engine, device, seed)
        history.goes_on(EACH)
    print(dict(history.seen))


def ended(engine: Engine) -> None:
    """The threads are gone."""
    team = engine.parts.host.team
    assert team is not None
    team._closing = True
    team._called.set()
    team._leader.join()


def hanging(engine: Engine) -> None:
    """They take what is posted, and do nothing with it."""
    team = engine.parts.host.team
    assert team is not None

    def never(at: int, patience: int = 0) -> None:
        if team._state.value == code.POSTED:
            team._state.value = code.TAKEN

    team._serve, team._recall = never, never  # type: ignore[assignment]


def silent(engine: Engine) -> None:
    """They attend to a token that the GPU leads, and never set the flag that its kernels wait for."""
    join = engine.parts.device_decode.step.join
    join._function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(lambda *given: None)
    join.mail = join.mail._replace(limit_ns=50_000_000)


FAULTS = (
    ("cpu", "host", ended, "it has ended"),
    ("cpu", "host", hanging, r"did not finish within 0\.2 seconds"),
    ("cuda", "host", ended, "it has ended"),
    ("cuda", "device", ended, "it has ended"),
    ("cuda", "device", hanging, r"did not end within 0\.2 seconds"),
    ("cuda", "graph", silent, "the GPU waited"),
)


@pytest.mark.parametrize(
    ("device", "led", "fault", "words"),
    layered(FAULTS, quick=lambda case: case[1:3] in (("host", hanging), ("graph", silent))),
    ids=lambda one: getattr(one, "__name__", None),
)
def test_threads_that_fail_within_a_history(
    device: str, led: str, fault: Callable[[Engine], None], words: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the error answers are as ever, and no miss is left to the host."""
    monkeypatch.setattr(background, "TIMEOUT_S", 0.2)
    with engine_on(device, path, 2) as engine:
        wanted = answer(engine)
        engine.change({**ALL, "budget": "35%", **HOSTED, "gpu_decode": led})
        if engine.parts.host.team is None:
            pytest.skip("this machine leaves the host no processor")
        assert torch.equal(answer(engine), wanted)
        fault(engine)
        with pytest.raises(HostError, match=words):
            answer(engine)
        assert not engine.parts.host.active
        assert torch.equal(answer(engine), wanted)
        engine.expert_cache.check_integrity()
