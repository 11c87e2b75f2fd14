"""Chooses how many guessed tokens a pass verifies: as many as make the most tokens in the time that passes have been
measured to take, and none where that is not surely more than without."""

import math
from collections import deque
from collections.abc import Collection, Sequence
from itertools import accumulate, repeat
from operator import mul
from typing import NamedTuple

from core.engine.pass_price import Load, PassPrice, Usual

COUNTS = 1, 2, 4, 8  # guesses that passes verify: of few kinds of passes it is soon known what they take
KEPT = 16  # of the latest passes of each width
PLAIN = 16  # passes with guesses, after which one without shows what a token takes now
REST = 512  # passes, after which what those of other rows took is forgotten, and may be tried again
LEAST = 1.1  # times the tokens a second without, or nothing is guessed: what is expected is known no better
LEAST_ALONE = 0.2  # of what a token usually takes, of one whose experts are foretold
LOSS = 0.01  # of the time of decoding, which trials may cost
CREDIT, MOST = 1.0, 2.0  # tokens' time: what trials may cost at first, and what is put by at most
SURE = 0.25  # tokens' time that is always risked, where more than that is expected to be won
SLOPE = 0.3  # of a token's time that each further row takes, before any was measured
STRENGTH = 2.0  # guessed tokens, or passes, that a prior counts as
WEIGHT = 0.98  # of what was seen before, with each pass
GROUPS = ((4, 0.15), (8, 0.4), (16, 0.7), (1 << 30, 0.85))  # tokens that matched, and the share accepted before any


class Worth(NamedTuple):
    """How many guesses to verify, and the tokens a second that this is expected to make, by those without."""

    guesses: int = 0
    faster: float = 1.0


