"""How far a prompt is read, as one line of a terminal."""

from __future__ import annotations

import sys
import time

from core.types import Piece

FIRST_S, AGAIN_S = 1.0, 0.2  # a prompt that is read sooner shows nothing


class Reading:
    """Written to stderr while a prompt is read: percent, tokens a second, time left. `end` wipes it out."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._next_s = self._began_s + FIRST_S
        self._wide = 0

    def __call__(self, piece: Piece) -> None:
        """So much is read: see `core.engine.Engine.generate`."""
        now_s = time.perf_counter()
        if now_s < self._next_s:
            return
        self._next_s = now_s + AGAIN_S
        text = describe(piece, now_s - self._began_s)
        self._write(text)
        self._wide = len(text)

    def end(self) -> None:
        """The prompt is read, or a part of it."""
        if self._wide:
            self._write("")
            self._wide = 0

    def _write(self, text: str) -> None:
        print(f"\r{text.ljust(self._wide)}" + "\r" * (not text), end="", file=sys.stderr, flush=True)


def describe(piece: Piece, seconds: float) -> str:
    """The line after `seconds`."""
    speed = (piece.done - piece.cached) / seconds
    left = f", {speed:.0f} tok/s, {(piece.total - piece.done) / speed:.0f} s left" if speed else ""
    return f"Reading the prompt: {piece.done / piece.total:.0%} of {piece.total} tokens{left}"
