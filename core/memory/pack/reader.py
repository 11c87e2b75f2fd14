"""Reads experts from a pack, one at a time, from any thread."""

from __future__ import annotations

import logging
import threading
import zlib
from pathlib import Path
from typing import NamedTuple

import torch

from core.errors import ModelError
from core.memory.codec.segments import ExpertParts, Segments
from core.memory.pack.kind import Kind
from core.memory.pack.manifest import layer_file
from core.memory.pack.pagefile import PageFile
from core.memory.pack.remedies import changed, damaged, unreadable
from core.memory.pack.verify import check
from core.memory.pages import PAGE, aligned, page_up

log = logging.getLogger("moestro.pack")


class _Form(NamedTuple):
    """How blobs of a kind are turned into `blocks`: joined from how they are `stored`, and cut as they are `given`;
    None where that is not needed."""

    blocks: int
    stored: Segments | None
    given: Segments | None

    @property
    def as_stored(self) -> bool:
        """Whether they are given as they are stored."""
        return self.stored is None and self.given is None


def _form(kind: Kind, experts: ExpertParts, blocks: int) -> _Form:
    stored, given = kind.cutter(experts), kind.cut(experts, blocks)
    if stored is not None and given is not None and stored.segments == given.segments:
        return _Form(blocks, None, None)
    return _Form(blocks, stored, given)


