"""What lossy options do to a running model: exactly what their events say, nothing where gates forbid it, and no more
once they are off. The oracle is transformers' own model, its experts exchanged as the events tell."""

from typing import Any

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.errors import SettingError
from core.hf.cached_pass import cached_pass
from core.metrics.lossy_events import Action
from core.types import Outcome
from tests.engine.lossy.passes import answer, run, told
from tests.selection import layered

WAYS: tuple[dict[str, object], ...] = (
    {"miss": "substitute", "substitute": "buddy", "rho": 64},
    {"miss": "substitute", "substitute": "similar", "rho": 1},
    {"miss": "substitute", "substitute": "random"},
    {"miss": "substitute", "substitute": "router_ranked"},
    {"miss": "drop", "rho": 1},
    {"miss": "drop", "rho": 64},
    {"miss": "substitute_drop", "rho": 64},
    {"miss": "drop", "drop_share": 0.4},
    {"miss": "substitute", "substitute": "predicted", "predictor": "gate"},
)


@pytest.mark.parametrize(
    "way",
    layered(WAYS, quick=lambda way: way in (WAYS[0], *WAYS[6:])),
    ids=lambda way: "-".join(map(str, way.values())),
)
def test_what_is_computed_is_what_the_events_say(engine: Engine, reference: Any, way: dict[str, object]) -> None:
    logits, events = run(engine, **way)
    assert sum(one.changed for one in events if one) > 0
    drops = any(one.count(Action.DROP) for one in events if one)  # not computed here, computed and weighed 0 there, so
    for mine, theirs in zip(logits, told(reference, [one for one in events if one]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4 * drops, atol=1e-4 * drops)  # products differ in size


def test_a_token_has_no_expert_twice_and_no_more_than_rho_changes(engine: Engine) -> None:
    _, events = run(engine, miss="substitute", substitute="buddy", rho=1)
    for one in events:
        done = one.choices[one.choices["action"] == Action.SUBSTITUTE]
        pairs = list(zip(done["layer"].tolist(), done["token"].tolist(), strict=True))
        assert len(pairs) == len(set(pairs))


def test_dropped_weight_goes_to_the_others_when_asked_for(engine: Engine) -> None:
    plain, _ = run(engine, miss="drop", rho=1)
    engine.expert_cache.reshape(make_policy=engine.expert_cache.make_policy)
    renormalised, events = run(engine, drop_renormalise=True)
    assert events[0] is not None and events[0].changed
    assert not torch.equal(plain[0], renormalised[0])


def test_turning_everything_off_in_mid_answer_is_exact_from_the_next_token_on(engine: Engine, reference: Any) -> None:
    seen: list[torch.Tensor] = []
    with engine.model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0, -1].clone())):
        engine.change({"miss": "substitute", "rho": 64})
        tokens, steps, stats = answer(engine, {6: {"miss": "wait"}})
    assert stats.changed and not stats.exact and stats.assignments > stats.changed
    phases = [step.phase for step in steps]
    again = phases.index("prefill", phases.index("decode"))
    assert not any(step.exact for step in steps[:again]) and all(step.exact for step in steps[again:])
    prompt = engine.prompt.tokens("What is it?")
    assert steps[again].tokens == len(prompt) + 5  # all but the token that comes next
    with torch.inference_mode():
        from transformers import DynamicCache

        cache, read = DynamicCache(config=reference.config), [*prompt, *tokens[:5]]
        cached_pass(reference, torch.tensor([read]), cache)
        for at in range(5, 15):
            out = cached_pass(reference, torch.tensor([[tokens[at]]]), cache)
            assert torch.equal(seen[again + 1 + at - 5], out.logits[0, -1])


def test_a_pass_counts_what_was_done_about_each_request(engine: Engine) -> None:
    engine.change({"miss": "substitute_drop", "rho": 1})
    _, steps, _ = answer(engine, {})
    kinds = np.concatenate([step.outcome for step in steps])
    assert {Outcome.HIT, Outcome.SUBSTITUTED} <= set(kinds.tolist())
    for step in steps:
        asked = {(layer, int(e)) for layer, ids in enumerate(step.ids) for e in np.unique(ids)}
        assert sorted(asked) == sorted(zip(step.layer.tolist(), step.expert.tolist(), strict=True))
        assert step.changed <= step.assignments == step.ids.size
        missing = np.bincount(step.layer[step.outcome >= Outcome.MISS], minlength=engine.shape.layers)
        assert np.allclose(step.lossy.delta, missing / np.bincount(step.layer))
        assert ((step.lossy.tae >= 0) & (step.lossy.tae <= 1)).all()


def test_frames_show_what_is_done(engine: Engine) -> None:
    engine.change({"miss": "substitute", "rho": 64, "gate": "tau", "gate_tau": 0.25})
    _, steps, _ = answer(engine, {})
    look = engine.frame(layer=1).lossy
    assert look is not None and 0 < look.rate < 1
    now = [step for step in engine.parts.telemetry._last if step.lossy is not None]
    assert steps[-1] in now
    assert look.rate == pytest.approx(sum(s.changed for s in now) / sum(s.assignments for s in now))
    assert look.per_layer.sum(1).mean() == pytest.approx(look.rate, rel=1e-3) and look.tae.sum() > 0
    assert (look.threshold == 0.25).all()
    assert look.buddies is not None and look.buddies.shape == (engine.shape.experts, engine.shape.experts)
    engine.change({"miss": "wait"})
    assert engine.frame().lossy is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"execute": "always"}, "Choose one of these"),
        ({"protect": "9:1", "miss": "drop"}, "names layer 9"),
        ({"miss": "anything"}, "no choice"),
        ({"rho": 65}, "between 0 and 64"),
        ({"protect": "x"}, "not understood"),
        ({"substitute.buddy.alpha": "1.5"}, "1"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(engine: Engine, settings: dict[str, object], why: str) -> None:
    before = engine.settings
    with pytest.raises(SettingError, match=why):
        engine.change(settings)
    assert engine.settings is before


def test_without_a_profile_the_next_best_of_the_router_is_substituted(engine: Engine) -> None:
    profile = engine.profile
    engine.use_profile(None)
    try:
        changed = engine.change({"miss": "substitute"})
        assert (changed["miss"], changed["substitute"]) == ("substitute", "router_ranked")
    finally:
        engine.change({"miss": "wait"})
        engine.use_profile(profile)


@pytest.mark.parametrize(
    "settings",
    [
        {"miss": "substitute", "substitute": "buddy"},
        {"miss": "drop", "gate": "percentile"},
        {"miss": "drop", "protect": "top:1"},
    ],
)
def test_without_a_profile_the_way_to_one_is_told(engine: Engine, settings: dict[str, object]) -> None:
    profile = engine.profile
    engine.use_profile(None)
    try:
        with pytest.raises(SettingError, match=r"launch.py calibrate"):
            engine.change(settings)
    finally:
        engine.use_profile(profile)
