"""The prompt for the next answer of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from app.services.engine_protocol import AnyPrompt
from app.store import Message


def prompt_of(messages: Sequence[Message], system: str, takes_chats: bool) -> AnyPrompt:
    """The chat so far, after the system prompt. A model without a chat template (`takes_chats` false) continues its
    text.
    """
    if not takes_chats:
        return text_of(messages)
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": one.role, "content": one.text} for one in messages]


def text_of(messages: Sequence[Message]) -> str:
    """One text: what the user wrote and how the model went on with it; what the user adds begins a line."""
    text = ""
    for one in messages:
        text += ("\n" if one.role == "user" and text and not text[-1].isspace() else "") + one.text
    return text
