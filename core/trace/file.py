"""Moestro's own trace files: written while an answer is computed, readable up to wherever the writing stopped.

A line that says what it is, a line of JSON (the head), then frames: a mark, tokens, passes and bytes as little-endian
numbers, and that many bytes of an `.npz` with the arrays of a Chunk under their names.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from core.errors import TraceError
from core.trace.chunk import CHUNK, Chunk, Trace, id_type
from core.types import StepRecord

MAGIC = b"moestro-trace\n"
VERSION = 1
FRAME = struct.Struct("<4sIIQ")   # mark, tokens, passes, bytes
MARK = b"pass"


class TraceWriter:
    """Collects passes and writes them `CHUNK` tokens at a time. Close it, or use it as a context manager."""

    def __init__(self, path: Path, layers: int, experts: int, top_k: int, *, model: str = "", model_hash: str = "",
                 packed: bool = True) -> None:
        """`packed` = compressed. Raises TraceError when the file cannot be made."""
        self._ids_type, self._packed = id_type(experts), packed
        self._shape = layers, top_k
        self._pending: list[Chunk] = []
        self._tokens = 0
        head = {"version": VERSION, "layers": layers, "experts": experts, "top_k": top_k, "model": model,
                "model_hash": model_hash}
        try:
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise TraceError(f"The trace {path} cannot be written: {error.strerror}.") from error
        self._file.write(MAGIC + json.dumps(head).encode() + b"\n")

    def add(self, step: StepRecord, rid: int = 0, tok: npt.NDArray[Any] | None = None,
            weights: npt.NDArray[Any] | None = None) -> None:
        """One forward pass. `tok` [tokens]; `weights` [layers, tokens, k]. One recorded without its routing (telemetry
        off) is left out."""
        if step.ids.size:
            self.write(Chunk(step.ids.transpose(1, 0, 2).astype(self._ids_type), np.array([step.tokens], np.int32),
                             np.array([step.phase == "decode"]), np.array([rid], np.int32),
                             None if tok is None else np.asarray(tok, np.int32),
                             None if weights is None else weights.transpose(1, 0, 2).astype(np.float16)))

    def write(self, chunk: Chunk) -> None:
        """Some passes; they reach the disk with the others of their frame."""
        if chunk.ids.shape[1:] != self._shape:
            raise TraceError(f"A pass of shape {chunk.ids.shape[1:]} (layers, k) does not belong to a trace of "
                             f"{self._shape}.")
        if self._pending and _extras(chunk) != _extras(self._pending[-1]):
            self.flush()
        self._pending.append(chunk)
        self._tokens += len(chunk.ids)
        if self._tokens >= CHUNK:
            self.flush()

    def flush(self) -> None:
        """Write out what is pending."""
        if not self._pending:
            return
        names = ["ids", "sizes", "decode", "rid", *_extras(self._pending[0])]
        arrays: dict[str, Any] = {name: np.concatenate([getattr(c, name) for c in self._pending]) for name in names}
        arrays["ids"] = arrays["ids"].astype(self._ids_type)
        data = io.BytesIO()
        (np.savez_compressed if self._packed else np.savez)(data, **arrays)
        self._file.write(FRAME.pack(MARK, self._tokens, len(arrays["sizes"]), data.tell()))
        self._file.write(data.getbuffer())
        self._file.flush()
        self._pending.clear()
        self._tokens = 0

    def close(self) -> None:
        """Write the rest and close the file; closing twice is the same as once."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


class FileTrace:
    """A trace on disk, read frame by frame. `cut`: its last frame is incomplete, and left out."""

    def __init__(self, path: Path) -> None:
        """Raises TraceError when it is none of ours, of a later version, or damaged."""
        self.path = path
        with path.open("rb") as file:
            if file.readline() != MAGIC:
                raise TraceError(f"{path} is not a trace of Moestro.")
            try:
                head = json.loads(file.readline())
                version = int(head["version"])
                if version > VERSION:
                    raise TraceError(f"{path} was written by a later version of Moestro (trace version {version}; this "
                                     f"one reads up to {VERSION}). Update Moestro.")
                self.layers, self.experts, self.top_k = int(head["layers"]), int(head["experts"]), int(head["top_k"])
                self.model, self.model_hash = str(head["model"]), str(head["model_hash"])
            except (ValueError, KeyError, TypeError) as error:
                raise TraceError(f"{path} is damaged: its second line is not the head of a trace.") from error
            self._frames, self.cut = self._scan(file)

    @property
    def tokens(self) -> int:
        return sum(tokens for _, _, tokens in self._frames)

    def chunks(self) -> Iterator[Chunk]:
        with self.path.open("rb") as file:
            for offset, size, tokens in self._frames:
                file.seek(offset)
                yield self._chunk(file.read(size), tokens)

    def _scan(self, file: BinaryIO) -> tuple[list[tuple[int, int, int]], bool]:
        """(offset, bytes, tokens) of every complete frame, and whether something incomplete follows."""
        frames: list[tuple[int, int, int]] = []
        end = self.path.stat().st_size
        while (at := file.tell()) < end:
            head = file.read(FRAME.size)
            if len(head) < FRAME.size:
                return frames, True
            mark, tokens, _, size = FRAME.unpack(head)
            if mark != MARK:
                raise TraceError(f"{self.path} is damaged at byte {at}. Record or export it again.")
            if file.tell() + size > end:
                return frames, True
            frames.append((file.tell(), size, tokens))
            file.seek(size, io.SEEK_CUR)
        return frames, False

    def _chunk(self, data: bytes, tokens: int) -> Chunk:
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                chunk = Chunk(**{name: arrays[name] for name in Chunk.__slots__ if name in arrays.files})
        except Exception as error:  # zlib, zipfile and numpy each have their own
            raise TraceError(f"{self.path} is damaged ({error}). Record or export it again.") from error
        if chunk.ids.shape != (tokens, self.layers, self.top_k) or int(chunk.sizes.sum()) != tokens:
            raise TraceError(f"{self.path} is damaged: a frame does not have the shape it says.")
        if tokens and not 0 <= int(chunk.ids.min()) <= int(chunk.ids.max()) < self.experts:
            raise TraceError(f"{self.path} is damaged: it names an expert that the model does not have.")
        return chunk


def save(trace: Trace, path: Path, *, packed: bool = True) -> FileTrace:
    """Write any trace as one of our files."""
    with TraceWriter(path, trace.layers, trace.experts, trace.top_k, model=trace.model, packed=packed) as writer:
        for chunk in trace.chunks():
            writer.write(chunk)
    return FileTrace(path)


def _extras(chunk: Chunk) -> list[str]:
    return [name for name in ("tok", "weights") if getattr(chunk, name) is not None]
