"""Bytes that requests have in flight, all of them together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InFlight:
    """A cap on what many requests hold at once. For one event loop: nothing here waits or locks.

    `held`: bytes taken and not yet given back.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """What one request holds; given back at the end of the `with`."""
        share = Share(self)
        try:
            yield share
        finally:
            share.give(share.held)


class Share:
    """The bytes of one request."""

    def __init__(self, whole: InFlight) -> None:
        self._whole, self.held = whole, 0

    def take(self, count: int, elsewhere: int = 0) -> bool:
        """Hold `count` bytes more; False, and nothing is held, where they do not fit next to `elsewhere` bytes that
        count against the same cap."""
        if self._whole.held + elsewhere + count > self._whole.most:
            return False
        self._whole.held += count
        self.held += count
        return True

    def give(self, count: int) -> None:
        """Give back up to `count` of the bytes held."""
        count = min(count, self.held)
        self._whole.held -= count
        self.held -= count
