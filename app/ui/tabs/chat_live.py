"""Tab Chat + Live: the chats, the shown one with its streaming tail, composer and context gauge, and the live deck."""

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
from app.store import Chat, Message
from app.ui.controls import EACH, LIVE, ONCE, button, html
from app.ui.deck import deck
from app.ui.event_data import ChatAction, MessageAction, PolicyPicked
from app.ui.tabs.chat_views import (
    ATTACH,
    LIST,
    MORE,
    TOOLS,
    ask_for,
    empty,
    gauge,
    in_use,
    no_template,
    shortcuts,
    title,
)
from app.ui.tabs.messages import shown
from app.ui.text import notice
from core.errors import MoestroError

TAIL = """<div class="tail" data-state="none" aria-live="off"><div data-t="text"></div>
<div class="bar thin" data-t="prefill" hidden><i></i></div><p data-t="line" role="status"></p></div>"""
MESSAGES = '<div class="messages" role="log" aria-live="off" aria-label="Messages"></div>'
REMEMBERED = 32  # chats whose ended answer can still be queried by a page
ENDING_S = 2.0  # an answer that left no trace reports its error within this time
UNEXPECTED = "That did not work because of an error inside Moestro. Its details are in the log; you can try again."
ALERT, TEXT, SYSTEM = 4, 5, 6  # places in `ChatLive.page`
NO_CHAT = "There is no chat here yet. Write a message first."
log = logging.getLogger("moestro.app")

# State of a page: its "chat" (id or None) and the "stamp" of its messages; "open" once that is known. "turn" names the
# last thing its user did: a redraw has that of when it was requested, so that the page sees when it comes too late.
# "sent": that was a message, so what stands in the composer since is for this chat.
Shown = dict[str, Any]


