"""The file that a batch is answered into: its own journal. A line is written whole or not at all, so that a run that
was killed goes on where it ended."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import ModelError, MoestroError
from core.memory.pack.lock import Lock

log = logging.getLogger("moestro.app")
SYNC_S = 1.0  # at most so long after it was written a line is on the disk itself
FULL = "{} could not be written to: {}. {} answers are in it; make room, and run the command again to go on."


class AnswersFile:
    """Open for one run; another one is refused meanwhile. `done`: ids that have an answer, or an error."""

    def __init__(self, file: Path, retry_errors: bool = False) -> None:
        """`retry_errors`: take lines with errors out, so that they are asked again. Raises MoestroError when the file
        is not of a batch, or cannot be opened."""
        self._path = file
        if not file.parent.is_dir():
            raise MoestroError(f"{file} cannot be written: there is no folder {file.parent}. Create it first.")
        try:
            self._lock = Lock(file.with_name(file.name + ".lock"), f"Another run{{}} is writing {file}. Wait for it.")
        except ModelError as error:
            raise MoestroError(str(error)) from None
        except OSError as error:
            raise MoestroError(f"{file} cannot be written: {error.strerror or error}.") from error
        try:
            self.done = self._read(retry_errors)
            self._end = file.stat().st_size if file.exists() else 0
            self._out = file.open("ab", buffering=0)
        except OSError as error:
            self._lock.release()
            raise MoestroError(f"{file} cannot be opened: {error.strerror or error}.") from error
        except BaseException:
            self._lock.release()
            raise
        self._synced_s = time.monotonic()

    def _read(self, retry_errors: bool) -> set[str]:
        """The ids in the file, from which a torn last line is cut off."""
        if not self._path.exists():
            return set()
        done, kept, whole, errors = set[str](), list[bytes](), 0, 0
        with self._path.open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                found = _record(raw)
                if found is None:
                    if lines.read(1):
                        raise MoestroError(
                            f"Line {number} of {self._path} is not of a batch. Name another file for the answers."
                        )
                    break
                whole += len(raw)
                if retry_errors and failed(found):
                    errors += 1
                    continue
                if retry_errors:
                    kept.append(raw)
                done.add(_id(found))
        if errors:
            beside = self._path.with_name(self._path.name + ".new")
            with beside.open("wb") as out:
                out.writelines(kept)
                out.flush()
                os.fsync(out.fileno())
            beside.replace(self._path)
        elif whole < self._path.stat().st_size:
            os.truncate(self._path, whole)
        return done

    def append(self, record: Mapping[str, Any]) -> None:
        """Write an answer. Raises MoestroError when it could not be written; the file then is as before."""
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += self._out.write(line[written:]) or 0
            if time.monotonic() - self._synced_s >= SYNC_S:
                self._sync()
        except OSError as error:
            try:
                os.truncate(self._path, self._end)
            except OSError:
                pass  # the next run cuts the torn line off
            raise MoestroError(
                FULL.format(self._path, (error.strerror or str(error)).lower(), len(self.done))
            ) from error
        self._end += len(line)
        self.done.add(_id(record))

    def close(self) -> None:
        """Also after an error."""
        try:
            self._sync()
        except OSError as error:
            log.warning("%s may not be on the disk yet: %s", self._path, error.strerror or error)
        self._out.close()
        self._lock.release()

    def _sync(self) -> None:
        os.fsync(self._out.fileno())
        self._synced_s = time.monotonic()


def failed(record: Mapping[str, Any]) -> bool:
    """Whether it says why there is no answer."""
    return bool(record.get("error"))


def _id(record: Mapping[str, Any]) -> str:
    return str(record["custom_id"] if "custom_id" in record else record["id"])


def _record(raw: bytes) -> dict[str, Any] | None:
    """A whole line of a batch, or None."""
    if not raw.endswith(b"\n"):
        return None
    try:
        found = json.loads(raw)
    except ValueError:
        return None
    return found if isinstance(found, dict) and ("custom_id" in found or "id" in found) else None
