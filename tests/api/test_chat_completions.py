"""Chat completions: what of a request is taken, what is refused by name, and what an answer says."""

import logging
from typing import Any

import pytest

from app.server.v1.fields import say_once
from core.types import Begun
from tests.api.conftest import Refusing, Start, events
from tests.logged import Logged

COMPLETE = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'


def ask(content: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": content}], **more}


def test_parts_roles_and_tool_messages_reach_the_model_as_text(start: Start) -> None:
    client, _, engine = start(takes_tools=True)
    called = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": "hello", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": [{"type": "text", "text": "seen"}], "tool_call_id": "call_1"},
    ]
    assert client.post(COMPLETE, json=ask(messages=messages)).status_code == 200
    assert engine.asked[-1][0] == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**called, "function": {"name": "look", "arguments": {"at": "it"}}}],
        },
        {"role": "tool", "content": "seen", "tool_call_id": "call_1"},
    ]


def test_fields_of_sampling_reach_the_engine(start: Start) -> None:
    client, host, engine = start()
    assert host.chats.set_sampling(top_k=7) == ""
    fields = {
        "max_tokens": 5,
        "max_completion_tokens": 100_000,
        "temperature": 0.5,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "seed": 4,
        "stop": ["a", "", "b"],
        "logprobs": True,
        "top_logprobs": 2,
    }
    assert client.post(COMPLETE, json=ask(**fields)).status_code == 200
    sampling = engine.asked[-1][1]
    assert sampling.max_new_tokens == 32768, "a limit beyond any context is none"
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.seed) == (0.5, 0.9, 0.1, 4)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.5, -0.5, 1.1)
    assert (sampling.stop, sampling.logprobs) == (("a", "b"), 2)
    assert sampling.top_k == 7, "the sidebar's value stands for what is left out"


