"""Work in a terminal: its progress on stderr, and Ctrl-C, whose first press stops the work and whose second exits."""

import dataclasses
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from app.wording import lossy, scored
from core.engine.quality.report import Quality
from core.types import AnswerStats, Piece

BAR = 24  # characters
EVERY_S = 0.1  # between two redraws of the bar
FIRST_S, AGAIN_S = 1.0, 0.2  # a prompt that is read sooner shows nothing


class Bar:
    """One line on stderr with a job's progress; without a terminal, a line per step."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._text, self._width, self._drawn = "", 0, 0.0
        self._began, self._total, self._first = 0.0, 0, 0

    def show(self, text: str, share: float, done: int = 0, total: int = 0) -> None:
        """Show `done` of `total` bytes; for a job without bytes, only `share` and the elapsed time."""
        now = time.perf_counter()
        if total != self._total or not self._began:  # another phase: download, then import
            self._began, self._total, self._first = now, total, done
        if not self._live:
            if text != self._text:
                print(f"{share:4.0%}  {text}", file=sys.stderr)
        elif text != self._text or now - self._drawn >= EVERY_S or share >= 1:
            self._draw(self._line(text, share, done, now))
            self._drawn = now
        self._text = text

    def _line(self, text: str, share: float, done: int, now: float) -> str:
        spent, fresh = now - self._began, done - self._first
        speed = fresh / spent if spent > 0 else 0.0
        left = f", {clock((self._total - done) / speed)} left" if speed and done < self._total else ""
        full = round(share * BAR)
        if not self._total:
            return f"[{'#' * full}{'.' * (BAR - full)}] {share:4.0%}  {clock(spent)}  {text}"
        return (
            f"[{'#' * full}{'.' * (BAR - full)}] {share:4.0%}  {done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, "
            f"{speed / 1e6:,.0f} MB/s{left}  {text}"
        )

    def _draw(self, line: str) -> None:
        line = line[: shutil.get_terminal_size().columns - 1]  # a wrapped line cannot be overwritten
        print(f"\r{line}{' ' * (self._width - len(line))}", end="", file=sys.stderr, flush=True)
        self._width = len(line)

    def end(self) -> None:
        """Finish the line."""
        if self._live and self._width:
            print(file=sys.stderr)


def clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


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
        text = describe_reading(piece, now_s - self._began_s)
        self._write(text)
        self._wide = len(text)

    def end(self) -> None:
        """The prompt is read, or a part of it."""
        if self._wide:
            self._write("")
            self._wide = 0

    def _write(self, text: str) -> None:
        print(f"\r{text.ljust(self._wide)}" + "\r" * (not text), end="", file=sys.stderr, flush=True)


def describe_reading(piece: Piece, seconds: float) -> str:
    """The line after `seconds`."""
    speed = (piece.done - piece.cached) / seconds
    left = f", {speed:.0f} tok/s, {(piece.total - piece.done) / speed:.0f} s left" if speed else ""
    return f"Reading the prompt: {piece.done / piece.total:.0%} of {piece.total} tokens{left}"


@contextmanager
def stoppable(cancel: threading.Event) -> Iterator[None]:
    """Within this context, SIGINT sets `cancel`, or raises KeyboardInterrupt if it is already set. Undone on exit.

    Python delivers signals only to the main thread; in another thread this changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def line(stats: AnswerStats, quality: Quality | None = None) -> str:
    """The figures under an answer, on one line."""
    reused = f" ({stats.cached_tokens} of the prompt's {stats.prompt_tokens} reused)" if stats.cached_tokens else ""
    hit = "" if stats.hit_rate is None else f" · hit rate {stats.hit_rate:.0%}"
    drafted, accepted = (stats.more.get(name, 0) for name in ("drafted", "accepted"))
    guessed = f" · {accepted} of {drafted} guesses right" if drafted else ""
    disk = f", {stats.disk_bytes / 1e6:.1f} MB of it from disk" if stats.disk_bytes else ""
    quality_words = scored(dataclasses.asdict(quality) if quality is not None else None)
    marks = "".join(f" · {one}" for one in [lossy(stats.as_dict()), *quality_words])
    marks = (" · emulated link" if stats.emulated else "") + marks
    return (
        f"[{stats.new_tokens} tokens · {stats.tok_s:.1f} tok/s · first after {stats.ttft_ms:.0f} ms{reused}{hit}"
        f"{guessed} · {stats.demand_bytes / 1e6:.1f} MB fetched{disk} · {stats.reason}{marks}]"
    )
