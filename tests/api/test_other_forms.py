"""Completions, Anthropic's messages, OpenAI's responses and the list of models: one server, each in its own form."""

import json
from typing import Any

import pytest

from core.types import Chat
from tests.api.conftest import Refusing, Start, events

THOUGHT = "<think>Why not.</think>"
CALL = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
NESTED = {"type": "json_schema", "schema": SCHEMA}
OFFERED = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}


def types(told: list[tuple[str, Any]]) -> list[str]:
    assert all(name == data["type"] for name, data in told), "an event has another name than its data"
    return [name for name, _ in told]


def test_a_text_is_continued_without_a_template(start: Start) -> None:
    client, _, engine = start(f"{THOUGHT} goes on")
    asked = {"prompt": ["def f():"], "max_tokens": 50, "stop": "on", "logprobs": 1, "seed": 3}
    told = client.post("/v1/completions", json=asked).json()
    assert engine.asked[-1][0] == "def f():"
    assert told["object"] == "text_completion"
    assert told["choices"][0]["text"] == f"{THOUGHT} goes ", "a completion has no parts"
    assert told["choices"][0]["logprobs"]["text_offset"][:3] == [0, 3, 6]
    assert told["choices"][0]["logprobs"]["top_logprobs"][0] == {"<th": -0.5}
    assert (told["choices"][0]["finish_reason"], told["seed"], told["moestro"]["exact"]) == ("stop", 3, True)
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    lines = events(client.post("/v1/completions", json=streamed).text)
    assert "".join(one["choices"][0]["text"] for _, one in lines[:-2]) == f"{THOUGHT} goes "
    assert lines[-2][1]["usage"]["completion_tokens"] > 5
    assert lines[-1] == ("", "[DONE]")


MESSAGE: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 100,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "metadata": {"user_id": "me"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}


def test_a_message_of_anthropic_s_is_the_same_chat(start: Start) -> None:
    client, _, engine = start(f"{THOUGHT}Because they do.", takes_tools=True)
    turns = [
        *MESSAGE["messages"],
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "it"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "seen"}]},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    tools = [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}, {"type": "web_search_20250305"}]
    told = client.post("/v1/messages", json={**MESSAGE, "messages": turns, "tools": tools}).json()
    called = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    assert engine.asked[-1][0] == Chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Let me look.", "tool_calls": [called]},
            {"role": "tool", "content": "seen", "tool_call_id": "t1"},
            {"role": "user", "content": "Well?"},
        ],
        (OFFERED,),
    )
    assert told["content"] == [
        {"type": "thinking", "thinking": "Why not.", "signature": ""},
        {"type": "text", "text": "Because they do."},
    ]
    assert [told[name] for name in ("type", "role", "stop_reason")] == ["message", "assistant", "end_turn"]
    assert told["moestro"]["exact"] is True
    assert told["usage"]["input_tokens"] == 5 + 4 + 6 + 4 + 4
    assert told["usage"]["output_tokens"] > 3


def test_a_message_streams_in_blocks(start: Start) -> None:
    client, _, _ = start(f"{THOUGHT}Look.{CALL}", takes_tools=True)
    tools = [{"name": "look", "input_schema": SCHEMA}]
    told = events(client.post("/v1/messages", json={**MESSAGE, "tools": tools, "stream": True}).text)
    names = types(told)
    assert names[:2] == ["message_start", "ping"]
    assert told[0][1]["message"]["usage"]["input_tokens"] == told[-2][1]["usage"]["input_tokens"] == 9
    assert names[-2:] == ["message_delta", "message_stop"]
    begun = [data["content_block"]["type"] for name, data in told if name == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use"]
    assert names.count("content_block_stop") == 3
    assert [data["index"] for name, data in told if name == "content_block_stop"] == [0, 1, 2]
    deltas = [data["delta"] for name, data in told if name == "content_block_delta"]
    assert "".join(one.get("thinking", "") for one in deltas) == "Why not."
    assert "".join(one.get("text", "") for one in deltas) == "Look."
    assert [one["partial_json"] for one in deltas if "partial_json" in one] == ['{"at": "it"}']
    assert told[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert told[-2][1]["usage"]["output_tokens"] > 3


def test_a_message_says_what_ended_it(start: Start) -> None:
    client, _, _ = start("one two three")

    def ended(**more: Any) -> tuple[str, str | None]:
        told = client.post("/v1/messages", json={**MESSAGE, **more}).json()
        return told["stop_reason"], told["stop_sequence"]

    assert ended() == ("end_turn", None)
    assert ended(max_tokens=2) == ("max_tokens", None)
    assert ended(stop_sequences=["three", "two"]) == ("stop_sequence", "two")


def test_the_tokens_of_a_message_are_counted_without_an_answer(start: Start) -> None:
    client, _, engine = start()
    assert client.post("/v1/messages/count_tokens", json=MESSAGE).json() == {"input_tokens": 9}
    assert not engine.asked


def test_a_response_is_the_same_chat(start: Start) -> None:
    client, _, engine = start(f"{THOUGHT}Look.{CALL}", takes_tools=True)
    tool = {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": False}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "it"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
    ]
    asked = {"instructions": "Be brief.", "input": items, "tools": [tool], "store": False, "include": ["x"]}
    told = client.post("/v1/responses", json=asked).json()
    called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    assert engine.asked[-1][0] == Chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Let me look.", "tool_calls": [called]},
            {"role": "tool", "content": "seen", "tool_call_id": "c1"},
        ],
        (OFFERED,),
    )
    assert (told["object"], told["status"], told["moestro"]["exact"]) == ("response", "completed", True)
    assert [one["type"] for one in told["output"]] == ["reasoning", "message", "function_call"]
    assert told["output"][1]["content"][0]["text"] == "Look."
    assert told["output"][2]["arguments"] == '{"at": "it"}'
    assert told["usage"]["input_tokens_details"] == {"cached_tokens": 0}
    assert 0 < told["usage"]["output_tokens_details"]["reasoning_tokens"] <= told["usage"]["output_tokens"]


