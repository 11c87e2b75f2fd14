"""What programs send is answered as they need it: requests recorded from running ones (`recordings/`). All get
text, and those that offer tools their calls."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.server.v1.call_grammar import grammar
from app.server.v1.fields import LONGEST
from tests.api.conftest import HOME, SayingEngine, events, saying
from tests.app.conftest import open_host
from tests.selection import layered

RECORDINGS = {
    path.stem: json.loads(path.read_text("utf-8")) for path in Path(__file__).parent.glob("recordings/*.json")
}
TEXT = "Because programs repeat themselves."
RUN_ELSEWHERE = {"multi_agent_v1", "web_search"}  # tools of Codex: several in one, and one of the server's
SPOKEN = ("text", "content", "output", "instructions", "system")  # fields whose texts are said to the model


def request(name: str, number: int) -> dict[str, Any]:
    """A recorded request, with its tools where they are said once for several."""
    found: dict[str, Any] = RECORDINGS[name]["requests"][number]
    tools = (found["body"] or {}).get("tools")
    if isinstance(tools, dict):
        tools = RECORDINGS[name]["requests"][tools["request"]]["body"]["tools"]
        found = {**found, "body": {**found["body"], "tools": tools}}
    return found


REQUESTS = [
    pytest.param(name, number, id=f"{name} {number} {one['path']}")
    for name, recording in sorted(RECORDINGS.items())
    for number, one in enumerate(recording["requests"])
    if one["method"] == "POST"
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, type[SayingEngine]]]:
    engine = saying(TEXT, takes_tools=True)
    host = open_host(tmp_path_factory.mktemp("home"), engine)
    assert host.chats.set_sampling(max_new_tokens=1000) == ""
    with TestClient(build_app(host), base_url=HOME) as client:
        yield client, engine
    host.close()


def answer(served: tuple[TestClient, type[SayingEngine]], one: dict[str, Any], says: str) -> Any:
    client, engine = served
    engine.words = tuple(says[at : at + 3] for at in range(0, len(says), 3))
    reply = client.request(one["method"], one["path"], json=one["body"], headers=one["headers"])
    assert reply.status_code == 200, reply.text
    return reply


def told(one: dict[str, Any], reply: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls (name, arguments) of an answer, read in the form of its API as the programs do."""
    path = one["path"].split("?")[0]
    if not one["body"].get("stream"):
        return WHOLE[path](reply.json())
    assert reply.headers["content-type"].startswith("text/event-stream")
    return STREAMED[path]([data for _, data in events(reply.text)])


