"""One run of a batch: the lines that have no answer yet, through a backend, into the file of answers."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from app.services.batch.answers_file import Answers, AnswersFile
from app.services.batch.lines import Line, read
from app.services.batch.records import failed, refused
from core.errors import MoestroError

Put = Callable[[dict[str, Any]], None]


class Backend(Protocol):
    """What answers lines: `app.server.v1.batch.ByEngine`."""

    def run(self, lines: Iterable[Line], put: Put) -> Iterator[int]:
        """Answer lines until there are no more, in any order; `put` gets each one's record. Yields tokens answered."""


@dataclass(slots=True)
class Progress:
    """How far a run is. `before`: lines that an earlier run answered, `failed_before` of them with an error."""

    total: int
    before: int
    failed_before: int = 0
    done: int = 0
    errors: int = 0
    tokens: int = 0
    began_s: float = field(default_factory=time.perf_counter)
    ended_s: float | None = None

    @property
    def share(self) -> float:
        """Of all lines, those that are answered."""
        return (self.before + self.done) / self.total if self.total else 1.0

    @property
    def left(self) -> int:
        """Lines without an answer."""
        return self.total - self.before - self.done

    @property
    def tok_s(self) -> float:
        """Tokens a second of this run."""
        return self.tokens / max(1e-9, self.seconds)

    @property
    def seconds(self) -> float:
        """What it has taken, or took."""
        return (time.perf_counter() if self.ended_s is None else self.ended_s) - self.began_s

    @property
    def left_s(self) -> float | None:
        """Seconds until all are answered at this pace; None before any is."""
        return self.seconds / self.done * self.left if self.done else None


class Run:
    """Answers `source` into `out`. When `drain` is set, no further line is begun. Raises MoestroError at once for files
    that cannot be used."""

    def __init__(
        self,
        source: Path,
        out: Path,
        drain: threading.Event,
        retry_errors: bool = False,
        on_record: Put = lambda record: None,
    ) -> None:
        """`on_record` gets each record that was written."""
        self._source, self._drain, self._on_record = source, drain, on_record
        self.total = sum(1 for _ in read(source))
        if not self.total:
            raise MoestroError(f"{source} holds no prompt: it is empty.")
        if _same(source, out):
            raise MoestroError("The answers cannot go into the file of the prompts. Name another one.")
        mended = {f"line-{line.number}" for line in read(source) if not line.problem}
        self._file = AnswersFile(out, retry_errors, mended)
        known = [line.id for line in read(source) if line.id in self._file.done]
        self.progress = Progress(self.total, len(known), sum(one in self._file.failed for one in known))

    @property
    def left(self) -> int:
        """Lines without an answer."""
        return self.progress.left

    @property
    def answers(self) -> Answers:
        """The file of answers, which is this run's own."""
        return self._file.answers

    def answer(self, backend: Backend, shown: Callable[[Progress], None] = lambda progress: None) -> Progress:
        """Answer what is left. Raises MoestroError when that ends early; what was answered is in the file."""
        self.progress.began_s = time.perf_counter()
        try:
            for tokens in backend.run(self._lines(), self._put):
                self.progress.tokens += tokens
                shown(self.progress)
        finally:
            self.progress.ended_s = time.perf_counter()
        shown(self.progress)
        return self.progress

    def close(self) -> None:
        """Also after an error."""
        self._file.close()

    def _lines(self) -> Iterator[Line]:
        for line in read(self._source):
            if self._drain.is_set():
                return
            if line.id in self._file.done:
                continue
            if line.problem:
                self._put(refused(line, line.problem))
                continue
            yield line

    def _put(self, record: dict[str, Any]) -> None:
        self._file.append(record)
        self.progress.done += 1
        self.progress.errors += failed(record)
        self._on_record(record)


def _same(source: Path, out: Path) -> bool:
    """Whether both name one file, by whatever links."""
    try:
        return source.samefile(out)
    except OSError:
        return False  # there is no such file yet, or opening it says what is wrong
