"""Every preset in a loaded model: it acts, or says which profile it needs, and changes no answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.engine import Engine
from core.errors import SettingError
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.presets import PRESETS, Preset, matching
from core.settings.sampling import Sampling

CHAT = [{"role": "user", "content": "What does json.dumps do?"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.load(LoadSpec.checked("demo", Settings({"budget": "50%", "link": "own"}), device="cpu"))
    yield engine
    engine.unload()


def said(engine: Engine) -> str:
    return "".join(piece.text for piece in engine.generate(CHAT, Sampling(max_new_tokens=8)))


@pytest.fixture(scope="module")
def answer(engine: Engine) -> str:
    return said(engine)


@pytest.mark.parametrize("one", PRESETS, ids=lambda one: one.name)
def test_a_preset_acts_or_says_what_it_needs(engine: Engine, answer: str, one: Preset) -> None:
    before = engine.settings
    if one.needs:
        with pytest.raises(SettingError, match=r"needs a profile of this model: run python launch.py profile, or open"):
            engine.change(one.values)
        assert engine.settings is before
        return
    engine.change(one.values)
    assert matching(engine.settings) is one
    assert said(engine) == answer
    assert engine.expert_cache.scope == one.values["scope"]
    assert engine.expert_cache.policy.retains == (one.values["eviction"] != "none")
    engine.expert_cache.check_integrity()
