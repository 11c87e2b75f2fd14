"""A chat as Markdown and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.services.exports import transcript
from app.services.exports.archive import NothingThere
from app.store import Store
from tests.app.test_store import STATS


@pytest.fixture
def chat(tmp_path: Path) -> tuple[Store, int]:
    """A question with two answers, of which the first is shown again."""
    store = Store(tmp_path)
    number, answer = store.chats.begin(None, "What is *a* cache?", "demo", system="Be brief.")
    store.chats.append(answer, 0, "<think>\nHm.\n</think>\n\nA store:\n\n```python\nx = 1")
    store.chats.finish(answer, "stopped", {**STATS, "tok_s": float("nan")})
    _, other = store.chats.begin(number, None, "demo", answer)
    store.chats.append(other, 0, "why not</think>Yes.")
    store.chats.finish(other, "done", {**STATS, "opens_reasoning": True})
    store.chats.show(number, answer)
    return store, number


def test_markdown_is_the_branch_that_is_shown(chat: tuple[Store, int]) -> None:
    store, number = chat
    text = transcript.markdown(store, number)
    head, _, rest = text.partition("## System prompt")
    assert head.startswith("# What is *a* cache?\n\ndemo, 20")
    assert rest == (
        "\n\nBe brief.\n\n## You\n\nWhat is *a* cache?\n\n## Model\n\n<details>\n<summary>Reasoning</summary>\n\nHm."
        "\n\n</details>\n\nA store:\n\n```python\nx = 1\n```\n"
    )
    store.close()


def test_json_has_every_branch_with_its_statistics(chat: tuple[Store, int]) -> None:
    store, number = chat
    found = json.loads(transcript.as_json(store, number), parse_constant=lambda name: pytest.fail(name))
    question, first, second = found["messages"]
    assert (found["title"], found["system"], found["model"]) == ("What is *a* cache?", "Be brief.", "demo")
    assert found["shown"] == [question["id"], first["id"]]
    assert [one["parent"] for one in found["messages"]] == [None, question["id"], question["id"]]
    assert question["text"] == "What is *a* cache?" and "statistics" not in question
    assert (first["state"], first["statistics"]["new_tokens"], first["statistics"]["tok_s"]) == ("stopped", 2, None)
    assert second["text"] == "why not</think>Yes."
    with pytest.raises(NothingThere, match="no longer exists"):
        transcript.as_json(store, 99)
    store.close()


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("<think>a</think>\n\nb", False, ("a", "b")),
        ("\n<think>\na\n</think>b</think>", False, ("a", "b</think>")),
        ("a</think>b", False, ("a", "b")),
        ("a, cut off", True, ("a, cut off", "")),
        ("<think>a, cut off", False, ("a, cut off", "")),
        ("a <think> b", False, ("", "a <think> b")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_is_told_from_the_answer(text: str, opened: bool, parts: tuple[str, str]) -> None:
    assert transcript.reasoning_of(text, opened) == parts
