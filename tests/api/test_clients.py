"""What well-known clients send is answered: as text to all of them, and as calls to those that offer tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.conftest import Start, events
from tests.api.recorded import CODEX_CHAT, CODEX_RESPONSES, REQUESTS

TEXT = "Because programs repeat themselves."
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls"]}}\n</tool_call>'


def text_of(path: str, body: dict[str, Any], reply: Any) -> str:
    """The text of an answer in the form of its path."""
    if not body.get("stream"):
        return str(reply.json()["choices"][0]["message"]["content"])
    told = [data for _, data in events(reply.text)]
    if path.startswith("/v1/messages"):
        return "".join(one["delta"].get("text", "") for one in told if one["type"] == "content_block_delta")
    if path.startswith("/v1/responses"):
        return "".join(one["delta"] for one in told if one["type"] == "response.output_text.delta")
    assert told[-1] == "[DONE]"
    choices = [one["choices"][0] for one in told[:-1] if one["choices"]]
    if path == "/v1/completions":
        return "".join(one["text"] for one in choices)
    return "".join(one["delta"].get("content") or "" for one in choices)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_requests_of_clients_are_answered(start: Start, name: str) -> None:
    client, _, engine = start(TEXT, takes_tools=True)
    path, body = REQUESTS[name]
    reply = client.post(path, json=body, headers={"authorization": "Bearer sk-none", "accept": "text/event-stream"})
    assert reply.status_code == 200, reply.text
    assert text_of(path, body, reply) == TEXT
    asked, sampling = engine.asked[-1]
    offered = [one["function"]["name"] for one in getattr(asked, "tools", ())]
    assert bool(offered) == ("tools" in body)
    assert "apply_patch" not in offered, "its input is no JSON"
    assert sampling.temperature == body.get("temperature", 0.0)


@pytest.mark.parametrize("name", [name for name, (_, body) in REQUESTS.items() if "tools" not in body])
def test_without_tools_the_model_s_template_need_not_take_any(start: Start, name: str) -> None:
    client, _, _ = start(TEXT)
    path, body = REQUESTS[name]
    assert client.post(path, json=body).status_code == 200


def test_agents_get_their_calls(start: Start) -> None:
    client, _, _ = start(CALL, takes_tools=True)
    told = [data for _, data in events(client.post("/v1/chat/completions", json=CODEX_CHAT).text)[:-1]]
    [call] = [call for one in told for call in one["choices"][0]["delta"].get("tool_calls", [])]
    assert json.loads(call["function"]["arguments"]) == {"command": ["ls"]}
    told = [data for _, data in events(client.post("/v1/responses", json=CODEX_RESPONSES).text)]
    [item] = told[-1]["response"]["output"]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == (
        "function_call",
        "shell",
        {"command": ["ls"]},
    )
