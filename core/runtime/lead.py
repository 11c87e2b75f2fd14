"""Who leads the tokens of a GPU where the user leaves it open: the host or the GPU, whichever has been faster.

A graph spares the host's launches, but reads missing experts where they are, one after another; led by the host, their
copies land while others are computed. Which is faster depends on the model, the card, the link and the hit rate. So
both are timed on the answers' own tokens, whose bits are the same either way: mostly the faster one, now and then a few
tokens of the other.
"""

from collections import deque

TRIED = 2  # tokens of the slower way in a row, whose faster one counts
FIRST, OFTEN, SELDOM = 16, 128, 1024  # tokens of the faster way before the other is tried: at first, then, and at most
CLEAR = 2.0  # times as long: the longer way is tried more and more seldom
KEPT = 8  # latest times of each way, whose median counts


class Lead:
    """For the decoded tokens of one model and one set of settings."""

    def __init__(self) -> None:
        self.by_gpu = True  # who is faster, as far as is known
        self._times = {by_gpu: deque[float](maxlen=KEPT) for by_gpu in (True, False)}
        self._tries, self._until, self._apart = 0, FIRST, OFTEN

    @property
    def next(self) -> bool:
        """Whether the GPU leads the next token."""
        return self.by_gpu if self._until else not self.by_gpu

    def took(self, by_gpu: bool, seconds: float) -> None:
        """A token took so long."""
        self._times[by_gpu].append(seconds)
        if self._until:
            self._until -= by_gpu == self.by_gpu
        elif by_gpu != self.by_gpu:
            self._tries += 1
            if self._tries == TRIED:
                self._decide()

    def _decide(self) -> None:
        """After a trial of the other way."""
        tried, known = min(list(self._times[not self.by_gpu])[-TRIED:]), sorted(self._times[self.by_gpu])
        usual = known[len(known) // 2]
        if tried < usual:
            self.by_gpu = not self.by_gpu
        self._apart = min(SELDOM, 2 * self._apart) if tried > CLEAR * usual else OFTEN
        self._tries, self._until = 0, self._apart
