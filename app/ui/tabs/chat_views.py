"""The parts around the chat: its head and exports, the context gauge, the list of shortcuts, an empty chat."""

from __future__ import annotations

import json
from html import escape

from app.services.host import Host
from app.store import Message
from app.ui.tabs.messages import used_tokens
from app.ui.text import exactness, notice
from app.ui.theme import ROOT
from app.wording import name_of

SUGGESTIONS = ROOT / "assets" / "demo" / "questions.jsonl"
MOST_SUGGESTIONS = 6
LOAD_FIRST = (
    "Load a model to begin",
    "Choose one above, or enter the path of a folder or a GGUF file, and press <b>Load</b>. The bundled demo is ready "
    "at once.",
)
TOUR = '<p><button type="button" class="tour" data-tour>Watch it work: half a minute with less memory</button></p>'
GIVE = (
    "Give it a text",
    "It writes another one for it. Watch which experts are used, and change any setting while it writes.",
)
ASK = ("Ask something", "Watch which experts are used, and change any setting while it answers.")
GO_ON = (
    "Begin a text",
    "The model goes on with it. Watch which experts are used, and change any setting while it writes.",
)


TOOLS = """<div class="chat-tools"><button type="button" data-chats aria-controls="chat-list" aria-expanded="false"
 title="Chats (Alt+K)">☰<span> Chats</span></button></div>"""
MORE = """<div class="chat-tools"><button type="button" data-system aria-controls="system-panel" aria-expanded="false"
 title="System prompt (Alt+S)">System</button><button type="button" data-keys aria-haspopup="dialog"
 aria-label="Keyboard shortcuts" title="Keyboard shortcuts (?)">?</button></div>"""
ATTACH = """<button type="button" data-attach aria-label="Attach text files"
 title="Attach text files; you can also drop them on the chat">+</button>"""
LIST = """<nav aria-label="Chats"><input type="search" placeholder="Search the chats" aria-label="Search the chats"
 maxlength="200"><ul></ul><p class="minor" role="status" data-said></p></nav>"""
KEYS = (
    ("Enter", "Send the message"),
    ("Shift+Enter", "Begin a line in the message"),
    ("Esc", "Stop the answer; close a panel; leave an edit"),
    ("/", "Write a message"),
    ("Alt+N", "New chat"),
    ("Alt+K", "Search the chats"),
    ("Alt+S", "System prompt"),
    ("Alt+R", "Regenerate the last answer"),
    ("Alt+G", "Continue the last answer, if it was cut"),
    ("Alt+E", "Edit your last message"),
    ("Alt+C", "Copy the last answer"),
    ("Alt+, and Alt+.", "Earlier and later branch of the last message that has several"),
    ("?", "This list"),
)
TEXT_TO_TEXT = (
    "This model writes one text for another, like a translation or a summary: it sees your last message alone, neither "
    "the chat before it nor a system prompt."
)
NO_TEMPLATE = (
    "This model has no chat template: it does not answer, it goes on with your text (plain completion), and a system "
    "prompt is not used. For answers, load an instruction-tuned model."
)


def title(host: Host, chat: int | None) -> str:
    """The chat's name and its exports."""
    found = host.store.chats.find(chat) if chat is not None else None
    if found is None:
        return '<div class="chat-title"><b>New chat</b></div>'
    links = "".join(
        f'<a href="/export/{found.id}.{ending}" download id="{name}" title="{about}">{label}</a>'
        for ending, name, label, about in (
            ("md", "export-markdown", "Markdown", "The messages shown, as a text to read"),
            ("json", "export-json", "JSON", "All messages with their branches and statistics"),
            ("zip", "csv", "CSV", "Every token, request and copy of this chat as CSV files"),
            ("timeline.json", "export-timeline", "Timeline", "The last answer, to be opened at ui.perfetto.dev"),
        )
    )
    return (
        f'<div class="chat-title"><b title="{escape(found.title, quote=True)}">{escape(found.title)}</b>'
        f'<details class="menu"><summary id="export-menu">Export</summary><div>{links}</div></details></div>'
    )


def shortcuts() -> str:
    """The dialog that "?" opens."""
    rows = "".join(f"<dt><kbd>{escape(key)}</kbd></dt><dd>{escape(does)}</dd>" for key, does in KEYS)
    return (
        '<dialog id="shortcuts" aria-labelledby="shortcuts-head"><div><h2 id="shortcuts-head">Keyboard shortcuts</h2>'
        f'<dl>{rows}</dl><button type="button" data-close>Close</button></div></dialog>'
        '<p id="chat-said" class="unseen" role="status"></p>'
    )


def no_template(host: Host) -> str:
    """The notice above the composer of a model that does not take part in a chat."""
    loaded = host.models.loaded
    if loaded is None or (loaded.engine.takes_chats and not loaded.engine.text_to_text):
        return ""
    return notice(TEXT_TO_TEXT if loaded.engine.text_to_text else NO_TEMPLATE, "info")


def ask_for(host: Host) -> str:
    """The placeholder of the composer."""
    loaded = host.models.loaded
    if loaded is None:
        return "Load a model first"
    if loaded.engine.text_to_text:
        return "Give it a text"
    return "Ask something" if loaded.engine.takes_chats else "Begin a text that the model goes on with"


def in_use(host: Host) -> str:
    """The loaded model's name, shown where another one is chosen, and whether its answers are currently exact."""
    if (name := host.models.model) is None:
        return ""
    return f'<div class="in-use"><span title="{escape(name)}">In use: {escape(name_of(name))}</span>{exactness()}</div>'


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


def empty(host: Host) -> str:
    """What an empty chat shows: what to do, and questions to begin with."""
    loaded = host.models.loaded
    head, text = LOAD_FIRST if loaded is None else ASK if loaded.engine.takes_chats else GO_ON
    if loaded is not None and loaded.engine.text_to_text:
        head, text = GIVE
    ways = "".join(
        f'<button type="button" data-ask="{escape(one, quote=True)}">{escape(one)}</button>'
        for one in suggestions(host)
    )
    tour = TOUR if ways else ""
    known = ' data-without="model"' if loaded is None else ""  # shown once the page knows that there is none
    return (
        f'<div class="empty-chat"{known}><h3>{head}</h3><p>{text}</p>{f"<div>{ways}</div>" if ways else ""}{tour}</div>'
    )


def suggestions(host: Host) -> list[str]:
    """Questions that the bundled demo model can answer."""
    if host.models.model != "demo" or not SUGGESTIONS.exists():
        return []
    rows = [json.loads(line) for line in SUGGESTIONS.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [str(row["question"]) for row in rows if row.get("suggest")][:MOST_SUGGESTIONS]
