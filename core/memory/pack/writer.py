"""Writes a pack atomically: files are written to `<pack>.partial`, which is renamed at the end.

A journal lists the files that are finished and synced. An import that resumes after an interruption keeps those,
deletes the rest and writes what is missing; the result is identical byte for byte.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from core.errors import ModelError
from core.memory.pack.checked_json import CheckedObject, InvalidValue, whole
from core.memory.pack.lock import Lock
from core.memory.pack.manifest import DENSE, MOST_LAYERS, NAME, Manifest, layer_file, partial
from core.memory.pack.manifest_json import PackFile
from core.memory.pack.sync import replace, sync_dir, sync_file, write_all
from core.memory.pack.tensorfile import write_tensors
from core.memory.pack.verify import check, file_hash
from core.memory.pages import page_up
from core.system.reading import INDEX_BYTES, BadJson, parse_json, read_bytes

JOURNAL = "journal.jsonl"
LAYER_FILES = frozenset(layer_file(layer) for layer in range(MOST_LAYERS))


class Done(NamedTuple):
    """A finished file: `sums` of its blobs, and notes of its writer (text by text)."""

    entry: PackFile
    sums: tuple[int, ...] = ()
    notes: Mapping[str, str] = {}


class PackWriter:
    """Writes one pack. `identity` identifies the import: only one with an equal identity resumes an interrupted one.

    `directory` is where the pack is written, `finished` what is already complete; `complete`: an earlier import was
    stopped just before its end, and only `publish` is left. Raises ModelError when `out` exists, when another import is
    writing it, or when its partial directory was not made by Moestro; OSError.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.out, self.directory = out, partial(out)
        self._identity = json.loads(json.dumps(identity))
        self.finished: dict[str, Done] = {}
        self._published = False
        self._new_parents = [parent for parent in out.parents if not parent.exists()]
        out.parent.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(
            out.with_name(f"{out.name}.lock"),
            f"Another import{{}} is writing {out}. Wait until it is done, or choose another directory.",
        )
        try:
            if out.exists():
                raise ModelError(
                    f"{out} exists already, and nothing is ever overwritten. Choose another directory, or "
                    "delete it first."
                )
            self.complete = self._resume()
        except BaseException:
            self._lock.release()
            raise

    def write_dense(
        self,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        read: Callable[[str], torch.Tensor],
        wrote: Callable[[int], object],
    ) -> None:
        """Write the weights outside the experts: see `write_tensors`."""
        metadata = {"format": "pt", "moestro": json.dumps(self._identity, sort_keys=True)}
        with self._begun(DENSE) as file:
            self._finish(DENSE, Done(write_tensors(file, tensors, read, metadata, wrote)))

    def write_layer(
        self,
        layer: int,
        blobs: Iterable[torch.Tensor],
        wrote: Callable[[int], object],
        notes: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Write one MoE layer's experts (uint8 [any size]) in order, each padded to whole pages.

        `wrote(bytes)` is called after each, `notes()` at the end.
        """
        name, sums, size = layer_file(layer), [], 0
        with self._begun(name) as file:
            with file.open("wb", buffering=0) as handle:
                for blob in blobs:
                    page = torch.zeros(page_up(blob.numel()), dtype=torch.uint8)
                    page[: blob.numel()] = blob
                    raw = page.numpy().data
                    sums.append(zlib.crc32(raw))
                    write_all(handle, raw)
                    size += len(raw)
                    wrote(len(raw))
                sync_file(handle.fileno())
            self._finish(name, Done(PackFile(size), tuple(sums), dict(notes())))

    def entries(self) -> dict[str, PackFile]:
        """Every file of the pack so far: those finished here, and other files in `directory`, hashed now."""
        found = {name: done.entry for name, done in self.finished.items()}
        for file in sorted(self.directory.iterdir()):
            if file.name not in (JOURNAL, NAME, *found):
                with file.open("rb+") as handle:
                    sync_file(handle.fileno())
                found[file.name] = PackFile(file.stat().st_size, file_hash(file))
        return found

    def publish(self, manifest: Manifest | None = None) -> Path:
        """Last step: write the manifest (None: it is already `complete`) and rename the directory."""
        if manifest is not None:
            replace(self.directory / NAME, manifest.dump())
        (self.directory / JOURNAL).unlink(missing_ok=True)
        sync_dir(self.directory)
        if self.out.exists():  # created meanwhile: os.rename would replace an empty directory
            raise ModelError(
                f"{self.out} was created by another program meanwhile. The finished pack is in {self.directory}: "
                f"rename it."
            )
        os.rename(self.directory, self.out)
        self._published = True
        sync_dir(self.out.parent)
        return self.out

    def close(self) -> None:
        """Release the lock. Finished files stay for a later resume; without any, the directory is removed. May be
        called twice."""
        nothing = not (self.finished or self.complete or self._published)
        if nothing:
            shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.release()
        for parent in self._new_parents if nothing else ():
            try:
                parent.rmdir()
            except OSError:
                break  # it contains other files

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _begun(self, name: str) -> Iterator[Path]:
        """The file to write; removed when writing fails, because on a full disk it would only take space."""
        try:
            yield self.directory / name
        except BaseException:
            (self.directory / name).unlink(missing_ok=True)
            raise

    def _finish(self, name: str, done: Done) -> None:
        """Record in the journal a file whose bytes are on the disk."""
        sync_dir(self.directory)
        with (self.directory / JOURNAL).open("ab", buffering=0) as handle:
            handle.write(f"{_line(name, done)}\n".encode())
            sync_file(handle.fileno())
        self.finished[name] = done

    def _resume(self) -> bool:
        """Keep what is usable of an earlier import and delete the rest. True when nothing is missing."""
        journal, there = self.directory / JOURNAL, self.directory.exists()
        names = {file.name for file in self.directory.iterdir()} if there else set()
        if names and not names & {JOURNAL, f"{JOURNAL}.new", NAME}:
            raise ModelError(
                f"{self.directory} is in the way: it is not what an import left. Move it away, or choose "
                "another directory."
            )
        if NAME in names and JOURNAL not in names and check(self.directory).identity == self._identity:
            return True
        self.directory.mkdir(exist_ok=True)
        self.finished = {
            name: done
            for name, done in _journalled(journal, self._identity).items()
            if self._is_there(name, done.entry.bytes)
        }
        lines = (json.dumps(self._identity), *(_line(name, done) for name, done in self.finished.items()))
        replace(journal, "".join(f"{line}\n" for line in lines))
        for file in self.directory.iterdir():
            if file.name not in (JOURNAL, *self.finished):
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        return False

    def _is_there(self, name: str, size: int) -> bool:
        file = self.directory / name
        return not file.is_symlink() and file.is_file() and file.stat().st_size == size


def _line(name: str, done: Done) -> str:
    return json.dumps({"file": name, "entry": done.entry, "sums": done.sums, "notes": dict(done.notes)})


def _journalled(journal: Path, identity: Mapping[str, Any]) -> dict[str, Done]:
    """The finished files that a journal lists, ignoring a truncated last line.

    Empty, so that everything is written anew, when the journal belongs to another import or is damaged: then no line
    can be trusted. Raises ModelError when it cannot be read.
    """
    if not os.path.lexists(journal):
        return {}
    *lines, _ = read_bytes(journal, INDEX_BYTES).split(b"\n")
    try:
        stated = [parse_json(line) for line in lines]
        return dict(_done_of(CheckedObject(one)) for one in stated[1:]) if stated[:1] == [identity] else {}
    except (BadJson, InvalidValue):
        return {}


def _done_of(stated: CheckedObject) -> tuple[str, Done]:
    """The file that a journal line describes. Raises InvalidValue for a line that no import writes."""
    stated.only("file", "entry", "sums", "notes")
    name, entry = stated.text("file"), stated.values("entry")
    if name != DENSE and name not in LAYER_FILES:
        raise InvalidValue(f"its file is {name!r:.60}, which no import writes")
    if len(entry) != 3 or not all(isinstance(text, str) for text in entry[1:]):
        raise InvalidValue(f"its entry is {entry!r:.60}, not a size and two hashes")
    sums = tuple(whole(number, "sums", 0, (1 << 32) - 1) for number in stated.values("sums"))
    return name, Done(PackFile(whole(entry[0], "entry", 0), entry[1], entry[2]), sums, stated.texts("notes"))
