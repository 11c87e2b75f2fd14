"""Rules of the papers, followed through a running engine: what decides there is what the paper says decides."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core.engine import Engine
from core.hf.watch import Seen, watch
from core.policy.eviction import victim
from core.policy.hints import UNLIKELY
from core.policy.predict import Prediction
from core.settings.config import Settings
from core.settings.presets import preset
from core.settings.sampling import Sampling
from core.types import StepRecord
from tests.checkpoints import make_checkpoint
from tests.engine.profiles import drawn_profile
from tests.engine.test_predictors import captured_predictions, passes
from tests.equality.passes import PROMPT
from tests.loaded import loaded
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe")))
    settings = Settings({"budget": "50%", "scope": "global"})
    with loaded(path, settings, dtype="float32", context=256) as engine:
        yield engine


def test_finemoes_eviction_goes_by_the_whole_map_that_was_found_also_after_its_layer(engine: Engine) -> None:
    """FineMoE section 4.5: the largest 1 / (p x freq) leaves, p from the searched map."""
    known = drawn_profile(engine)
    engine.use_profile(replace(known, maps=known.maps[:1], map_keys=known.map_keys[:1]))  # every search finds this one
    engine.change({"predictor": "none"})
    engine.change({"eviction": "finemoe", "predictor": "expert_map", "predictor.expert_map.learn": False})
    engine.predictor_host.predictor.patient = True
    passes(engine)
    core, p = engine.expert_cache.core, np.maximum(known.maps[0].astype(np.float64).ravel(), UNLIKELY)
    assert core.hints.probability == pytest.approx(p, rel=1e-6)
    visits: Any = core.policy.score  # p x visits is what it ranks by
    residents = [eid for eid in range(engine.shape.total) if core.is_resident(eid)]
    for layer in range(engine.shape.layers):
        gone = victim(core.policy, core.pool(0).part, core.now, layer)
        assert gone == min(residents, key=lambda eid: (p[eid] * visits[eid], eid))
    engine.change({"predictor": "none", "eviction": "lru"})
    assert len(set(core.hints.probability.reshape(engine.shape.layers, -1)[0])) > 1  # the profile's shares again
    assert core.hints.probability != pytest.approx(p, rel=1e-6)


@pytest.mark.parametrize("name", ["moepic", "adapmoe"])
def test_the_first_router_is_asked_about_the_last_layers_state(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """MoEpic section 3.2, which follows AdapMoE in this: layer 0 is predicted from the last layer's state of the
    previous token."""
    engine.use_profile(drawn_profile(engine))
    engine.change({"predictor": "none"})
    engine.change(preset(name).values)
    shape, sites = engine.shape, engine.loaded.sites
    states: list[Any] = []
    predicted = captured_predictions(engine, monkeypatch)
    named: list[list[Prediction]] = []

    def note(seen: Seen) -> None:
        if seen.layer == shape.layers - 1:
            states.append(seen.hidden[-1:].clone())

    def collect() -> None:
        named.append([one for one in predicted if one.layer == 0])
        predicted.clear()

    with watch(engine.model, sites, note, norms=False):
        passes(engine, collect)
    assert len(PROMPT) > 1  # of a prompt the last token's state counts
    for state, found in zip(states, named, strict=True):
        weight = sites[0].router.weight.detach()
        expected = (state.to(weight.dtype) @ weight.T)[0].topk(shape.top_k).indices.tolist()
        assert [one.expert for one in found] == expected
        assert all(0.0 < one.score <= 1.0 for one in found)
    engine.change({"predictor": "none", "eviction": "lru"})


def test_time_is_counted_in_tokens_not_in_passes(engine: Engine) -> None:
    """MoEpic section 3.3: nu counts the tokens that did not use an expert; a prompt has as many as it has."""
    before, steps = engine.expert_cache.core.now, dict[int, StepRecord]()
    for piece in engine.generate([{"role": "user", "content": "Hello"}], Sampling(max_new_tokens=4)):
        if piece.step is not None:
            steps[id(piece.step)] = piece.step
    tokens = sum(step.tokens for step in steps.values())
    assert tokens > len(steps)  # a prompt is one pass
    assert engine.expert_cache.core.now - before == tokens
