"""Reasoning, content and tool calls in an answer's text, however it is cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.server.v1.parts import Parts, schemas

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
TOOLS = schemas([WEATHER])
CALL = '{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}'
TAGS = "<function=weather>\n<parameter=city>\n8001\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"


def read(pieces: list[str], *, opened: bool = False, tools: bool = True) -> list[tuple[str, str]]:
    """(kind, text) of each part, text of one kind together; a call as its name and arguments."""
    parts = Parts(opened=opened, tools=TOOLS if tools else None)
    found: list[tuple[str, str]] = []
    for part in [one for piece in pieces for one in parts.feed(piece)] + parts.end():
        if part.call is not None:
            found.append(("call", f"{part.call.name} {json.loads(part.call.arguments)}"))
        elif found and found[-1][0] == part.kind != "call":
            found[-1] = (part.kind, found[-1][1] + part.text)
        else:
            found.append((part.kind, part.text))
    return found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("plain", [("content", "plain")]),
        ("  plain <think>x</think>", [("content", "  plain <think>x</think>")]),
        ("<think>\nwhy\n</think>\n\nso", [("reasoning", "why\n"), ("content", "so")]),
        ("\n<think></think>\nso", [("content", "so")]),
        ("<think>never ends", [("reasoning", "never ends")]),
        ("<thi", [("content", "<thi")]),
        (f"<tool_call>\n{CALL}\n</tool_call>", [("call", "weather {'city': 'Zürich', 'days': 2}")]),
        (f"<tool_call>{TAGS}</tool_call>", [("call", "weather {'city': '8001', 'days': 2}")]),
        (
            f"Look.\n<tool_call>{CALL}</tool_call>\n<tool_call>{TAGS}</tool_call>",
            [
                ("content", "Look.\n"),
                ("call", "weather {'city': 'Zürich', 'days': 2}"),
                ("call", "weather {'city': '8001', 'days': 2}"),
            ],
        ),
        (f"<think>a</think><tool_call>{CALL}", [("reasoning", "a"), ("call", "weather {'city': 'Zürich', 'days': 2}")]),
        ("<tool_call>no JSON</tool_call>.", [("content", "<tool_call>no JSON</tool_call>.")]),
        ("<tool_call>[1]", [("content", "<tool_call>[1]")]),
        ('<tool_call>{"name": 3}</tool_call>', [("content", '<tool_call>{"name": 3}</tool_call>')]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_is_taken_apart(text: str, told: list[tuple[str, str]], size: int) -> None:
    assert read([text[at : at + size] for at in range(0, len(text), size)]) == told


def test_a_prompt_may_begin_the_reasoning() -> None:
    assert read(["so ", "it is</th", "ink>\n\n", "yes"], opened=True) == [("reasoning", "so it is"), ("content", "yes")]


def test_without_tools_calls_are_text() -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    assert read([text], tools=False) == [("content", text)]


@given(st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "t", "\n", " ", "x"])))
def test_nothing_is_lost_but_tags_and_line_breaks(pieces: list[str]) -> None:
    def bare(text: str) -> str:
        for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
            text = text.replace(tag, "")
        return "".join(text.split())

    text = "".join(pieces)
    at_once = read([text])
    assert read(list(text)) == at_once
    assert bare("".join(one for _, one in at_once)) == bare(text)