@pytest.mark.parametrize(
    ("change", "told", "param"),
    [
        ({"messages": []}, "empty", None),
        ({"temperature": 99}, "temperature must lie between", "temperature"),
        ({"logprobs": "many"}, "logprobs: Input should be a valid boolean", "logprobs"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: Field required", "messages.0.content"),
        ({"messages": [{"role": "user", "content": ""}] * 4097}, "at most 4096", "messages"),
        ({"n": 2}, "n cannot be honoured: one answer", "n"),
        ({"logit_bias": {"1": 5}}, "logit_bias cannot be honoured", "logit_bias"),
        ({"response_format": {"type": "grammar"}}, "there are the types text, json_object", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema with a schema", "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities cannot be honoured", "modalities"),
        ({"functions": [TOOL["function"]]}, "functions cannot be honoured", "functions"),
        ({"tools": [TOOL]}, "template of this model takes no tools", "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "template of this model takes no tools", "tools"),
        ({"tool_choice": "required"}, "tools offers: none", "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "'web_search' cannot be honoured", "tool_choice"),
        (
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
                ]
            },
            "template of this model takes no tools",
            "messages",
        ),
        ({"tools": [{**TOOL, "function": {"name": "look", "parameters": 5}}]}, "are a JSON schema", "tools.0"),
        ({"tools": [{"type": "function", "function": {}}]}, "a tool has a name", "tools.0.name"),
        ({"top_logprobs": 3}, "set logprobs", "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "less than or equal to 20", "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens must lie between 1", "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens must lie between", "max_completion_tokens"),
        ({"presence_penalty": 3}, "presence_penalty must lie between -2 and 2", "presence_penalty"),
        ({"stop": 5}, "stop: give a text", "stop"),
        ({"stop": ["x"] * 65}, "at most 64", "stop"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "there are the roles", "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "give a text, or a list", "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "'image_url' cannot be read",
            "messages.0.content.0",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "name and arguments",
            "messages.0.tool_calls.0.function",
        ),
    ],
)
def test_what_is_refused_is_named(refusing: Refusing, change: dict[str, Any], told: str, param: str | None) -> None:
    client, engine = refusing
    reply = client.post(COMPLETE, json={**ask(), **change})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert told in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)
    assert not engine.asked


def test_fields_that_ask_for_nothing_and_unknown_ones_are_ignored_and_logged(start: Start, caplog: Logged) -> None:
    client, _, _ = start()
    harmless = {"n": 1, "logit_bias": {}, "response_format": {"type": "text"}, "functions": [], "tools": []}
    unknown = {"user": "me", "service_tier": "auto", "metadata": {"a": 1}, "somebody's words": 1, "num_ctx": 4096}
    say_once.cache_clear()
    for _ in range(2):
        assert client.post(COMPLETE, json={**ask(), **harmless, **unknown}).status_code == 200
    said = [one for one in caplog.records if "fields without effect" in one.getMessage()]
    assert [one.levelno for one in said] == [logging.WARNING], "seen without any setting, and once"
    assert said[0].getMessage().endswith(": metadata, num_ctx, service_tier, user")
    assert "somebody" not in caplog.text


def test_another_model_is_refused_with_the_names_that_there_are(start: Start) -> None:
    client, _, _ = start()
    reply = client.post(COMPLETE, json={**ask(), "model": "gpt-5"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'demo'" in error["message"]
    assert client.post(COMPLETE, json={**ask(), "model": None}).status_code == 200


def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(start: Start) -> None:
    client, _, _ = start("one two three four")
    whole = client.post(COMPLETE, json=ask(stop="three")).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("one two ", "stop")
    told = events(client.post(COMPLETE, json=ask(stop=["zzz", "o t"], stream=True)).text)
    assert "".join(one["choices"][0]["delta"].get("content", "") for _, one in told[:-1]) == "one tw"


def test_log_probabilities_come_with_the_tokens(start: Start) -> None:
    client, _, _ = start("one two")
    whole = client.post(COMPLETE, json=ask(logprobs=True, top_logprobs=1)).json()["choices"][0]
    assert [one["token"] for one in whole["logprobs"]["content"]] == ["one", " tw", "o"]
    assert whole["logprobs"]["content"][1] == {
        "token": " tw",
        "logprob": -0.5,
        "bytes": [32, 116, 119],
        "top_logprobs": [{"token": " tw", "logprob": -0.5, "bytes": [32, 116, 119]}],
    }
    told = events(client.post(COMPLETE, json=ask(logprobs=True, stream=True)).text)[:-1]
    found = [one["choices"][0]["logprobs"] for _, one in told]
    assert [token["token"] for one in found if one for token in one["content"]] == ["one", " tw", "o"]


def test_a_stream_ends_with_its_usage_where_that_was_asked_for(start: Start) -> None:
    client, _, _ = start("one two")
    told = events(client.post(COMPLETE, json=ask(stream=True, stream_options={"include_usage": True})).text)
    assert told[-1] == ("", "[DONE]") and told[0][1]["choices"][0]["delta"]["role"] == "assistant"
    assert told[-2][1]["choices"] == []
    assert told[-2][1]["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert all(one["usage"] is None for _, one in told[:-2])
    assert told[-3][1]["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in events(client.post(COMPLETE, json=ask(stream=True)).text)[-2][1]


def test_a_last_message_of_the_model_is_continued(start: Start) -> None:
    """Unless the request asks for an answer to it, or it has no text."""
    client, _, engine = start("on it goes.", opens_reasoning=True)
    hello, yes = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "Yes, and"}
    for more in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        told = client.post(COMPLETE, json=ask(messages=[hello, yes], **more)).json()
        assert told["choices"][0]["message"] == {"role": "assistant", "content": "on it goes."}
        assert engine.asked[-1][0] == Begun([hello], "Yes, and")
    client.post(COMPLETE, json=ask(messages=[hello, yes], stream=True))
    assert engine.asked[-1][0] == Begun([hello], "Yes, and")
    client.post("/v1/messages", json={"messages": [hello, yes], "max_tokens": 9, "system": "Be brief."})
    system = {"role": "system", "content": "Be brief."}
    assert engine.asked[-1][0] == Begun([system, hello], "Yes, and")
    client.post("/v1/responses", json={"input": [hello, yes]})
    assert engine.asked[-1][0] == Begun([hello], "Yes, and")
    for more in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert client.post(COMPLETE, json=ask(messages=[hello, yes], **more)).status_code == 200
        assert engine.asked[-1][0] == [hello, yes]
    for messages in ([hello], [hello, {**yes, "content": " "}]):
        reply = client.post(COMPLETE, json=ask(messages=messages, continue_final_message=True))
        assert (reply.status_code, "continue_final_message" in reply.text) == (400, True)
    both = ask(messages=[hello, yes], continue_final_message=True, add_generation_prompt=True)
    assert client.post(COMPLETE, json=both).status_code == 400


@pytest.mark.parametrize(
    ("said", "opened"), [("<think>\nWhy not.\n</think>\n\nYes.", False), ("Why not.\n</think>Yes.", True)]
)
def test_reasoning_has_its_own_field(start: Start, said: str, opened: bool) -> None:
    client, _, _ = start(said, opens_reasoning=opened)
    told = client.post(COMPLETE, json=ask()).json()
    message, usage = told["choices"][0]["message"], told["usage"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Why not.\n"}
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]
    deltas = [one["choices"][0]["delta"] for _, one in events(client.post(COMPLETE, json=ask(stream=True)).text)[:-1]]
    assert "".join(one.get("reasoning_content", "") for one in deltas) == "Why not.\n"
    assert "".join(one.get("content", "") for one in deltas) == "Yes."


def test_a_model_that_takes_tools_calls_them(start: Start) -> None:
    client, _, engine = start(f"Let me look.\n{CALL}\n{CALL}", takes_tools=True)
    choice = client.post(COMPLETE, json=ask(tools=[TOOL, {"type": "web_search"}])).json()["choices"][0]
    asked = engine.asked[-1][0]
    assert [one["function"]["name"] for one in asked.tools] == ["look"], "the server runs no tools of its own"
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look.\n"
    calls = choice["message"]["tool_calls"]
    assert [one["function"] for one in calls] == [{"name": "look", "arguments": '{"at": "it"}'}] * 2
    assert len({one["id"] for one in calls}) == 2
    told = events(client.post(COMPLETE, json=ask(tools=[TOOL], stream=True)).text)[:-1]
    deltas = [call for _, one in told for call in one["choices"][0]["delta"].get("tool_calls", [])]
    assert [(one["index"], one["function"]["name"]) for one in deltas] == [(0, "look"), (1, "look")]
    assert told[-1][1]["choices"][0]["finish_reason"] == "tool_calls"


def test_one_call_at_most_where_more_are_not_wanted(start: Start) -> None:
    client, _, _ = start(f"{CALL}\n{CALL}", takes_tools=True)
    choice = client.post(COMPLETE, json=ask(tools=[TOOL], parallel_tool_calls=False)).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    choice = client.post(COMPLETE, json=ask(tools=[TOOL], tool_choice="none")).json()["choices"][0]
    assert "tool_calls" not in choice["message"], "tools were taken away"


Names = list[str] | None
CHOICES: list[tuple[Any, Names, Names]] = [  # which tool is asked for, has to be called, is told of
    ("auto", [], ["look", "write"]),
    ("required", ["look", "write"], ["look", "write"]),
    ({"type": "function", "function": {"name": "write"}}, ["write"], ["look", "write"]),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}, ["look"], ["look"]),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}, [], ["look"]),
    ({"type": "function", "function": {"name": "sing"}}, None, None),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, None, None),
    ({"type": "allowed_tools", "allowed_tools": 5}, None, None),
    ({"type": "function"}, None, None),
]


