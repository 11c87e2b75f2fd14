"""Misses that the host computes for a model on a GPU, on the fake one: joined in the router's order, near what the GPU
computes alone, with every access ordered."""

from pathlib import Path

import pytest
import torch

from app.wording import lossy
from core.engine import Engine
from core.errors import HostError
from core.memory.codec.fast import background
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Outcome
from tests.cuda.conftest import engine_on
from tests.decoded import PROMPT, answer
from tests.fake_cuda import FakeCuda
from tests.selection import covering

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
BASE = {"budget": "45%", "predictor": "none", "gpu_decode": "auto"}
TOKENS = 6
CLOSE = 0.05  # of the largest logit


@pytest.mark.parametrize(
    ("placement", "threads", "packed"), covering(["host", "measured"], [0, 1], [False, True], together=1)
)
def test_the_host_computes_what_the_gpu_would(
    placement: str, threads: int, packed: bool, model: Path, pack: Path, fake_kernels: FakeCuda
) -> None:
    with engine_on(pack if packed else model, BASE) as engine:
        alone = answer(engine, TOKENS, 0)
        engine.expert_cache.start_over()
        engine.change({"miss_placement": placement, "host_threads": threads})
        assert engine.parts.device_decode.step_for is not None and "miss_placement" in engine.parts.device_decode.reason
        beside = answer(engine, TOKENS, 0)
        decoded = [step for step in beside.steps if step.phase == "decode"]
        hosted = sum(step.host_computed for step in decoded)
        missed = sum(int((step.outcome == Outcome.MISS).sum()) for step in decoded)
        assert missed > 0 and (hosted == missed if placement == "host" else hosted <= missed)
        same = next(
            (n for n, (a, b) in enumerate(zip(alone.logits, beside.logits, strict=True)) if a.argmax() != b.argmax()),
            TOKENS,
        )
        off = (alone.logits[:same] - beside.logits[:same]).abs().max()
        assert off < CLOSE * alone.logits.abs().max()
        assert all(step.device_bytes <= step.budget_bytes for step in decoded)
        engine.expert_cache.check_integrity()
        engine.change({"miss_placement": "wait"})
        assert not engine.parts.device_decode.reason


def test_the_badge_names_two_processors(model: Path, fake_kernels: FakeCuda) -> None:
    with engine_on(model, {**BASE, "miss_placement": "host"}) as engine:
        *_, end = engine.generate(PROMPT, Sampling(temperature=0.0, max_new_tokens=8))
        assert end.stats is not None and end.stats.closeness
        assert lossy(end.stats.as_dict()) == "EXACT UP TO ROUNDING, two processors"


def test_a_thread_that_is_never_done_ends_the_answer(
    model: Path, fake_kernels: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "TIMEOUT_S", 0.2)
    with engine_on(model, {**BASE, "miss_placement": "host"}) as engine:
        team = engine.parts.host.team
        if team is None:
            pytest.skip("this machine leaves the host no processor")

        def never(at: int, patience: int = 0) -> None:
            if team._state.value == background.code.POSTED:
                team._state.value = background.code.TAKEN

        team._serve, team._recall = never, never  # type: ignore[assignment]
        with pytest.raises(HostError, match="did not finish"):
            _all(engine)
        _all(engine)  # waits for copies
        engine.expert_cache.check_integrity()


def _all(engine: Engine) -> torch.Tensor:
    return answer(engine, 6, 1).logits