def chat(whole: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    message = whole["choices"][0]["message"]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"] or "", [(one["name"], json.loads(one["arguments"])) for one in functions]


def chat_chunks(chunks: list[Any]) -> tuple[str, list[tuple[str, Any]]]:
    assert chunks[-1] == "[DONE]"
    deltas = [one["choices"][0]["delta"] for one in chunks[:-1] if one["choices"]]
    functions = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return text, [(one["name"], json.loads(one["arguments"])) for one in functions]


def message(whole: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    blocks = whole["content"]
    text = "".join(one["text"] for one in blocks if one["type"] == "text")
    return text, [(one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"]


def message_events(told: list[Any]) -> tuple[str, list[tuple[str, Any]]]:
    assert (told[0]["type"], told[-1]["type"]) == ("message_start", "message_stop")
    assert told[0]["message"]["usage"]["input_tokens"] > 0, "how full the context is"
    blocks: list[dict[str, Any]] = []
    for one in told:
        if one["type"] == "content_block_start":
            blocks.append({**one["content_block"], "input": ""})
        elif one["type"] == "content_block_delta":
            blocks[one["index"]]["text"] = blocks[one["index"]].get("text", "") + one["delta"].get("text", "")
            blocks[one["index"]]["input"] += one["delta"].get("partial_json", "")
    return message({"content": [{**one, "input": one["input"] and json.loads(one["input"])} for one in blocks]})


def response(whole: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    texts = [part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"]]
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    return "".join(texts), [(one["name"], json.loads(one["arguments"])) for one in calls]


def response_events(told: list[Any]) -> tuple[str, list[tuple[str, Any]]]:
    items = [one["item"] for one in told if one["type"] == "response.output_item.done"]
    assert told[-1]["type"] == "response.completed" and told[-1]["response"]["output"] == items
    return response({"output": items})


WHOLE = {"/v1/chat/completions": chat, "/v1/messages": message, "/v1/responses": response}
STREAMED = {"/v1/chat/completions": chat_chunks, "/v1/messages": message_events, "/v1/responses": response_events}


def names(body: dict[str, Any]) -> list[str]:
    found = [tool.get("name") or tool.get("function", {}).get("name") or tool["type"] for tool in body.get("tools", ())]
    return [name for name in found if name not in RUN_ELSEWHERE]


def spoken(value: Any, field: str = "") -> Iterator[str]:
    if isinstance(value, str) and field in SPOKEN:
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from spoken(one, field)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from spoken(one, key)


@pytest.mark.parametrize(("name", "number"), REQUESTS)
def test_clients_are_answered(served: tuple[TestClient, type[SayingEngine]], name: str, number: int) -> None:
    one, engine = request(name, number), served[1]
    body = one["body"]
    assert told(one, answer(served, one, TEXT)) == (TEXT, [])
    asked, sampling = engine.asked[-1]
    messages = getattr(asked, "messages", asked)
    heard = "\n".join(message["content"] for message in messages)
    said = [*spoken({"system": body.get("system"), "instructions": body.get("instructions")})]
    said += [*spoken(body.get("messages", body.get("input")), "content")]
    assert said and all(text in heard for text in said), "nothing that was said is lost"
    assert [tool["function"]["name"] for tool in getattr(asked, "tools", ())] == names(body)
    assert bool(sampling.grammar) == (body.get("tool_choice", "auto") != "auto" or bool("tools" in body and form(body)))
    assert bool(sampling.schema) == (form(body) is not None and "tools" not in body)
    said = body.get("max_tokens")
    assert sampling.max_new_tokens == (said or (LONGEST if "tools" in body or form(body) else 1000)), "no call is cut"
    assert sampling.temperature == body.get("temperature", 0.0)


def test_what_they_ask_before_is_answered(served: tuple[TestClient, type[SayingEngine]]) -> None:
    for name, recording in RECORDINGS.items():
        for number, one in enumerate(recording["requests"]):
            if one["method"] == "GET":
                assert answer(served, request(name, number), TEXT).json()["data"][0]["id"] == "demo"


def form(body: dict[str, Any]) -> Any:
    """The JSON schema that an answer is to keep to, if there is one."""
    return body.get("response_format") or (body.get("output_config") or {}).get("format")


AGENTS = [one for one in REQUESTS if request(*one.values)["body"].get("tools")]
FIRST = dict(reversed([one.values for one in AGENTS]))  # each program's first request


@pytest.mark.parametrize(
    ("name", "number"),
    [
        one
        if FIRST[one.values[0]] == one.values[1]
        else pytest.param(*one.values, id=one.id, marks=pytest.mark.long(0.1))
        for one in AGENTS
    ],
)
def test_agents_get_their_calls(served: tuple[TestClient, type[SayingEngine]], name: str, number: int) -> None:
    """Of each program's first request, the first tool and the last: later ones have the same."""
    one = request(name, number)
    tools = names(one["body"])
    for tool in [tools[0], tools[-1]] if FIRST[name] == number else tools:
        call = f'<tool_call>\n{{"name": "{tool}", "arguments": {{"path": "cache.py"}}}}\n</tool_call>'
        assert told(one, answer(served, one, call)) == ("", [(tool, {"path": "cache.py"})])


@pytest.mark.parametrize("name", layered(RECORDINGS, quick=lambda name: [*RECORDINGS].index(name) % 3 == 0))
def test_without_tools_the_model_s_template_need_not_take_any(
    served: tuple[TestClient, type[SayingEngine]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served[1], "takes_tools", False)
    for number, recorded in enumerate(RECORDINGS[name]["requests"]):
        if recorded["method"] != "POST":
            continue
        one = request(name, number)
        if not one["body"].get("tools"):
            answer(served, one, TEXT)
            continue
        reply = served[0].post(one["path"], json=one["body"], headers=one["headers"])
        assert (reply.status_code, reply.json()["error"]["param"] in ("tools", "messages", "input")) == (400, True)
        assert "takes no tools" in reply.json()["error"]["message"]


@pytest.mark.long(0.1)
def test_any_tool_of_theirs_can_be_required() -> None:
    llguidance = pytest.importorskip("llguidance", reason="the package llguidance is not installed")
    tokenizer = llguidance.LLTokenizer(str(Path(__file__).parents[2] / "assets" / "demo" / "tokenizer.json"))
    for name, recording in RECORDINGS.items():
        for number in range(len(recording["requests"])):
            body = request(name, number)["body"] or {}
            tools = [tool for tool in body.get("tools", ()) if tool.get("type", "function") in ("function", "custom")]
            functions = [{"function": tool.get("function", tool)} for tool in tools]
            for one in functions:  # Anthropic's name for it
                one["function"] = {"parameters": one["function"].get("input_schema"), **one["function"]}
            if not functions:
                continue
            written = llguidance.LLMatcher.grammar_from_lark(grammar(functions, '{"type": "object"}'))
            for text in ("<tool_call>", '{"'):
                matcher = llguidance.LLMatcher(tokenizer, written, log_level=0)
                assert not matcher.is_error(), (name, matcher.get_error())
                assert all(map(matcher.consume_token, tokenizer.tokenize_str(text))), (name, text)
