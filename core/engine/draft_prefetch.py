"""Fetches the experts that a pass over guesses is foretold to visit while the layers before theirs are computed, where
such passes are faster with it. Sources: SP-MoE (arXiv 2510.10302) and MoE-SpeQ (arXiv 2511.14102), which fetch what a
draft model's tokens are predicted to need; here that is what the same tokens have visited before in the text."""

import time

from core.engine.draft_trace import Foretold
from core.policy.comparison import Comparison
from core.policy.predict import Prediction
from core.policy.throttle import LITTLE, LONGEST, REST
from core.runtime.host_compute import HostCompute
from core.runtime.prefetcher import Prefetcher
from core.runtime.recorder import Recorder
from core.types import ModelShape

RIGHT, STRENGTH, WEIGHT = 0.8, 20.0, 0.99  # share that is used before any was; as how many that counts; of earlier ones
LATEST = 0.2  # weight of the latest time


class DraftPrefetch:
    """Of one loaded model, over all answers. Passes with it and without it take turns, and the faster way stays: their
    times are compared as multiples of what passes of as many rows usually take. Where copies are waited for no longer
    than predicting takes, or next to no time, it is not tried."""

    def __init__(
        self,
        shape: ModelShape,
        prefetcher: Prefetcher,
        host: HostCompute,
        recorder: Recorder,
    ) -> None:
        """Nothing is fetched while the `host` computes what passes over several rows miss where it lies."""
        self.fixed: bool | None = None  # always, or never: for comparisons
        self._shape, self._prefetcher, self._host = shape, prefetcher, host
        self._recorder = recorder
        self._used, self._begun = STRENGTH * RIGHT, STRENGTH
        self.restart()

    def restart(self) -> None:
        """Discard what passes took: another setting acts now."""
        self._comparison: Comparison | None = Comparison()
        self._pays, self._left, self._rest = False, 0, REST
        self._counts = self._fetches = False  # something might be fetched in the pass that comes, and is
        self._waited_ms: float | None = None  # in passes without it
        self._own_ms = 0.0  # what naming experts takes on the computing thread

    @property
    def _wanted(self) -> bool:
        if self.fixed is not None:
            return self.fixed
        return self._pays if self._comparison is None else self._comparison.other

    def fetch(self, foretold: Foretold, guesses: int, usual_ms: float | None) -> None:
        """The pass over so many guesses begins, which usually takes `usual_ms`: fetch what it lacks."""
        self._counts = self._fetches = False
        if not guesses or not foretold.missing or (self._host.used and self._host.takes_rows):
            return
        self._counts, self._fetches = True, self._wanted and (self.fixed is True or self._can_save(usual_ms))
        if self._fetches:
            began_s = time.perf_counter()
            experts, likely = self._shape.experts, min(1.0, self._used / self._begun)
            visited = dict.fromkeys(eid for row in foretold.rows[: 1 + guesses] for eid in row)  # in none's place
            self._prefetcher.fetch_for_draft([Prediction(*divmod(eid, experts), likely) for eid in visited])
            took_ms = 1e3 * (time.perf_counter() - began_s)
            self._own_ms += LATEST * (took_ms - self._own_ms) if self._own_ms else took_ms

    def _can_save(self, usual_ms: float | None) -> bool:
        return self._waited_ms is None or self._waited_ms > max(self._own_ms, LITTLE * (usual_ms or 0.0))

    def passed(self, took_ms: float, usual_ms: float | None, waited_ms: float) -> None:
        """That pass took so long, and waited for copies in it."""
        if not self._counts or usual_ms is None or self._recorder.latest is None:
            return
        if not self._fetches:
            before_ms = waited_ms if self._waited_ms is None else self._waited_ms
            self._waited_ms = before_ms + LATEST * (waited_ms - before_ms)
            if self._wanted:  # but it could save nothing
                return
        counts = self._recorder.latest.counts
        self._used = WEIGHT * self._used + counts.draft_prefetch_hits
        self._begun = WEIGHT * self._begun + counts.draft_prefetch_hits + counts.draft_prefetch_wasted
        if self._comparison is None:
            self._left -= 1
            if self._left <= 0:
                self._comparison = Comparison()
            return
        self._comparison.note(took_ms / usual_ms)
        if (result := self._comparison.result) is not None:
            pays = result.faster is True
            self._rest = min(LONGEST, 2 * self._rest) if pays == self._pays else REST
            self._comparison, self._pays, self._left = None, pays, self._rest
