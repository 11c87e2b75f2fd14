"""Expert formats: how one expert's weights are encoded into bytes and multiplied."""

from collections.abc import Mapping

import torch

from core.memory.codec.base import ALIGN, Base, Codec, Field, Layout, PartSpec, SlotParts
from core.memory.codec.coded import QuantizedTensor
from core.memory.codec.formats import FORMATS, Format, Numbers, format_of, numbers_of
from core.memory.codec.grouped import Grouped
from core.memory.codec.plain import Plain
from core.memory.codec.segments import ExpertParts, Segments, specs_of, stops_of

__all__ = [
    "ALIGN",
    "FORMATS",
    "Codec",
    "ExpertParts",
    "Field",
    "Format",
    "Layout",
    "Numbers",
    "PartSpec",
    "QuantizedTensor",
    "SlotParts",
    "format_of",
    "in_blocks",
    "make_codec",
    "on_cpu",
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
    return _made(format_of(format), specs, dtype, device, is_transposed, stored)


def on_cpu(codec: Codec) -> Codec:
    """The codec of the same experts in host memory."""
    assert isinstance(codec, Base)
    format, cpu = format_of(codec.name), torch.device("cpu")
    return _made(format, codec.specs, codec.dtype, cpu, codec.is_transposed, codec.numbers)


def in_blocks(
    format: str,
    *,
    experts: ExpertParts,
    blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    stored: Numbers | None = None,
) -> Codec:
    """The codec of `blocks` equal blocks of experts, as `make_codec`. Raises SettingError when experts cannot be cut
    into as many."""
    chosen = format_of(format)
    whole = _made(chosen, experts.parts, dtype, device, experts.is_transposed, stored)
    if blocks == 1:
        return whole
    stops = stops_of(experts, chosen.grain, blocks)
    block = _made(chosen, specs_of(experts, stops[0]), dtype, device, experts.is_transposed, stored)
    block.be_block(whole, Segments(whole.blob_layout, experts, stops))
    return block


def _made(
    chosen: Format,
    specs: Mapping[str, PartSpec],
    dtype: torch.dtype,
    device: torch.device,
    is_transposed: bool,
    stored: Numbers | None,
) -> Plain | Grouped:
    made = chosen, specs, dtype, device, is_transposed, numbers_of(chosen, dtype, stored)
    return (Plain if chosen.is_plain else Grouped)(*made)
