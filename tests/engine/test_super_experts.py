"""A super expert through calibration and the engine: found, kept with the profile, left alone when it is missing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.measure.calibrate.gather import calibrate
from core.metrics.lossy_events import Action, Lossy, Why
from core.policy.substitute.super_experts import super_experts
from core.profile import Profile, load, save
from core.settings.config import Settings
from tests.checkpoints import random_model
from tests.engine.lossy.passes import RESIDENT, run
from tests.loaded import loaded
from tests.tiny_tokenizer import save_tokenizer

LAYER, EXPERT = 1, 6
TEXTS = ["An expert whose outputs are enormous is found by them.", "And so is where it stands: 1, 6."]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A random model one of whose experts has outputs 300 times as large."""
    path = tmp_path_factory.mktemp("model")
    model = random_model("qwen3_moe")
    with torch.no_grad():
        model.model.layers[LAYER].mlp.experts.down_proj[EXPERT] *= 300
    model.save_pretrained(path)
    with loaded(save_tokenizer(path), RESIDENT, context=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def known(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    file = tmp_path_factory.mktemp("profile") / "p"
    save(calibrate(engine, TEXTS, parts={"peaks"}), file)
    return load(file, model_hash=engine.model_hash)


@pytest.fixture(autouse=True)
def fresh(engine: Engine, known: Profile) -> None:
    engine.change({**Settings(), **RESIDENT})
    engine.use_profile(known)
    anew(engine)


def anew(engine: Engine) -> None:
    with engine.workbench("A test begins.") as bench:
        bench.start_over()
    engine.parts.recorder.forget()


def about_it(events: list[Lossy | None]) -> Any:
    """What was done about the super expert when it was missing, over all passes."""
    rows = np.concatenate([one.choices for one in events if one is not None])
    return rows[(rows["layer"] == LAYER) & (rows["expert"] == EXPERT)]


def test_calibration_finds_it(known: Profile) -> None:
    assert known.parts() == ("peaks",) and known.peaks is not None
    [one] = super_experts(known.peaks)
    assert (one.layer, one.expert) == (LAYER, EXPERT) and one.ratio > 30


@pytest.mark.parametrize(
    "way",
    [
        {"miss": "drop"},
        {"miss": "drop", "eviction": "none"},  # so that it is missing for single tokens, too
        {"miss": "substitute", "substitute": "random"},
        {"miss": "substitute_drop", "substitute": "router_ranked"},
        {"miss": "substitute_drop", "substitute": "cache_prior"},
    ],
    ids=lambda way: "-".join(way.values()),
)
def test_it_is_waited_for_unless_that_is_turned_off(engine: Engine, way: dict[str, object]) -> None:
    _, events = run(engine, rho=64, **way)
    rows = about_it(events)
    assert len(rows) and (rows["action"] == Action.WAIT).all() and (rows["why"] == Why.PROTECTED).all()
    assert sum(one.changed for one in events if one) > 0, "others are replaced"
    if "eviction" in way:
        assert any(len(about_it([one])) for one in events[1:])
    anew(engine)
    _, events = run(engine, protect_super=False)
    rows = about_it(events)
    assert (rows["action"] >= Action.SUBSTITUTE).any() and not (rows["why"] == Why.PROTECTED).any()


def test_without_what_names_it_nothing_is_protected(engine: Engine, known: Profile) -> None:
    """A profile of before, or none, gives what turning the protection off gives, bit for bit."""
    found = []
    for profile, settings in ((known, {"protect_super": False}), (None, {}), (replace(known, peaks=None), {})):
        engine.change({**Settings(), **RESIDENT})
        engine.use_profile(profile)
        anew(engine)
        logits, events = run(engine, miss="drop", rho=64, **settings)
        assert (about_it(events)["action"] == Action.DROP).any()
        found.append(logits)
    first, *others = found
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_experts_protected_by_name_stay_protected(engine: Engine) -> None:
    _, events = run(engine, miss="drop", rho=64, protect="0:7, 2:7")
    rows = np.concatenate([one.choices for one in events if one is not None])
    places = set(zip(rows["layer"].tolist(), rows["expert"].tolist(), strict=True))
    kept = {(0, 7), (2, 7), (LAYER, EXPERT)} & places
    assert (LAYER, EXPERT) in kept and len(kept) > 1
    for row in rows:
        named = (int(row["layer"]), int(row["expert"])) in kept
        assert (row["why"] == Why.PROTECTED) == named == (row["action"] == Action.WAIT)
