"""What Python tells the page of a chat."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.server.live_state import stamp
from app.store import Chat
from app.ui.tabs.chat_live import ChatLive
from tests.app.conftest import ended, open_host, page


def test_what_changes_while_a_page_is_made_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = open_host(tmp_path)
    with page():
        made = ChatLive(host)
    answer = host.chats.ask(None, "One, in 2 words")
    ended(answer)
    chat, find = answer.chat_id, host.store.chats.find
    assert chat is not None and made.open(chat)[0]["stamp"] == stamp(host, chat)

    def late(id: int) -> Chat:  # open() has read the messages by now
        ended(host.chats.ask(chat, "Two, in 2 words"))
        return find(id)

    monkeypatch.setattr(host.store.chats, "find", late)
    shown = made.open(chat)
    assert len(shown[1]["messages"]) == 2 and len(host.chats.messages(chat)) == 4
    assert shown[0]["stamp"] != stamp(host, chat)
    host.close()
