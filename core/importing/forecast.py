"""What an import makes of a source, before it begins: how large the pack is, and what the experts' weights lose."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch

from core.hf.head import MIMO, STORED
from core.importing.job import CPU, ImportPlan
from core.importing.left_out import AHEAD, LeftOut, left_out
from core.memory.codec import make_codec
from core.memory.codec.coded import QuantizedTensor
from core.memory.codec.formats import Format, label_of
from core.system.wording import format_bytes


class Conversion(NamedTuple):
    """What becomes of the experts' weights that are stored alike."""

    stored: str  # how the source has them: "Q6_K", "float32"
    share: float  # of all weights of experts
    how: str  # "requantised", "exact codes"
    error: float  # root mean square of what the pack's are off by, as a share of the weights' own; 0.0 = nothing


@dataclass(frozen=True, slots=True)
class ImportForecast:
    """`format` of the experts in the pack; the `bytes` it takes, those of the source, and of what is not experts."""

    format: str
    bytes: int
    dense_bytes: int
    source_bytes: int
    conversions: tuple[Conversion, ...]  # most weights first
    left_out: tuple[LeftOut, ...] = ()  # the largest first
    head_bytes: int = 0  # of a head that predicts further tokens, which the pack will have

    def lines(self) -> list[str]:
        """For the user: the pack's size, then a line for each kind of weights."""
        grown = self.bytes / max(1, self.source_bytes)
        change = f", {grown:.2g} times as much" if grown > 1.1 else ""
        return [
            f"The pack takes {format_bytes(self.bytes)}{change}; the source has {format_bytes(self.source_bytes)}. "
            f"Experts as {self.format}: {format_bytes(self.bytes - self.dense_bytes)}; everything else: "
            f"{format_bytes(self.dense_bytes)}.",
            *(
                f"{one.stored}, {_percent(one.share)} of the experts' weights: {one.how}, {_off(one.error)}."
                for one in self.conversions
            ),
            *([f"With it: {AHEAD}, {format_bytes(self.head_bytes)} of that."] if self.head_bytes else []),
            *(f"Left out: {one.what}, {format_bytes(one.bytes)}." for one in self.left_out),
        ]


def make_forecast(job: ImportPlan) -> ImportForecast:
    """The forecast of a planned import. Reads and converts one matrix of each kind that the experts are stored in.
    Raises ModelError where that cannot be read."""
    kinds: dict[tuple[str, Format], tuple[int, str]] = {}  # how it is stored, and becomes -> one, as (MoE layer, part)
    weights = Counter[tuple[str, Format]]()
    for layer in range(job.layers):
        for part, spec in job.site.parts.items():
            if spec.is_weight:
                stored = " and ".join(dict.fromkeys(map(job.source.stored_as, job.reader.names_of(layer, 0, part))))
                kind = stored, job.codecs[layer].formats[part]
                kinds.setdefault(kind, (layer, part))
                weights[kind] += math.prod(spec.shape)
    conversions = [
        Conversion(kind[0], count / weights.total(), *_converted(job, *kinds[kind]))
        for kind, count in weights.most_common()
    ]
    return ImportForecast(
        label_of(job.formats),
        job.bytes,
        job.dense_bytes,
        job.source.bytes,
        tuple(conversions),
        _left_out(job),
        _head_bytes(job),
    )


def _head_bytes(job: ImportPlan) -> int:
    """What a head takes in the pack."""
    if job.head != "":
        return 0
    own = [one for name, one in job.dense.items() if name.startswith((job.head_layer, STORED, MIMO))]
    experts = job.heads and job.site.num_experts * job.padded_bytes(job.layers - 1)
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in own) + experts


def _left_out(job: ImportPlan) -> tuple[LeftOut, ...]:
    stated = job.source.tensors.tensors
    plain = {name: math.prod(stated[name].shape) * stated[name].dtype.itemsize for name in job.reader.unused}
    return left_out(plain | dict(job.source.passed_over), job.head)


def _converted(job: ImportPlan, layer: int, part: str) -> tuple[str, float]:
    """(how, error) of a matrix of the layer's first expert, by the codec of the import."""
    given = job.read(layer, 0)[part]
    site = job.site
    codec = make_codec(
        job.codecs[layer].formats[part].name,
        specs={part: site.parts[part]},
        dtype=torch.float32,
        device=CPU,
        is_transposed=site.is_transposed,
        stored=job.numbers,
    )
    slot = torch.empty(codec.slot_bytes, dtype=torch.uint8)
    codec.place(codec.encode({part: given}), slot)
    made = codec.dequantize(codec.views(slot), part)
    wanted = _numbers(given, site.is_transposed)
    off = (made - wanted).square().mean().sqrt() / wanted.square().mean().sqrt().clamp_min(1e-30)
    return job.origin(layer, part, given).partition(" from ")[0], float(off)


def _numbers(given: torch.Tensor | QuantizedTensor, is_transposed: bool) -> torch.Tensor:
    """What is stored, in the model's own layout, fp32."""
    if isinstance(given, torch.Tensor):
        return given.float()
    return given.turned().dequantized().t() if is_transposed else given.dequantized()


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share < 0.995 else "all"


def _off(error: float) -> str:
    return f"off by {100 * error:.2g} % (root mean square of one matrix)" if error else "nothing is lost"
