"""Quantised linear layers outside the experts: smaller, and faster where codes are multiplied directly.

Attention, shared experts, dense feed-forward layers and the output layer are quantised. Embeddings (and an output layer
that shares their weights), routers, norms and layers that do not fit the format are not. This changes outputs.

Beside layers of 4 bits, values that several heads share have 8: every head that reads them repeats their error. On the
demo model an eighth of the weights of attention are values; in 8 bits they take the KL of the rest from .012 to .008.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from core.errors import ModelError
from core.hf.discover import ExpertsSite
from core.memory.codec import Codec, PartSpec, SlotParts, format_of, make_codec, on_cpu
from core.memory.codec.fast.products import CanonicalProducts, serves
from core.memory.codec.grouped import Grouped
from core.memory.codec.kernels import SlotKernels, available, make_kernels, portable, say_unavailable
from core.memory.codec.matrix import matrix

WEIGHT, BIAS = "weight", "weight_bias"
FEW = 8  # rows up to which a GPU computes directly from the codes
VALUES, FINER = "v_proj", "int8-g32"
SHARED = 4  # inputs for an output of VALUES, at least, where they have FINER: some 1.5 % more bytes of a token
CLOSE = 0.03  # maximum error of a GPU's kernels against the portable product, relative to the result's norm


class Linear(NamedTuple):
    """One layer that can be quantised, as the model has it."""

    name: str  # dotted, in the model
    out: int
    columns: int
    has_bias: bool
    bytes: int  # unquantised
    is_head: bool  # the output layer, computed for one position at a time


def linears(model: nn.Module, sites: Sequence[ExpertsSite]) -> tuple[Linear, ...]:
    """The layers eligible for quantisation: plain `nn.Linear`, outside experts and routers, without shared weights, and
    not a gate of one number, which weighs a whole layer."""
    kept = [m for site in sites for part in (site.module, site.router) for m in part.modules()]
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return tuple(
        Linear(
            name, m.out_features, m.in_features, m.bias is not None, sum(p.nbytes for p in m.parameters()), m is head
        )
        for name, m in model.named_modules()
        if type(m) is nn.Linear and m.out_features > 1 and m not in kept and owners[id(m.weight)] == 1
    )


def codec_for(layer: Linear, format: str, dtype: torch.dtype, device: torch.device) -> Grouped | None:
    """The codec of a layer; None where the device would have to dequantise the weights for every token."""
    return _codec(layer.out, layer.columns, layer.has_bias, format_for(layer, format), dtype, device)


def format_for(layer: Linear, format: str) -> str:
    """The format of a layer where dense layers have `format`."""
    few = layer.name.rpartition(".")[2] == VALUES and layer.out * SHARED <= layer.columns
    return FINER if few and format_of(format).bits == 4 and layer.columns % format_of(FINER).group == 0 else format


@lru_cache(maxsize=256)
def _codec(
    out: int, columns: int, has_bias: bool, format: str, dtype: torch.dtype, device: torch.device
) -> Grouped | None:
    if columns % (format_of(format).grain or 1):
        return None
    specs = {WEIGHT: PartSpec((out, columns), dtype)} | ({BIAS: PartSpec((out,), dtype)} if has_bias else {})
    codec = make_codec(format, specs=specs, dtype=dtype, device=device)
    assert isinstance(codec, Grouped)
    if device.type == "cuda":
        return codec if available(device) else None
    return codec if dtype != torch.float32 and serves(matrix(codec, WEIGHT)) else None


def rounded_bytes(layers: Sequence[Linear], format: str, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """(bytes that quantisation saves, peak bytes for dequantising a matrix during a prompt). Raises ModelError when no
    layer can be quantised here."""
    chosen = [(layer, codec) for layer in layers if (codec := codec_for(layer, format, dtype, device)) is not None]
    if not chosen:
        raise ModelError(
            f"None of this model's dense layers can be kept as {format} here: that needs bfloat16 or "
            "float16 on a CPU with AVX2 and llvmlite, or Triton on a GPU, and layers that the format's "
            "groups divide. "
            "Choose dense weights as in the checkpoint."
        )
    return (
        sum(layer.bytes - codec.slot_bytes for layer, codec in chosen),
        max((codec.unpacked_bytes for layer, codec in chosen if not layer.is_head), default=0),
    )


class CodedLayers:
    """How the quantised layers of a model multiply on a CPU: in the `fast` arithmetic by the canonical product, else by
    torch's product of the dequantised matrix. They share what it is for their kinds."""

    def __init__(self) -> None:
        self.fast = False
        self._of: dict[Grouped, CanonicalProducts] = {}

    def of(self, codec: Grouped) -> CanonicalProducts:
        """The canonical product of a kind of layer."""
        if codec not in self._of:
            self._of[codec] = CanonicalProducts(matrix(codec, WEIGHT), codec.dtype)
        return self._of[codec]

    def products(self) -> Iterable[CanonicalProducts]:
        """Those of all kinds that were asked for."""
        return self._of.values()


