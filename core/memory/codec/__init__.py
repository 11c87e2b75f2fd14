"""Expert formats: how one expert's weights are encoded into bytes and multiplied."""

from collections.abc import Mapping

import torch

from core.memory.codec.base import ALIGN, Base, Codec, Field, Layout, PartSpec, SlotParts
from core.memory.codec.coded import QuantizedTensor
from core.memory.codec.formats import FORMATS, Format, Numbers, format_of, formats_of, numbers_of
from core.memory.codec.grouped import Grouped
from core.memory.codec.plain import Plain
from core.memory.codec.segments import ExpertParts, Segments, grain_of, specs_of, stops_of

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
    """The codec of a format for experts made of `specs`, or of one for each of their matrices, as `formats_of` names
    them, computing in `dtype` on `device`.

    `stored` = the number types in blobs; None = the compute dtype. Raises SettingError for an unknown format,
    ModelError when the format does not fit the model's shapes.
    """
    return _made(format, specs, dtype, device, is_transposed, stored)


def on_cpu(codec: Codec) -> Codec:
    """The codec of the same experts in host memory."""
    assert isinstance(codec, Base)
    return _made(codec.name, codec.specs, codec.dtype, torch.device("cpu"), codec.is_transposed, codec.numbers)


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
    whole = _made(format, experts.parts, dtype, device, experts.is_transposed, stored)
    if blocks == 1:
        return whole
    stops = stops_of(experts, grain_of(format, experts), blocks)
    block = _made(format, specs_of(experts, stops[0]), dtype, device, experts.is_transposed, stored)
    block.be_block(whole, Segments(whole.blob_layout, experts, stops))
    return block


def _made(
    name: str,
    specs: Mapping[str, PartSpec],
    dtype: torch.dtype,
    device: torch.device,
    is_transposed: bool,
    stored: Numbers | None,
) -> Plain | Grouped:
    formats = formats_of(name, (part for part, spec in specs.items() if spec.is_weight))
    numbers = stored or Numbers(dtype, dtype, dtype)
    if len({*formats.values()}) == 1:
        numbers = numbers_of(next(iter(formats.values())), dtype, stored)
    plain = all(one.is_plain for one in formats.values())
    return (Plain if plain else Grouped)(formats, specs, dtype, device, is_transposed, numbers)
