"""Expert formats: how one expert's weights are packed into bytes and multiplied by."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from core.errors import SettingError
from core.memory.codec.base import ALIGN, Codec, Field, Layout, PartSpec, SlotParts
from core.memory.codec.int4 import Int4
from core.memory.codec.int4_cpu import Int4Packed, supported
from core.memory.codec.int8 import Int8
from core.memory.codec.plain import Plain

__all__ = ["ALIGN", "FORMATS", "Codec", "Field", "Layout", "PartSpec", "SlotParts", "make_codec"]

FORMATS = ("checkpoint", "int8", "int4")


def make_codec(format: str, *, specs: Mapping[str, PartSpec], dtype: torch.dtype, device: torch.device,
               is_transposed: bool = False, group_size: int = 64) -> Codec:
    """The codec of a format for experts made of `specs`, computing in `dtype` on `device`.

    `group_size` matters to int4 only. Raises SettingError for an unknown format, ModelError when the format does not
    fit the model's shapes.
    """
    if format == "checkpoint":
        return Plain(specs, dtype, device, is_transposed)
    if format == "int8":
        return Int8(specs, dtype, device, is_transposed)
    if format == "int4":
        packed = supported(specs, dtype, device, is_transposed)
        return (Int4Packed if packed else Int4)(specs, dtype, device, is_transposed, group_size)
    raise SettingError(f"There is no expert format {format!r}. Choose one of: {', '.join(FORMATS)}.")
