"""GPTQ: codes of 4 or 8 bits packed along the input, `qweight [in * bits / 32, out]`, with `qzeros`, `scales [groups,
out]` and `g_idx [in]`. Format 1 (AutoGPTQ) stores each zero point minus one, format 2 (GPTQModel) unchanged."""

from typing import Any

import torch

from core.errors import ModelError
from core.hf.safetensors_file import TensorFiles
from core.importing.sources.decoded import Matrices, QuantizedWeight, mismatch, stored
from core.importing.sources.integers import IntegerMatrix, Integers, order_of, unpacked

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
FORMATS = {"": 1, "gptq": 1, "gptq_v2": 2}  # checkpoint_format -> version


class GptqMatrix(IntegerMatrix):
    """One GPTQ weight. Bits and group size follow from its own shapes, because `dynamic` settings
    may differ per layer."""

    def __init__(self, files: TensorFiles, prefix: str, symmetric: bool, by_row: bool, minus_one: bool) -> None:
        self._files, self._prefix, self._minus_one = files, prefix, minus_one
        self.symmetric, self.by_row = symmetric, by_row
        (words, out), zeros, scales = (stored(files, f"{prefix}.{s}", prefix) for s in SUFFIXES[:3])
        self.bits = 32 * zeros[1] // out if len(zeros) == 2 else 0
        if files.tensors[f"{prefix}.qweight"].dtype != torch.int32 or self.bits not in (4, 8):
            raise mismatch(prefix, f"GPTQ of {self.bits or 'unknown'} bits is not read, only of 4 and of 8")
        self.shape = (out, words * 32 // self.bits)
        self.scales = self.groups = scales[0]
        if (
            scales[1:] != (out,)
            or zeros[0] != scales[0]
            or not all((words, *scales))
            or files.tensors[f"{prefix}.qzeros"].dtype != torch.int32
        ):
            raise mismatch(prefix, f"scales {scales} and qzeros {zeros} do not fit qweight {(words, out)}")

    def unpack(self) -> Integers:
        def read(suffix: str) -> torch.Tensor:
            return self._files.read(f"{self._prefix}.{suffix}")

        codes = unpacked(read("qweight").t(), self.bits)
        points = unpacked(read("qzeros"), self.bits).t().to(torch.int16)
        if self._minus_one:
            points = (points + 1) & ((1 << self.bits) - 1)
        order = None
        if f"{self._prefix}.g_idx" in self._files.tensors:
            order = order_of(read("g_idx"), self.groups)
        elif self.shape[1] % self.groups:
            order = torch.arange(self.shape[1]) // -(-self.shape[1] // self.groups)
        return Integers(self.bits, codes, read("scales").t().contiguous(), points.contiguous(), order)


def matrices(files: TensorFiles, config: dict[str, Any]) -> Matrices:
    """Raises ModelError for unsupported GPTQ variants."""
    kind = str(config.get("checkpoint_format") or config.get("format") or "").lower()
    if kind not in FORMATS:
        raise ModelError(
            f"This GPTQ checkpoint is in the {kind!r} format, which only one kernel reads. Use a version "
            "whose checkpoint_format is gptq or gptq_v2."
        )
    bits, group = config.get("bits"), config.get("group_size", -1)
    if bits is not None and bits not in (4, 8):
        raise ModelError(
            f"This is a GPTQ checkpoint of {bits} bits. GPTQ is read with 4 and with 8 bits: use such a "
            "version of the model."
        )
    prefixes = [n.removesuffix(".qweight") for n in files.tensors if n.endswith(".qweight")]
    found: dict[str, QuantizedWeight] = {
        f"{p}.weight": GptqMatrix(files, p, bool(config.get("sym")), group == -1, FORMATS[kind] == 1) for p in prefixes
    }
    label = f"GPTQ {bits or 4}-bit, " + ("one scale a row" if group == -1 else f"groups of {group}")
    return found, [f"{p}.{s}" for p in prefixes for s in SUFFIXES], label
