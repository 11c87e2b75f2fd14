"""The quality meter of one engine: what it keeps of answers, the queue of answers to score, and the results."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy

import torch

from core.engine.quality.audit import PendingAnswer, Scores, score
from core.engine.quality.figures import perplexity
from core.engine.quality.report import Quality, together
from core.engine.quality.sample import Landing, Sample
from core.engine.quality.saved import EngineCache, Shadow, Waits, spared
from core.runtime.measurement import MeasurementSession, Preempted
from core.types import StepRecord

WAITING = 4  # most answers queued for scoring
ROLLING = 16  # answers in the rolling figures
TOO_MANY = "not scored: newer answers took its place"
TOO_OFTEN = "not scored: it was interrupted too often"


class Meter:
    """Any thread may read `due` and `quality`; all else needs the model lock. `audit` lets the model's errors through;
    that answer is then not tried again."""

    def __init__(self, device: torch.device, cache: EngineCache, copy_ms: Callable[[], float]) -> None:
        self.waits, self._cache = Waits(copy_ms), cache
        self.quality: Quality | None = None  # over the last ROLLING answers
        self._number, self._cuda = 0, device.type == "cuda"
        self._waiting: deque[PendingAnswer] = deque()
        self._lost: deque[Quality] = deque()
        self._last: deque[Quality] = deque(maxlen=ROLLING)

    @property
    def due(self) -> int:
        """Number of answers that `audit` still has a result for. May be called from any thread."""
        return len(self._waiting) + len(self._lost)

    @property
    def read(self) -> float:
        """Share of the oldest queued answer that `audit` has read. May be called from any thread."""
        return next((one.read for one in tuple(self._waiting)), 0.0)

    # ------------------------------------------------------------------ answers

    def begin(self) -> Sample:
        """An answer begins: where its logits are kept. An audit that it interrupted has one attempt less."""
        for one in self._waiting:
            one.left -= one.broken_off
            one.broken_off = False
        for one in [one for one in self._waiting if one.left <= 0]:
            self._waiting.remove(one)
            self._give_up(one, TOO_OFTEN)
        return Sample(Landing() if self._cuda else None)

    def end(self, sample: Sample, prompt: Sequence[int], tokens: Sequence[int], steps: Sequence[StepRecord]) -> int:
        """The answer is complete. Returns the number of its later quality result, or 0 when there will be none: no
        assignment was changed or had another weight, or no logits were kept."""
        rows = sample.finish()
        self.waits.note(steps)
        if not rows or all(step.lossless for step in steps):
            return 0
        self._number += 1
        self._waiting.append(
            PendingAnswer(self._number, list(prompt), list(tokens), rows, list(steps), Shadow(self._cache))
        )
        if len(self._waiting) > WAITING:
            self._give_up(self._waiting.popleft(), TOO_MANY)
        return self._number

    def clear(self) -> None:
        """Clears the queue, when the model is unloaded."""
        self._waiting.clear()
        self._lost.clear()

    # ------------------------------------------------------------------ audit

    def audit(self, bench: MeasurementSession, stop: Callable[[], bool]) -> Quality | None:
        """Scores the oldest queued answer. None when none is queued, or when `stop()`, called in every layer, became
        true: then the answer stays queued, and the cache may lack a few experts that it had."""
        if self._lost:
            return self._lost.popleft()
        if not self._waiting or not _quiet(bench, stop):
            return None
        answer = self._waiting[0]
        try:
            saved_ms = self._saved_ms(answer, stop)
            with bench.borrowed_cache(stop), bench.interruptible(stop):
                scores = score(bench, answer)
        except Preempted:
            answer.broken_off = True
            return None
        except BaseException:
            self._waiting.popleft()
            raise
        self._waiting.popleft()
        quality = _quality(answer, scores, saved_ms)
        self._last.append(quality)
        self.quality = together(self._last)
        return quality

    def _give_up(self, answer: PendingAnswer, why: str) -> None:
        self._lost.append(_quality(answer, Scores(), None, why))

    def _saved_ms(self, answer: PendingAnswer, stop: Callable[[], bool]) -> float | None:
        def go_on() -> None:
            if stop():
                raise Preempted

        requests = spared(answer.steps, deepcopy(answer.shadow), go_on) if answer.shadow is not None else None
        return None if requests is None else requests * self.waits.wait_ms()


def _quiet(bench: MeasurementSession, stop: Callable[[], bool]) -> bool:
    """Waits until no copy is in flight; False when `stop()` came first."""
    while not bench.expert_cache.quiet():
        if stop():
            return False
        time.sleep(0.002)
    return True


def _quality(answer: PendingAnswer, scores: Scores, saved_ms: float | None, note: str = "") -> Quality:
    n = len(scores.kl)
    return Quality(
        answer=answer.number,
        tokens=len(answer.tokens),
        scored=n,
        kl=sum(scores.kl) / n if n else None,
        kl_most=max(scores.kl) if n else None,
        agreement=sum(scores.agrees) / n if n else None,
        perplexity=perplexity(scores.log_p),
        saved_ms=saved_ms,
        note=note,
        changed=sum(step.changed for step in answer.steps),
        assignments=sum(step.assignments for step in answer.steps),
    )
