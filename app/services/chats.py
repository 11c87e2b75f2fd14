"""The chats: asking, following and stopping answers, and changing a chat."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from app.services.answer_queue import AnswerQueue, Request
from app.services.loading import AnyPrompt, Loaded
from app.services.model_manager import ModelManager
from app.services.progress import Answer
from app.services.remembered import Remembered
from app.services.writer import Writer
from app.store import Message, Store
from core.errors import BusyError, MoestroError, SettingError
from core.settings.sampling import Sampling
from core.types import Begun, Chat

REMEMBERED = 100  # ended answers whose outcome is still available
SYSTEM = "system"  # under which the default of new chats is remembered
EMPTY = "The message is empty. Write something first."


class Chats:
    """All chats, and answers that belong to none (of the HTTP API). `sampling` is that of the next answer.

    Methods return at once and may be called from any thread."""

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

    def before(self, answer: Answer) -> int:
        """Number of queued answers that are written before this one."""
        return self._queue.before(answer)

    @property
    def default_system(self) -> str:
        """The system prompt of a chat that begins now."""
        return self._store.db.get(SYSTEM, str) or ""

    @default_system.setter
    def default_system(self, text: str) -> None:
        self._remembered.put(SYSTEM, self._checked_system(text))

    def set_system(self, chat_id: int, system: str) -> None:
        """Change a chat's system prompt, from the next answer on."""
        self._store.chats.set_system(chat_id, self._checked_system(system))

    def ask(self, chat_id: int | None, text: str, system: str | None = None) -> Answer:
        """Ask in a chat; the answer is written whether or not a page watches it. None: in a new chat, with the system
        prompt `system`, or the default."""
        text, system = self._clean(text), self.default_system if system is None else self._checked_system(system)
        return self._begin(chat_id, text, None, system)

    def regenerate(self, chat_id: int, message: int | None = None) -> Answer:
        """Write an answer that is shown again, by default the last one, as another branch of the chat. It is undone if
        it fails before its first token."""
        messages = self.messages(chat_id)
        if not messages:
            raise MoestroError("There is no answer to regenerate: this chat is empty.")
        last = next((m for m in messages if m.id == message), None) if message is not None else messages[-1]
        if last is None or (message is not None and last.role != "assistant"):
            raise MoestroError("That answer is not shown any more. Reload the page.")
        return self._begin(chat_id, None, last.id if last.role == "assistant" else None)

    def go_on(self, chat_id: int, message: int) -> Answer:
        """Continue the last answer shown, which was cut, with the settings of sampling that it was begun with: it
        becomes what it would have been. It is as it was if that fails before the next token.
        """
        with self._lock, self._models.held() as model:
            self._require_free(chat_id)
            self._writer.unsaved.save(chat_id)
            asked = self._prompt(chat_id, model)
            begun = self._store.chats.go_on(chat_id, message)
            answer = self._followed(Answer(chat_id, message))
            answer.text = begun.text
            if begun.ids is not None and not isinstance(asked, str):
                answer.opens_reasoning = model.engine.opens_reasoning
            own = {**self.sampling.settings, **begun.sampling, "max_new_tokens": self.sampling.max_new_tokens}
            prompt = Begun(asked, begun.text, begun.ids or ())
            self._queue.put(Request(answer, prompt, _sampling(own, self.sampling), model))
            return answer

    def edit(self, chat_id: int, message: int, text: str) -> Answer:
        """Ask `text` in place of one of the user's messages that are shown, as another branch of the chat."""
        if not any(m.id == message and m.role == "user" for m in self.messages(chat_id)):
            raise MoestroError("Only your own messages can be edited. Pick one of them.")
        return self._begin(chat_id, self._clean(text), message)

    def rewrite(self, chat_id: int, message: int, text: str) -> None:
        """Put `text` in place of one of the answers that are shown, as another branch: the next answer follows it."""
        with self._lock:
            if self.answer(chat_id) is not None:
                raise BusyError("This chat is being answered. Stop the answer, then edit one.")
            if not any(m.id == message and m.role == "assistant" for m in self.messages(chat_id)):
                raise MoestroError("That answer is not shown any more. Reload the page.")
            self._writer.unsaved.save(chat_id)
            self._store.chats.rewrite(chat_id, message, self._clean(text))

    def show(self, chat_id: int, message: int) -> None:
        """Show the branch of a chat that a message is in."""
        with self._lock:
            if self.answer(chat_id) is not None:
                raise BusyError("This chat is being answered. Stop the answer, then look at another branch.")
            self._writer.unsaved.save(chat_id)  # what is kept for the branch that is left
            self._store.chats.show(chat_id, message)

    def complete(self, prompt: AnyPrompt, sampling: Sampling) -> Answer:
        """Answer a prompt that belongs to no chat (from the HTTP API), in queue order.

        Raises MoestroError; its subclass QueueFullError when the queue is full."""
        asked = prompt.asked if isinstance(prompt, Begun) else prompt
        messages = asked.messages if isinstance(asked, Chat) else asked
        text = messages if isinstance(messages, str) else "".join(one["content"] for one in messages)
        if not (text if isinstance(messages, str) else text.strip()):
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

    def _begin(self, chat_id: int | None, text: str | None, instead_of: int | None, system: str = "") -> Answer:
        with self._lock, self._models.held() as model:
            self._require_free(chat_id)
            model.engine.check_length(text or "")
            self._writer.unsaved.save(chat_id)  # before newer text
            sampling = self.sampling.drawn()
            with self._store.db.tx():
                chat_id, message = self._store.chats.begin(chat_id, text, model.spec.model, instead_of, system)
                self._store.chats.keep_sampling(message, sampling.settings)
            answer, prompt = self._followed(Answer(chat_id, message)), self._prompt(chat_id, model)
            answer.opens_reasoning = not isinstance(prompt, str) and model.engine.opens_reasoning
            self._queue.put(Request(answer, prompt, sampling, model))
            return answer

    def _require_free(self, chat_id: int | None) -> None:
        """Raises BusyError where the chat is being answered, or the queue is full."""
        if self.answer(chat_id) is not None:
            raise BusyError("This chat is already being answered. Stop that answer or let it end, then ask again.")
        self._queue.require_place()

    def _followed(self, answer: Answer) -> Answer:
        """The same, to be found as its chat's; the oldest ended ones are forgotten."""
        assert answer.chat_id is not None
        ended = [chat for chat, one in self._answers.items() if one.finished]
        for old in ended[:-REMEMBERED]:
            del self._answers[old]
        self._answers.pop(answer.chat_id, None)  # re-inserted as the newest
        self._answers[answer.chat_id] = answer
        return answer

    def _prompt(self, chat_id: int, model: Loaded) -> list[dict[str, Any]] | str:
        """What the last answer of a chat answers."""
        chat = self._store.chats.find(chat_id)
        messages = self._store.chats.messages(chat_id)[:-1]
        return prompt_of(messages, chat.system if chat else "", model.engine.takes_chats)

    @staticmethod
    def _clean(text: str) -> str:
        if not text.strip():
            raise MoestroError(EMPTY)
        _require_whole(text)
        return text.strip()

    @staticmethod
    def _checked_system(system: str) -> str:
        _require_whole(system)
        return system.strip()

    def set_sampling(self, **values: object) -> str:
        """Change the sampling settings from the next answer on; returns the problem, or ""."""
        with self._lock:
            try:
                self.sampling = Sampling.checked(**{**self.sampling.settings, **values})
            except SettingError as error:
                return str(error)
            self._remembered.put("sampling", self.sampling.settings)
            return ""


def _sampling(values: Mapping[str, object], otherwise: Sampling) -> Sampling:
    """Settings of sampling as the store has them; others where they are damaged."""
    try:
        return Sampling.checked(**values)
    except (SettingError, TypeError):
        return otherwise


def prompt_of(messages: Sequence[Message], system: str, takes_chats: bool) -> list[dict[str, Any]] | str:
    """The chat so far, after the system prompt. A model without a chat template (`takes_chats` false) continues its
    text."""
    if not takes_chats:
        return text_of(messages)
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": one.role, "content": one.text} for one in messages]


def text_of(messages: Sequence[Message]) -> str:
    """One text: what the user wrote and how the model went on with it; what the user adds begins a line."""
    text = ""
    for one in messages:
        text += ("\n" if one.role == "user" and text and not text[-1].isspace() else "") + one.text
    return text


def _require_whole(text: str) -> None:
    """Raises MoestroError for text with lone surrogates, which no tokenizer or file can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MoestroError(
            "The message contains an unpaired surrogate, which is not a character. Remove it, then send it again."
        ) from None
