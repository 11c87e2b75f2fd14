"""AWQ, gemm layout: 4-bit codes packed along the output, `qweight [in, out / 8]`, eight to a word in an interleaved
order, with `qzeros [groups, out / 8]` packed alike and `scales [groups, out]`."""

from typing import Any

import torch

from core.errors import ModelError
from core.hf.safetensors_file import TensorFiles
from core.importing.sources.decoded import Matrices, QuantizedWeight, mismatch, stored
from core.importing.sources.integers import IntegerMatrix, Integers

SUFFIXES = ("qweight", "qzeros", "scales")
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # position in its word of the code of each of eight outputs


class AwqMatrix(IntegerMatrix):
    """One AWQ weight."""

    def __init__(self, files: TensorFiles, prefix: str) -> None:
        self._files, self._prefix = files, prefix
        (columns, words), zeros, scales = (stored(files, f"{prefix}.{s}", prefix) for s in SUFFIXES)
        self.shape, self.scales = (words * 8, columns), scales
        if (
            files.tensors[f"{prefix}.qweight"].dtype != torch.int32
            or zeros != (*scales[:1], words)
            or files.tensors[f"{prefix}.qzeros"].dtype != torch.int32
            or not all((columns, *scales))
            or scales[1:] != (words * 8,)
            or columns % scales[0]
        ):
            raise mismatch(prefix, f"qzeros {zeros} and scales {scales} do not fit qweight {(columns, words)}")

    def unpack(self) -> Integers:
        codes, points = (_outputs(self._files.read(f"{self._prefix}.{s}")) for s in SUFFIXES[:2])
        scale = self._files.read(f"{self._prefix}.scales").t().contiguous()
        return Integers(4, codes, scale, points.to(torch.int16), None)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, out / 8] -> uint8 [out, n]."""
    turned = words.t().contiguous()
    return torch.stack([(turned >> 4 * place & 15).to(torch.uint8) for place in PLACES], 1).flatten(0, 1)


def matrices(files: TensorFiles, config: dict[str, Any]) -> Matrices:
    """Raises ModelError for unsupported AWQ variants."""
    version = str(config.get("version") or config.get("checkpoint_format") or "gemm").lower()
    bits, group = config.get("bits", config.get("w_bit", 4)), config.get("group_size", config.get("q_group_size", 128))
    if version != "gemm" or bits != 4:
        raise ModelError(
            f"This is an AWQ checkpoint of {bits} bits in the {version!r} layout. AWQ is read with 4 bits "
            "in the gemm layout: use such a version of the model."
        )
    prefixes = [n.removesuffix(".qweight") for n in files.tensors if n.endswith(".qweight")]
    found: dict[str, QuantizedWeight] = {f"{p}.weight": AwqMatrix(files, p) for p in prefixes}
    label = "AWQ 4-bit, " + ("one scale a row" if group == -1 else f"groups of {group}")
    return found, [f"{p}.{s}" for p in prefixes for s in SUFFIXES], label
