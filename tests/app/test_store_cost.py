"""What storing a token costs, however long the answer is."""

from __future__ import annotations

from pathlib import Path

from app.store import Store
from tests.app.records import a_step, load_of


def test_the_cost_of_a_token_does_not_grow_with_the_answer(tmp_path: Path) -> None:
    store = Store(tmp_path)
    load = load_of(store)
    chat, answer = store.chats.begin(None, "hello", "demo")
    before = store.db.rows("SELECT total(length(text)) FROM pieces")[0][0]
    for seq in range(50):
        store.token(load, chat, answer, seq, "word ", a_step(seq), {})
    rows = store.db.rows("SELECT length(text) FROM pieces")
    assert before == 0
    assert [row[0] for row in rows] == [5] * 50, "an earlier token was written again"
    assert store.db.rows("SELECT length(text) FROM messages WHERE id = ?", answer)[0][0] == 0
    store.close()
