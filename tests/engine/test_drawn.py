"""What is drawn: by a seed, in bounds, with penalties, after a JSON schema; and the model's own log probabilities."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.server.v1.call_grammar import grammar
from app.server.v1.parts import read_call
from core.engine import Engine
from core.engine.constraint import Constraint, Constraints
from core.engine.sampler import PresenceFrequencyPenalty, Sampler
from core.errors import PromptError
from core.settings.sampling import Sampling
from core.types import Piece
from tests.engine.test_generate import CHAT, talk
from tests.loaded import loaded
from tests.selection import layered

END = 5  # stands for an end token, which the tiny tokenizer has none of
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sure": {"type": "boolean"},
        "kind": {"enum": ["cache", "router"]},
        "ids": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["sure", "kind", "ids"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with loaded(model, {"budget": "50%"}, context=256) as engine:
        yield engine


@pytest.fixture
def ending(engine: Engine) -> Iterator[Engine]:
    pytest.importorskip("llguidance", reason="the package llguidance is not installed")
    engine.prompt.ends, opens = {END}, engine.prompt.opens_reasoning
    yield engine
    engine.prompt.ends, engine.prompt.opens_reasoning = set(), opens


def said(engine: Engine, schema: object, **sampling: Any) -> tuple[str, list[Piece]]:
    asked = replace(Sampling.checked(max_new_tokens=100, **sampling), schema=json.dumps(schema))
    pieces = list(engine.generate(CHAT, asked))
    return "".join(piece.text for piece in pieces), pieces


@pytest.mark.parametrize(
    "sampling",
    layered(
        [
            {},
            {"temperature": 2.0, "seed": 1},
            {"temperature": 1.0, "seed": 2, "top_p": 0.3, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
        ],
        quick=lambda sampling: "top_p" in sampling,
    ),
)
def test_the_answer_is_json_of_the_schema_and_ends(ending: Engine, sampling: dict[str, Any]) -> None:
    text, pieces = said(ending, SCHEMA, **sampling)
    value = json.loads(text)
    assert list(value) == ["sure", "kind", "ids"]
    assert isinstance(value["sure"], bool) and value["kind"] in ("cache", "router") and len(value["ids"]) <= 3
    assert text == json.dumps(value), "written in one line"
    assert pieces[-1].stats is not None and pieces[-1].stats.reason == "stop"


@pytest.mark.long(0.1)
def test_a_tool_that_has_to_be_called_is(ending: Engine) -> None:
    tools = [
        {"function": {"name": "look", "parameters": {"properties": {"at": {"enum": ["it"]}}, "required": ["at"]}}},
        {"function": {"name": 'say "x"', "parameters": {"type": "object", "additionalProperties": False}}},
    ]
    for offered, schema in ((tools[:1], ""), (tools[1:], ""), (tools, json.dumps(SCHEMA))):
        asked = replace(Sampling.checked(max_new_tokens=200, temperature=1.0, seed=3), grammar=grammar(offered, schema))
        text = "".join(piece.text for piece in ending.generate(CHAT, asked))
        if text.startswith("{"):
            assert schema and list(json.loads(text)) == ["sure", "kind", "ids"]
            continue
        call = read_call(text.split("<tool_call>")[1].split("</tool_call>")[0], {})
        assert call is not None and call.name in [one["function"]["name"] for one in offered], text
        assert call.arguments == ('{"at": "it"}' if call.name == "look" else "{}"), "no argument that no tool names"


def test_without_a_schema_nothing_is_ruled_out(ending: Engine) -> None:
    free = [p.token for p in ending.generate(CHAT, Sampling(max_new_tokens=8))]
    text, _ = said(ending, {"const": "x"})
    assert text == '"x"'
    assert [p.token for p in ending.generate(CHAT, Sampling(max_new_tokens=8))] == free


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"type": "string", "format": "no-such"}, {"$ref": "#/x"}])
def test_a_schema_that_cannot_be_kept_to_is_refused(ending: Engine, schema: object) -> None:
    with pytest.raises(PromptError, match="cannot keep to this JSON schema"):
        said(ending, schema)
    assert not ending.busy


def test_a_model_that_never_ends_cannot_keep_to_one(fresh: Engine) -> None:
    pytest.importorskip("llguidance", reason="the package llguidance is not installed")
    fresh.prompt.ends = set()
    with pytest.raises(PromptError, match="no end token"):
        said(fresh, SCHEMA)


def test_what_is_reasoned_before_is_free(ending: Engine) -> None:
    tokenizer = ending.prompt.tokenizer
    ending.prompt.opens_reasoning = True  # as its template would say
    ids = tokenizer("question", add_special_tokens=False).input_ids
    constraint = Constraints(ending.prompt).of(Sampling(schema=json.dumps({"const": "x"})), len(ids))
    assert isinstance(constraint, Constraint)
    logits = torch.zeros(1, 256)

    def allowed(text: str) -> str:
        drawn = tokenizer(text, add_special_tokens=False).input_ids if text else []
        scores = constraint([*ids, *drawn], logits)
        found = [n for n in range(256) if scores[0, n] > -torch.inf]
        return tokenizer.decode(found) if len(found) < 256 else "anything"

    thought = "so</think>"
    assert [allowed(thought[:n]) for n in range(len(thought))] == ["anything"] * len(thought)
    assert [allowed(thought + '"x"'[:n]) for n in range(3)] == ['"', "x", '"']


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
