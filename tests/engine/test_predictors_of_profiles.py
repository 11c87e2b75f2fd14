"""Predictors that need a profile: which one a load finds, what says that there is none, and when another one acts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.errors import ProfileError, SettingError
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.registry import variants
from core.settings.sampling import Sampling
from tests.engine.profiles import drawn_profile
from tests.engine.test_predictors import STEPS, passes

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
def test_the_profile_says_what_the_estimator_is_fed(
    exact: Engine, quasi: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
