"""Writes answers in request order, in a thread independent of any browser tab: one at a time, or several together
where the model was loaded for that."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import cast

from app.services.answer_queue import AnswerQueue, Request
from app.services.crash import log_crash
from app.services.progress import Answer
from app.services.unsaved_answers import UnsavedAnswers
from app.store import Store
from core.engine.batch_request import BatchRequest
from core.errors import ContextError, MoestroError, PromptError
from core.system import process_memory
from core.system.template_worker import RENDERER
from core.types import Piece, StepRecord

log = logging.getLogger("moestro.app")
AGAIN_S = 5.0  # between two attempts to save unsaved text
READING_S = 0.2  # between two updates of how far a prompt is read
UNEXPECTED = "The answer broke off because of an error inside Moestro. Its details are in the log; you can ask again."


OnStep = Callable[[Request, StepRecord], None]
Ended = Callable[[Request], None]


class Writer:
    """The one thread that writes the answers of a queue. It calls `on_step` for every pass, and `ended` for every
    answer that was begun."""

    def __init__(
        self,
        store: Store,
        queue: AnswerQueue,
        on_step: OnStep = lambda request, step: None,
        ended: Ended = lambda request: None,
    ) -> None:
        self._store, self._queue, self._on_step, self._ended = store, queue, on_step, ended
        self.unsaved = UnsavedAnswers(store)
        self._thread = threading.Thread(target=self._run, name="moestro-answers", daemon=True)
        self._thread.start()

    def stop(self, answer: Answer) -> None:
        """Stop an answer: a queued one at once, one being written before the next MoE layer."""
        waiting = self._queue.withdraw(answer)
        answer.cancelled.set()
        for request in waiting:
            self._end(request, "")

    def interrupt(self) -> None:
        """Stop every answer, because the program ends: see `Answer.interrupted`."""
        for request in self._queue.close():
            request.answer.interrupted = True
            self.stop(request.answer)
        RENDERER.interrupt()  # a chat template is not stopped between two layers, as the rest of an answer is

    def close(self, timeout: float = 30.0) -> bool:
        """Stop everything and end the thread; returns whether it ended within `timeout` seconds."""
        self.interrupt()
        self._thread.join(timeout)
        self.unsaved.save()
        if self.unsaved:
            log.error("answers that there was no room for on the disk end with this process")
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            request = self._queue.next(AGAIN_S if self.unsaved else None)
            if request is None:
                if self._queue.closed:
                    return
                self._retry()
                continue
            if request.model.spec.sequences > 1:
                self._write_together(request)
            else:
                self._over(request, self._write(request))
            process_memory.trim_now_and_then()
            try:
                self._store.db.checkpoint()
                self._store.backups.answered()
            except MoestroError:
                log.exception("could not checkpoint the store")

    def _retry(self) -> None:
        """Save unsaved text if there is room now."""
        try:
            self.unsaved.save()
        except Exception as error:
            log_crash(log, error, "could not save an answer")

    def _write(self, request: Request) -> str:
        """Generate, commit and publish token by token; returns the error as display text, or ""."""
        answer = request.answer
        answer.update(state="prefill", queued_ms=(time.perf_counter() - answer.requested_s) * 1000)
        try:
            pieces = request.model.engine.generate(
                request.prompt, request.sampling, answer.cancelled, reuse=True, reading=_reading(answer)
            )
            try:
                for piece in pieces:
                    self._take(request, piece)
            finally:
                if isinstance(pieces, Generator):  # releases the engine now, not when collected
                    pieces.close()
        except MoestroError as error:
            log.info("answer failed: %s", type(error).__name__)  # its message may quote the prompt
            answer.update(
                refused=isinstance(error, (ContextError, PromptError)), too_long=isinstance(error, ContextError)
            )
            return str(error)
        except Exception as error:
            log_crash(log, error, "unexpected error while writing an answer")
            return UNEXPECTED
        return ""

    def _write_together(self, first: Request) -> None:
        """Generate the answer to `first`, and to those that arrive while it is written, pass by pass."""
        writing, over, numbers, last = {0: first}, dict[int, str](), itertools.count(1), -1

        def arriving() -> Iterator[BatchRequest | None]:
            yield _batched(0, first)
            while True:
                request = self._queue.at_once()
                if request is None:
                    yield None
                    continue
                number = next(numbers)
                writing[number] = request
                yield _batched(number, request)

        def end(numbers: Iterable[int], error: str = "") -> None:
            for number in tuple(numbers):
                self._over(writing.pop(number), over.pop(number, error))

        pieces, failed = first.model.engine.generate_many(arriving(), first.model.spec.sequences), ""
        try:
            for one in pieces:
                number = cast(int, one.key)
                request, piece = writing[number], one.piece
                if piece is not None:
                    step = piece.step if piece.step is not None and piece.step.index != last else None
                    last = piece.step.index if piece.step is not None else last
                    self._take(request, replace(piece, step=step))  # a pass of several is recorded once
                if one.error:
                    request.answer.update(refused=one.refused, too_long=one.too_long)
                if one.error or (piece is not None and piece.kind == "end"):
                    over[number] = one.error
                if len(over) < len(writing):  # the last ones when the engine is free
                    end(over)
        except MoestroError as error:
            failed = str(error)
        except Exception as error:
            log_crash(log, error, "unexpected error while writing answers")
            failed = UNEXPECTED
        finally:
            if isinstance(pieces, Generator):
                pieces.close()
        end(writing, failed)

    def _over(self, request: Request, error: str) -> None:
        self._queue.end(request)  # before the answer is marked as ended, so that a waiting caller finds the engine free
        self._end(request, error)
        self._ended(request)

    def _take(self, request: Request, piece: Piece) -> None:
        """Commit one piece, then show it: displayed text is in the store, or queued in memory for it."""
        answer, step = request.answer, piece.step
        if step is not None and not step.changes and not request.model.engine.settings.telemetry.enabled:
            step = None
        if step is not None or piece.text or piece.token is not None:
            self._save(request, piece, step)
        if step is not None:
            request.model.effective.update(step.changes)
        if piece.kind == "prefill":
            _read(answer, piece)
        elif piece.kind == "token":
            if not answer.n_tokens:
                answer.update(ttft_ms=(time.perf_counter() - answer.requested_s) * 1000 - answer.queued_ms)
            if piece.logprob is not None:  # before the text that it belongs to
                answer.update(logprobs=(*answer.logprobs, piece.logprob))
            answer.update(state="streaming", text=answer.text + piece.text, n_tokens=answer.n_tokens + 1)
        else:
            answer.update(stats=piece.stats, text=answer.text + piece.text)
        if step is not None:
            self._on_step(request, step)

    def _save(self, request: Request, piece: Piece, step: StepRecord | None) -> None:
        """Save one pass in the store, or keep its text in memory when the store cannot take it."""
        answer, model, text, token = request.answer, request.model, piece.text, piece.token
        if self.unsaved.has(answer):
            self.unsaved.save()
        try:
            kept = self._store.token(
                model.load, answer.chat_id, answer.message_id, answer.n_tokens, text, step, model.effective, token
            )
            answer.unrecorded += not kept
        except MoestroError as error:
            answer.unrecorded += step is not None
            if (text or token is not None) and answer.message_id is not None:
                self.unsaved.add(answer, answer.n_tokens, text, token, str(error))

    def _end(self, request: Request, error: str) -> None:
        """Record the answer's final state in the store and for display. A failure before the first token leaves no
        trace."""
        answer = request.answer
        stopped = answer.cancelled.is_set()
        undone = answer.n_tokens == 0 and bool(error or stopped)
        state = "undone" if undone else "error" if error else "stopped" if stopped else "done"
        stats = None
        if answer.stats is not None:
            sampling = {**request.sampling.settings, "seed": answer.stats.seed}
            stats = {**answer.stats.as_dict(), "queued_ms": answer.queued_ms, "sampling": sampling}
            stats["load"] = request.model.load
        if stats and answer.opens_reasoning:
            stats["opens_reasoning"] = True
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


def _batched(number: int, request: Request) -> BatchRequest:
    answer = request.answer
    answer.update(state="prefill", queued_ms=(time.perf_counter() - answer.requested_s) * 1000)
    return BatchRequest(
        number, request.prompt, request.sampling, answer.cancelled, reuse=True, reading=_reading(answer)
    )


def _reading(answer: Answer) -> Callable[[Piece], None]:
    """Shows how far the prompt is read, a few times a second."""
    shown_s = time.perf_counter()

    def show(piece: Piece) -> None:
        nonlocal shown_s
        now_s = time.perf_counter()
        if now_s - shown_s >= READING_S:
            shown_s = now_s
            _read(answer, piece)

    return show


def _read(answer: Answer, piece: Piece) -> None:
    answer.update(prefill_done=piece.done, prefill_total=piece.total, prefill_cached=piece.cached)
