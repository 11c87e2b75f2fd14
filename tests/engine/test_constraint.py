"""An answer that is to keep to a JSON schema does, whatever the model would rather say."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.server.v1.call_grammar import grammar
from app.server.v1.parts import read_call
from core.engine import Engine
from core.engine.constraint import Constraint, Constraints
from core.errors import PromptError
from core.settings.sampling import Sampling
from core.types import Piece
from tests.selection import layered

pytest.importorskip("llguidance", reason="the package llguidance is not installed")
CHAT = [{"role": "user", "content": "hello there"}]
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


@pytest.fixture
def ending(engine: Engine) -> Engine:
    engine.prompt.ends = {END}
    return engine


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


def test_a_model_that_never_ends_cannot_keep_to_one(engine: Engine) -> None:
    engine.prompt.ends = set()
    with pytest.raises(PromptError, match="no end token"):
        said(engine, SCHEMA)


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
