"""Ends an answer before the first of some texts, wherever tokens begin and end in it."""

from collections.abc import Sequence


class StopText:
    """Fed the text of an answer piece by piece. It withholds what may be the beginning of one of the texts `stops`."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [one for one in stops if one]
        self._held = ""
        self.found = ""  # the text that ended the answer; "" while none has

    def feed(self, text: str) -> str:
        """The next text of the answer -> what may be shown of it and of what was withheld. When a stop text is
        complete, that is the text before it, and `found` is set."""
        held = self._held + text
        if found := min(((held.index(one), -len(one), one) for one in self._stops if one in held), default=None):
            at, _, self.found = found
            self._held = ""
            return held[:at]
        keep = max((begun(held, one) for one in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """What is still withheld, for an answer that has ended otherwise."""
        held, self._held = self._held, ""
        return held


def begun(text: str, stop: str) -> int:
    """The number of characters at the end of `text` that `stop` begins with, and does not consist of."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