def test_a_response_streams_in_items(start: Start) -> None:
    client, _, _ = start(f"{THOUGHT}Look.{CALL}", takes_tools=True)
    tool = {"type": "function", "name": "look", "parameters": SCHEMA}
    told = events(client.post("/v1/responses", json={"input": "hello", "tools": [tool], "stream": True}).text)
    names = types(told)
    assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == 3
    text = "".join(data["delta"] for name, data in told if name == "response.output_text.delta")
    assert text == "Look." == next(data["text"] for name, data in told if name == "response.output_text.done")
    assert "".join(data["delta"] for name, data in told if name == "response.reasoning_text.delta") == "Why not."
    done = [data["item"] for name, data in told if name == "response.output_item.done"]
    assert told[-1][1]["response"]["output"] == done
    added = [data["item"]["id"] for name, data in told if name == "response.output_item.added"]
    assert added == [one["id"] for one in done]


def test_a_response_that_is_cut_says_so(start: Start) -> None:
    client, _, _ = start("one two three")
    told = client.post("/v1/responses", json={"input": "hello", "max_output_tokens": 2}).json()
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    streamed = events(client.post("/v1/responses", json={"input": "x", "max_output_tokens": 2, "stream": True}).text)
    assert streamed[-1][0] == "response.incomplete"


REFUSED: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = {  # path -> a request; changes, the field
    "completions": (
        {"prompt": "x"},
        [
            ({"echo": True}, "echo"),
            ({"suffix": "x"}, "suffix"),
            ({"best_of": 3}, "best_of"),
            ({"prompt": ["a", "b"]}, "prompt"),
            ({"prompt": [1, 2]}, "prompt"),
            ({"prompt": None}, "prompt"),
            ({"logprobs": 6}, "logprobs"),
        ],
    ),
    "messages": (
        MESSAGE,
        [
            ({"messages": [{"role": "assistant", "content": "I"}], "output_format": NESTED}, "messages"),
            ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
            ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
            ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
            ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
            ({"output_format": {"type": "json_schema"}}, "output_format"),
            ({"tool_choice": {"type": "any"}}, "tool_choice"),
            ({"tools": [{"name": "look", "input_schema": SCHEMA}]}, "tools"),
        ],
    ),
    "responses": (
        {"input": "hello"},
        [
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"background": True}, "background"),
            ({"text": {"format": {"type": "grammar"}}}, "text.format"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
            ({"input": 5}, "input"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
        ],
    ),
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_refused_is_named(refusing: Refusing, path: str) -> None:
    client, engine = refusing
    plain, changes = REFUSED[path]
    for change, param in changes:
        reply = client.post(f"/v1/{path}", json={**plain, **change})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), change
    assert not engine.asked


def test_a_schema_reaches_the_engine_in_every_form(start: Start) -> None:
    client, _, engine = start('{"at": "it"}', takes_tools=True)
    hello, flat = [{"role": "user", "content": "hello"}], {"type": "json_schema", "name": "at", "schema": SCHEMA}
    nested = {"type": "json_schema", "json_schema": {"name": "at", "strict": True, "schema": SCHEMA}}
    for path, body in (
        ("chat/completions", {"messages": hello, "response_format": nested}),
        ("completions", {"prompt": "x", "response_format": nested}),
        ("messages", {"messages": hello, "output_config": {"format": flat}}),
        ("messages", {"messages": hello, "output_format": flat}),
        ("responses", {"input": "hello", "text": {"format": flat}}),
    ):
        assert client.post(f"/v1/{path}", json=body).status_code == 200
        assert json.loads(engine.asked[-1][1].schema) == SCHEMA
        if path != "completions":
            assert client.post(f"/v1/{path}", json={**body, "tools": [OFFERED]}).status_code == 200
            sampling = engine.asked[-1][1]
            assert not sampling.schema, "a call is no JSON of the schema"
            assert "start: calls | answer" in sampling.grammar
    body = {"messages": hello, "response_format": {"type": "json_object"}}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert json.loads(engine.asked[-1][1].schema) == {"type": "object"}


def test_models_tell_how_long_a_context_they_have_and_embed_nothing(start: Start) -> None:
    client, host, _ = start()
    reply = client.post("/v1/embeddings", json={"model": "demo", "input": "x"})
    assert reply.status_code == 400 and "Embeddings are not served" in reply.json()["error"]["message"]
    [listed] = client.get("/v1/models").json()["data"]
    assert (listed["id"], listed["context_length"], listed["max_model_len"]) == ("demo", 512, 512)
    assert client.get("/v1/models/demo").json() == listed
    assert client.get("/v1/models/other/one").json()["error"]["code"] == "model_not_found"
    host.models.unload()
    assert client.get("/v1/models/demo").status_code == 404