class PackReader:
    """An open pack. Opening checks everything but the weights; a blob is verified at its first read, and again after
    its file was written to.

    Thread-safe. Owns open files until `close`; after that the pack can be deleted, on Windows too. Raises ModelError,
    with the remedy, when the pack is missing, damaged or made by a newer Moestro.
    """

    def __init__(self, path: Path | str, direct: bool = True, blocks: int = 1) -> None:
        """`blocks`: equal blocks, one after the other, that blobs are given in, however they are stored."""
        self.path = Path(path)
        self.manifest = check(self.path)
        self._forms = [_form(kind, self.manifest.expert_parts, blocks) for kind in self.manifest.kinds]
        self._checked = bytearray(self.manifest.total)
        self._lock, self._bytes_read = threading.Lock(), 0
        self._scratch = threading.local()
        self._files: list[PageFile] = []
        try:
            for layer in range(self.manifest.layers):
                self._files.append(PageFile(self.path / layer_file(layer), direct))
        except OSError as error:
            self.close()
            raise ModelError(unreadable(self.path / layer_file(len(self._files)), error)) from None
        self._stamps = [file.stamp() for file in self._files]  # of each layer's file, as last checked
        self._opened = tuple(self._stamps)
        self.why_buffered = next((f.why_buffered for f in self._files if f.why_buffered), "")
        if self.why_buffered:
            log.warning(
                "%s is read through the system's file cache; direct reads are not used: %s",
                self.path,
                self.why_buffered,
            )

    @property
    def direct(self) -> bool:
        """Whether reads bypass the system's file cache; `why_buffered` has the reason if not."""
        return not self.why_buffered

    @property
    def blob_bytes(self) -> int:
        """Bytes of the largest expert in its codec's layout."""
        return self.manifest.blob_bytes

    @property
    def padded_bytes(self) -> int:
        """Bytes read from disk for the largest expert: whole pages."""
        return self.manifest.padded_bytes

    def padded_of(self, eid: int) -> int:
        """Bytes read from disk for an expert: whole pages."""
        return self.manifest.kind(eid // self.manifest.experts).padded_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk so far by all threads."""
        return self._bytes_read

    @property
    def row_bytes(self) -> int:
        """Bytes of a buffer that `read_into` can use for itself: whole pages."""
        return max(self.padded_bytes, *[0 if one.given is None else page_up(one.given.bytes) for one in self._forms])

    def read_into(self, eid: int, buffer: torch.Tensor, blocks: range | None = None) -> int:
        """Read one expert's blob, or only some of its blocks, to their places from the start of `buffer` on (uint8
        [>= blob_bytes], CPU) -> the bytes read from disk. Its other bytes are undefined.

        A page-aligned buffer with room for all of its pages is read into directly, and no further; any other needs an
        extra copy. An expert that is stored otherwise than in these blocks is read as a whole, and so is every expert
        at first, to be verified. Raises ModelError when the disk read fails or the checksum does not match, IndexError.
        """
        manifest = self.manifest
        if not 0 <= eid < manifest.total:
            raise IndexError(f"the pack has no expert {eid}")
        layer, expert = divmod(eid, manifest.experts)
        kind, form = manifest.kind(layer), self._forms[manifest.kind_of[layer]]
        padded = kind.padded_bytes
        fits = buffer.numel() >= padded and (buffer.data_ptr() % PAGE == 0 or not self.direct)
        into = buffer[:padded] if fits and form.as_stored else self._bounce()[:padded]
        if blocks is not None and len(blocks) < form.blocks and form.as_stored and self._is_checked(layer, expert):
            size = kind.segments[0].layout.bytes
            used = slice(blocks.start * size // PAGE * PAGE, page_up(blocks.stop * size))
        else:
            used = slice(0, padded)
        self._read(layer, expert, into, used)
        if form.as_stored:
            if not fits:
                stop = min(used.stop, len(buffer))
                buffer[used.start : stop].copy_(into[used.start : stop])
            return used.stop - used.start
        whole = buffer if form.given is None else torch.empty(kind.blob_bytes, dtype=torch.uint8)
        if form.stored is not None:
            form.stored.join(into, whole[: kind.blob_bytes])
        else:
            whole = into
        if form.given is not None:
            buffer[: form.given.bytes].copy_(form.given.cut(whole[: kind.blob_bytes]))
        return padded

    def _bounce(self) -> torch.Tensor:
        """The calling thread's bounce buffer of whole pages."""
        buffer: torch.Tensor | None = getattr(self._scratch, "buffer", None)
        if buffer is None:
            buffer = self._scratch.buffer = aligned(self.padded_bytes)
        return buffer

    def _is_checked(self, layer: int, expert: int) -> bool:
        """Whether an expert's bytes are known to be those that were written."""
        return bool(self._checked[layer * self.manifest.experts + expert]) and (
            self._files[layer].stamp() == self._stamps[layer]
        )

    def _read(self, layer: int, expert: int, buffer: torch.Tensor, used: slice) -> None:
        """Read a range of whole pages of a padded blob, all of it unless the blob is checked."""
        file, raw, before = self.path / layer_file(layer), buffer[used].numpy().data, self._stamps[layer]
        padded = self.manifest.kind(layer).padded_bytes
        try:
            self._files[layer].read(raw, expert * padded + used.start)
        except EOFError as error:
            raise ModelError(
                changed(file, f": {error}") if self._was_written(layer) else damaged(file, f": {error}")
            ) from None
        except OSError as error:
            raise ModelError(unreadable(file, error)) from None
        with self._lock:
            self._bytes_read += len(raw)
        eid = layer * self.manifest.experts + expert
        written = self._was_written(layer)
        if len(raw) < padded and not self._checked[eid]:  # written to during the read
            self._read(layer, expert, buffer, slice(0, padded))
        elif not self._checked[eid]:
            if zlib.crc32(raw) != self.manifest.sums[layer][expert]:
                how = f": expert {expert} of MoE layer {layer} is not what was written"
                raise ModelError(changed(file, how) if written else damaged(file, how))
            with self._lock:
                self._checked[eid] = self._stamps[layer] is before  # else the file may have changed since the read

    def _was_written(self, layer: int) -> bool:
        """Whether a layer's file was written to since it was opened; its blobs are then verified again."""
        now = self._files[layer].stamp()
        if now != self._stamps[layer]:
            with self._lock:
                first = layer * self.manifest.experts
                self._checked[first : first + self.manifest.experts] = bytes(self.manifest.experts)
                self._stamps[layer] = now
        return now != self._opened[layer]

    def close(self) -> None:
        """Release the files; may be called twice. No read may be running."""
        for file in self._files:
            file.close()

    def __enter__(self) -> PackReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
