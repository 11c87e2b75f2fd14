"""A pack's manifest, `moestro.json`. It is written last, so a directory that has one is complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from core.errors import ModelError
from core.memory.codec import PartSpec
from core.memory.codec.formats import BETWEEN, Numbers, label_of
from core.memory.codec.layers import LayerCodecs
from core.memory.codec.segments import ExpertParts
from core.memory.pack.checked_json import FLOATS, CheckedObject, InvalidValue, whole
from core.memory.pack.kind import Kind
from core.memory.pack.manifest_json import PackFile, dtype_name, file_from, numbers_json, sums_from
from core.memory.pack.remedies import unusable
from core.system.reading import CONFIG_BYTES, BadJson, is_file_name, parse_json, read_bytes

NAME = "moestro.json"
DENSE = "model.safetensors"
VERSION = 3  # of packs with several formats; of others with heads it is 2, and without them 1
MOST_LAYERS, MOST_EXPERTS = 1000, 1 << 14


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything known about a pack without reading its weights."""

    model_hash: str  # identity of the model it was made from
    kinds: tuple[Kind, ...]  # how experts are stored, in the order of the first layer of each
    kind_of: tuple[int, ...]  # of each layer: its place in `kinds`
    numbers: Numbers  # number types in the blobs, where a format does not prescribe them
    layers: int  # MoE layers, with the heads' own, which are the last
    experts: int  # in each
    top_k: int
    parts: Mapping[str, PartSpec]  # of one expert, in the model's own layout and dtype
    is_transposed: bool
    has_gate: bool
    is_concatenated: bool
    files: Mapping[str, PackFile]
    sums: tuple[tuple[int, ...], ...]  # zlib.crc32 of every padded blob, by layer and expert
    source: Mapping[str, str]  # kind, label, name, hash of what was imported
    exact: Mapping[str, str]  # by part: how its numbers were derived from the source, in words
    moestro: str  # version that wrote it
    created: str  # ISO 8601
    heads: int = 0  # of the layers: those of heads that predict further tokens, which no pass over the model computes

    def kind(self, layer: int) -> Kind:
        """How a layer's experts are stored."""
        return self.kinds[self.kind_of[layer]]

    @property
    def formats(self) -> tuple[str, ...]:
        """The name of each layer's formats."""
        return tuple(self.kinds[at].format for at in self.kind_of)

    @property
    def format(self) -> str:
        """What the experts are held in, for display."""
        return label_of(self.formats)

    @property
    def blob_bytes(self) -> int:
        """Bytes of the largest expert in its codec's layout."""
        return max(one.blob_bytes for one in self.kinds)

    @property
    def padded_bytes(self) -> int:
        """Bytes of the largest expert in its file."""
        return max(one.padded_bytes for one in self.kinds)

    @property
    def identity(self) -> dict[str, Any]:
        """The values an interrupted import must share to be resumed: see `identity_of`."""
        segments = self.kinds[0].segments
        top = segments[0].stop if segments else 0
        return identity_of(self.model_hash, self.formats, self.numbers, top, self.moestro, self.heads)

    @property
    def total(self) -> int:
        """Total number of experts."""
        return self.layers * self.experts

    @property
    def bytes(self) -> int:
        """Size on disk, without the manifest itself."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def expert_parts(self) -> ExpertParts:
        """How the model lays out an expert."""
        return ExpertParts(self.parts, self.is_transposed, self.has_gate, self.is_concatenated)

    def codecs(self, dtype: torch.dtype, device: torch.device, blocks: int = 1) -> LayerCodecs:
        """The codecs of the blobs, or of so many equal blocks of them, computing in `dtype` on `device`. Raises
        ModelError when this version of Moestro uses another layout for a format, SettingError where experts cannot be
        cut into as many blocks."""
        made = [one.codec(self.expert_parts, self.numbers, dtype, device, blocks) for one in self.kinds]
        return LayerCodecs([made[at] for at in self.kind_of], self.experts)

    def dump(self) -> str:
        """The manifest file's text, with a digest over its content."""
        version = version_of(self.formats, self.heads)
        kind = self.kinds[0].dump() if version < VERSION else {}
        body = {
            "pack": version,
            "model_hash": self.model_hash,
            **({"format": kind["format"]} if kind else {}),
            "numbers": numbers_json(self.numbers),
            "layers": self.layers,
            "experts": self.experts,
            "top_k": self.top_k,
            "parts": {n: {"shape": list(s.shape), "dtype": dtype_name(s.dtype)} for n, s in self.parts.items()},
            "is_transposed": self.is_transposed,
            "has_gate": self.has_gate,
            "is_concatenated": self.is_concatenated,
            **{name: value for name, value in kind.items() if name != "format"},
            "files": {n: e._asdict() for n, e in sorted(self.files.items())},
            "crc32": [list(layer) for layer in self.sums],
            "source": dict(self.source),
            "exact": dict(self.exact),
            "moestro": self.moestro,
            "created": self.created,
            **({"heads": self.heads} if self.heads or not kind else {}),
            **({} if kind else {"kinds": [one.dump() for one in self.kinds], "layer_kinds": [*self.kind_of]}),
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
        alike = "kinds" not in body.names()  # as in all older packs
        new = [] if "heads" in body.names() else ["heads"]  # which older packs have none of
        own = [f.name for f in fields(cls) if f.name not in ("sums", "kinds", "kind_of", *new)]
        body.only("pack", *own, "crc32", *(Kind.NAMES if alike else ("kinds", "layer_kinds")))
        numbers, parts, files = body.object("numbers"), body.object("parts"), body.object("files")
        numbers.only(*(f.name for f in fields(Numbers)))
        layers, experts = body.whole("layers", 1, MOST_LAYERS), body.whole("experts", 1, MOST_EXPERTS)
        return cls(
            model_hash=body.text("model_hash"),
            kinds=(Kind.load(body),) if alike else tuple(Kind.of(one) for one in body.values("kinds")),
            kind_of=(0,) * layers
            if alike
            else tuple(whole(at, "layer_kinds", 0, MOST_LAYERS) for at in body.values("layer_kinds")),
            layers=layers,
            experts=experts,
            top_k=body.whole("top_k", 1, experts),
            is_transposed=body.flag("is_transposed"),
            has_gate=body.flag("has_gate"),
            is_concatenated=body.flag("is_concatenated"),
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
            files={name: file_from(files.object(name)) for name in files.names()},
            sums=tuple(sums_from(layer) for layer in body.values("crc32")),
        )

    def _check(self) -> None:
        """Raises InvalidValue when the fields contradict each other."""
        if "label" not in self.source:
            raise InvalidValue("its source.label is missing")
        if not any(name.startswith("down") and spec.is_weight for name, spec in self.parts.items()):
            raise InvalidValue("none of its parts is the matrix that ends an expert (down)")
        if len(self.kind_of) != self.layers or [*dict.fromkeys(self.kind_of)] != [*range(len(self.kinds))]:
            raise InvalidValue(f"its layer_kinds do not say which of {len(self.kinds)} kinds each layer has")
        for kind in self.kinds:
            kind.check(self.expert_parts)
        if len({tuple(one.stop for one in kind.segments) for kind in self.kinds}) > 1:
            raise InvalidValue("its segments differ between layers")
        if len(self.sums) != self.layers or any(len(layer) != self.experts for layer in self.sums):
            raise InvalidValue(f"its crc32 are not those of {self.layers} x {self.experts} experts")
        wanted = {layer_file(n): self.experts * self.kind(n).padded_bytes for n in range(self.layers)}
        for name, entry in self.files.items():
            if not is_file_name(name) or name == NAME:
                raise InvalidValue(f"it names the file {name[:100]!r}, which cannot be one of its own")
            if name.startswith("experts-") and wanted.get(name) != entry.bytes:
                raise InvalidValue(f"its {name[:100]} has {entry.bytes:,} bytes, which is not a layer of its experts")
        if lost := next((name for name in (*wanted, DENSE, "config.json") if name not in self.files), None):
            raise InvalidValue(f"it does not name {lost}")


def identity_of(
    model_hash: str, formats: Sequence[str], numbers: Numbers, top: int, moestro: str, heads: int = 0
) -> dict[str, Any]:
    """Identifies an import: imports with equal identity write equal bytes. `formats`: the name of each layer's; `top` =
    neurons of the top segment, or 0."""
    return {
        "pack": version_of(formats, heads),
        "model_hash": model_hash,
        "format": formats[0] if len({*formats}) == 1 else " ".join(formats),
        "numbers": numbers_json(numbers),
        "top": top,
        "moestro": moestro,
    }


def version_of(formats: Sequence[str], heads: int) -> int:
    """The version of a pack: the lowest that can say what it has."""
    mixed = len({*formats}) > 1 or BETWEEN in formats[0]
    return VERSION if mixed else 2 if heads else 1


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