class DraftGate:
    """Of one loaded model and one way of guessing, over all answers. Times are those of whole passes, by their rows:
    they contain what guessing takes, and the union of the rows' experts. Those of several rows are kept as multiples of
    what one took then, as both grow with the text, and on a machine that is busy. Where the experts of a pass are
    foretold, it is expected to take as much more or less as their number differs from that of others of its rows."""

    def __init__(self, slope: float = SLOPE, guess_ms: float = 0.0) -> None:
        """Before any was measured, each further row takes `slope` of a token's time, and its guess `guess_ms` beside
        that."""
        self.fixed: int | None = None  # guess so many always, as far as there are guesses: for comparisons
        self._slope, self._guess_ms = slope, guess_ms
        self._judged = 0  # the number of the pass whose guesses were judged last
        self._owed_ms = 0.0  # that reading took and guesses have not won back
        self._forget()
        self.restart()

    def _forget(self) -> None:
        """How often guesses are right is not known."""
        self._held = [[STRENGTH * share, STRENGTH] for _, share in GROUPS]  # guesses that were right, and judged ones

    def restart(self) -> None:
        """Discard what passes took: another setting acts now. How often guesses are right does not depend on it."""
        self._plain = deque[float](maxlen=KEPT)  # what passes of one row took
        self._times: dict[int, deque[float]] = {}  # by rows: how many times as long as one of one row then
        self._loads: dict[int, Usual] = {}  # by rows, 1 included
        self._price = PassPrice()
        self._latest: dict[int, int] = {}  # the number of the latest pass of so many rows
        self._credit_ms: float | None = None
        self._passes = self._judged = 0

    @property
    def ready(self) -> bool:
        """Whether guesses may be chosen: otherwise a pass of one row is to show what that takes."""
        return self.fixed is not None or bool(self._plain and self._passes - self._latest[1] < PLAIN)

    def passed_by(self, passes: int) -> None:
        """So many passes of one row went by, of which it is not told more."""
        self._passes += passes
        self._latest[1] = self._passes

    def choose(self, matched: int, offered: int, loads: Sequence[Load] = ()) -> Worth:
        """How many of the `offered` tokens to verify, which follow a match of `matched` tokens. `loads`: foretold of
        passes of 1, 2, .. rows, as far as they are known."""
        if self.fixed is not None:
            return Worth(min(self.fixed, offered), math.inf)
        if self._passes - self._judged > REST:  # another text may be guessed better
            self._judged = self._passes
            self._forget()
        for rows in [rows for rows in self._times if self._passes - self._latest[rows] > REST]:
            del self._times[rows]
            self._loads.pop(rows, None)
        plain = self.took_ms(1)
        if plain is None or self._credit_ms is None or not self.ready:
            return Worth()
        right, judged = self._held[_group(matched)]
        risk, expected, best, chosen = 1 - right / judged, 1.0, LEAST, 0
        alone = self._alone(loads)
        for count, share in enumerate(accumulate(repeat(1 - risk, offered), mul), 1):
            expected += share  # that all of so many are right
            if count in COUNTS:
                times = self._expected_times(count + 1, loads)
                times = max(alone, times) if loads else times
                affords = risk * (times - alone) * plain <= max(self._credit_ms, SURE * plain)
                if affords and expected * alone / times > best:
                    best, chosen = expected * alone / times, count
        return Worth(chosen, best) if chosen else Worth()

    def wins_back(self, worth: Worth, first_ms: float, left: int) -> bool:
        """Whether such guesses are expected to win back, in the `left` tokens that are written next, the `first_ms` of
        what has to be computed before them; and have won back what that took before."""
        plain = self.took_ms(1)
        if not first_ms or plain is None or self.fixed is not None:
            return True
        return self._owed_ms <= MOST * plain and first_ms <= left * plain * (1 - 1 / worth.faster)

    def judged(self, matched: int, right: int, judged: int) -> None:
        """Of the tokens guessed after a match of `matched` ones, `judged` were compared with what was drawn, whether a
        pass verified them or not."""
        group = self._held[_group(matched)]
        group[:] = WEIGHT * group[0] + right, WEIGHT * group[1] + judged
        self._judged = self._passes

    def took(
        self, guessed: int, accepted: int, took_ms: float, first_ms: float = 0.0, load: Load | None = None
    ) -> float:
        """A pass verified `guessed` tokens in `took_ms`, after what was computed first in `first_ms` -> the time that
        this saved, negative where it cost more; 0 where nothing was guessed, or what a token takes is not known.
        `load`: what was foretold of it, or of one without guesses what it had."""
        self._passes += 1
        self._latest[1 + guessed] = self._passes
        before = self.took_ms(1 + guessed) if load is not None else None
        if not guessed:
            self._plain.append(took_ms)
        plain = self.took_ms(1)
        if plain is None:
            return 0.0
        if guessed:
            self._times.setdefault(1 + guessed, deque(maxlen=KEPT)).append(took_ms / plain)
        if load is not None:
            usual_load = self._loads.setdefault(1 + guessed, Usual(KEPT))
            if usual_load.passes and before is not None:
                self._price.note(load, took_ms / plain, usual_load.load, before / plain)
            usual_load.note(load)
        instead, usual = (1 + accepted) * plain, (self.took_ms(1 + guessed) or plain) if guessed else plain
        credit = CREDIT * plain if self._credit_ms is None else self._credit_ms
        won = LOSS * took_ms + (instead - usual if guessed else 0.0)
        self._credit_ms = min(MOST * plain, credit + won)
        self._owed_ms = max(0.0, self._owed_ms + first_ms - won)
        return instead - took_ms - first_ms if guessed else 0.0

    def took_ms(self, rows: int) -> float | None:
        """What a pass of so many rows takes, without the slowest of those measured; None before one was."""
        plain = _usual(self._plain) if self._plain else None
        if plain is None or rows == 1:
            return plain
        return plain * _usual(self._times[rows]) if rows in self._times else None

    def _alone(self, loads: Sequence[Load]) -> float:
        """How many times as long as usual the pass of one row is expected to take."""
        if not loads or 1 not in self._loads:
            return 1.0
        return max(LEAST_ALONE, 1 + self._price.more(loads[0], self._loads[1].load))

    def _expected_times(self, rows: int, loads: Sequence[Load]) -> float:
        """How many times as long as one row so many take: as measured, if seldom closer to what other numbers of rows
        say of it; more or less as the experts that are foretold. Each further row is expected to take no more than
        SLOPE until it was tried: experts are shared."""
        taken = self._times.get(rows, ())
        fewer = max((other for other in self._times if other < rows), default=1)
        more = min((other for other in self._times if other > rows), default=0)
        known = {other: _usual(self._times[other]) for other in (fewer, more) if other > 1} | {1: 1.0}
        slope = self._slope + self._guess_ms / (self.took_ms(1) or math.inf)
        if more:
            slope = (known[more] - known[fewer]) / (more - fewer)
        elif fewer > 1:
            slope = min(slope, (known[fewer] - 1) / (fewer - 1))
        prior = known[fewer] + max(0.0, slope) * (rows - fewer)
        if len(loads) >= rows and fewer in self._loads and not more:
            prior = max(prior, known[fewer] + self._price.more(loads[rows - 1], self._loads[fewer].load))
        measured = len(taken) * _usual(taken) if taken else 0.0
        times = (measured + STRENGTH * prior) / (len(taken) + STRENGTH)
        if len(loads) >= rows and taken and rows in self._loads:
            times += self._price.more(loads[rows - 1], self._loads[rows].load)
        return times


def _usual(taken: Collection[float]) -> float:
    """The mean, without the largest one where there are more than two."""
    return (sum(taken) - max(taken)) / (len(taken) - 1) if len(taken) > 2 else sum(taken) / len(taken)


def _group(matched: int) -> int:
    """The group of matches of so many tokens."""
    return next(at for at, (end, _) in enumerate(GROUPS) if matched < end)
