"""Every preset in a loaded model: it acts, or says which profile it needs and acts with one; only lossy ones may change
an answer."""

from collections.abc import Iterator

import pytest

from core.engine import Engine
from core.engine.texts import bundled
from core.errors import SettingError
from core.measure.calibrate.gather import calibrate
from core.settings.preset import Preset
from core.settings.presets import PRESETS, matching
from core.settings.sampling import Sampling
from core.types import StepRecord
from tests.loaded import loaded
from tests.selection import layered

CHAT = [{"role": "user", "content": "What does json.dumps do?"}]
NEEDY = [one for one in PRESETS if one.needs and not one.splits]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with loaded("demo", {"budget": "50%", "link": "own"}, device="cpu") as engine:
        yield engine


def lived(engine: Engine) -> tuple[str, list[StepRecord]]:
    steps: dict[int, StepRecord] = {}
    text = ""
    for piece in engine.generate(CHAT, Sampling(max_new_tokens=8)):
        text += piece.text
        if piece.step is not None:
            steps[piece.step.index] = piece.step
    return text, list(steps.values())


def said(engine: Engine) -> str:
    return lived(engine)[0]


@pytest.fixture(scope="module")
def answer(engine: Engine) -> str:
    return said(engine)


@pytest.mark.parametrize(
    "one", layered(PRESETS, quick=lambda one: PRESETS.index(one) % 3 == 0), ids=lambda one: one.name
)
def test_a_preset_acts_or_says_what_it_needs(engine: Engine, answer: str, one: Preset) -> None:
    before = engine.settings
    if one.needs or one.splits:
        needs = r"needs a profile of this model: run python launch.py (calibrate, or open|plan --save)"
        with pytest.raises(SettingError, match=needs if one.needs else "loaded with whole experts"):
            engine.change(one.values)
        assert engine.settings is before
        return
    engine.change(one.values)
    assert matching(engine.settings) is one
    assert said(engine) == answer
    assert engine.expert_cache.placement.scope == one.values["scope"]
    assert engine.expert_cache.policy.retains == (one.values["eviction"] != "none")
    engine.expert_cache.check_integrity()


@pytest.fixture
def profiled(engine: Engine, answer: str, one: Preset) -> Iterator[Engine]:
    """With a profile of the model's own routing and states: of what the preset needs."""
    before = engine.settings
    engine.use_profile(calibrate(engine, bundled("demo"), parts=set(one.needs), limit=600))
    yield engine
    engine.change(before)
    engine.use_profile(None)


@pytest.mark.long(0.1)
@pytest.mark.parametrize("one", NEEDY, ids=lambda one: one.name)
def test_a_preset_that_needs_a_profile_answers_with_one(profiled: Engine, answer: str, one: Preset) -> None:
    profiled.change(one.values)
    assert matching(profiled.settings) is one
    list(profiled.generate(CHAT, Sampling(max_new_tokens=1)))  # from here on the predictor is the preset's
    profiled.predictor_host.predictor.patient = True
    text, steps = lived(profiled)
    assert text and sum(step.prefetch_issued for step in steps) > 0
    if profiled.settings.lossy.active:
        assert sum(step.changed for step in steps) > 0
    else:
        assert text == answer and all(step.exact for step in steps)
    assert profiled.expert_cache.placement.scope == one.values["scope"]
    assert profiled.expert_cache.policy.retains == (one.values["eviction"] != "none")
    profiled.expert_cache.check_integrity()
