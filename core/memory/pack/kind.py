"""How the experts of some layers of a pack are stored: their formats, and where everything is in a blob."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from core.errors import ModelError, SettingError
from core.memory.codec import Codec, Layout, in_blocks
from core.memory.codec.formats import Numbers, formats_of
from core.memory.codec.segments import ExpertParts, SegmentLayout, Segments, grain_of, inner_of, stops_of
from core.memory.pack.checked_json import CheckedObject, InvalidValue
from core.memory.pack.manifest_json import check_layout, layout_from, layout_json, segment_from
from core.memory.pages import page_up


@dataclass(frozen=True, slots=True)
class Kind:
    """Of the experts of some layers."""

    NAMES: ClassVar = ("format", "blob", "segments", "padded_bytes")  # in a manifest

    format: str  # of all matrices, or one for each: see core.memory.codec.formats.formats_of
    layout: Layout  # of one expert's blob, as its codec has it
    segments: tuple[SegmentLayout, ...]  # how blobs are cut on disk; () = not cut
    padded_bytes: int  # from one expert to the next in a file

    @property
    def blob_bytes(self) -> int:
        """Bytes of one expert in its codec's layout."""
        return self.layout.bytes

    def cutter(self, experts: ExpertParts) -> Segments | None:
        """Joins the segments of a blob; None when blobs are not cut."""
        stops = [one.stop for one in self.segments]
        return Segments(self.layout, experts, stops) if self.segments else None

    def cut(self, experts: ExpertParts, blocks: int) -> Segments | None:
        """Cuts whole blobs into equal blocks; None for one. Raises SettingError where they cannot be."""
        if blocks == 1:
            return None
        return Segments(self.layout, experts, stops_of(experts, grain_of(self.format, experts), blocks))

    def codec(
        self, experts: ExpertParts, numbers: Numbers, dtype: torch.dtype, device: torch.device, blocks: int
    ) -> Codec:
        """As `Manifest.codecs`, of these layers."""
        codec = in_blocks(self.format, experts=experts, blocks=blocks, dtype=dtype, device=device, stored=numbers)
        if codec.expert_layout != self.layout:
            raise ModelError(
                f"This pack holds its experts as {self.format} in a layout that this version of Moestro "
                "does not read. Import the model again."
            )
        return codec

    def check(self, experts: ExpertParts) -> None:
        """Raises InvalidValue when it contradicts itself, or the experts."""
        try:
            formats_of(self.format, (name for name, spec in experts.parts.items() if spec.is_weight))
        except SettingError:
            raise InvalidValue(f"its format is {self.format!r:.60}, which there is not") from None
        check_layout(self.layout, "blob")
        size = self.layout.bytes
        if self.segments:
            try:
                cutter = self.cutter(experts)
            except (LookupError, ValueError, RuntimeError, ArithmeticError):
                cutter = None
            if cutter is None or cutter.segments != self.segments or self.segments[-1].stop != inner_of(experts):
                raise InvalidValue("its segments do not make up its experts")
            size = cutter.bytes
        if self.padded_bytes != page_up(size):
            raise InvalidValue(f"its padded_bytes is {self.padded_bytes:,}, and its experts have {size:,} bytes")

    def dump(self) -> dict[str, Any]:
        """As the manifest has it."""
        return {
            "format": self.format,
            "blob": layout_json(self.layout),
            "segments": [
                {"neurons": [s.start, s.stop], "offset": s.offset, **layout_json(s.layout)} for s in self.segments
            ],
            "padded_bytes": self.padded_bytes,
        }

    @classmethod
    def of(cls, stated: Any) -> Kind:
        """One of several in a manifest. Raises InvalidValue."""
        body = CheckedObject(stated, "kinds.")
        body.only(*cls.NAMES)
        return cls.load(body)

    @classmethod
    def load(cls, stated: CheckedObject) -> Kind:
        """The inverse. Raises InvalidValue."""
        return cls(
            format=stated.text("format"),
            layout=layout_from(stated.object("blob")),
            segments=tuple(segment_from(CheckedObject(s, "segments.")) for s in stated.values("segments")),
            padded_bytes=stated.whole("padded_bytes", 1),
        )