def coded_layers(model: nn.Module) -> CodedLayers:
    """What all quantised layers of a model share."""
    found = (module.shared for module in model.modules() if isinstance(module, QuantizedLinear))
    return next(found, CodedLayers())


class QuantizedLinear(nn.Module):
    """Quantised replacement of an `nn.Linear`."""

    def __init__(self, linear: nn.Linear, codec: Grouped, shared: CodedLayers | None = None) -> None:
        super().__init__()
        self.shared = shared or CodedLayers()
        self._canonical = self.shared.of(codec) if codec.device.type == "cpu" else None
        self.in_features, self.out_features = linear.in_features, linear.out_features
        given = {WEIGHT: linear.weight.detach()} | ({} if linear.bias is None else {BIAS: linear.bias.detach()})
        with torch.inference_mode(False):
            self._raw = torch.empty(codec.slot_bytes, dtype=torch.uint8, device=codec.device)
            codec.place(codec.encode(given), self._raw)
        self.codec, self._parts = codec, codec.views(self._raw)
        self._bias = self._parts.plain.get(BIAS)
        self._kernels = _kernels(codec, self._raw) if codec.device.type == "cuda" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if self._kernels is not None and x.numel() <= FEW * self.in_features:
            rows = x.reshape(-1, self.in_features)
            return self._kernels.multiply(WEIGHT, [self._raw] * len(rows), rows).view(*x.shape[:-1], self.out_features)
        if self._canonical is None or not self.shared.fast:
            return self.codec.linear(self._parts, WEIGHT, x, self._bias)
        y = self._canonical.many(self._parts.at, x)
        return y if self._bias is None else y.add_(self._bias)

    def on_host(self) -> QuantizedLinear:
        """A copy in host memory, which computes there."""
        found = QuantizedLinear.__new__(QuantizedLinear)
        nn.Module.__init__(found)
        found.in_features, found.out_features = self.in_features, self.out_features
        codec = on_cpu(self.codec)
        assert isinstance(codec, Grouped)
        found.codec, found._raw, found._kernels = codec, self._raw.cpu(), None
        found.shared, found._canonical = self.shared, None
        found._parts = found.codec.views(found._raw)
        found._bias = found._parts.plain.get(BIAS)
        return found

    def release(self) -> None:
        """Give the codes up; it cannot compute any more."""
        self._raw, self._parts, self._bias = self._raw.new_empty(0), SlotParts({}, {}), None

    @property
    def address(self) -> int:
        """Where its codes are."""
        return self._raw.data_ptr()

    @property
    def weight(self) -> torch.Tensor:
        """[out, in]: dequantised at each access, for code that reads a layer's weights."""
        return self.codec.dequantize(self._parts, WEIGHT)

    @property
    def bias(self) -> torch.Tensor | None:
        """[out], unquantised."""
        return self._bias


def round_linears(
    model: nn.Module, layers: Sequence[Linear], format: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Replace the eligible ones of `layers`, one at a time, so that at most one exists twice in memory."""
    shared = CodedLayers()
    for layer in layers:
        codec = codec_for(layer, format, dtype, device)
        if codec is not None:
            owner, _, name = layer.name.rpartition(".")
            linear = model.get_submodule(layer.name)
            assert isinstance(linear, nn.Linear)
            setattr(model.get_submodule(owner), name, QuantizedLinear(linear, codec, shared))


@torch.inference_mode()
def _kernels(codec: Codec, raw: torch.Tensor) -> SlotKernels | None:
    """Kernels whose results agree with the portable product on this layer; None (logged once) when there are none."""
    kernels = make_kernels(codec)
    if kernels is None:
        return None
    x = torch.randn(2, codec.out_in(WEIGHT)[1], generator=torch.Generator().manual_seed(0))
    x, plain = x.to(codec.device, codec.dtype), portable(codec)
    parts = plain.views(raw.cpu())
    want = plain.linear(parts, WEIGHT, x.cpu()).float()
    if BIAS in parts.plain:
        want += parts.plain[BIAS].float()
    try:
        got = kernels.multiply(WEIGHT, [raw] * len(x), x).cpu().float()
    except Exception as error:  # a compiler or driver can raise anything
        say_unavailable(f"they do not run here for dense layers ({type(error).__name__}: {error})")
        return None
    off = float((got - want).norm() / want.norm())
    if not off < CLOSE:
        say_unavailable(f"they are {off:.1%} off in a trial with a dense layer")
        return None
    return kernels
