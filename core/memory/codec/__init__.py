"""Expert formats: how one expert's weights are encoded into bytes and multiplied."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from core.memory.codec.base import ALIGN, Codec, Field, Layout, PartSpec, SlotParts
from core.memory.codec.coded import QuantizedTensor
from core.memory.codec.direct import FusedCodec, supported
from core.memory.codec.formats import FORMATS, Format, Numbers, format_of, numbers_of
from core.memory.codec.grouped import Grouped
from core.memory.codec.plain import Plain

__all__ = [
    "ALIGN",
    "FORMATS",
    "Codec",
    "Field",
    "Format",
    "Layout",
    "Numbers",
    "PartSpec",
    "QuantizedTensor",
    "SlotParts",
    "format_of",
    "make_codec",
]


def make_codec(
    format: str,
    *,
    specs: Mapping[str, PartSpec],
    dtype: torch.dtype,
    device: torch.device,
    is_transposed: bool = False,
    stored: Numbers | None = None,
) -> Codec:
    """The codec of a format for experts made of `specs`, computing in `dtype` on `device`.

    `stored` = the number types in blobs; None = the compute dtype. Raises SettingError for an unknown format,
    ModelError when the format does not fit the model's shapes.
    """
    chosen = format_of(format)
    made = chosen, specs, dtype, device, is_transposed, numbers_of(chosen, dtype, stored)
    if chosen.is_plain:
        return Plain(*made)
    portable = Grouped(*made)
    return FusedCodec(*made) if supported(portable) else portable
