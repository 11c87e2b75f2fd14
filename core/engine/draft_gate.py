"""Chooses how many guessed tokens a pass verifies: as many as make the most tokens in the time that passes have been
measured to take, and none where that is not surely more than without."""

from collections import deque
from itertools import accumulate, repeat
from operator import mul

KEPT = 16  # of the latest passes of each width
PLAIN = 16  # passes with guesses, after which one without shows what a token takes now
REST = 512  # passes, after which what those of other rows took is forgotten, and may be tried again
LEAST = 1.03  # times the tokens a second without, or nothing is guessed
LOSS = 0.01  # of the time of decoding, which trials may cost
CREDIT, MOST = 1.0, 2.0  # tokens' time: what trials may cost at first, and what is put by at most
SLOPE = 0.3  # of a token's time that each further row takes, before any was measured
STRENGTH = 2.0  # guessed tokens that a prior counts as
WEIGHT = 0.98  # of what was seen before, with each pass
GROUPS = ((4, 0.15), (8, 0.4), (16, 0.7), (1 << 30, 0.85))  # tokens that matched, and the share accepted before any


class DraftGate:
    """Of one loaded model, over all its answers. Times are milliseconds of whole passes, by their rows: they contain
    what the union of the rows' experts takes."""

    def __init__(self) -> None:
        self.fixed: int | None = None  # guess so many always, as far as there are guesses: for comparisons
        self._held = [[STRENGTH * share, STRENGTH] for _, share in GROUPS]  # guesses that were right, and judged ones
        self.restart()

    def restart(self) -> None:
        """Discard what passes took: another setting acts now. How often guesses are right does not depend on it."""
        self._taken: dict[int, deque[float]] = {}  # by rows
        self._latest: dict[int, int] = {}  # the number of the latest pass of so many rows
        self._credit_ms: float | None = None
        self._passes = 0

    def choose(self, matched: int, offered: int) -> int:
        """How many of the `offered` tokens to verify, which follow a match of `matched` tokens."""
        if self.fixed is not None:
            return min(self.fixed, offered)
        for rows in [rows for rows, at in self._latest.items() if rows > 1 and self._passes - at > REST]:
            del self._taken[rows], self._latest[rows]
        plain = self.took_ms(1)
        if plain is None or self._credit_ms is None or self._passes - self._latest[1] >= PLAIN:
            return 0
        right, judged = self._held[_group(matched)]
        risk, expected, best, chosen = 1 - right / judged, 1.0, LEAST / plain, 0
        for count, share in enumerate(accumulate(repeat(1 - risk, offered), mul), 1):
            expected += share  # that all of so many are right
            took = self._expected_ms(count + 1, plain)
            if expected / took > best and risk * (took - plain) <= self._credit_ms:
                best, chosen = expected / took, count
        return chosen

    def judged(self, matched: int, right: int, judged: int) -> None:
        """Of the tokens guessed after a match of `matched` ones, `judged` were compared with what was drawn, whether a
        pass verified them or not."""
        group = self._held[_group(matched)]
        group[:] = WEIGHT * group[0] + right, WEIGHT * group[1] + judged

    def took(self, guessed: int, accepted: int, took_ms: float) -> float:
        """A pass verified `guessed` tokens in `took_ms` -> the time that this saved, negative where it cost more; 0
        where nothing was guessed, or what a token takes is not known."""
        self._passes += 1
        self._latest[1 + guessed] = self._passes
        self._taken.setdefault(1 + guessed, deque(maxlen=KEPT)).append(took_ms)
        plain = self.took_ms(1)
        if plain is None:
            return 0.0
        saved = (1 + accepted) * plain - took_ms if guessed else 0.0
        credit = CREDIT * plain if self._credit_ms is None else self._credit_ms
        self._credit_ms = min(MOST * plain, credit + saved + LOSS * took_ms)
        return saved

    def took_ms(self, rows: int) -> float | None:
        """What a pass of so many rows takes, without the slowest of those measured; None before one was."""
        taken = self._taken.get(rows)
        if not taken:
            return None
        return (sum(taken) - max(taken)) / (len(taken) - 1) if len(taken) > 2 else sum(taken) / len(taken)

    def _expected_ms(self, rows: int, plain: float) -> float:
        """The same, or what the nearest number of rows that was measured says of it."""
        took = self.took_ms(rows)
        if took is not None:
            return took
        known = [other for other in self._taken if other > 1]
        if not known:
            return plain * (1 + SLOPE * (rows - 1))
        nearest = min(known, key=lambda other: abs(other - rows))
        slope = max(0.0, (self.took_ms(nearest) or plain) - plain) / (nearest - 1)
        return plain + slope * (rows - 1)


def _group(matched: int) -> int:
    """The group of matches of so many tokens."""
    return next(at for at, (end, _) in enumerate(GROUPS) if matched < end)
