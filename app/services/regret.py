"""The regret meter during chat: feeds the session's routing to shadow caches in a process of their own.

The computing thread only appends to a queue (`add`). A thread here sends the passes of each half second to the process
(`app.services.regret_process`) and keeps the returned figures. When it falls behind, the oldest passes are dropped and
counted."""

import logging
import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from app.services.analysis.whatif import BOUNDS
from app.services.regret_feed import WINDOW, Compared, Feed, Step, choices
from app.services.regret_process import Lost, Process
from core.engine.quality.interval import margin, mean_error, surely_more
from core.metrics.limit import Fewest
from core.policy.allocation.slot_allocation import AllocationProfile
from core.settings.config import Settings
from core.settings.registry import variant, variants
from core.simulate import BELADY, BELADY_BYPASS
from core.types import ModelShape, StepRecord

log = logging.getLogger("moestro.app")
QUEUE = 2048  # queued passes
GATHER_S = 0.5  # passes are collected this long before they are sent
TRIES = 3  # consecutive process failures before giving up
ENOUGH = 32  # fewest tokens for meaningful figures


class Regret:
    """One per application. `add`, `switch` and `rest` return at once, independent of the process."""

    def __init__(self, on: bool = True, start: Callable[[], Process] = Process) -> None:
        self.on = on
        self.heard: Callable[[], None] = lambda: None  # called after every change of `view`, on the thread here
        self.version = 0  # incremented with every change of `view`
        self._queue: deque[Step] = deque(maxlen=QUEUE)
        self._news = threading.Condition()
        self._closing = threading.Event()
        self._asleep = self._resting = self._failed = False
        self._thread: threading.Thread | None = None
        self._feed = Feed(start, self._publish)
        self._now = -1, Settings()
        self._left_out = self._losses = 0
        self._compared: Compared | None = None

    def add(
        self,
        load: int,
        shape: ModelShape,
        settings: Mapping[str, Any],
        step: StepRecord,
        profile: AllocationProfile | None = None,
    ) -> None:
        """Queue a pass computed with these settings. Called on the computing thread; only appends."""
        if not self.on or (self._failed and load == self._now[0]):
            return
        if load != self._now[0] or step.changes:
            self._now = load, Settings(settings)
        self._left_out += len(self._queue) == QUEUE  # a full deque drops its oldest entry
        self._queue.append(Step(load, shape, self._now[1], step, profile))
        if self._asleep or self._thread is None:
            self._wake()

    def switch(self, on: bool) -> None:
        """Switch on or off; off ends the process."""
        if on != self.on:
            self.on = on
            self.rest()

    def rest(self) -> None:
        """Forget the figures, and end the process until new passes come."""
        with self._news:
            self._queue.clear()
            self._failed, self._resting = False, True
            self._news.notify_all()
        self._hurry()

    def close(self, timeout: float = 5.0) -> None:
        """End the process and the thread."""
        self.on = False
        self._closing.set()
        self.rest()
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def pid(self) -> int | None:
        """The id of the process, or None."""
        process = self._feed.process
        return process.pid if process is not None else None

    def view(
        self, load: int | None, settings: Settings, *, in_blocks: bool = False, text_to_text: bool = False
    ) -> dict[str, Any] | None:
        """The data shown by the deck, or None when the meter is off or no model is loaded. `state`:

        "waiting" for tokens, "warming" up (fewer than ENOUGH tokens), "ready", "untold" (telemetry is off: nothing to
        compare), "in blocks" (of which others would have no part), "text to text" (whose routing is not recorded), or
        "failed"."""
        if not settings.telemetry.regret or load is None:
            return None
        name, compared = settings.cache.eviction.name, self._compared
        fits = self._fitting(load, settings)
        report = fits.report if fits is not None else None
        tokens = report["tokens"] if report else 0
        shown: dict[str, Any] = {
            "policy": name,
            "title": variant("eviction", name).title,
            "window": WINDOW,
            "tokens": tokens,
            "enough": ENOUGH,
            "left_out": fits.left_out if fits is not None else 0,
            "prefetch": settings.prefetch.predictor.name != "none",
            "state": "in blocks"
            if in_blocks
            else "text to text"
            if text_to_text
            else "untold"
            if not settings.telemetry.enabled
            else "failed"
            if self._failed
            else "ready"
            if tokens >= ENOUGH
            else "warming"
            if compared is not None
            else "waiting",
        }
        if shown["state"] == "ready" and report is not None:
            shown |= ranked(name, report, shown["prefetch"])
        return shown

    def fewest(self, load: int | None, settings: Settings) -> Fewest | None:
        """What the best cache policy would have missed under these settings; None while that is not known."""
        fits = self._fitting(load, settings) if settings.telemetry.regret and load is not None else None
        if fits is None or fits.report is None or fits.report["tokens"] < ENOUGH:
            return None
        return Fewest(1.0 - fits.report["belady"], fits.report["tokens"], fits.until)

    def _fitting(self, load: int, settings: Settings) -> Compared | None:
        """The figures, where they are of this load and these settings."""
        compared = self._compared
        return (
            compared if load is not None and compared is not None and compared.of == choices(load, settings) else None
        )

    def wait(self, version: int, timeout: float | None = None) -> int:
        """Block until the version differs from `version`, or `timeout` s passed; returns the version."""
        with self._news:
            self._news.wait_for(lambda: self.version != version, timeout)
            return self.version

    # -- the thread --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._news:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="moestro-regret", daemon=True)
                self._thread.start()
            self._news.notify_all()

    def _run(self) -> None:
        try:
            while self._wait():
                try:
                    self._step()
                except Lost as lost:
                    self._lost(str(lost))
                except Exception:
                    self._lost(traceback.format_exc())
        finally:
            self._feed.let_go()

    def _wait(self) -> bool:
        """Wait for work; False when closing."""
        with self._news:
            self._asleep = True
            self._news.wait_for(lambda: self._queue or self._resting or self._closing.is_set(), self._feed.due_s)
            self._asleep = False
        return not (self._closing.wait(GATHER_S) if self._queue else self._closing.is_set())

    def _step(self) -> None:
        if self._resting:
            self._resting = False
            self._feed.forget()
            self._publish(None)
            return
        steps = [self._queue.popleft() for _ in range(len(self._queue))]
        left_out, self._left_out = self._left_out, 0
        self._feed.take(steps, left_out)
        if self._feed.due_s == 0.0:
            self._feed.report()
            self._losses = 0

    def _lost(self, why: str) -> None:
        """The process was ended from here, or failed. Failures are retried up to TRIES times in a row."""
        self._feed.let_go()
        if self._resting or self._closing.is_set():
            return
        self._losses += 1
        self._failed = self._losses >= TRIES
        log.warning("the regret meter broke off (%d of %d): %s", self._losses, TRIES, why)
        self._publish(None)

    def _hurry(self) -> None:
        """Stop waiting for an answer of the process."""
        process = self._feed.process
        if process is not None:
            process.kill()

    def _publish(self, compared: Compared | None) -> None:
        with self._news:
            self._compared = compared
            self.version += 1
            self._news.notify_all()
        self.heard()


