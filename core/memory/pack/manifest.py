"""What a pack says about itself: `moestro.json`. It is written last, so a directory that has one is complete."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from core.errors import ModelError
from core.memory.codec import Codec, Layout, PartSpec, make_codec
from core.memory.codec.base import Field
from core.memory.codec.formats import Numbers
from core.memory.codec.segments import Experts, Segment, Segments

NAME = "moestro.json"
DENSE = "model.safetensors"
VERSION = 1


class Entry(NamedTuple):
    """One file of a pack: its size in bytes and sha256. Expert files have "" there, since their blobs have checksums of
    their own; `head` is the sha256 of a safetensors header, "" for other files."""

    bytes: int
    sha256: str = ""
    head: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything there is to know of a pack without reading its weights."""

    model_hash: str                    # identity of the model it was made from
    format: str                        # of the experts: a name of core.memory.codec.FORMATS
    numbers: Numbers                   # number types in the blobs
    layers: int                        # MoE layers
    experts: int                       # in each
    top_k: int
    parts: Mapping[str, PartSpec]      # of one expert, in the model's own layout and dtype
    is_transposed: bool
    has_gate: bool
    is_concatenated: bool
    layout: Layout                     # of one expert's blob, as its codec has it
    segments: tuple[Segment, ...]      # how blobs are cut on disk; () = not at all
    padded_bytes: int                  # from one expert to the next in a file
    files: Mapping[str, Entry]
    sums: tuple[tuple[int, ...], ...]  # zlib.crc32 of every padded blob, by layer and expert
    source: Mapping[str, str]          # kind, label, name, hash of what was imported
    exact: Mapping[str, str]           # by part: how its numbers came about, in words
    moestro: str                       # version that made it
    created: str                       # ISO 8601

    @property
    def blob_bytes(self) -> int:
        """Bytes of one expert as its codec wants it."""
        return self.layout.bytes

    @property
    def identity(self) -> dict[str, Any]:
        """What an import must share to go on where another one stopped: see `identity_of`."""
        return identity_of(self.model_hash, self.format, self.numbers, self.segments[0].stop if self.segments else 0,
                           self.moestro)

    @property
    def total(self) -> int:
        """Number of experts in all."""
        return self.layers * self.experts

    @property
    def bytes(self) -> int:
        """Size on disk, without the manifest itself."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def cutter(self) -> Segments | None:
        """What joins the segments of a blob; None when blobs are whole."""
        experts = Experts(self.parts, self.is_transposed, self.has_gate, self.is_concatenated)
        return Segments(self.layout, experts, self.segments[0].stop) if self.segments else None

    def codec(self, dtype: torch.dtype, device: torch.device) -> Codec:
        """The codec of the blobs, computing in `dtype` on `device`. Raises ModelError when this version of Moestro lays
        the format out in another way."""
        codec = make_codec(self.format, specs=self.parts, dtype=dtype, device=device, is_transposed=self.is_transposed,
                           stored=self.numbers)
        if codec.blob_layout != self.layout:
            raise ModelError(f"This pack holds its experts as {self.format} in a layout that this version of Moestro "
                             "does not read. Import the model again.")
        return codec

    def dump(self) -> str:
        """The text of the file, with a digest over everything in it."""
        body = {
            "pack": VERSION, "model_hash": self.model_hash, "format": self.format,
            "numbers": _names(self.numbers),
            "layers": self.layers, "experts": self.experts, "top_k": self.top_k,
            "parts": {n: {"shape": list(s.shape), "dtype": _name(s.dtype)} for n, s in self.parts.items()},
            "is_transposed": self.is_transposed, "has_gate": self.has_gate, "is_concatenated": self.is_concatenated,
            "blob": _layout(self.layout), "segments": [
                {"neurons": [s.start, s.stop], "offset": s.offset, **_layout(s.layout)} for s in self.segments],
            "padded_bytes": self.padded_bytes, "files": {n: e._asdict() for n, e in sorted(self.files.items())},
            "crc32": [list(layer) for layer in self.sums], "source": dict(self.source), "exact": dict(self.exact),
            "moestro": self.moestro, "created": self.created}
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in body.items())
        return f'{{\n{lines},\n  "digest": "{_digest(body)}"\n}}\n'

    @classmethod
    def load(cls, pack: Path) -> Manifest:
        """Read and check a pack's manifest. Raises ModelError, with what to do, when it is missing or damaged."""
        file = pack / NAME
        if not pack.exists() and partial(pack).is_dir():
            raise ModelError(f"The import into {pack} is not finished. Run the same import again: it goes on where it "
                             "stopped.")
        try:
            text = file.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise ModelError(f"There is no pack at {pack}: it has no {NAME}. Give the directory that an import made.",
                             ) from None
        except UnicodeDecodeError:
            raise ModelError(damaged(file)) from None
        except OSError as error:
            raise ModelError(unreadable(file, error)) from None
        try:
            body = json.loads(text)
            stated, version = body.pop("digest"), int(body["pack"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(damaged(file)) from None
        if version > VERSION:
            raise ModelError(f"The pack {pack} was made by a newer Moestro ({body.get('moestro', '?')}). Update "
                             "Moestro to open it.")
        if stated != _digest(body):
            raise ModelError(damaged(file))
        return cls._of(body)

    @classmethod
    def _of(cls, body: Mapping[str, Any]) -> Manifest:
        same = ("model_hash format layers experts top_k is_transposed has_gate is_concatenated padded_bytes source "
                "exact moestro created").split()
        return cls(
            **{name: body[name] for name in same},
            numbers=Numbers(**{n: _dtype(d) for n, d in body["numbers"].items()}),
            parts={n: PartSpec(tuple(s["shape"]), _dtype(s["dtype"])) for n, s in body["parts"].items()},
            layout=_layout_of(body["blob"]),
            segments=tuple(_segment(**s) for s in body["segments"]),
            files={n: Entry(**e) for n, e in body["files"].items()}, sums=tuple(map(tuple, body["crc32"])))


def identity_of(model_hash: str, format: str, numbers: Numbers, top: int, moestro: str) -> dict[str, Any]:
    """What tells one import from another: equal ones write equal bytes. `top` = neurons of the top segment, or 0."""
    return {"pack": VERSION, "model_hash": model_hash, "format": format, "numbers": _names(numbers), "top": top,
            "moestro": moestro}


def pack_at(path: Path) -> bool:
    """Whether a directory says that it is a pack; `check` tells whether it is a good one."""
    return (path / NAME).is_file()


def partial(pack: Path) -> Path:
    """Where a pack is while it is being made."""
    return pack.with_name(f"{pack.name}.partial")


def layer_file(layer: int) -> str:
    """The name of a MoE layer's expert file."""
    return f"experts-{layer:05}.bin"


def damaged(file: Path, how: str = "") -> str:
    """What to say of a file of a pack that is not what it was."""
    return f"{file} is damaged{how}. Delete {file.parent} and import the model again."


def changed(file: Path, how: str = "") -> str:
    """What to say of a file of a pack that somebody wrote to while the pack was open."""
    return (f"{file} was changed while its model was loaded{how}. Unload the model and load it again. If it is then "
            f"said to be damaged, delete {file.parent} and import the model again.")


def unreadable(file: Path, error: OSError) -> str:
    """What to say when the system refuses a read."""
    return f"{file} cannot be read: {error.strerror or error}. Check the disk and your permissions for this file."


def _digest(body: Mapping[str, Any]) -> str:
    """sha256 over the canonical JSON of a manifest without its digest."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(numbers: Numbers) -> dict[str, str]:
    return {f.name: _name(getattr(numbers, f.name)) for f in fields(numbers)}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _segment(neurons: list[int], offset: int, **layout: Any) -> Segment:
    return Segment(neurons[0], neurons[1], offset, _layout_of(layout))


def _layout(layout: Layout) -> dict[str, Any]:
    return {"bytes": layout.bytes, "fields": {
        n: {"dtype": _name(f.dtype), "shape": list(f.shape), "offset": f.offset} for n, f in layout.fields.items()}}


def _layout_of(stated: Mapping[str, Any]) -> Layout:
    return Layout({n: Field(_dtype(f["dtype"]), tuple(f["shape"]), f["offset"])
                   for n, f in stated["fields"].items()}, stated["bytes"])
