"""The routing path's training data: what the model wrote itself, with the experts that each token really had."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.errors import ProfileError
from core.measure.calibrate.gather import calibrate
from core.measure.calibrate.paths import Paths
from core.measure.calibrate.texts import tokenize
from core.policy.predict.nets.path import Passage
from core.profile.summary import describe
from core.profile.trace import ArrayTrace
from core.settings.calibration import CalibrationSettings
from tests.profile.oracle import Oracle

TEXTS: list[Any] = [
    "An expert that is not asked is not loaded, and the others are.",
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4, of course."}],
]
FEW = CalibrationSettings(path_tokens=200, path_answer=24)


@pytest.fixture(scope="module")
def truth(chat_model: Callable[[str], Path]) -> Oracle:
    return Oracle(chat_model("qwen3_moe"))


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> list[Passage]:
    """What the network is trained on and tested with."""
    found: list[Passage] = []
    passages = Paths.passages

    def kept(self: Paths) -> list[Passage]:
        found.extend(Passage(one.prompt, one.ids, one.routes.clone()) for one in passages(self))
        return passages(self)

    monkeypatch.setattr(Paths, "passages", kept)
    return found


def prompts(engine: Engine) -> list[list[int]]:
    read = [tokenize(engine.prompt.tokenizer, text) for text in TEXTS]
    return [one.ids[: one.prompt].tolist() for one in read]


def test_by_default_the_model_writes_what_the_network_learns_from(
    engine: Engine, learnt: list[Passage], truth: Oracle
) -> None:
    profile = calibrate(engine, TEXTS, parts={"path"}, settings=FEW)
    assert sum(len(one.ids) for one in learnt) == FEW.path_tokens == profile.tokens
    asked = prompts(engine)
    whole = learnt[:-1]  # the last one is as long as there was room
    assert [list(one.prompt) for one in whole] == [asked[at % len(asked)] for at in range(len(whole))]
    outputs = [list(one.ids)[len(one.prompt) :] for one in whole]
    assert all(list(one.ids)[: len(one.prompt)] == list(one.prompt) for one in whole)
    assert all(1 <= len(one) <= FEW.path_answer for one in outputs) and not any(
        {*one} & engine.prompt.ends for one in outputs
    )
    assert outputs[0] != outputs[len(asked)]  # the same prompt, drawn anew
    for one in learnt:
        passed = truth.read(list(one.ids))
        for layer in range(engine.shape.layers):
            assert one.routes[:, layer].long().sort(-1).values.tolist() == passed.ids[layer].sort(-1).values.tolist()
    assert profile.settings["path_texts"] == "generated"
    assert "trained on 200 tokens that the model wrote itself" in describe(profile)["path"]


def test_it_writes_the_same_again(engine: Engine, learnt: list[Passage]) -> None:
    for _ in range(2):
        calibrate(engine, TEXTS, parts={"path"}, settings=FEW, limit=100)
    first, again = learnt[: len(learnt) // 2], learnt[len(learnt) // 2 :]
    assert [list(one.ids) for one in first] == [list(one.ids) for one in again]


def test_texts_can_be_learnt_as_they_are(engine: Engine, learnt: list[Passage]) -> None:
    profile = calibrate(engine, TEXTS, parts={"path"}, settings=CalibrationSettings(path_texts="read"))
    read = [tokenize(engine.prompt.tokenizer, text).ids.tolist() for text in TEXTS]
    assert [list(one.ids) for one in learnt] == read
    assert "trained on" in (said := describe(profile)["path"]) and "tokens read" in said


def test_the_most_tokens_to_read_are_the_most_to_write(engine: Engine, learnt: list[Passage]) -> None:
    calibrate(engine, TEXTS, parts={"path"}, settings=FEW, limit=70)
    assert sum(len(one.ids) for one in learnt) == 70


def test_recorded_routing_counts_and_the_rest_is_written(engine: Engine, learnt: list[Passage]) -> None:
    ids = torch.rand(40, 3, 8).argsort(-1)[..., :4].numpy()
    trace = ArrayTrace(ids, 8, tok=torch.arange(40).numpy())
    calibrate(engine, TEXTS, parts={"path"}, traces=[trace], settings=FEW)
    assert list(learnt[0].ids) == list(range(40)) and learnt[0].routes.tolist() == ids.tolist()
    assert sum(len(one.ids) for one in learnt) == FEW.path_tokens
    learnt.clear()
    calibrate(engine, [], parts={"path"}, traces=[trace], settings=FEW)
    assert [list(one.ids) for one in learnt] == [list(range(40))]


def test_a_disk_without_room_is_said_before_anything_is_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda where: usage(0, 0, (256 << 20) + 12 * 1000))  # 3 layers of 4
    with pytest.raises(ProfileError, match=r"set path_tokens to at most 1,000, or"):
        calibrate(engine, TEXTS, parts={"path"}, settings=CalibrationSettings(path_tokens=2000), folder=tmp_path)
    assert not engine.busy
    calibrate(engine, TEXTS, parts={"path"}, settings=FEW, folder=tmp_path)
    assert not [*tmp_path.iterdir()]
