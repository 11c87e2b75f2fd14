"""The host: the single object behind the dashboard and the HTTP API.

All tabs and the HTTP API share it. Methods return at once (work runs in threads) and may be called from any thread.
Commands raise MoestroError, with a text to display, and then change nothing; setters (`change`, `change_many`,
`set_sampling`) return that text instead, "" on success.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from app.services.analysis.analyst import Analyst
from app.services.analysis.quality import Evaluate
from app.services.auditor import Auditor
from app.services.calibrator import Calibrate
from app.services.engine_protocol import EngineProtocol, Estimate, Prompt
from app.services.importer import Importer, ImportModel
from app.services.library import Library, delete
from app.services.progress import Answer
from app.services.regret import Regret
from app.services.workshop import Workshop
from app.services.writer import Job, Writer
from app.store import Message, Store
from core.errors import BusyError, MoestroError, SettingError
from core.quality.report import Quality
from core.settings.config import Sampling

log = logging.getLogger("moestro.app")
REMEMBERED = 100  # ended answers whose outcome is still available
EMPTY = "The message is empty. Write something first."


class Host(Workshop):
    """Combines the loaded engine (`ModelManager`), long jobs over it (`Workshop`), the answer queue, and the store.

    `engine`, `estimate`, `importing`, `calibrating` and `evaluating` default to core's own. Raises BusyError or
    StoreError when the store cannot be opened.
    """

    def __init__(
        self,
        store: Store | None = None,
        engine: type[EngineProtocol] | None = None,
        estimate: Estimate | None = None,
        importing: ImportModel | None = None,
        calibrating: Calibrate | None = None,
        evaluating: Evaluate | None = None,
    ) -> None:
        super().__init__(store or Store(), engine, estimate, calibrating, evaluating)
        self.sampling = self._remembered_sampling()
        self._answers: dict[int, Answer] = {}
        self.regret = Regret(bool(self.settings["regret"]))
        self._writer = Writer(
            self.store,
            lambda job, step: self.regret.add(
                job.load, job.engine.shape, job.effective, step, getattr(job.engine, "profile", None)
            ),
            self._audit,
        )
        self._unsaved = self._writer.unsaved
        self._auditor = Auditor(self.store, lambda: self._writer.busy)
        self.library = Library(self.store.db, self.store.folder)
        self.importer = Importer(self.library.packs, self.store.db, importing, self.library.refresh)
        self.analyst = Analyst(self.store)

    @property
    def busy(self) -> bool:
        """Whether an answer is being written or waits, or a model is being loaded."""
        return self._writer.busy or self._is_loading or self.working

    @property
    def waiting(self) -> int:
        """Number of queued answers."""
        return self._writer.waiting

    # -- chatting ----------------------------------------------------------------------------------------------------

    def chat(self, chat_id: int | None, text: str) -> Answer:
        """Ask in a chat (None: a new one); the answer is written whether or not a page watches it."""
        return self._begin(chat_id, self._clean(text), None)

    def regenerate(self, chat_id: int) -> Answer:
        """Write the last answer of a chat again. The old one is restored if the new one fails before its first
        token.
        """
        messages = self.messages(chat_id)
        if not messages:
            raise MoestroError("There is no answer to write anew: this chat is empty.")
        last = messages[-1]
        return self._begin(chat_id, None, last.id if last.role == "assistant" else None)

    def edit(self, chat_id: int, index: int, text: str) -> Answer:
        """Replace user message `index` (counted from 0) and everything after it, and answer the new text."""
        messages = self.messages(chat_id)
        if not 0 <= index < len(messages) or messages[index].role != "user":
            raise MoestroError("Only your own messages can be edited. Pick one of them.")
        return self._begin(chat_id, self._clean(text), messages[index].id)

    def complete(self, prompt: Prompt, sampling: Sampling) -> Answer:
        """Answer a prompt that belongs to no chat (from the HTTP API), in queue order.

        Raises MoestroError; its subclass QueueFullError when the queue is full.
        """
        if not prompt or not any(one["content"].strip() for one in prompt):
            raise MoestroError(EMPTY)
        _require_whole("".join(one["content"] for one in prompt))
        self._writer.require_place()
        self._ready()[0].check_length(prompt)  # may be slow, so outside the lock
        with self._lock:
            engine, load = self._ready()
            self._writer.require_place()
            answer = Answer(None, None)
            self._writer.put(Job(answer, prompt, sampling, engine, load, self._effective))
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
        return self._unsaved.shown(self.store.chats.messages(chat_id, answer.text if answer is not None else None))

    def delete(self, chat_id: int) -> None:
        """Delete a chat and its statistics."""
        with self._lock:
            if self.answer(chat_id) is not None:
                raise BusyError("This chat is being answered. Stop the answer, then delete the chat.")
            self.store.chats.delete(chat_id)
            self._unsaved.forget(chat_id)
            self._answers.pop(chat_id, None)

    def delete_recording(self, chat_id: int) -> None:
        """Delete a chat's measurements and routing, and keep its messages."""
        with self._lock:
            if self.answer(chat_id) is not None:
                raise BusyError("This chat is being answered. Stop the answer, then delete what was recorded of it.")
            self.store.chats.require(chat_id)
            self.store.steps.delete(chat_id)

    def rename(self, chat_id: int, title: str) -> None:
        """Give a chat another title."""
        self.store.chats.rename(chat_id, title)

    def count_tokens(self, chat_id: int | None, text: str = "") -> int | None:
        """Tokens of a chat with `text` added, for the context gauge; None while no model is loaded."""
        prompt = self._prompt(self.messages(chat_id)) if chat_id is not None else []
        if text.strip():
            prompt.append({"role": "user", "content": text})
        with self._view:
            return None if self._engine is None else self._engine.count_tokens(prompt) if prompt else 0

    def _begin(self, chat_id: int | None, text: str | None, replaces_from: int | None) -> Answer:
        with self._lock:
            engine, load = self._ready()
            if self.answer(chat_id) is not None:
                raise BusyError("This chat is already being answered. Stop that answer or let it end, then ask again.")
            self._writer.require_place()
            engine.check_length(text or "")
            self._unsaved.save(chat_id)  # before newer text
            chat_id, message = self.store.chats.begin(chat_id, text, self.model or "", replaces_from)
            ended = [chat for chat, answer in self._answers.items() if answer.finished]
            for old in ended[:-REMEMBERED]:
                del self._answers[old]
            self._answers.pop(chat_id, None)  # re-inserted as the newest
            self._answers[chat_id] = answer = Answer(chat_id, message)
            prompt = self._prompt(self.store.chats.messages(chat_id)[:-1])
            self._writer.put(Job(answer, prompt, self.sampling, engine, load, self._effective))
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

    # -- quality -----------------------------------------------------------------------------------------------------

    @property
    def quality(self) -> Quality | None:
        """Quality loss from lossy options, over the last scored answers; None before the first."""
        with self._view:
            return self._engine.quality if self._engine is not None else None

    def _audit(self, job: Job) -> None:
        stats = job.answer.stats
        if stats is not None and stats.audit:
            self._auditor.expect(job.engine, stats.audit, job.answer.message_id)

    # -- models on this machine ----------------------------------------------------------------------------------------

    def delete_model(self, path: str, from_cache: bool = False) -> int:
        """Delete the library's model at a path; returns the bytes freed. Raises MoestroError for a model in use."""
        entry = self.library.find(path)
        if entry is None:
            raise MoestroError("It is not there any more. Refresh the list.")
        loading, job = self.loading, self.importer.job
        using = [
            *([self.model] if self.model else []),
            *([loading.model] if loading and not loading.finished else []),
            *([job.source, str(job.out), str(job.partial)] if job and not job.finished and job.out else []),
        ]
        freed = delete(entry, using, from_cache)
        self.library.refresh()
        return freed

    # -- sampling and the end ----------------------------------------------------------------------------------------

    def change_many(self, changes: Mapping[str, object]) -> str:
        """Like the model manager's; also applies the changes that do not reach the engine."""
        problem = super().change_many(changes)
        self.regret.switch(bool(self.settings["regret"]))
        return problem

    def unload(self) -> None:
        """Free the model's memory. Does nothing when none is loaded. Raises BusyError."""
        super().unload()
        self.regret.rest()
        self._auditor.rest()

    def set_sampling(self, **values: object) -> str:
        """Change the sampling settings from the next answer on; returns the problem, or ""."""
        with self._lock:
            try:
                self.sampling = Sampling.checked(**{**asdict(self.sampling), **values})
            except SettingError as error:
                return str(error)
            self.remember("sampling", asdict(self.sampling))
            return ""

    def close(self) -> None:
        """Stop the current answer or load, save the text so far, free the model, close the store."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.cancel_load()
        self.importer.close()
        self.analyst.close()
        self._close_jobs()
        if not self._writer.close():
            log.error("an answer did not stop within its time; the store is closed without its end")
        self.regret.close()
        self._auditor.close()
        self._close_model()
        self.store.close()

    def _refuse_if_writing(self, what: str) -> None:
        super()._refuse_if_writing(what)
        if self._writer.busy:
            raise BusyError(f"An answer is being written. Stop it or let it end, then {what}.")

    def _remembered_sampling(self) -> Sampling:
        sampling, remembered = Sampling(), self.store.db.get("sampling")
        values: dict[str, Any] = remembered if isinstance(remembered, dict) else {}
        for name, value in values.items():
            try:
                sampling = Sampling.checked(**{**asdict(sampling), name: value})
            except (SettingError, TypeError, ValueError) as error:
                log.warning("forgot a sampling setting of an earlier version: %s", error)
        return sampling


def _require_whole(text: str) -> None:
    """Raises MoestroError for text with lone surrogates, which no tokenizer or file can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MoestroError(
            "The message holds half a character (a surrogate without its other half). Take it out, then send it again."
        ) from None
