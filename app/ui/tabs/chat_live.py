"""Tab Chat + Live: the chat with its streaming tail, composer and context gauge on the left, the live deck on the
right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any
from uuid import uuid4

import gradio as gr

from app.server.live_state import stamp
from app.services.crash import log_crash
from app.services.host import Host
from app.services.progress import Answer
from app.store import Message
from app.ui.carried import ExamplePicked, MessageEdited, PolicyPicked
from app.ui.controls import LIVE, ONCE, html
from app.ui.deck import deck
from app.ui.tabs.chat_views import gauge, model, placeholder, suggestions, title
from app.ui.tabs.messages import shown
from app.ui.text import notice
from core.errors import MoestroError

TAIL = """<div class="tail" data-state="none" aria-live="off"><div data-t="text"></div>
<div class="bar thin" data-t="prefill" hidden><i></i></div><p data-t="line" role="status"></p></div>"""
REMEMBERED = 32  # chats whose ended answer can still be queried by a page
ENDING_S = 2.0  # an answer that left no trace reports its error within this time

UNEXPECTED = "That did not work because of an error inside Moestro. Its details are in the log; you can try again."
log = logging.getLogger("moestro.app")

# State of a page: its "chat" (id or None) and the "stamp" of its messages; "open" once that is known. "turn" names the
# last thing its user did: a redraw has that of when it was asked for, so that the page sees when it comes too late.
Shown = dict[str, Any]


def reporting(event: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Decorator of chat events: unexpected errors are shown on the page, and logged without user text."""

    @wraps(event)
    def run(chat: ChatLive, *sent: Any) -> list[Any]:
        try:
            return event(chat, *sent)
        except Exception as error:
            log_crash(log, error, "unexpected error in an event of the chat")
            return [*[gr.skip()] * 4, notice(UNEXPECTED), gr.skip()]

    return run


