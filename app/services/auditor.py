"""Scores answers against the exact model while no answer waits, in a thread independent of any browser tab."""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

from app.services.answer_queue import AnswerQueue
from app.store import Store
from core.engine.quality.report import Quality
from core.errors import MoestroError

if TYPE_CHECKING:
    from core.engine import Engine

log = logging.getLogger("moestro.app")
AGAIN_S = 0.25  # before retrying an engine that was in use, or whose audit was interrupted


class Auditor:
    """Scores while the queue of answers is empty. The thread starts with the first answer to score; the audit releases
    the engine when another thread wants it."""

    def __init__(self, store: Store, answers: AnswerQueue) -> None:
        self._store, self._answers = store, answers
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._engine: Engine | None = None
        self._messages: dict[int, int | None] = {}  # answer number in `_engine` -> message id; None = of no chat
        self._thread: threading.Thread | None = None

    def expect(self, engine: Engine, number: int, message: int | None) -> None:
        """Queue an ended answer of `engine` for scoring under this number (AnswerStats.audit)."""
        with self._news:
            if self._stop.is_set():
                return
            if engine is not self._engine:  # the previous engine is unloaded, with its unscored answers
                self._engine = engine
                self._messages.clear()
            self._messages[number] = message
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="moestro-quality", daemon=True)
                self._thread.start()
            self._news.notify_all()

    def rest(self) -> None:
        """The model is being unloaded: unscored answers stay unscored."""
        with self._news:
            self._engine = None
            self._messages.clear()

    def close(self, timeout: float = 30.0) -> bool:
        """End the thread; returns whether it ended within `timeout` seconds."""
        self._stop.set()
        with self._news:
            self._engine = None
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while (engine := self._next()) is not None:
            try:
                quality = engine.audit(self._stop)
            except Exception:
                log.exception("an answer could not be scored against the exact model")
                continue
            if quality is not None:
                self._keep(engine, quality)
            elif engine.unscored:
                with self._news:
                    self._news.wait_for(self._stop.is_set, AGAIN_S)

    def _next(self) -> Engine | None:
        """Wait until an engine has something to score and no answer waits; None when closing."""
        with self._news:
            while not self._stop.is_set():
                waits = self._engine is not None and self._engine.unscored > 0
                if waits and not self._answers.busy:
                    return self._engine
                self._news.wait(AGAIN_S if waits else None)
            return None

    def _keep(self, engine: Engine, quality: Quality) -> None:
        with self._news:
            message = self._messages.pop(quality.answer, None) if engine is self._engine else None
        if message is None:
            return
        try:
            self._store.chats.score(message, asdict(quality))
        except MoestroError:
            log.exception("could not keep what an answer's quality is")
