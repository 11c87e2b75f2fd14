"""Parts of a pack's manifest as JSON: number types, files, segments and the layout of a blob.

`*_json` return what the manifest holds; `*_from` read it back, and raise InvalidValue.
"""

from dataclasses import fields
from typing import Any, NamedTuple

import torch

from core.memory.codec import ALIGN, Field, Layout
from core.memory.codec.formats import Numbers
from core.memory.codec.segments import SegmentLayout
from core.memory.pack.checked_json import CheckedObject, InvalidValue, whole


class PackFile(NamedTuple):
    """One file of a pack: its size in bytes and sha256. Expert files have "" as sha256, since each blob has its own
    checksum; `head` is the sha256 of a safetensors header, "" for other files."""

    bytes: int
    sha256: str = ""
    head: str = ""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def numbers_json(numbers: Numbers) -> dict[str, str]:
    return {f.name: dtype_name(getattr(numbers, f.name)) for f in fields(numbers)}


def sums_from(layer: Any) -> tuple[int, ...]:
    if not isinstance(layer, list):
        raise InvalidValue(f"its crc32 has {layer!r:.60} for a layer")
    return tuple(whole(number, "crc32", 0, (1 << 32) - 1) for number in layer)


def file_from(stated: CheckedObject) -> PackFile:
    stated.only(*PackFile._fields)
    return PackFile(stated.whole("bytes"), stated.text("sha256"), stated.text("head"))


def segment_from(stated: CheckedObject) -> SegmentLayout:
    neurons = [whole(n, "segments.neurons", 0) for n in stated.values("neurons")]
    if len(neurons) != 2:
        raise InvalidValue(f"its segments.neurons is {neurons!r:.60}, not a start and an end")
    return SegmentLayout(neurons[0], neurons[1], stated.whole("offset"), layout_from(stated))


def layout_json(layout: Layout) -> dict[str, Any]:
    return {
        "bytes": layout.bytes,
        "fields": {
            n: {"dtype": dtype_name(f.dtype), "shape": list(f.shape), "offset": f.offset}
            for n, f in layout.fields.items()
        },
    }


def layout_from(stated: CheckedObject) -> Layout:
    inner = stated.object("fields")
    made = {}
    for name in inner.names():
        field = inner.object(name)
        made[name] = Field(field.dtype("dtype"), field.shape("shape"), field.whole("offset"))
    return Layout(made, stated.whole("bytes", 1))


def check_layout(layout: Layout, name: str) -> None:
    """Raises InvalidValue unless the layout's fields are consecutive and lie within its bytes."""
    end = 0
    for part, field in layout.fields.items():
        if field.offset < end or field.offset % ALIGN or field.offset + field.bytes > layout.bytes:
            raise InvalidValue(
                f"its {name}.fields.{part[:60]} lies at byte {field.offset:,} of {layout.bytes:,}, in another "
                "field or outside"
            )
        end = field.offset + field.bytes
