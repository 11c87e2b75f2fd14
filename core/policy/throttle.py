"""Does what is to save waiting for copies only where tokens are faster with it than without: compared while answers are
written, again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from core.policy.comparison import Compared, Comparison, most
from core.types import StepRecord

REST = 256  # tokens until the next comparison; doubles each time that it says the same
LONGEST = 4096
LITTLE = 0.03  # of a token's time: where copies are waited for no longer, nothing can save more, and it is not tried
FEW = 3  # tokens with it, each of which took longer to predict than copies are waited for: it cannot save as much
CLEAR = 0.6  # of the time that waiting for every copy would take, as predicted: as little is not compared with it


Seen = tuple[float, float, int, bool]  # ms a token with it and without, over so many tokens each; whether it goes on


class Tried(NamedTuple):
    """What was compared while answers were written, None before any comparison and where there is none: prefetching;
    where that was not tried, `waits`, the ms waited for copies and the ms of a token; and computing missing experts on
    the host, whose time without it is `predicted` where it is clear."""

    prefetching: Seen | None = None
    waits: tuple[float, float] | None = None
    placement: Seen | None = None
    predicted: bool = False


class Throttle:
    """Of `what`: prefetching, or computing missing experts on the host. While `enabled`, that is paused from the first
    token on; then tokens with it and without it are compared (`core.policy.comparison`). It goes on where it is surely
    faster, and pauses otherwise: also where the two cannot be told apart, and where there is next to nothing to save,
    or less than predicting takes. `say(text)` is called with every result; `last` is the last comparison, and `waits`
    why there was none: (ms waited for copies, ms) of a token.

    What `foretells` how much it saves is not paused at first: tokens are compared only where that is neither clearly
    much nor next to nothing. What predicting took is kept by the `way` that it is done, so that the first look after a
    `restart` needs no token with it where that is more than can be saved."""

    def __init__(self, what: str = "prefetching", *, foretells: bool = False) -> None:
        self._what, self._foretells = what, foretells
        self.free = False  # by its costs it is never slower: it goes on uncompared, whatever is foretold
        self.after: Throttle | None = None  # what is compared first, as it saves the same waiting
        self.say: Callable[[str], None] = lambda text: None
        self.enabled = False
        self._known_ms = dict[str, float]()  # the least that predicting took of a token, by way
        self.restart()

    def restart(self, way: str = "") -> None:
        """Discard all measurements because what is done, or how, has changed. `way`: how it is predicted now."""
        self._way, self._knows = way, way in self._known_ms
        self.last: Compared | None = None
        self.predicted = False  # `last` is by what was foretold
        self.waits: tuple[float, float] | None = None
        self._begin()
        self._pays, self._left, self._rest = False, 0, REST

    def _begin(self) -> None:
        self._comparison: Comparison | None = Comparison()
        self._foretold: list[tuple[float, float]] | None = [] if self._foretells else None  # ms of a token, ms saved
        self._waited, self._took = list[float](), list[float]()  # ms of the tokens before the first one with it
        self._predicted = list[float]()  # ms of predicting, of those with it

    @property
    def seen(self) -> Seen | None:
        """The last result."""
        last = self.last if self.enabled else None
        return None if last is None else (last.other_ms, last.usual_ms, last.tokens, last.faster is True)

    @property
    def paused(self) -> bool:
        """Whether the next pass goes without it."""
        if not self.enabled or self._foretold is not None:
            return False
        return not (self._pays if self._comparison is None else self._comparison.other)

    @property
    def comparing(self) -> bool:
        """Whether tokens with it and without it take turns now."""
        return self.enabled and self._comparison is not None

    def note(self, step: StepRecord, saved_ms: float = 0.0) -> None:
        """Take a pass into account, which is foretold to have saved so much; only decoded tokens count."""
        if not self.enabled or step.phase != "decode" or (self.after is not None and self.after.comparing):
            return
        if self._comparison is None:
            self._left -= 1
            if self._left <= 0:
                self._begin()
            return
        if self._foretold is not None:
            self._foretold.append((step.total_ms / step.tokens, saved_ms / step.tokens))
            if len(self._foretold) == FEW:
                self._weigh(*zip(*self._foretold, strict=True))
                self._foretold = None
            return
        untried, with_it = not self._comparison.tried, self._comparison.other
        self._comparison.note(step.total_ms / step.tokens)
        if self._comparison.result is not None:
            self._conclude(self._comparison.result)
        elif untried:
            self._waited.append(step.stall_ms / step.tokens)
            self._took.append(step.total_ms / step.tokens)
            if self._comparison.tried and sum(self._waited) < LITTLE * sum(self._took):
                self._leave("")
            elif self._comparison.tried and self._knows:
                self._weigh_predicting()
        elif with_it:
            self._predicted.append(step.predict_ms / step.tokens)
            if len(self._predicted) == FEW:
                self._known_ms[self._way] = min(self._predicted)
                self._weigh_predicting()

    def _weigh(self, took_ms: tuple[float, ...], saved_ms: tuple[float, ...]) -> None:
        """By what was foretold of FEW tokens with it: it goes on, is paused, or is compared."""
        shares = [took / (took + saved) for took, saved in zip(took_ms, saved_ms, strict=True)]
        if self.free or max(shares) <= CLEAR or min(shares) >= 1 - LITTLE:
            mean_ms = sum(took_ms) / FEW
            faster = True if self.free or max(shares) <= CLEAR else None
            self._conclude(Compared(mean_ms + sum(saved_ms) / FEW, mean_ms, FEW, faster), ", as foretold")
            self.predicted = True

    def _weigh_predicting(self) -> None:
        """Leave where it takes longer than copies are waited for."""
        self._knows = False  # of the next look tokens are measured again
        if self._known_ms[self._way] > most(self._waited):
            self._leave(f", predicting takes {self._known_ms[self._way]:.3g}")

    def _leave(self, why: str) -> None:
        """There is too little to save."""
        tokens = len(self._waited)
        self._rest = REST if self.waits is None else min(LONGEST, 2 * self._rest)
        self.waits, self.last = (sum(self._waited) / tokens, sum(self._took) / tokens), None
        self._comparison, self._pays, self._left = None, False, self._rest
        self.say(
            f"{self._what} paused: copies are waited for {self.waits[0]:.3g} of a token's {self.waits[1]:.3g} ms{why}; "
            f"looked at again in {self._rest} tokens"
        )

    def _conclude(self, result: Compared, how: str = "") -> None:
        pays, self.predicted = result.faster is True, False
        self._rest = min(LONGEST, 2 * self._rest) if self.last is not None and pays == self._pays else REST
        self.last, self._comparison, self._pays, self._left = result, None, pays, self._rest
        self.waits = None
        verdict = "goes on" if pays else "paused" if result.faster is False else "paused, not told apart"
        self.say(
            f"{self._what} {verdict}: {result.other_ms:.3g} ms a token with it, {result.usual_ms:.3g} without{how}, "
            f"over {result.tokens} tokens each; compared again in {self._rest} tokens"
        )
