"""The chats: asking, following and stopping answers, and what may be done with a chat meanwhile."""

from __future__ import annotations

import threading

from app.services.answer_queue import AnswerQueue, Request
from app.services.engine_protocol import Asked
from app.services.model_manager import ModelManager
from app.services.progress import Answer
from app.services.remembered import Remembered
from app.services.writer import Writer
from app.store import Message, Store
from core.errors import BusyError, MoestroError, SettingError
from core.settings.sampling import Sampling
from core.types import Chat

REMEMBERED = 100  # ended answers whose outcome is still available
EMPTY = "The message is empty. Write something first."


class Chats:
    """All chats, and answers that belong to none (of the HTTP API). `sampling` is that of the next answer.

    Methods return at once and may be called from any thread.
    """

    def __init__(
        self, store: Store, remembered: Remembered, models: ModelManager, queue: AnswerQueue, writer: Writer
    ) -> None:
        self._store, self._remembered, self._models, self._queue = store, remembered, models, queue
        self._writer = writer
        self.sampling = remembered.sampling()
        self._answers: dict[int, Answer] = {}  # the last one of a chat, newest chat last
        self._lock = threading.RLock()

    @property
    def waiting(self) -> int:
        """Number of queued answers."""
        return self._queue.waiting

    def ask(self, chat_id: int | None, text: str) -> Answer:
        """Ask in a chat (None: a new one); the answer is written whether or not a page watches it."""
        return self._begin(chat_id, self._clean(text), None)

    def regenerate(self, chat_id: int) -> Answer:
        """Write the last answer of a chat again. The old one is restored if the new one fails before its first
        token.
        """
        messages = self.messages(chat_id)
        if not messages:
            raise MoestroError("There is no answer to regenerate: this chat is empty.")
        last = messages[-1]
        return self._begin(chat_id, None, last.id if last.role == "assistant" else None)

    def edit(self, chat_id: int, index: int, text: str) -> Answer:
        """Replace user message `index` (counted from 0) and everything after it, and answer the new text."""
        messages = self.messages(chat_id)
        if not 0 <= index < len(messages) or messages[index].role != "user":
            raise MoestroError("Only your own messages can be edited. Pick one of them.")
        return self._begin(chat_id, self._clean(text), messages[index].id)

    def complete(self, prompt: Asked, sampling: Sampling) -> Answer:
        """Answer a prompt that belongs to no chat (from the HTTP API), in queue order.

        Raises MoestroError; its subclass QueueFullError when the queue is full.
        """
        said = prompt.messages if isinstance(prompt, Chat) else prompt
        text = said if isinstance(said, str) else "".join(one["content"] for one in said)
        if not (text if isinstance(said, str) else text.strip()):
            raise MoestroError(EMPTY)
        _require_whole(text)
        self._queue.require_place()
        self._models.ready().engine.check_length(prompt)  # may be slow, so before the model is held
        with self._models.held() as model:
            self._queue.require_place()
            answer = Answer(None, None)
            self._queue.put(Request(answer, prompt, sampling, model))
            return answer

    def stop(self, chat_id: int) -> None:
        """End the answer being written in a chat, keeping the text so far. Does nothing when there is none."""
        if (answer := self.answer(chat_id)) is not None:
            self._writer.stop(answer)

    def stop_answer(self, answer: Answer) -> None:
        """End this answer like `stop`, whether or not it belongs to a chat."""
        self._writer.stop(answer)

    def answer(self, chat_id: int | None) -> Answer | None:
        """The unfinished answer of a chat, for following it, or None."""
        with self._lock:
            found = self._answers.get(chat_id) if chat_id is not None else None
            return found if found is not None and not found.finished else None

    def outcome(self, chat_id: int) -> Answer | None:
        """The last answer of a chat since the start, finished or not: for its `error` and `undone`."""
        with self._lock:
            return self._answers.get(chat_id)

    def messages(self, chat_id: int) -> list[Message]:
        """The messages of a chat as shown; the last one has state "writing" while it is being written."""
        answer = self.answer(chat_id)
        return self._writer.unsaved.shown(
            self._store.chats.messages(chat_id, answer.text if answer is not None else None)
        )

    def delete(self, chat_id: int) -> None:
        """Delete a chat and its statistics."""
        with self._lock:
            if self.answer(chat_id) is not None:
                raise BusyError("This chat is being answered. Stop the answer, then delete the chat.")
            self._store.chats.delete(chat_id)
            self._writer.unsaved.forget(chat_id)
            self._answers.pop(chat_id, None)

    def delete_recording(self, chat_id: int) -> None:
        """Delete a chat's measurements and routing, and keep its messages."""
        with self._lock:
            if self.answer(chat_id) is not None:
                raise BusyError("This chat is being answered. Stop the answer, then delete what was recorded of it.")
            self._store.chats.require(chat_id)
            self._store.steps.delete(chat_id)

    def rename(self, chat_id: int, title: str) -> None:
        """Give a chat another title."""
        self._store.chats.rename(chat_id, title)

    def count_tokens(self, chat_id: int | None, text: str = "") -> int | None:
        """Tokens of a chat with `text` added, for the context gauge; None while no model is loaded."""
        prompt = self._prompt(self.messages(chat_id)) if chat_id is not None else []
        if text.strip():
            prompt.append({"role": "user", "content": text})
        return self._models.count_tokens(prompt)

    def _begin(self, chat_id: int | None, text: str | None, replaces_from: int | None) -> Answer:
        with self._lock, self._models.held() as model:
            if self.answer(chat_id) is not None:
                raise BusyError("This chat is already being answered. Stop that answer or let it end, then ask again.")
            self._queue.require_place()
            model.engine.check_length(text or "")
            self._writer.unsaved.save(chat_id)  # before newer text
            chat_id, message = self._store.chats.begin(chat_id, text, model.spec.model, replaces_from)
            ended = [chat for chat, answer in self._answers.items() if answer.finished]
            for old in ended[:-REMEMBERED]:
                del self._answers[old]
            self._answers.pop(chat_id, None)  # re-inserted as the newest
            self._answers[chat_id] = answer = Answer(chat_id, message)
            prompt = self._prompt(self._store.chats.messages(chat_id)[:-1])
            self._queue.put(Request(answer, prompt, self.sampling, model))
            return answer

    @staticmethod
    def _prompt(messages: list[Message]) -> list[dict[str, str]]:
        return [{"role": m.role, "content": m.text} for m in messages]

    @staticmethod
    def _clean(text: str) -> str:
        if not text.strip():
            raise MoestroError(EMPTY)
        _require_whole(text)
        return text.strip()

    def set_sampling(self, **values: object) -> str:
        """Change the sampling settings from the next answer on; returns the problem, or ""."""
        with self._lock:
            try:
                self.sampling = Sampling.checked(**{**self.sampling.settings, **values})
            except SettingError as error:
                return str(error)
            self._remembered.put("sampling", self.sampling.settings)
            return ""


def _require_whole(text: str) -> None:
    """Raises MoestroError for text with lone surrogates, which no tokenizer or file can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MoestroError(
            "The message contains an unpaired surrogate, which is not a character. Remove it, then send it again."
        ) from None
