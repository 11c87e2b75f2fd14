"""Predictors that need a profile: which one a load finds, what says that there is none, and when another one acts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.errors import ProfileError, SettingError
from core.hf.watch import Seen, watch
from core.policy.eviction import victim
from core.policy.hints import UNLIKELY
from core.policy.predict import Prediction
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.presets import preset
from core.settings.registry import variants
from core.settings.sampling import Sampling
from core.types import StepRecord
from tests.engine.profiles import drawn_profile
from tests.engine.test_predictors import STEPS, captured_predictions, passes
from tests.equality.passes import PROMPT

NEEDY = [v.name for v in variants("predictor") if v.needs]


@pytest.mark.parametrize("name", NEEDY)
def test_without_a_profile_a_predictor_that_needs_one_says_what_to_do(exact: Engine, name: str) -> None:
    profile = exact.profile
    exact.change({"predictor": "gate"})
    exact.use_profile(None)
    kept = exact.predictor_host.predictor
    with pytest.raises(SettingError, match=r"needs a profile of this model: run python launch\.py calibrate"):
        exact.change({"predictor": name, "budget": "60%"})
    assert exact.settings["predictor"] == "gate" and exact.settings["budget"] == "50%"
    assert exact.predictor_host.predictor is kept
    exact.use_profile(profile)
    exact.change({"predictor": name})
    with pytest.raises(SettingError, match="needs a profile of this model"):
        exact.use_profile(None)
    assert exact.profile is profile
    exact.change({"predictor": "none"})


def test_a_load_finds_the_models_profile_or_says_what_to_do(exact: Engine, model: Path) -> None:
    spec = LoadSpec.checked(str(model), Settings({"budget": "50%", "predictor": "estimator"}), context=256)
    with pytest.raises(SettingError, match="needs a profile of this model"):
        Engine.load(spec)
    with pytest.raises(SettingError, match="needs a profile of this model"):
        Engine.load(spec, profile=lambda model_hash: None)
    loaded = Engine.load(spec, profile={exact.model_hash: exact.profile}.get)
    assert loaded.profile is exact.profile and loaded.predictor_host.predictor.needs
    loaded.unload()


def test_a_profile_of_another_model_is_refused(exact: Engine) -> None:
    profile = exact.profile
    assert profile is not None
    with pytest.raises(ProfileError, match="elsewhere"):
        exact.use_profile(replace(profile, model="elsewhere", model_hash="0" * 64))
    assert exact.profile is profile


def test_another_profile_acts_from_the_next_pass_on(exact: Engine) -> None:
    exact.change({"predictor": "estimator"})
    before = exact.predictor_host.predictor
    fresh = drawn_profile(exact, seed=1)
    answer: Any = exact.generate("Why?", Sampling(max_new_tokens=3))
    next(answer)
    exact.use_profile(fresh)
    assert exact.profile is fresh and exact.predictor_host.predictor is before
    next(answer)
    next(answer)
    assert exact.predictor_host.profile is fresh and exact.predictor_host.predictor is not before
    list(answer)
    exact.change({"predictor": "none"})


@pytest.mark.parametrize("quasi", [False, True], ids=["hidden", "quasi"])
def test_a_profile_says_what_the_estimator_is_fed(exact: Engine, quasi: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quasi-hidden states are made for it alone if it was trained on them, also when the profile changes under it."""
    exact.change({"predictor": "estimator"})
    kept, plain = exact.profile, passes(exact)
    exact.use_profile(drawn_profile(exact, quasi=quasi))
    made, fed = list[torch.Tensor](), list[torch.Tensor]()
    host, net = exact.predictor_host, exact.predictor_host.estimator
    default, probabilities = host.default, net.probabilities

    def noted(*args: Any) -> torch.Tensor | None:
        made.append(found := default(*args))  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(host, "default", noted)
    monkeypatch.setattr(net, "probabilities", lambda states, layer: fed.append(states) or probabilities(states, layer))
    logits, tokens = passes(exact)
    assert torch.equal(logits, plain[0]) and tokens == plain[1]
    assert len(fed) == (STEPS + 1) * (exact.shape.layers - 1)
    assert [id(state) for state in fed] == [id(state) for state in made] if quasi else not made
    monkeypatch.undo()
    exact.use_profile(kept)
    exact.change({"predictor": "none"})


def test_finemoes_eviction_goes_by_the_whole_map_that_was_found_also_after_its_layer(exact: Engine) -> None:
    """FineMoE section 4.5: the largest 1 / (p x freq) leaves, p from the searched map."""
    known = drawn_profile(exact)
    exact.use_profile(replace(known, maps=known.maps[:1], map_keys=known.map_keys[:1]))  # every search finds this one
    exact.change({"predictor": "none"})
    exact.change({"eviction": "finemoe", "predictor": "expert_map", "predictor.expert_map.learn": False})
    exact.predictor_host.predictor.patient = True
    passes(exact)
    core, p = exact.expert_cache.core, np.maximum(known.maps[0].astype(np.float64).ravel(), UNLIKELY)
    assert core.hints.probability == pytest.approx(p, rel=1e-6)
    visits: Any = core.policy.score  # p x visits is what it ranks by
    residents = [eid for eid in range(exact.shape.total) if core.is_resident(eid)]
    for layer in range(exact.shape.layers):
        gone = victim(core.policy, core.pool(0).part, core.now, layer)
        assert gone == min(residents, key=lambda eid: (p[eid] * visits[eid], eid))
    exact.change({"predictor": "none", "eviction": "lru"})
    assert len(set(core.hints.probability.reshape(exact.shape.layers, -1)[0])) > 1  # the profile's shares again
    assert core.hints.probability != pytest.approx(p, rel=1e-6)


@pytest.mark.parametrize("name", ["moepic", "adapmoe"])
def test_the_first_router_sees_the_last_layers_state(exact: Engine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """MoEpic section 3.2, which follows AdapMoE in this: layer 0 is predicted from the last layer's state of the
    previous token."""
    exact.use_profile(drawn_profile(exact))
    exact.change({"predictor": "none"})
    exact.change(preset(name).values)
    shape, sites = exact.shape, exact.loaded.sites
    states: list[Any] = []
    predicted = captured_predictions(exact, monkeypatch)
    named: list[list[Prediction]] = []

    def note(seen: Seen) -> None:
        if seen.layer == shape.layers - 1:
            states.append(seen.hidden[-1:].clone())

    def collect() -> None:
        named.append([one for one in predicted if one.layer == 0])
        predicted.clear()

    with watch(exact.model, sites, note, norms=False):
        passes(exact, collect)
    assert len(PROMPT) > 1  # of a prompt the last token's state counts
    for state, found in zip(states, named, strict=True):
        weight = sites[0].router.weight.detach()
        expected = (state.to(weight.dtype) @ weight.T)[0].topk(shape.top_k).indices.tolist()
        assert [one.expert for one in found] == expected
        assert all(0.0 < one.score <= 1.0 for one in found)
    exact.change({"predictor": "none", "eviction": "lru"})


def test_time_is_counted_in_tokens_not_in_passes(exact: Engine) -> None:
    """MoEpic section 3.3: nu counts the tokens that did not use an expert; a prompt has as many as it has."""
    before, steps = exact.expert_cache.core.now, dict[int, StepRecord]()
    for piece in exact.generate([{"role": "user", "content": "Hello"}], Sampling(max_new_tokens=4)):
        if piece.step is not None:
            steps[id(piece.step)] = piece.step
    tokens = sum(step.tokens for step in steps.values())
    assert tokens > len(steps)  # a prompt is one pass
    assert exact.expert_cache.core.now - before == tokens
