"""Writes answers one at a time, in request order, in a thread independent of any browser tab."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from typing import Any

from app.services.answer_times import Turns
from app.services.crash import log_crash
from app.services.engine_protocol import EngineProtocol, Prompt
from app.services.progress import Answer
from app.services.unsaved import Unsaved
from app.store import Store
from core.errors import ContextError, MoestroError
from core.settings.config import Sampling
from core.system import process_memory
from core.types import Piece, StepRecord

log = logging.getLogger("moestro.app")
AGAIN_S = 5.0  # between two attempts to save unsaved text
UNEXPECTED = "The answer broke off because of an error inside Moestro. Its details are in the log; you can ask again."


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to write, with its inputs."""

    answer: Answer
    prompt: Prompt
    sampling: Sampling
    engine: EngineProtocol
    load: int
    effective: dict[str, Any]  # settings in force at the last recorded pass of this load


Heard = Callable[[Job, StepRecord], None]
Ended = Callable[[Job], None]


class Writer:
    """A queue of jobs and the one thread that processes it. That thread calls `heard` for every pass, and `ended` for
    every answer that was begun.
    """

    def __init__(self, store: Store, heard: Heard = lambda job, step: None, ended: Ended = lambda job: None) -> None:
        self._store, self._heard, self._ended = store, heard, ended
        self.unsaved = Unsaved(store)
        self._jobs: deque[Job] = deque()
        self._now: Job | None = None
        self._turns = Turns()
        self._news = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="moestro-answers", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue an answer; it starts when the earlier ones have ended."""
        with self._news:
            self._jobs.append(job)
            self._news.notify_all()

    def require_place(self) -> None:
        """Raises QueueFullError when the queue is full."""
        with self._news:
            self._turns.require_place(len(self._jobs))

    def stop(self, answer: Answer) -> None:
        """Stop an answer: a queued one at once, one being written at the next token."""
        with self._news:
            waiting = [job for job in self._jobs if job.answer is answer]
            for job in waiting:
                self._jobs.remove(job)
        answer.cancelled.set()
        for job in waiting:
            self._end(job, "")

    @property
    def busy(self) -> bool:
        """Whether an answer is being written or waits."""
        with self._news:
            return self._now is not None or bool(self._jobs)

    @property
    def waiting(self) -> int:
        """Number of queued answers."""
        with self._news:
            return len(self._jobs)

    def close(self, timeout: float = 30.0) -> bool:
        """Stop everything and end the thread; returns whether it ended within `timeout` seconds."""
        with self._news:
            self._closing = True
            jobs = [*self._jobs, *([self._now] if self._now else [])]
            self._news.notify_all()
        for job in jobs:
            self.stop(job.answer)
        self._thread.join(timeout)
        self.unsaved.save()
        if self.unsaved:
            log.error("answers that there was no room for on the disk end with this process")
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._jobs and not self._closing:
                    if not self._news.wait(AGAIN_S if self.unsaved else None):
                        break
                if self._jobs:
                    self._now = job = self._jobs.popleft()
                    self._turns.begin()
                elif self._closing:
                    return
                else:
                    job = None
            if job is None:
                self._retry()
                continue
            error = self._write(job)
            with self._news:
                self._turns.end()
                self._now = None  # before the answer is marked as ended, so that a waiting caller finds the engine free
            self._end(job, error)
            self._ended(job)
            process_memory.trim_now_and_then()
            try:
                self._store.db.settle()
                self._store.backups.answered()
            except MoestroError:
                log.exception("could not checkpoint the store")

    def _retry(self) -> None:
        """Save unsaved text if there is room now."""
        try:
            self.unsaved.save()
        except Exception as error:
            log_crash(log, error, "could not save an answer")

    def _write(self, job: Job) -> str:
        """Generate, commit and publish token by token; returns the error as display text, or ""."""
        answer = job.answer
        answer.update(state="prefill", queued_ms=(time.perf_counter() - answer.asked_s) * 1000)
        try:
            pieces = job.engine.generate(job.prompt, job.sampling, answer.cancelled)
            try:
                for piece in pieces:
                    self._take(job, piece)
            finally:
                if isinstance(pieces, Generator):  # releases the engine now, not when collected
                    pieces.close()
        except MoestroError as error:
            log.info("answer failed: %s", type(error).__name__)  # its message may quote the prompt
            answer.update(refused=isinstance(error, ContextError))
            return str(error)
        except Exception as error:
            log_crash(log, error, "unexpected error while writing an answer")
            return UNEXPECTED
        return ""

    def _take(self, job: Job, piece: Piece) -> None:
        """Commit one piece, then show it: displayed text is in the store, or queued in memory for it."""
        answer, step = job.answer, piece.step
        if step is not None and not step.changes and not job.engine.settings["telemetry"]:
            step = None
        if step is not None or piece.text:
            self._save(job, piece.text, step)
        if step is not None:
            job.effective.update(step.changes)
        if piece.kind == "prefill":
            answer.update(prefill_done=piece.done, prefill_total=piece.total)
        elif piece.kind == "token":
            if not answer.n_tokens:
                answer.update(ttft_ms=(time.perf_counter() - answer.asked_s) * 1000 - answer.queued_ms)
            answer.update(state="streaming", text=answer.text + piece.text, n_tokens=answer.n_tokens + 1)
        else:
            answer.update(stats=piece.stats)
        if step is not None:
            self._heard(job, step)

    def _save(self, job: Job, text: str, step: StepRecord | None) -> None:
        """Save one pass in the store, or keep its text in memory when the store cannot take it."""
        answer = job.answer
        if self.unsaved.has(answer):
            self.unsaved.save()
        try:
            kept = self._store.token(
                job.load, answer.chat_id, answer.message_id, answer.n_tokens, text, step, job.effective
            )
            answer.unrecorded += not kept
        except MoestroError as error:
            answer.unrecorded += step is not None
            if text and answer.message_id is not None:
                self.unsaved.add(answer, answer.n_tokens, text, str(error))

    def _end(self, job: Job, error: str) -> None:
        """Record the answer's final state in the store and for display. A failure before the first token leaves no
        trace.
        """
        answer = job.answer
        stopped = answer.cancelled.is_set()
        undone = answer.n_tokens == 0 and bool(error or stopped)
        state = "undone" if undone else "error" if error else "stopped" if stopped else "done"
        stats = None
        if answer.stats is not None:
            sampling = {**asdict(job.sampling), "seed": answer.stats.seed}
            stats = {**asdict(answer.stats), "queued_ms": answer.queued_ms, "sampling": sampling}
        if stats and answer.unrecorded:
            stats["unrecorded"] = answer.unrecorded
        try:
            if answer.message_id is not None:
                self.unsaved.end(answer, state, stats, error)
        except Exception as failure:
            log_crash(log, failure, "could not finish an answer in the store")
            error, undone = error or UNEXPECTED, False
        if undone and answer.unsaved:
            error, undone = error or answer.unsaved, False
        answer.update(state="error" if error else "done", error=error, undone=undone)
