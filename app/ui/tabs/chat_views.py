"""The parts around the chat: its title, the context gauge, the placeholder and suggestions of an empty chat."""

from __future__ import annotations

import json
from html import escape

from app.services.host import Host
from app.store import Message
from app.ui.tabs.messages import used_tokens
from app.ui.text import exactness
from app.ui.theme import ROOT
from app.words import name_of

SUGGESTIONS = ROOT / "assets" / "demo" / "questions.jsonl"
MOST_SUGGESTIONS = 6
LOAD_FIRST = (
    "### Load a model to begin\nChoose one in the sidebar and press **Load**. The bundled demo is ready at once."
)
ASK = "### Ask something\nWatch which experts are used, and change any setting while it answers."


def title(host: Host, chat: int | None) -> str:
    """The chat's name and the link to its measurements."""
    found = next((c for c in host.store.chats.all() if c.id == chat), None) if chat is not None else None
    if found is None:
        return '<div class="chat-title"><b>New chat</b></div>'
    return (
        f'<div class="chat-title"><b>{escape(found.title)}</b><a href="/export/{found.id}.zip" download id="csv" '
        f'title="Every token, request and copy of this chat as CSV files">CSV</a></div>'
    )


def model(host: Host) -> str:
    """The loaded model's name, and whether its answers are currently exact."""
    if (name := host.models.model) is None:
        return ""
    return f'<div class="chat-model"><span title="{escape(name)}">{escape(name_of(name))}</span>{exactness()}</div>'


def gauge(host: Host, messages: list[Message]) -> str:
    """The share of the context that the chat has used; while an answer is written the page itself updates it."""
    full = host.models.context
    if full is None:
        return '<div class="gauge"><span>Context</span><span>no model loaded</span></div>'
    used = used_tokens(messages)
    return (
        '<div class="gauge"><span>Context</span><div class="bar thin" role="meter" aria-label="Context used" '
        f'aria-valuemin="0" aria-valuemax="{full}" aria-valuenow="{used}">'
        f'<i style="width:{min(100, 100 * used / full):.1f}%"></i></div><span>{used} of {full} tokens</span></div>'
    )


def placeholder(host: Host) -> str:
    """The text of an empty chat."""
    return ASK if host.models.model is not None else LOAD_FIRST


def suggestions(host: Host) -> list[dict[str, str]]:
    """Clickable questions that the bundled demo model can answer."""
    if host.models.model != "demo" or not SUGGESTIONS.exists():
        return []
    rows = [json.loads(line) for line in SUGGESTIONS.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [{"text": str(row["question"])} for row in rows if row.get("suggest")][:MOST_SUGGESTIONS]
