"""Writes a pack atomically: files are written to `<pack>.partial`, which is renamed at the end.

A journal lists the files that are finished and synced. An import that resumes after an interruption keeps those,
deletes the rest and writes what is missing; the result is identical byte for byte.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from core.errors import ModelError
from core.memory.pack.contents import contents, delete, is_pack_file, names
from core.memory.pack.journal import JOURNAL, Done, finished_in, line_of
from core.memory.pack.lock import Lock
from core.memory.pack.manifest import DENSE, NAME, Manifest, layer_file, partial
from core.memory.pack.manifest_json import PackFile
from core.memory.pack.sync import replace, sync_dir, sync_file, write_all
from core.memory.pack.tensorfile import write_tensors
from core.memory.pack.verify import check, file_hash
from core.memory.pages import page_up


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
        """Every file of the pack so far: those finished here, and those copied into `directory`, hashed now."""
        found = {name: done.entry for name, done in self.finished.items()}
        for file in sorted(self.directory.iterdir()):
            if is_pack_file(file.name) and file.name not in found and file.is_file():
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
        if self.out.exists():  # created during the import: os.rename would replace an empty directory
            raise ModelError(
                f"{self.out} was created by another program. The finished pack is in {self.directory}: rename it."
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
            with suppress(OSError, ModelError):  # nothing is lost: the next import starts with what is left
                delete(self.directory)
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
            handle.write(f"{line_of(name, done)}\n".encode())
            sync_file(handle.fileno())
        self.finished[name] = done

    def _resume(self) -> bool:
        """Keep what is usable of an earlier import and delete the rest. True when nothing is missing."""
        own = contents(self.directory) if self.directory.exists() and any(self.directory.iterdir()) else None
        if own is not None and own.foreign:
            raise ModelError(
                f"{self.directory} is not finished, and it also has what no import wrote: {names(own.foreign)}. Move "
                "that away, then run the same import again."
            )
        if own and NAME in own.own and JOURNAL not in own.own and check(self.directory).identity == self._identity:
            return True
        self.directory.mkdir(exist_ok=True)
        self.finished = {
            name: done
            for name, done in finished_in(self.directory / JOURNAL, self._identity).items()
            if self._is_there(name, done.entry.bytes)
        }
        lines = (json.dumps(self._identity), *(line_of(name, done) for name, done in self.finished.items()))
        replace(self.directory / JOURNAL, "".join(f"{line}\n" for line in lines))
        for name in own.own if own else ():
            if name not in (JOURNAL, *self.finished):
                (self.directory / name).unlink(missing_ok=True)
        return False

    def _is_there(self, name: str, size: int) -> bool:
        file = self.directory / name
        return not file.is_symlink() and file.is_file() and file.stat().st_size == size
