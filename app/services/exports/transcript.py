"""A chat as a text to read (Markdown) and as data (JSON)."""

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from app.services.exports.archive import NothingThere
from app.store import Chat, Message, Store
from app.wording import model_id, short_name
from core import __version__
from core.errors import MoestroError

SPEAKERS = {"user": "You", "assistant": "Model"}
THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)(.*)", re.DOTALL)
OPENED = re.compile(r"(.*?)(?:</think>|\Z)(.*)", re.DOTALL)


def markdown(store: Store, chat: int) -> str:
    """The branch of a chat that is shown, a heading for each message, reasoning folded. Raises NothingThere."""
    found, messages = _read(store, chat, tree=False)
    parts = [f"# {found.title}", f"{short_name(found.model)}, {_utc(found.created)}"]
    if found.system:
        parts += ["## System prompt", found.system]
    for message in messages:
        parts += [f"## {SPEAKERS.get(message.role, message.role)}", *_parts(message)]
    return "\n\n".join(parts) + "\n"


def as_json(store: Store, chat: int) -> str:
    """A chat with all its branches and the statistics of its answers, as JSON. `shown` = the ids of the branch that is
    shown; a message follows its `parent`. Raises NothingThere."""
    found, messages = _read(store, chat, tree=True)
    value = {
        "moestro": __version__,
        "chat": found.id,
        "title": found.title,
        "model": model_id(found.model),
        "created": _utc(found.created),
        "system": found.system,
        "shown": [message.id for message in store.chats.messages(chat)],
        "messages": [_plain(message) for message in messages],
    }
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def reasoning_of(text: str, opened: bool) -> tuple[str, str]:
    """(reasoning, answer) of an answer's text. `opened`: it starts in the middle of the reasoning."""
    found = THOUGHT.fullmatch(text) or (OPENED.fullmatch(text) if opened or "</think>" in text else None)
    return (found[1].strip(), found[2].lstrip("\n")) if found else ("", text)


def _read(store: Store, chat: int, tree: bool) -> tuple[Chat, Sequence[Message]]:
    found = store.chats.find(chat)
    if found is None:
        raise NothingThere("That chat no longer exists. Pick another one to export.")
    try:
        return found, store.chats.tree(chat) if tree else store.chats.messages(chat)
    except MoestroError as error:  # just deleted, or the file cannot be read
        raise NothingThere(str(error)) from error


def _parts(message: Message) -> list[str]:
    if message.role == "user":
        return [message.text]
    thought, answer = reasoning_of(message.text, opened(message))
    folded = ["<details>\n<summary>Reasoning</summary>", thought, "</details>"] if thought else []
    return [*folded, _closed(answer.strip())]


def opened(message: Message) -> bool:
    """Whether an answer starts in the middle of the model's reasoning."""
    return bool((message.stats or {}).get("opens_reasoning"))


def _closed(text: str) -> str:
    """With the end of a code block that the answer broke off in, so that it does not swallow what follows."""
    fence = ""
    for line in text.splitlines():
        if found := re.match(r" {0,3}(`{3,}|~{3,})(.*)", line):
            if not fence:
                fence = found[1]
            elif found[1].startswith(fence) and not found[2].strip():
                fence = ""
    return f"{text}\n{fence}" if fence else text


def _plain(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": message.id,
        "parent": message.parent,
        "role": message.role,
        "created": _utc(message.created),
        "text": message.text,
    }
    if message.role == "assistant":
        fields |= {"state": message.state, "error": message.error}
        fields |= {"statistics": _finite(message.stats), "quality": _finite(message.quality)}
    return fields


def _finite(value: Any) -> Any:
    """The same without what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and value - value != 0 else value


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
