"""The file that a batch is answered into: its own journal. A line is written whole or not at all, so that a run that
was killed goes on where it ended. Bytes that no batch wrote are never changed."""

import io
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from app.services.batch.records import decoded, encoded, failed, id_of, is_torn, unread
from core.errors import MoestroError
from core.system.reading import FLAGS, irregular, open_regular, reason

log = logging.getLogger("moestro.app")
SYNC_S = 1.0  # at most so long after it was written a line is on the disk itself
LONGEST = 256 << 20  # bytes of a line
ATTEMPTS = 5  # to open the file that has the name
REPLACES_OPEN = os.name == "posix"  # Windows gives no new file the name of an open one
FULL = "{} could not be written to: {}. {} answers are in it; make room, and run the command again to go on."
FOREIGN = "Line {} of {} is not the answer of a batch, so nothing was changed. Name another file for the answers."
CUT = (
    "{} holds nothing but a part of an answer, as a run that was killed may leave it, so nothing was changed. Delete "
    "it, or name another file for the answers."
)


@dataclass(frozen=True, slots=True)
class Answers:
    """A file that a run verified and wrote. It is opened only while `path` still names that very file."""

    path: Path
    id: tuple[int, int]  # its device, and its number there

    def open(self) -> io.BufferedReader:
        """Open it for reading. Raises MoestroError when something else has its name, or it cannot be read now."""
        file = open_regular(self.path, MoestroError)
        try:
            if _id(file.fileno()) != self.id:
                raise MoestroError(f"{self.path.name} is not the file that the batch wrote any more.")
            file.peek(1)  # on Windows a file that is being written cannot be read
            return file
        except OSError as error:
            file.close()
            raise MoestroError(f"{self.path.name} cannot be read now: {reason(error)}. Try again later.") from error
        except BaseException:
            file.close()
            raise


class AnswersFile:
    """Open for one run, and locked against others. `done`: ids that have an answer, or an error;
    `failed`: those of errors that were there when it was opened."""

    def __init__(self, file: Path, retry_errors: bool = False, mended: Collection[str] = ()) -> None:
        """`retry_errors`: take lines with errors out, so that they are run again; otherwise only that a line held no
        prompt, of the `mended` ones ("line-N"). Raises MoestroError when the file holds anything but answers, or cannot
        be used; it is unchanged then."""
        self._path = file
        self._out = _locked(file)
        try:
            with _error_names_file(file):
                self._read()
                drop = self.failed if retry_errors else self._unread.intersection(mended)
                if drop:
                    self._drop_errors(drop)
        except BaseException:
            self._out.close()
            raise
        self._synced_s = time.monotonic()

    @property
    def answers(self) -> Answers:
        """The file, to be opened after the run, too."""
        return Answers(self._path, _id(self._out.fileno()))

    def _lines(self) -> Iterator[bytes]:
        with open(self._out.fileno(), "rb", closefd=False) as lines:
            lines.seek(0)
            yield from iter(lambda: lines.readline(LONGEST), b"")

    def _read(self) -> None:
        """Take note of the answers; cut a torn last line off, or complete one that lacks its newline alone."""
        self.done, self.failed, self._unread, self._end = set[str](), set[str](), set[str](), 0
        missing = b""
        for number, line in enumerate(self._lines(), 1):
            missing = b"" if line.endswith(b"\n") else b"\n"
            record = decoded(line + missing)
            if record is None:
                if not missing or len(line) == LONGEST or not is_torn(line):
                    raise MoestroError(FOREIGN.format(number, self._path))
                if not self.done:
                    raise MoestroError(CUT.format(self._path))
                self._out.truncate(self._end)
                return
            self._end += len(line)
            self.done.add(id_of(record))
            if failed(record):
                self.failed.add(id_of(record))
            if unread(record):
                self._unread.add(id_of(record))
        self._end += self._out.write(missing) or 0

    def _drop_errors(self, ids: Set[str]) -> None:
        """Put a file without these errors in its place: at every moment there is a whole one."""
        place = Path(os.path.realpath(self._path))
        fd, name = tempfile.mkstemp(".new", "moestro-", place.parent)
        try:
            with open(fd, "wb") as fresh:
                for line in self._lines():
                    record = decoded(line)
                    if record is not None and not (failed(record) and id_of(record) in ids):
                        fresh.write(line)
                fresh.flush()
                os.fsync(fd)
            shutil.copymode(place, name)
            if not REPLACES_OPEN:
                self._out.close()
            os.replace(name, place)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._out.close()
        self._out = _locked(self._path)
        self._read()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write an answer. Raises MoestroError when it could not be written; the file then is as before."""
        line = encoded(record)
        try:
            written = 0
            while written < len(line):
                written += self._out.write(line[written:]) or 0
            if time.monotonic() - self._synced_s >= SYNC_S:
                self._sync()
        except OSError as error:
            try:
                self._out.truncate(self._end)
            except OSError:
                pass  # the next run cuts the torn line off
            raise MoestroError(FULL.format(self._path, reason(error).lower(), len(self.done))) from error
        self._end += len(line)
        self.done.add(id_of(record))

    def close(self) -> None:
        """Also after an error."""
        try:
            self._sync()
        except OSError as error:
            log.warning("%s may not be on the disk yet: %s", self._path, reason(error))
        self._out.close()

    def _sync(self) -> None:
        os.fsync(self._out.fileno())
        self._synced_s = time.monotonic()


def _locked(file: Path) -> io.FileIO:
    """Open a regular file, or make one, and lock it. Raises MoestroError."""
    for _ in range(ATTEMPTS):
        with _error_names_file(file):
            try:
                _require_regular(file, file.stat())  # to open a device may already do something
            except FileNotFoundError:
                pass
            out = io.FileIO(os.open(file, FLAGS | os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), "a+")
            try:
                _require_regular(file, os.fstat(out.fileno()))
                if not lock_descriptor(out.fileno(), blocking=False):
                    raise MoestroError(f"Another run is writing {file}. Wait for it.")
                if os.path.samestat(os.fstat(out.fileno()), file.stat()):
                    return out
            except FileNotFoundError:
                pass
            except BaseException:
                out.close()
                raise
            out.close()  # while it was opened, another run put another file in its place
    raise MoestroError(f"Something keeps replacing {file}. Name another file for the answers.")


def _require_regular(file: Path, found: os.stat_result) -> None:
    if kind := irregular(found.st_mode):
        raise MoestroError(f"{file} is {kind}, which keeps no answers. Name another file for them.")


def _id(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


@contextmanager
def _error_names_file(file: Path) -> Iterator[None]:
    """A system error is raised as one that names the file and says what to do."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise MoestroError(
            f"{file} cannot be written: {reason(error)}. Name another file for the answers, in a folder that is there "
            "and that you may write to."
        ) from error