def reporting(event: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Decorator of chat events: unexpected errors are shown on the page, and logged without user text."""

    @wraps(event)
    def run(chat: ChatLive, *sent: Any) -> list[Any]:
        try:
            return event(chat, *sent)
        except Exception as error:
            log_crash(log, error, "unexpected error in an event of the chat")
            return [*[gr.skip()] * ALERT, notice(UNEXPECTED), *[gr.skip()] * 2]

    return run


class ChatLive:
    """The chat's components and events. `pulse` holds the page's state, and fires when the server has an update.

    `page` are the outputs of every change of the shown chat, in the order of `open`; `outputs` those of `values`, with
    the top bar's `model`: which one is loaded, and whether it is exact.
    """

    def __init__(self, host: Host, model: gr.HTML) -> None:
        self.host, self.model = host, model
        self._questions: dict[int, tuple[Answer, str]] = {}
        with gr.Row(equal_height=False, elem_id="chat-live"):
            with gr.Column(scale=0, min_width=0, elem_id="chat-list-column"):
                self.list = _drawn("chat-list", LIST, "list")
            with gr.Column(scale=5, min_width=320, elem_id="chat-column"):
                with gr.Row(elem_id="chat-head"):
                    html(TOOLS, elem_id="chat-tools")
                    self.title = html(title(host, None), elem_id="chat-title")
                    html(MORE, elem_id="chat-more")
                    self.new = button("New chat", "new-chat", min_width=90, scale=0)
                with gr.Column(elem_id="system-panel"):
                    self.system = gr.Textbox(
                        host.chats.default_system,
                        label="System prompt",
                        info="Instructions for this chat; used from the next answer.",
                        lines=3,
                        max_lines=10,
                        elem_id="system",
                    )
                    with gr.Row(elem_classes="buttons"):
                        self.default = button("Use for new chats", "system-default", min_width=140)
                        self.system_notice = html(elem_id="system-said")
                with gr.Column(elem_id="talk"):
                    self.chat = _drawn("chat", MESSAGES, "view", {"messages": []})
                    self.empty = _drawn("chat-empty", "${value}", "suggestions", empty(host))
                    self.pulse = gr.HTML(
                        {"open": False, "chat": None, "stamp": "", "turn": "", "sent": False},
                        html_template=TAIL,
                        elem_id="tail",
                        apply_default_css=False,
                        js_on_load='import("/ui/pulse.js").then((m) => m.start(element, props, trigger, watch));',
                    )
                self.alert = html(elem_id="chat-alert")
                self.plain = html(no_template(host), elem_id="chat-plain")
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
                        label="Message",
                    )
                    html(ATTACH, elem_id="attach")
                    self.send = gr.Button("Send", variant="primary", elem_id="send", scale=0, min_width=84)
                    self.stop = gr.Button("Stop", variant="stop", elem_id="stop", scale=0, min_width=84)
                self.gauge = html('<div class="gauge"></div>', elem_id="context")
                html(shortcuts(), elem_id="chat-dialogs")
            with gr.Column(scale=6, min_width=320, elem_id="deck-column"):
                self.deck = deck()
        self.page = [self.pulse, self.chat, self.title, self.gauge, self.alert, self.text, self.system]
        self.outputs = [self.send, self.text, self.empty, self.gauge, self.model, self.plain]
        self._wire()

    def values(self, now: Shown) -> list[Any]:
        """The values that depend on whether a model is loaded."""
        return [
            gr.update(interactive=self.host.models.model is not None),
            gr.update(placeholder=ask_for(self.host)),
            empty(self.host),
            gauge(self.host, self._messages(now.get("chat"))),
            in_use(self.host),
            no_template(self.host),
        ]

    def open(self, chat: int | None) -> list[Any]:
        """The page for this chat as stored; for a deleted chat an empty page with a notice."""
        problem, messages = "", list[Message]()
        found: Chat | None = None
        mark = stamp(self.host, chat)  # first: later changes are drawn again
        try:
            messages = self.host.chats.messages(chat) if chat is not None else []
            found = self.host.store.chats.find(chat) if chat is not None else None
        except MoestroError as error:
            problem, chat, mark = notice(str(error), "info"), None, stamp(self.host, None)
        system = found.system if found is not None else self.host.chats.default_system
        head, used = title(self.host, chat), gauge(self.host, messages)
        now: Shown = {"open": True, "chat": chat, "stamp": mark, "turn": uuid4().hex, "sent": False}
        return [now, shown(messages), head, used, problem, gr.skip(), system]

    def _wire(self) -> None:
        now = [self.pulse, self.system]
        gr.on([self.text.submit, self.send.click], self._send, [self.text, *now], self.page, **ONCE)
        self.stop.click(self._stop, self.pulse, None, **ONCE)
        self.new.click(lambda: self.open(None), None, self.page, **ONCE)
        self.chat.select(self._act, now, self.page, **ONCE)
        self.empty.select(self._act, now, self.page, **ONCE)
        self.list.select(self._pick, self.pulse, self.page, **EACH)
        self.system.blur(self._system_left, now, self.system_notice, **ONCE)
        self.default.click(self._set_default_system, self.system, self.system_notice, **ONCE)
        self.deck.select(self._use_policy, None, self.alert, **ONCE)
        self.pulse.end(self._refresh, [self.pulse, self.text], self.page, **LIVE)

    @reporting
    def _send(self, text: str, now: Shown, system: str) -> list[Any]:
        chat = now.get("chat")
        try:
            self._set_system(now, system)
            answer = self.host.chats.ask(chat, text, system if now["open"] else None)
        except MoestroError as error:
            return self._refused(error)
        return self._begun(answer, text, sent=True)

    @reporting
    def _act(self, now: Shown, system: str, action: MessageAction) -> list[Any]:
        message, text = getattr(action, "id", None), getattr(action, "text", None) or ""
        if action.do == "ask":
            return self._send(text, now, system)
        if now.get("chat") is None or (message is None and action.do != "regenerate"):
            return self._refused(MoestroError(NO_CHAT))
        chat, chats = int(now["chat"]), self.host.chats
        try:
            if message is not None and action.do in ("show", "rewrite"):
                chats.show(chat, message) if action.do == "show" else chats.rewrite(chat, message, text)
                return [*self.open(chat)[:SYSTEM], gr.skip()]
            self._set_system(now, system)
            if message is not None and action.do in ("edit", "continue"):
                answer = chats.edit(chat, message, text) if action.do == "edit" else chats.go_on(chat, message)
                return self._begun(answer, text)
            return self._begun(chats.regenerate(chat, message), "")
        except MoestroError as error:
            return self._refused(error, now)

    @reporting
    def _pick(self, now: Shown, action: ChatAction) -> list[Any]:
        """Open a chat of the list, pin it, delete it, or give it another name."""
        chats, mine, page = self.host.chats, action.id == now.get("chat"), [gr.skip()] * len(self.page)
        try:
            if action.do == "rename":
                chats.rename(action.id, getattr(action, "text", None) or "")
            elif action.do != "open":
                (chats.delete if action.do == "delete" else self.host.store.chats.pin)(action.id)
        except MoestroError as error:
            return self._refused(error)
        if action.do == "open" or (mine and action.do == "delete"):
            return self.open(action.id if action.do == "open" else None)
        return [*page[:2], title(self.host, action.id) if mine else gr.skip(), gr.skip(), "", *page[ALERT + 1 :]]

    def _system_left(self, now: Shown, system: str) -> Any:
        """The system prompt's field was left."""
        try:
            self._set_system(now, system)
        except MoestroError as error:
            return notice(str(error))
        return gr.skip()  # a button that was pressed instead may have shown a notice

    def _set_system(self, now: Shown, system: str) -> None:
        """What this page shows as the chat's system prompt is so from now on."""
        chat = now.get("chat")
        found = self.host.store.chats.find(chat) if chat is not None and now["open"] else None
        if found is not None and found.system != system.strip():
            self.host.chats.set_system(found.id, system)

    def _set_default_system(self, system: str) -> str:
        try:
            self.host.chats.default_system = system
        except MoestroError as error:
            return notice(str(error))
        begin = "New chats begin with this system prompt." if system.strip() else "New chats begin without one."
        return notice(begin, "info")

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
        page[0] |= {"turn": now["turn"], "sent": now["sent"]}
        page[ALERT] = page[ALERT] or gr.skip()  # the notice on a message stays
        page[SYSTEM] = gr.skip() if page[0]["chat"] == chat else page[SYSTEM]
        answer, question = self._questions.get(chat, (None, "")) if chat is not None else (None, "")
        if answer is not None and answer.message_id not in [m.id for m in self._messages(chat) if m.state == "writing"]:
            answer.join(ENDING_S)
            if answer.undone:
                page[ALERT], page[TEXT] = notice(answer.error), typed or question
        if chat is not None and answer is not None and answer.finished:
            self._questions.pop(chat, None)
        return page

    def _begun(self, answer: Answer, text: str, sent: bool = False) -> list[Any]:
        """The page of an answer that was begun; `text` = the question, to be given back if it leads to nothing."""
        assert answer.chat_id is not None
        ended = [chat for chat, (one, _) in list(self._questions.items()) if one.finished]
        for chat in ended[:-REMEMBERED]:  # no page shows them any more
            self._questions.pop(chat, None)
        self._questions[answer.chat_id] = (answer, text)
        page = self.open(answer.chat_id)
        page[0]["sent"] = sent
        page[TEXT], page[SYSTEM] = "" if sent else gr.skip(), gr.skip()
        return page

    def _refused(self, error: MoestroError, now: Shown | None = None) -> list[Any]:
        page = self.open(now.get("chat")) if now else [gr.skip()] * len(self.page)
        page[ALERT], page[SYSTEM] = notice(str(error)), gr.skip()
        return page

    def _messages(self, chat: int | None) -> list[Message]:
        try:
            return self.host.chats.messages(chat) if chat is not None else []
        except MoestroError:
            return []


def _drawn(elem_id: str, template: str, script: str, value: object = None) -> gr.HTML:
    """A component drawn by a script of assets/ui/chat, whose `select` event carries what the user did."""
    return gr.HTML(
        value,
        html_template=template,
        elem_id=elem_id,
        apply_default_css=False,
        js_on_load=f'import("/ui/chat/{script}.js").then((m) => m.start(element, props, trigger, watch));',
    )
