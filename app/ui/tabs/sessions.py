"""Tab Sessions: past chats: open, rename, delete, download what was recorded of them; and all answers as runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr

from app.services.host import Host
from app.store import Chat, StoredTrace
from app.ui.controls import LIVE, ONCE, button, html
from app.ui.tabs.chat_live import ChatLive
from app.ui.tabs.library_views import when
from app.ui.tabs.runs import Runs
from app.ui.text import notice
from app.wording import name_of
from core.errors import MoestroError
from core.system.command import COMMAND
from core.system.wording import format_bytes

EMPTY = (
    "<div class='empty-note'><b>No chats yet</b>"
    "<span>Your chats are kept here, with their measurements, until you delete them.</span></div>"
)
NOT_FOUND = "<div class='empty-note'><b>No chat has these words</b><span>Names and messages are searched.</span></div>"
NO_TRACE = "<p class='minor'>No routing was recorded. It is recorded while Telemetry is on.</p>"


class Sessions:
    """The list on the left, the actions for the chosen chat on the right, the runs below."""

    def __init__(self, host: Host, chat: ChatLive, tabs: gr.Tabs) -> None:
        self.host = host
        with gr.Row(elem_id="sessions", equal_height=False):
            with gr.Column(scale=3, min_width=320):
                self.search = gr.Textbox(
                    "",
                    label="Search",
                    placeholder="Words of a name or of a message",
                    max_lines=1,
                    elem_id="chat-search",
                )
                self.none = html(EMPTY, elem_id="no-chats")
                self.list = gr.Radio([], label="Chats, newest first", elem_id="chats", show_label=True)
            with gr.Column(scale=2, min_width=300, visible=False, elem_id="chat-card") as self.card:
                self.about = html(elem_id="chat-about")
                self.name = gr.Textbox(
                    "", label="Name", info="Shown in the list. Press Enter or Rename.", max_lines=1, elem_id="chat-name"
                )
                with gr.Row(elem_classes="buttons"):
                    self.open = button("Open", "open-chat", variant="primary")
                    self.rename = button("Rename", "rename-chat")
                    self.delete = button("Delete…", "delete-chat")
                    self.strip = button("Delete recording…", "delete-recording", min_width=140)
                with gr.Row(visible=False, elem_classes="confirm", elem_id="confirm") as self.confirm:
                    html("<p>Delete this chat and its measurements for good?</p>")
                    self.yes = button("Delete", "delete-yes", variant="stop")
                    self.no = button("Keep", "delete-no")
                with gr.Row(visible=False, elem_classes="confirm", elem_id="confirm-recording") as self.confirm_strip:
                    html("<p>Delete the measurements and the routing of this chat for good, and keep its text?</p>")
                    self.strip_yes = button("Delete", "recording-yes", variant="stop")
                    self.strip_no = button("Keep", "recording-no")
                self.alert = html(elem_id="sessions-alert")
        self.runs = Runs(host)
        self.outputs = [
            self.search,
            self.none,
            self.list,
            self.card,
            self.about,
            self.name,
            self.strip,
            self.confirm,
            self.confirm_strip,
            self.alert,
        ]
        self._wire(chat, tabs)

    def show(self, chosen: int | None, words: str | None = None, problem: str = "", confirm: str = "") -> list[Any]:
        """The chats that have `words` (None: all, and the search is emptied), with `chosen` selected if it is one of
        them. `confirm`: ask before deleting the "chat", or its recorded data ("recording").
        """
        every = self.host.store.chats.all()
        chats = every
        if words and words.strip():
            having = {one.chat for one in self.host.store.search_chats(words, len(every))}
            chats = [chat for chat in every if chat.id in having]
        found = next((c for c in chats if c.id == chosen), None)
        traces = self.host.store.traces(found.id) if found else []
        return [
            "" if words is None else gr.skip(),
            gr.update(value=NOT_FOUND if every else EMPTY, visible=not chats),
            gr.update(choices=[(line(c), c.id) for c in chats], value=chosen if found else None, visible=bool(chats)),
            gr.update(visible=found is not None),
            about(found, traces) if found else "",
            found.title if found else "",
            gr.update(visible=bool(traces)),
            gr.update(visible=confirm == "chat" and found is not None),
            gr.update(visible=confirm == "recording" and bool(traces)),
            notice(problem),
        ]

    def _wire(self, chat: ChatLive, tabs: gr.Tabs) -> None:
        now = [self.list, self.search]
        self.search.change(self.show, now, self.outputs, **LIVE)  # its input event knows of keys only, not of pasting
        self.list.input(self.show, now, self.outputs, **LIVE)
        self.open.click(
            lambda chosen: [*chat.open(chosen), gr.Tabs(selected="chat")], self.list, [*chat.page, tabs], **ONCE
        )
        gr.on([self.rename.click, self.name.submit], self._rename, [*now, self.name], self.outputs, **ONCE)
        self.delete.click(lambda chosen, words: self.show(chosen, words, confirm="chat"), now, self.outputs, **ONCE)
        self.strip.click(lambda chosen, words: self.show(chosen, words, confirm="recording"), now, self.outputs, **ONCE)
        gr.on([self.no.click, self.strip_no.click], self.show, now, self.outputs, **ONCE)
        self.yes.click(self._delete, now, self.outputs, **ONCE)
        self.strip_yes.click(self._delete_recording, now, self.outputs, **ONCE)

    def _rename(self, chosen: int, words: str, name: str) -> list[Any]:
        try:
            self.host.chats.rename(chosen, name)
        except MoestroError as error:
            return self.show(chosen, words, str(error))
        return self.show(chosen, words)

    def _delete(self, chosen: int, words: str) -> list[Any]:
        try:
            self.host.chats.delete(chosen)
        except MoestroError as error:
            return self.show(chosen, words, str(error))
        return self.show(None, words)

    def _delete_recording(self, chosen: int, words: str) -> list[Any]:
        try:
            self.host.chats.delete_recording(chosen)
        except MoestroError as error:
            return self.show(chosen, words, str(error))
        return self.show(chosen, words)


def line(chat: Chat) -> str:
    """A chat's line in the list."""
    return f"{chat.title}\n{when(chat.updated)} · {chat.messages} messages · {chat.tokens} tokens"


def about(chat: Chat, traces: Sequence[StoredTrace]) -> str:
    """Details of the chosen chat, with links to its measurements and to its routing."""
    return (
        f"<div class='about-chat'><p>{escape(name_of(chat.model))}</p>"
        f"<p class='minor'>Started {when(chat.created)}, last answer {when(chat.updated)}</p>"
        f"<p><a href='/export/{chat.id}.zip' download id='session-csv'>Download measurements (CSV, zip)</a></p>"
        f"{''.join(link(chat, one, len(traces) > 1) for one in traces) or NO_TRACE}</div>"
    )


def link(chat: Chat, trace: StoredTrace, several: bool) -> str:
    """The link to one model's routing in a chat."""
    of = f" of {escape(name_of(trace.model))}" if several else ""
    return (
        f"<p><a href='/export/{chat.id}.trace?load={trace.loads[-1]}' download class='session-trace' "
        f"title='The experts of every token, for {COMMAND} simulate'>Download routing{of} (trace)</a> "
        f"<span class='minor'>{trace.tokens} tokens, prompts included, {format_bytes(trace.size)}</span></p>"
    )
