"""What lossy options do to a running model: what their events say, within gates, rho and budgets."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.engine.lossy_check import check_allowed, with_substitute
from core.errors import SettingError
from core.hf.cached_pass import cached_pass
from core.metrics.lossy_events import Action, Why
from core.policy.substitute.entropy import entropy
from core.profile.routing import Entropies
from core.settings.config import Settings
from core.types import Outcome
from tests.engine.lossy.passes import answer, run, told
from tests.engine.profiles import drawn_profile
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


def test_where_a_token_has_one_expert_no_two_are_buddies(engine: Engine) -> None:
    profile, shape = drawn_profile(engine), replace(engine.shape, top_k=1)
    profile = replace(profile, pairs=np.zeros((shape.layers, shape.experts, shape.experts), np.float32))
    asked = Settings({"miss": "substitute", "substitute": "buddy"})
    check_allowed(asked, engine.shape, profile)
    with pytest.raises(SettingError, match="a token of this model chooses a single one"):
        check_allowed(asked, shape, profile)
    assert with_substitute(asked, {"miss": "substitute"}, profile, engine.shape)["substitute"] == "buddy"
    assert with_substitute(asked, {"miss": "substitute"}, profile, shape)["substitute"] == "router_ranked"


def test_a_single_layer_executes_no_predictions(engine: Engine) -> None:
    asked = Settings({"execute": "always", "predictor": "gate"})
    check_allowed(asked, engine.shape, None)
    with pytest.raises(SettingError, match="this model has a single one"):
        check_allowed(asked, replace(engine.shape, layers=1), None)


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


FORBIDDING: tuple[dict[str, object], ...] = (
    {"rho": 0},
    {"gate": "tau", "gate_tau": 1.0},
    {"gate_margin": 0.0},
    {"batch_gate": "fixed", "beta": 0.0},
    {"batch_gate": "adaptive", "beta_budget": 65536.0},
    {"protect": "top:8"},
    {"gate": "percentile", "gate_percentile": 100.0},
)


@pytest.mark.parametrize(
    "way", layered(["substitute", "drop", "substitute_drop"], quick=lambda way: way == "substitute_drop")
)
@pytest.mark.parametrize(
    "gates",
    layered(FORBIDDING, quick=lambda gates: "batch_gate" not in gates),
    ids=lambda gates: "-".join(map(str, gates)),
)
def test_what_gates_forbid_leaves_every_bit(engine: Engine, reference: Any, gates: dict[str, object], way: str) -> None:
    logits, events = run(engine, miss=way, **gates)
    waited = [row for one in events if one for row in one.choices]
    assert waited and all(row["action"] == Action.WAIT and row["why"] != Why.ALLOWED for row in waited)
    nothing = [replace(one, choices=one.choices[:0]) for one in events if one]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(logits, told(reference, nothing), strict=True))


@pytest.mark.parametrize("order", layered(["lightest", "heaviest"], quick=lambda order: order == "lightest"))
@pytest.mark.parametrize("way", [{"miss": "drop"}, {"miss": "substitute", "substitute": "random"}], ids=str)
def test_rho_is_spent_on_the_experts_of_least_weight(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, way: dict[str, object], order: str
) -> None:
    """By default; of most weight on request. Every missing expert may be replaced here, so that only rho decides."""
    gates: list[dict[tuple[int, int, int], float]] = []  # a pass: (layer, token, expert) -> its weight
    begin, route = engine.parts.prediction.miss.begin, engine.parts.prediction.miss.route

    def begun(*phase: str) -> None:
        gates.append({})
        begin(*phase)

    def routed(layer: int, ids: torch.Tensor, weights: torch.Tensor, asked: list[list[int]]) -> Any:
        for token, (row, shares) in enumerate(zip(asked, weights.tolist(), strict=True)):
            gates[-1] |= {(layer, token, expert): share for expert, share in zip(row, shares, strict=True)}
        return route(layer, ids, weights, asked)

    monkeypatch.setattr(type(engine.parts.prediction.miss), "begin", lambda self, *phase: begun(*phase))
    monkeypatch.setattr(type(engine.parts.prediction.miss), "route", lambda self, *args: routed(*args))
    _, events = run(engine, rho=1, **way, **({} if order == "lightest" else {"rho_order": order}))
    limited = 0
    for weights, one in zip([known for known in gates if known], events, strict=True):
        lost: dict[tuple[int, int], list[Any]] = {}
        for row in one.choices:
            lost.setdefault((int(row["layer"]), int(row["token"])), []).append(row)
        for place, rows in lost.items():
            share = {int(row["expert"]): weights[(*place, int(row["expert"]))] for row in rows}
            if any(row["why"] == Why.RHO for row in rows):
                [changed] = [int(row["expert"]) for row in rows if row["action"] >= Action.SUBSTITUTE]
                assert share[changed] == (min if order == "lightest" else max)(share.values())
                limited += 1
    assert limited > 20


@pytest.mark.parametrize("temperature", layered([0.8, 0.95, 1.2], quick=lambda value: value == 0.8))
def test_percentiles_are_at_the_temperature(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """A profile of the very passes that follow leaves alone the share of tokens that was asked for, at any of them."""
    kept: list[np.ndarray[Any, Any]] = []  # a layer's weights [T, k]
    route = type(engine.parts.prediction.miss).route

    def routed(self: Any, layer: int, ids: torch.Tensor, weights: torch.Tensor, asked: list[list[int]]) -> Any:
        kept.append(weights.double().numpy())
        return route(self, layer, ids, weights, asked)

    monkeypatch.setattr(type(engine.parts.prediction.miss), "route", routed)
    run(engine, miss="drop", rho=0)
    layers, before = engine.shape.layers, engine.profile
    measured = Entropies(layers)
    for at, weights in enumerate(kept):
        measured.add(at % layers, weights)
    assert before is not None
    engine.use_profile(replace(before, tae=measured.percentiles(), tae_tempered=measured.tempered()))
    try:
        engine.change({"gate": "percentile", "gate_percentile": 30.0, "gate_temperature": temperature})
        limits = engine.parts.prediction.miss.thresholds
        for layer in range(layers):
            found = entropy(np.concatenate(kept[layer::layers]), temperature)
            assert (found <= limits[layer]).mean() == pytest.approx(0.3, abs=0.05)
        with pytest.raises(SettingError, match="at temperature 1 only"):
            engine.use_profile(replace(before, tae_tempered=None))
    finally:
        engine.change({"gate": "none", "gate_temperature": 1.0})
        engine.use_profile(before)


def test_an_adaptive_layer_gate_loads_what_the_budget_pays_for(engine: Engine) -> None:
    size = engine.shape.expert_bytes / 1e6
    for budget in (0.0, 3 * size, 1000 * size):
        engine.expert_cache.reshape(make_policy=engine.expert_cache.make_policy)
        engine.change({"miss": "substitute_drop", "rho": 64, "batch_gate": "adaptive", "beta_budget": budget})
        _, steps, _ = answer(engine, {})
        decode = [step for step in steps if step.phase == "decode"]
        assert all(step.demand_bytes <= budget * 1e6 for step in decode)
        changed = sum(step.changed for step in decode)
        assert (changed > 0) == (budget < 1000 * size)