def test_a_tool_that_has_to_be_called_is(start: Start) -> None:
    client, _, engine = start(CALL, takes_tools=True)
    write = {**TOOL, "function": {**TOOL["function"], "name": "write"}}
    for choice, forced, told_of in CHOICES:
        reply = client.post(COMPLETE, json=ask(tools=[TOOL, write], tool_choice=choice))
        if forced is None:
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice"), choice
            continue
        assert reply.status_code == 200, choice
        asked, sampling = engine.asked[-1]
        assert [one["function"]["name"] for one in asked.tools] == told_of, choice
        assert "call)*" not in sampling.grammar, "one call is enough, unless more are asked for"
        assert [name for name in ("look", "write") if f'\\"{name}\\"' in sampling.grammar] == forced, choice


def test_an_answer_says_whether_it_is_exact(start: Start) -> None:
    client, host, _ = start()
    told = client.post(COMPLETE, json=ask()).json()["moestro"]
    assert (told["exact"], told["changed"], told["closeness"]) == (True, 0, 0.0)
    assert (told["arithmetic"], told["distance_kl"], told["distance_tokens"]) == ("reference", None, 0)
    assert host.models.change_many({"miss": "drop"}) == ""
    told = client.post(COMPLETE, json=ask("lossy " * 50)).json()["moestro"]
    assert told["exact"] is False
    assert told["changed"] > 0
    streamed = events(client.post(COMPLETE, json=ask("lossy " * 50, stream=True)).text)[-2][1]
    assert streamed["moestro"]["exact"] is False