class ChatLive:
    """The chat's components and events. `pulse` holds the page's state, and fires when the server has an update.

    `page` are the outputs of every change of the shown chat, in the order of `open`; `outputs` those of `values`.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self._asked: dict[int, tuple[Answer, str]] = {}
        with gr.Row(equal_height=False, elem_id="chat-live"):
            with gr.Column(scale=5, min_width=320, elem_id="chat-column"):
                with gr.Row(elem_id="chat-head"):
                    self.title = html(title(host, None), elem_id="chat-title")
                    self.model = html(model(host), elem_id="chat-model")
                    self.new = gr.Button("New chat", size="sm", elem_id="new-chat", min_width=90, scale=0)
                with gr.Column(elem_id="talk"):
                    self.chat = gr.Chatbot(
                        height=None,
                        show_label=False,
                        elem_id="chat",
                        buttons=["copy"],
                        editable="user",
                        autoscroll=False,
                        feedback_options=None,
                        layout="bubble",
                        placeholder=placeholder(host),
                    )
                    self.pulse = gr.HTML(
                        {"open": False, "chat": None, "stamp": "", "turn": ""},
                        html_template=TAIL,
                        elem_id="tail",
                        apply_default_css=False,
                        js_on_load='import("/ui/pulse.js").then((m) => m.start(element, props, trigger, watch));',
                    )
                self.alert = html(elem_id="chat-alert")
                with gr.Row(elem_id="composer"):
                    self.text = gr.Textbox(
                        "",
                        show_label=False,
                        container=False,
                        lines=1,
                        max_lines=6,
                        scale=8,
                        elem_id="message",
                        autofocus=True,
                        placeholder="Ask something",
                        label="Message",
                    )
                    self.send = gr.Button("Send", variant="primary", elem_id="send", scale=0, min_width=84)
                    self.stop = gr.Button("Stop", variant="stop", elem_id="stop", scale=0, min_width=84)
                self.gauge = html(gauge(host, []), elem_id="context")
            with gr.Column(scale=6, min_width=320, elem_id="deck-column"):
                self.deck = deck()
        self.page = [self.pulse, self.chat, self.title, self.gauge, self.alert, self.text]
        self.outputs = [self.send, self.text, self.chat, self.gauge, self.model]
        self._wire()

    def values(self, now: Shown) -> list[Any]:
        """The values that depend on whether a model is loaded."""
        ready = self.host.models.model is not None
        return [
            gr.update(interactive=ready),
            gr.update(placeholder="Ask something" if ready else "Load a model first"),
            gr.update(placeholder=placeholder(self.host), examples=suggestions(self.host)),
            gauge(self.host, self._messages(now.get("chat"))),
            model(self.host),
        ]

    def open(self, chat: int | None) -> list[Any]:
        """The page for this chat as stored; for a deleted chat an empty page with a notice."""
        try:
            messages = self.host.chats.messages(chat) if chat is not None else []
        except MoestroError as error:
            empty = [self._shown(None), [], title(self.host, None), gauge(self.host, [])]
            return [*empty, notice(str(error), "info"), gr.skip()]
        return [self._shown(chat), shown(messages), title(self.host, chat), gauge(self.host, messages), "", gr.skip()]

    def _wire(self) -> None:
        gr.on([self.text.submit, self.send.click], self._send, [self.text, self.pulse], self.page, **ONCE)
        self.stop.click(self._stop, self.pulse, None, **ONCE)
        self.new.click(lambda: self.open(None), None, self.page, **ONCE)
        self.chat.retry(self._regenerate, self.pulse, self.page, **ONCE)
        self.chat.edit(self._edit, self.pulse, self.page, **ONCE)
        self.chat.example_select(self._suggested, self.pulse, self.page, **ONCE)
        self.deck.select(self._use_policy, None, self.alert, **ONCE)
        self.pulse.end(self._refresh, [self.pulse, self.text], self.page, **LIVE)

    @reporting
    def _send(self, text: str, now: Shown) -> list[Any]:
        try:
            answer = self.host.chats.ask(now.get("chat"), text)
        except MoestroError as error:
            return self._refused(error)
        return self._begun(answer, text)

    @reporting
    def _suggested(self, now: Shown, picked: ExamplePicked) -> list[Any]:
        return self._send(str(picked.value.get("text", "")), now)

    @reporting
    def _regenerate(self, now: Shown) -> list[Any]:
        try:
            answer = self.host.chats.regenerate(int(now["chat"]))
        except (MoestroError, KeyError, TypeError) as error:
            return self._refused(error, now)
        return self._begun(answer, "")

    @reporting
    def _edit(self, now: Shown, edited: MessageEdited) -> list[Any]:
        index = edited.index[0] if isinstance(edited.index, list) else edited.index
        try:
            answer = self.host.chats.edit(int(now["chat"]), index, edited.value)
        except (MoestroError, KeyError, TypeError) as error:
            return self._refused(error, now)
        return self._begun(answer, edited.value)

    def _stop(self, now: Shown) -> None:
        if now.get("chat") is not None:
            self.host.chats.stop(int(now["chat"]))

    def _use_policy(self, picked: PolicyPicked) -> str:
        """Switch to the best policy of the regret meter; the sidebar's controls follow by themselves."""
        return notice(self.host.models.change("eviction", picked.policy))

    @reporting
    def _refresh(self, now: Shown, typed: str) -> list[Any]:
        """Show the chat's current state. The text of a request that failed before its first token returns to the input
        box.
        """
        chat = now.get("chat")
        page = self.open(chat)
        page[0]["turn"] = now["turn"]
        page[4] = page[4] or gr.skip()  # what was said of a message stays
        answer, asked = self._asked.get(chat, (None, "")) if chat is not None else (None, "")
        if answer is not None and answer.message_id not in [m.id for m in self._messages(chat)]:
            answer.join(ENDING_S)
            if answer.undone:
                page[4:] = [notice(answer.error), typed or asked]
        if chat is not None and answer is not None and answer.finished:
            self._asked.pop(chat, None)
        return page

    def _begun(self, answer: Answer, text: str) -> list[Any]:
        assert answer.chat_id is not None
        ended = [chat for chat, (one, _) in list(self._asked.items()) if one.finished]
        for chat in ended[:-REMEMBERED]:  # no page shows them any more
            self._asked.pop(chat, None)
        self._asked[answer.chat_id] = (answer, text)
        page = self.open(answer.chat_id)
        page[5] = "" if text else gr.skip()
        return page

    def _refused(self, error: Exception, now: Shown | None = None) -> list[Any]:
        text = str(error) if isinstance(error, MoestroError) else "There is no chat here yet. Write a message first."
        page = self.open(now.get("chat")) if now else [gr.skip()] * 6
        page[4] = notice(text)
        return page

    def _shown(self, chat: int | None) -> Shown:
        return {"open": True, "chat": chat, "stamp": stamp(self.host, chat), "turn": uuid4().hex}

    def _messages(self, chat: int | None) -> list[Message]:
        try:
            return self.host.chats.messages(chat) if chat is not None else []
        except MoestroError:
            return []
