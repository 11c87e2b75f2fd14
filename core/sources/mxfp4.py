"""MXFP4 as gpt-oss has it: `NAME_blocks [experts, out, in / 32, 16]`, two 4-bit floats a byte, the even input in the
low half, and `NAME_scales [experts, out, in / 32]`, exponents of 2 plus 127. The model's own parameter NAME is
[experts, in, out]."""

from __future__ import annotations

from typing import Any

import torch

from core.hf.files import TensorFiles
from core.memory.codec.coded import Coded
from core.memory.codec.tables import table
from core.sources.decoded import Matrix, exponents, mismatch, stored

GROUP = 32


class Mxfp4Matrix(Matrix):
    """Stacked experts, transposed: the model wants [in, out]."""

    def __init__(self, files: TensorFiles, name: str) -> None:
        self._files, self._name = files, name
        blocks, scales = (stored(files, f"{name}_{s}", name) for s in ("blocks", "scales"))
        if blocks[3:] != (GROUP // 2,) or scales != blocks[:3]:
            raise mismatch(name, f"scales {scales} do not fit blocks {blocks}")
        self.shape = (blocks[0], blocks[2] * GROUP, blocks[1])

    def read(self, row: int | None) -> torch.Tensor:
        coded = self.coded(row)
        return scaled(coded.codes.transpose(1, 2), coded.scale.transpose(1, 2)).transpose(1, 2).contiguous()

    def coded(self, row: int | None) -> Coded:
        codes = halves(self._files.read(f"{self._name}_blocks", row).flatten(2))
        scale = self._files.read(f"{self._name}_scales", row)
        return Coded("mxfp4", codes.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous(), None)


def halves(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] -> codes uint8 [..., 2n], the low half of each byte first."""
    return torch.stack((raw & 15, raw >> 4), -1).flatten(-2)


def scaled(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes [..., in] and exponents [..., in / 32] -> fp32 weights."""
    values: torch.Tensor = table("mxfp4", codes.device)[codes.long()].unflatten(-1, (-1, GROUP))
    return (values * exponents(scale)[..., None]).flatten(-2)


def matrices(files: TensorFiles, config: dict[str, Any]) -> tuple[dict[str, Matrix], list[str], str]:
    """(weights by name, the tensors they are made of, a label). Raises ModelError for what is not read."""
    names = [n.removesuffix("_blocks") for n in files.tensors if n.endswith("_blocks")]
    found: dict[str, Matrix] = {n: Mxfp4Matrix(files, n) for n in names}
    return found, [f"{n}_{s}" for n in names for s in ("blocks", "scales")], "MXFP4"
