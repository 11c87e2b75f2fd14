"""Settings reach the parts that act on them: each is given its group, before and after."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from core.engine import Engine
from core.memory.link_emulation import LinkEmulation
from core.policy.eviction.lfu import LFU
from core.settings.config import Settings
from core.settings.link import LinkSettings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling

CHAT = [{"role": "user", "content": "hello there"}]


def test_a_part_is_given_its_group_before_and_after(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[LinkSettings | None, LinkSettings]] = []
    monkeypatch.setattr(LinkEmulation, "configure", lambda part, old, new: seen.append((old, new)))
    before = engine.settings
    after = engine.change({"link": "emulated", "link_gbps": 2})
    assert seen == [(before.link, after.link)] and (after.link.kind, after.link.gbps) == ("emulated", 2.0)


def test_telemetry_that_is_off_at_the_load_is_off(model: Path) -> None:
    engine = Engine.load(LoadSpec.checked(str(model), Settings({"telemetry": False}), context=256))
    list(engine.generate(CHAT, Sampling(max_new_tokens=3)))
    assert engine.parts.telemetry.activations().sum() == 0
    engine.change({"telemetry": True})
    list(engine.generate(CHAT, Sampling(max_new_tokens=3)))
    assert engine.parts.telemetry.activations().sum() > 0
    engine.unload()


def test_only_what_a_change_concerns_is_built_anew(engine: Engine) -> None:
    engine.change({"predictor": "gate"})
    policy, predictor = engine.expert_cache.policy, engine.predictor_host.predictor
    engine.change({"eviction.lcp.omega": 8, "predictor.recent.tokens": 3, "link_latency_us": 20})
    assert engine.expert_cache.policy is policy and engine.predictor_host.predictor is predictor
    engine.change({"predictor.width": 3})
    assert engine.expert_cache.policy is policy and engine.predictor_host.predictor is not predictor
    engine.change({"eviction": "lfu"})
    assert engine.expert_cache.policy is not policy


def test_what_changes_in_the_last_pass_is_applied_when_the_answer_ends(engine: Engine) -> None:
    """As when a prompt of one pass is being read, a control is moved, and Stop follows."""
    cancel, applied = threading.Event(), list[bool]()

    def moved(module: object, args: object) -> None:
        engine.change({"budget": "75%", "eviction": "lfu"})
        applied.append(engine.expert_cache.slots > before)
        cancel.set()

    before, hook = engine.expert_cache.slots, engine.model.register_forward_pre_hook(moved)
    try:
        pieces = list(engine.generate(CHAT, Sampling(max_new_tokens=3), cancel))
    finally:
        hook.remove()
    assert pieces[-1].kind == "end" and applied == [False], "one pass, and no change within it"
    assert engine.expert_cache.slots == engine.sizes.slots(engine.settings.cache.budget) > before
    assert isinstance(engine.expert_cache.policy, LFU)