def ranked(name: str, report: Mapping[str, Any], prefetch: bool) -> dict[str, Any]:
    """The chosen policy's figures, those of the other that hits most, the bound's, and every shadow cache's by rate.

    `bound`: which bound `belady` is. `alone`: the hit rate of the chosen policy's own shadow, which others are compared
    with: the same tokens, the same contents to begin with, nothing prefetched and nothing left out. The best of them
    counts as `better` only where it hits more by more than its noise, on blocks of the same tokens (`gain` and `error`,
    half its 95 % interval, as shares of the requests; wider, as it is the best of several), and without a prefetcher
    also more than the engine itself did."""
    titles = {v.name: v.title for v in variants("eviction")}
    rates: dict[str, float] = report["rates"]
    order = sorted((other for other in rates if other != name), key=lambda other: -rates[other])
    best = order[0] if order else None
    own = report["own"]
    alone = rates.get(name, own)  # a user-defined policy has no shadow
    gain, error = _gain(report, name, best)
    better = best is not None and surely_more(gain, error, len(order)) and (prefetch or rates[best] > own)
    return {
        "own": own,
        "alone": alone,
        "belady": report["belady"],
        "bound": BOUNDS[BELADY_BYPASS if report["bypass"] else BELADY],
        "best": best,
        "best_title": titles.get(best or "", best),
        "best_rate": rates.get(best or ""),
        "better": better,
        "gain": gain,
        "error": margin(error, len(order)) if math.isfinite(error) else None,
        "rates": [[titles.get(one, one), rates[one]] for one in sorted(rates, key=lambda one: -rates[one])],
    }


def _gain(report: Mapping[str, Any], name: str, best: str | None) -> tuple[float, float]:
    """How much more `best` hits than `name` on the same tokens, and the standard error of that; infinite where one of
    them has no shadow, or where the tokens are too few."""
    rates, blocks = report["rates"], report["blocks"]
    if best is None or name not in rates:
        return 0.0, math.inf
    differences = [high - low for high, low in zip(blocks[best], blocks[name], strict=True)]
    return float(rates[best] - rates[name]), mean_error(differences)[1]
