"""Moestro's own trace files: written while an answer is computed, readable up to the last complete frame.

Format: a line with the file type, a line of JSON (the head), then frames: a mark, tokens, passes and bytes as
little-endian numbers, and that many bytes of an `.npz` with the arrays of a Chunk under their names."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from core.errors import TraceError
from core.profile.trace.chunk import CHUNK, Chunk, Trace, id_type, map_type
from core.profile.trace.sound import TooLarge, predictor_of, predictors_of, problem_of, require_bounded, text, whole
from core.settings.param import Value
from core.system.reading import open_regular, parse_json
from core.types import StepRecord

MAGIC = b"moestro-trace\n"
VERSION = 3  # 2: router distributions and predictions; 3: predictions of several; without any, 1 is written
PENDING_BYTES = 16 << 20  # pending bytes at which a frame is written at the latest
FRAME = struct.Struct("<4sIIQ")  # mark, tokens, passes, bytes
MARK = b"pass"
HEAD_BYTES = 1 << 20  # most bytes of a head
LIMITS = {"layers": 10_000, "experts": 2**15, "top_k": 2**15}
PREDICTED = {"ranked", "maps", "beside", "beside_maps"}  # arrays whose rows name their pass
OPTIONAL = ("tok", "weights", "probs", "ranked", "maps", "beside", "beside_maps")
Named = tuple[str, Mapping[str, Value]]  # a predictor and its parameters
PACKED_MOST = 1100  # an .npz compresses at most this many bytes into one


def _private(name: str, flags: int) -> int:
    """Opens a file that only its user may read: the routing reveals something of the prompts."""
    return os.open(name, flags, 0o600)


@dataclass(frozen=True, slots=True)
class TraceHead:
    """What a trace file states of all its passes. `probs`: they include the router's distributions. `predictor`: name
    and parameters of the predictor whose predictions they include; `beside`: of those that were asked beside it."""

    layers: int
    experts: int
    top_k: int
    model: str = ""
    model_hash: str = ""
    probs: bool = False
    predictor: Named | None = None
    beside: Sequence[Named] = ()

    @property
    def stated(self) -> dict[str, Any]:
        """Its JSON."""
        shape = {"layers": self.layers, "experts": self.experts, "top_k": self.top_k}
        named = {"model": self.model, "model_hash": self.model_hash}
        version = 3 if self.beside else 2 if self.probs or self.predictor else 1
        own = {"predictor": _stated(self.predictor)} if self.predictor else {}
        others = {"beside": [_stated(one) for one in self.beside]} if self.beside else {}
        return {"version": version, **shape, **named, **own, **others}


class TraceWriter:
    """Collects passes and writes them `CHUNK` tokens at a time. Close it, or use it as a context manager."""

    def __init__(self, path: Path, head: TraceHead, *, packed: bool = True) -> None:
        """`packed` = compressed. Raises TraceError when the file cannot be created."""
        self._ids_type, self._packed = id_type(head.experts), packed
        self._shape, self._experts = (head.layers, head.top_k), head.experts
        self._pending: list[Chunk] = []
        self._tokens = self._bytes = 0
        self.probs, self.predictor, self.beside = head.probs, head.predictor, tuple(head.beside)
        try:
            self._file: BinaryIO = open(path, "wb", opener=_private)  # noqa: SIM115
        except OSError as error:
            raise TraceError(f"The trace {path} cannot be written: {error.strerror}.") from error
        self._file.write(MAGIC + json.dumps(head.stated).encode() + b"\n")

    def add(
        self, step: StepRecord, tok: npt.NDArray[Any] | None = None, weights: npt.NDArray[Any] | None = None
    ) -> None:
        """Adds one forward pass. `tok` [tokens], else the step's own; `weights` [layers, tokens, k]. A pass recorded
        without its routing (telemetry off) is left out. Distributions and predictions are the step's, if the file
        includes them. Its request is the step's, 0 where that names none."""
        if step.ids.size:
            ((request, _),) = step.rows or ((0, step.tokens),)
            probs = step.probs.transpose(1, 0, 2) if self.probs and step.probs is not None else None
            ranked = step.ranked if self.predictor and step.ranked is not None else None
            maps = None
            if self.predictor and step.maps is not None:
                maps = np.array([(0, *one) for one in step.maps], map_type(self._experts))
            mine = step.beside is not None and step.beside.predictors == self.beside
            beside = step.beside if self.beside and mine else None
            tok = step.tok if tok is None else tok
            self.write(
                Chunk(
                    step.ids.transpose(1, 0, 2).astype(self._ids_type),
                    np.array([step.tokens], np.int32),
                    np.array([step.phase == "decode"]),
                    np.array([request], np.int32),
                    None if tok is None else np.asarray(tok, np.int32),
                    None if weights is None else weights.transpose(1, 0, 2).astype(np.float16),
                    probs,
                    ranked,
                    maps,
                    beside.ranked if beside is not None else None,
                    beside.maps if beside is not None else None,
                )
            )

    def write(self, chunk: Chunk) -> None:
        """Adds some passes; they reach the disk with the others of their frame."""
        if chunk.ids.shape[1:] != self._shape:
            raise TraceError(
                f"A pass of shape {chunk.ids.shape[1:]} (layers, k) does not belong to a trace of {self._shape}."
            )
        if chunk.probs is not None and chunk.probs.shape[1:] != (self._shape[0], self._experts):
            raise TraceError(
                f"Distributions of shape {chunk.probs.shape[1:]} (layers, experts) do not belong to a "
                f"trace of {(self._shape[0], self._experts)}."
            )
        if self._pending and _extras(chunk) != _extras(self._pending[-1]):
            self.flush()
        self._pending.append(chunk)
        self._tokens += len(chunk.ids)
        self._bytes += sum(getattr(chunk, name).nbytes for name in ("ids", *_extras(chunk)))
        if self._tokens >= CHUNK or self._bytes >= PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes out what is pending."""
        if not self._pending:
            return
        names = ["ids", "sizes", "decode", "rid", *_extras(self._pending[0])]
        arrays: dict[str, Any] = {name: np.concatenate([getattr(c, name) for c in self._pending]) for name in names}
        arrays["ids"] = arrays["ids"].astype(self._ids_type)
        for name in PREDICTED & arrays.keys():
            arrays[name] = _joined(self._pending, name)
        data = io.BytesIO()
        (np.savez_compressed if self._packed else np.savez)(data, **arrays)
        self._file.write(FRAME.pack(MARK, self._tokens, len(arrays["sizes"]), data.tell()))
        self._file.write(data.getbuffer())
        self._file.flush()
        self._pending.clear()
        self._tokens = self._bytes = 0

    def close(self) -> None:
        """Writes the rest and closes the file; may be called again."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FileTrace:
    """A trace on disk, read frame by frame. `cut`: its last frame is incomplete, and left out."""

    def __init__(self, path: Path) -> None:
        """Raises TraceError when it is not a trace file, of a later version, or damaged."""
        self.path = path
        with open_regular(path, TraceError) as file:
            if file.readline(len(MAGIC)) != MAGIC:
                raise TraceError(f"{path} is not a trace of Moestro.")
            try:
                head = parse_json(file.readline(HEAD_BYTES))
                version = whole(head["version"], 2**31)
                if version > VERSION:
                    raise TraceError(
                        f"{path} was written by a later version of Moestro (trace version {version}; this "
                        f"one reads up to {VERSION}). Update Moestro."
                    )
                self.layers, self.experts, self.top_k = (whole(head[name], most) for name, most in LIMITS.items())
                self.model, self.model_hash = text(head["model"]), text(head["model_hash"])
                self.predictor = predictor_of(head.get("predictor"))
                self.beside = predictors_of(head.get("beside"))
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
            if tokens * self.layers * self.top_k > PACKED_MOST * size:
                raise TraceError(
                    f"{self.path} is damaged at byte {at}: so many tokens are not in so few bytes. Record "
                    "or export it again."
                )
            if file.tell() + size > end:
                return frames, True
            frames.append((file.tell(), size, tokens))
            file.seek(size, io.SEEK_CUR)
        return frames, False

    def _chunk(self, data: bytes, tokens: int) -> Chunk:
        try:
            require_bounded(io.BytesIO(data))
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                chunk = Chunk(**{name: arrays[name] for name in Chunk.__slots__ if name in arrays.files})
        except TooLarge as error:
            raise TraceError(f"{self.path} is damaged: {error}. Record or export it again.") from None
        except Exception as error:  # zlib, zipfile and numpy each have their own errors
            raise TraceError(
                f"{self.path} is damaged: a frame cannot be unpacked. Record or export it again."
            ) from error
        if problem := problem_of(chunk, (tokens, self.layers, self.top_k), self.experts, len(self.beside)):
            raise TraceError(f"{self.path} is damaged: {problem}. Record or export it again.")
        return chunk


