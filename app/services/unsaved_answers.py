"""Keeps in memory the text of answers that the store could not save (disk full), and retries saving it."""

import logging
import threading
from dataclasses import dataclass, field, replace
from typing import Any

from app.services.progress import Answer
from app.store import Message, Store
from app.store.chat_rows import State
from core.errors import MoestroError

log = logging.getLogger("moestro.app")


@dataclass(slots=True)
class Draft:
    """The unsaved part of one answer. `state`: None while it is being written, "undone" for one to be removed."""

    answer: Answer
    pieces: list[tuple[int, str, int | None]] = field(default_factory=list)
    state: State | str | None = None
    stats: dict[str, Any] | None = None
    error: str = ""


class UnsavedAnswers:
    """All drafts of a host. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._drafts: dict[int, Draft] = {}

    def __bool__(self) -> bool:
        return bool(self._drafts)

    def has(self, answer: Answer) -> bool:
        """Whether part of this answer is unsaved."""
        return answer.message_id in self._drafts

    def add(self, answer: Answer, seq: int, text: str, token: int | None, reason: str) -> None:
        """Add a token, with its text, that could not be saved."""
        assert answer.message_id is not None
        with self._lock:
            draft = self._drafts.get(answer.message_id)
            if draft is None:
                log.warning("an answer is kept in memory for now: %s", reason)
                draft = self._drafts[answer.message_id] = Draft(answer)
            draft.pieces.append((seq, text, token))
        answer.update(unsaved=reason)

    def end(self, answer: Answer, state: State | str, stats: dict[str, Any] | None, error: str) -> None:
        """Save an answer's final state with its waiting text, or keep both in memory. Raises no StoreError:
        `answer.unsaved` holds the reason."""
        assert answer.message_id is not None
        with self._lock:
            draft = self._drafts.setdefault(answer.message_id, Draft(answer))
            draft.state, draft.stats, draft.error = state, stats, error
        self.save()

    def save(self, chat: int | None = None) -> None:
        """Retry saving all drafts. Raises StoreError if the answer of this `chat` still cannot be saved."""
        with self._lock:
            for message, draft in list(self._drafts.items()):
                try:
                    self._save(message, draft)
                except MoestroError as problem:
                    if draft.answer.unsaved != str(problem):
                        draft.answer.update(unsaved=str(problem))
                    if chat is not None and draft.answer.chat_id == chat:
                        raise
                except Exception:
                    del self._drafts[message]
                    raise
                else:
                    draft.answer.update(unsaved="")
                    if draft.state is not None:
                        del self._drafts[message]

    def _save(self, message: int, draft: Draft) -> None:
        chats = self._store.chats
        with self._store.db.tx():
            for piece in draft.pieces:
                chats.append(message, *piece)
            if draft.state == "undone":
                chats.undo(message)
            elif draft.state is not None:
                chats.finish(message, draft.state, draft.stats, draft.error)  # type: ignore[arg-type]
        draft.pieces = []

    def shown(self, messages: list[Message]) -> list[Message]:
        """Stored messages, with unsaved drafts in place of their stored versions."""
        with self._lock:
            waiting = {message: draft for message, draft in self._drafts.items() if draft.state is not None}
        if not waiting:
            return messages
        return [
            replace(
                m,
                text=d.answer.text,
                state="error" if d.state == "undone" else d.state,  # type: ignore[arg-type]  # None is left out above
                stats=d.stats,
                error=d.error,
                unsaved=d.answer.unsaved,
            )
            if (d := waiting.get(m.id)) is not None
            else m
            for m in messages
        ]

    def forget(self, chat: int) -> None:
        """Drop the drafts of a deleted chat."""
        with self._lock:
            self._drafts = {m: draft for m, draft in self._drafts.items() if draft.answer.chat_id != chat}
