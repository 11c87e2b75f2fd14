"""A pack's manifest, `moestro.json`. It is written last, so a directory that has one is complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from core.errors import ModelError
from core.memory.codec import FORMATS, Codec, Layout, PartSpec, in_blocks
from core.memory.codec.formats import Numbers
from core.memory.codec.segments import ExpertParts, SegmentLayout, Segments, inner_of, stops_of
from core.memory.pack.checked_json import FLOATS, CheckedObject, InvalidValue
from core.memory.pack.manifest_json import (
    PackFile,
    check_layout,
    dtype_name,
    file_from,
    layout_from,
    layout_json,
    numbers_json,
    segment_from,
    sums_from,
)
from core.memory.pack.remedies import unusable
from core.memory.pages import page_up
from core.system.reading import CONFIG_BYTES, BadJson, is_file_name, parse_json, read_bytes

NAME = "moestro.json"
DENSE = "model.safetensors"
VERSION = 2  # of packs with heads; others are of version 1
MOST_LAYERS, MOST_EXPERTS = 1000, 1 << 14


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything known about a pack without reading its weights."""

    model_hash: str  # identity of the model it was made from
    format: str  # of the experts: a name of core.memory.codec.FORMATS
    numbers: Numbers  # number types in the blobs
    layers: int  # MoE layers, with the heads' own, which are the last
    experts: int  # in each
    top_k: int
    parts: Mapping[str, PartSpec]  # of one expert, in the model's own layout and dtype
    is_transposed: bool
    has_gate: bool
    is_concatenated: bool
    layout: Layout  # of one expert's blob, as its codec has it
    segments: tuple[SegmentLayout, ...]  # how blobs are cut on disk; () = not cut
    padded_bytes: int  # from one expert to the next in a file
    files: Mapping[str, PackFile]
    sums: tuple[tuple[int, ...], ...]  # zlib.crc32 of every padded blob, by layer and expert
    source: Mapping[str, str]  # kind, label, name, hash of what was imported
    exact: Mapping[str, str]  # by part: how its numbers were derived from the source, in words
    moestro: str  # version that wrote it
    created: str  # ISO 8601
    heads: int = 0  # of the layers: those of heads that predict further tokens, which no pass over the model computes

    @property
    def blob_bytes(self) -> int:
        """Bytes of one expert in its codec's layout."""
        return self.layout.bytes

    @property
    def identity(self) -> dict[str, Any]:
        """The values an interrupted import must share to be resumed: see `identity_of`."""
        top = self.segments[0].stop if self.segments else 0
        return identity_of(self.model_hash, self.format, self.numbers, top, self.moestro, self.heads)

    @property
    def total(self) -> int:
        """Total number of experts."""
        return self.layers * self.experts

    @property
    def bytes(self) -> int:
        """Size on disk, without the manifest itself."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def cutter(self) -> Segments | None:
        """Joins the segments of a blob; None when blobs are not cut."""
        stops = [one.stop for one in self.segments]
        return Segments(self.layout, self.expert_parts, stops) if self.segments else None

    @property
    def expert_parts(self) -> ExpertParts:
        """How the model lays out an expert."""
        return ExpertParts(self.parts, self.is_transposed, self.has_gate, self.is_concatenated)

    def cut(self, blocks: int) -> Segments | None:
        """Cuts whole blobs into equal blocks; None for one. Raises SettingError where they cannot be."""
        if blocks == 1:
            return None
        return Segments(self.layout, self.expert_parts, stops_of(self.expert_parts, FORMATS[self.format].grain, blocks))

    def codec(self, dtype: torch.dtype, device: torch.device, blocks: int = 1) -> Codec:
        """The codec of the blobs, or of so many equal blocks of them, computing in `dtype` on `device`. Raises
        ModelError when this version of Moestro uses another layout for the format, SettingError where experts cannot
        be cut into as many blocks."""
        codec = in_blocks(
            self.format, experts=self.expert_parts, blocks=blocks, dtype=dtype, device=device, stored=self.numbers
        )
        if codec.expert_layout != self.layout:
            raise ModelError(
                f"This pack holds its experts as {self.format} in a layout that this version of Moestro "
                "does not read. Import the model again."
            )
        return codec

    def dump(self) -> str:
        """The manifest file's text, with a digest over its content."""
        body = {
            "pack": VERSION if self.heads else 1,
            "model_hash": self.model_hash,
            "format": self.format,
            "numbers": numbers_json(self.numbers),
            "layers": self.layers,
            "experts": self.experts,
            "top_k": self.top_k,
            "parts": {n: {"shape": list(s.shape), "dtype": dtype_name(s.dtype)} for n, s in self.parts.items()},
            "is_transposed": self.is_transposed,
            "has_gate": self.has_gate,
            "is_concatenated": self.is_concatenated,
            "blob": layout_json(self.layout),
            "segments": [
                {"neurons": [s.start, s.stop], "offset": s.offset, **layout_json(s.layout)} for s in self.segments
            ],
            "padded_bytes": self.padded_bytes,
            "files": {n: e._asdict() for n, e in sorted(self.files.items())},
            "crc32": [list(layer) for layer in self.sums],
            "source": dict(self.source),
            "exact": dict(self.exact),
            "moestro": self.moestro,
            "created": self.created,
            **({"heads": self.heads} if self.heads else {}),
        }
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in body.items())
        return f'{{\n{lines},\n  "digest": "{_digest(body)}"\n}}\n'

    @classmethod
    def load(cls, pack: Path, name: str = NAME) -> Manifest:
        """Read and check a pack's manifest. Raises ModelError, with what to do, when it is missing or damaged."""
        file = pack / name
        if not pack.exists() and partial(pack).is_dir():
            raise ModelError(
                f"The import into {pack} is not finished. Run the same import again: it continues where it stopped."
            )
        if not os.path.lexists(file):
            raise ModelError(f"There is no pack at {pack}: it has no {NAME}. Give the directory that an import made.")
        try:
            body = parse_json(read_bytes(file, CONFIG_BYTES))
        except BadJson as error:
            raise ModelError(unusable(file, f": {error}")) from None
        stated, version = (body.pop("digest", None), body.get("pack")) if isinstance(body, dict) else (None, None)
        if type(version) is not int:
            raise ModelError(unusable(file))
        if version > VERSION:
            raise ModelError(
                f"The pack {pack} was made by a newer Moestro ({str(body.get('moestro', '?'))[:40]}). "
                "Update Moestro to open it."
            )
        if stated != _digest(body):
            raise ModelError(unusable(file))
        try:
            manifest = cls._of(CheckedObject(body))
            manifest._check()
        except InvalidValue as error:  # the digest is right, so another program wrote it
            raise ModelError(unusable(file, f": {error}")) from None
        return manifest

    @classmethod
    def _of(cls, body: CheckedObject) -> Manifest:
        new = [] if "heads" in body.names() else ["heads"]  # which older packs have none of
        body.only("pack", *(f.name for f in fields(cls) if f.name not in ("layout", "sums", *new)), "blob", "crc32")
        numbers, parts, files = body.object("numbers"), body.object("parts"), body.object("files")
        numbers.only(*(f.name for f in fields(Numbers)))
        layers, experts = body.whole("layers", 1, MOST_LAYERS), body.whole("experts", 1, MOST_EXPERTS)
        return cls(
            model_hash=body.text("model_hash"),
            format=body.text("format"),
            layers=layers,
            experts=experts,
            top_k=body.whole("top_k", 1, experts),
            is_transposed=body.flag("is_transposed"),
            has_gate=body.flag("has_gate"),
            is_concatenated=body.flag("is_concatenated"),
            padded_bytes=body.whole("padded_bytes", 1),
            source=body.texts("source"),
            exact=body.texts("exact"),
            moestro=body.text("moestro"),
            created=body.text("created"),
            heads=0 if new else body.whole("heads", 0, layers - 1),
            numbers=Numbers(**{name: numbers.dtype(name) for name in numbers.names()}),
            parts={
                name: PartSpec(parts.object(name).shape("shape"), parts.object(name).dtype("dtype", FLOATS))
                for name in parts.names()
            },
            layout=layout_from(body.object("blob")),
            segments=tuple(segment_from(CheckedObject(s, "segments.")) for s in body.values("segments")),
            files={name: file_from(files.object(name)) for name in files.names()},
            sums=tuple(sums_from(layer) for layer in body.values("crc32")),
        )

    def _check(self) -> None:
        """Raises InvalidValue when the fields contradict each other."""
        if "label" not in self.source:
            raise InvalidValue("its source.label is missing")
        if self.format not in FORMATS:
            raise InvalidValue(f"its format is {self.format!r:.60}, which there is not")
        if not any(name.startswith("down") and spec.is_weight for name, spec in self.parts.items()):
            raise InvalidValue("none of its parts is the matrix that ends an expert (down)")
        check_layout(self.layout, "blob")
        size, experts = self.layout.bytes, self.expert_parts
        if self.segments:
            try:
                cutter = self.cutter
            except (LookupError, ValueError, RuntimeError, ArithmeticError):
                cutter = None
            if cutter is None or cutter.segments != self.segments or self.segments[-1].stop != inner_of(experts):
                raise InvalidValue("its segments do not make up its experts")
            size = cutter.bytes
        if self.padded_bytes != page_up(size):
            raise InvalidValue(f"its padded_bytes is {self.padded_bytes:,}, and its experts have {size:,} bytes")
        if len(self.sums) != self.layers or any(len(layer) != self.experts for layer in self.sums):
            raise InvalidValue(f"its crc32 are not those of {self.layers} x {self.experts} experts")
        wanted = {layer_file(n): self.experts * self.padded_bytes for n in range(self.layers)}
        for name, entry in self.files.items():
            if not is_file_name(name) or name == NAME:
                raise InvalidValue(f"it names the file {name[:100]!r}, which cannot be one of its own")
            if name.startswith("experts-") and wanted.get(name) != entry.bytes:
                raise InvalidValue(f"its {name[:100]} has {entry.bytes:,} bytes, which is not a layer of its experts")
        if lost := next((name for name in (*wanted, DENSE, "config.json") if name not in self.files), None):
            raise InvalidValue(f"it does not name {lost}")


def identity_of(
    model_hash: str, format: str, numbers: Numbers, top: int, moestro: str, heads: int = 0
) -> dict[str, Any]:
    """Identifies an import: imports with equal identity write equal bytes. `top` = neurons of the top segment, or 0."""
    return {
        "pack": VERSION if heads else 1,
        "model_hash": model_hash,
        "format": format,
        "numbers": numbers_json(numbers),
        "top": top,
        "moestro": moestro,
    }


def pack_at(path: Path) -> bool:
    """Whether a directory has a manifest, i.e. is meant to be a pack; `check` validates it."""
    return (path / NAME).is_file()


def partial(pack: Path) -> Path:
    """Directory in which a pack is written before it is complete."""
    return pack.with_name(f"{pack.name}.partial")


def layer_file(layer: int) -> str:
    """The name of a MoE layer's expert file."""
    return f"experts-{layer:05}.bin"


def _digest(body: Mapping[str, Any]) -> str:
    """sha256 over the canonical JSON of a manifest without its digest."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
