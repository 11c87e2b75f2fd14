"""What is drawn: by a seed, within bounds, with penalties; and the model's own log probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.engine.sampler import PresenceFrequencyPenalty, Sampler
from core.settings.sampling import Sampling
from core.types import Piece
from tests.engine.test_generate import CHAT, talk
from tests.loaded import loaded
from tests.selection import layered


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with loaded(model, {"budget": "50%"}, context=256) as engine:
        yield engine


def test_the_same_seed_says_the_same_and_another_does_not(engine: Engine) -> None:
    def said(seed: int) -> list[int | None]:
        return [p.token for p in talk(engine, temperature=1.5, seed=seed, max_new_tokens=8)]

    assert said(1) == said(1)
    assert said(1) != said(2)


@pytest.mark.parametrize(
    ("name", "value"), layered([("top_k", 1), ("top_p", 0.0), ("min_p", 1.0)], quick=lambda case: case[0] == "top_p")
)
def test_narrow_sampling_is_greedy(engine: Engine, name: str, value: float) -> None:
    greedy = [p.token for p in talk(engine, max_new_tokens=8)]
    # at this temperature the likeliest token alone passes 5 %, yet unbounded sampling still varies
    assert [p.token for p in talk(engine, temperature=0.3, max_new_tokens=8, **{name: value})] == greedy
    assert [p.token for p in talk(engine, temperature=0.3, max_new_tokens=8)] != greedy


def test_the_repetition_penalty_acts(engine: Engine) -> None:
    assert [p.token for p in talk(engine, max_new_tokens=12)] != [
        p.token for p in talk(engine, max_new_tokens=12, repetition_penalty=2.0)
    ]


def test_without_a_seed_one_is_drawn_and_repeats_the_answer(engine: Engine) -> None:
    drawn = Sampling(temperature=1.5, max_new_tokens=6)

    def say(sampling: Sampling) -> tuple[list[int | None], int]:
        pieces = list(engine.generate(CHAT, sampling))
        return [p.token for p in pieces if p.kind == "token"], pieces[-1].stats.seed

    first, second = say(drawn), say(drawn)
    assert first[1] != second[1]
    assert first[0] != second[0]
    assert say(replace(drawn, seed=first[1])) == first
    assert say(replace(drawn, seed=2**63 - 1)) == say(replace(drawn, seed=2**63 - 1))


def test_log_probabilities_are_those_of_the_model_whatever_is_drawn(engine: Engine) -> None:
    def said(sampling: Sampling) -> list[Piece]:
        return [p for p in engine.generate(CHAT, sampling) if p.kind == "token"]

    assert all(piece.logprob is None for piece in said(Sampling(max_new_tokens=4)))
    greedy = said(Sampling(max_new_tokens=4, logprobs=3))
    for piece in greedy:
        assert piece.logprob.top[0] == (piece.logprob.text, piece.logprob.logprob)
        assert len(piece.logprob.top) == 3
        assert 0 >= piece.logprob.top[0][1] >= piece.logprob.top[1][1]
    drawn = said(Sampling(max_new_tokens=4, logprobs=256, temperature=1.5, frequency_penalty=1.0, seed=3))
    assert drawn[0].logprob.top[:3] == greedy[0].logprob.top
    assert sum(np.exp(value) for _, value in drawn[0].logprob.top) == pytest.approx(1, abs=1e-4)


def test_penalties_are_those_of_their_definition() -> None:
    logits = torch.tensor([[3.0, 2.5, 2.0, 0.0]])
    ids = [0, 0, 0, 1, 2, 2]  # the first two are the prompt
    penalty = PresenceFrequencyPenalty(0.5, 0.25, prompt=2)
    assert penalty(torch.tensor([ids]), logits).tolist() == [[2.25, 1.75, 1.0, 0.0]]
    cpu = torch.device("cpu")
    assert Sampler(Sampling(), cpu, 2)(ids, logits) == 0
    assert Sampler(Sampling(frequency_penalty=2.0), cpu, 2)(ids, logits) == 0
    assert Sampler(Sampling(presence_penalty=2.0, frequency_penalty=2.0), cpu, 0)(ids, logits) == 3