def save(trace: Trace, path: Path, *, packed: bool = True) -> FileTrace:
    """Writes any trace as a trace file of this format."""
    chunks = iter(trace.chunks())
    first = next(chunks, None)
    own_predictor = trace.predictor if isinstance(trace, FileTrace) else None
    with TraceWriter(
        path,
        TraceHead(
            trace.layers,
            trace.experts,
            trace.top_k,
            model=trace.model,
            predictor=own_predictor,
            beside=getattr(trace, "beside", ()),
            probs=first is not None and first.probs is not None,
        ),
        packed=packed,
    ) as writer:
        for chunk in () if first is None else chain([first], chunks):
            writer.write(chunk)
    return FileTrace(path)


def _extras(chunk: Chunk) -> list[str]:
    return [name for name in OPTIONAL if getattr(chunk, name) is not None]


def _stated(predictor: Named) -> dict[str, object]:
    name, params = predictor
    return {"name": name, "params": dict(params)}


def _joined(chunks: Sequence[Chunk], name: str) -> npt.NDArray[Any]:
    """Their predictions or maps, with the pass numbers (`of`) counted through all chunks."""
    parts, passes = [], 0
    for chunk in chunks:
        part = getattr(chunk, name).copy()
        part["of"] += passes
        parts.append(part)
        passes += len(chunk.sizes)
    return np.concatenate(parts)
