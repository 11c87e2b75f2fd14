"""HQQ, as transformers stores it: each module has `W_q` with `scale` and `zero`, which need not be whole, and each
setting of it (`shape`, `axis`, `group_size`, `packing`) as a tensor of its own. weight = (code - zero) * scale.

The weight is laid out as `[weights / group, group]` (axis 1) or `[group, weights / group]` (axis 0), and its rows are
packed: of codes of 4 bits the first half of the rows is in the high halves of bytes, and so on.
"""

import torch

from core.hf.safetensors_file import TensorFiles
from core.importing.sources.decoded import Matrices, QuantizedWeight, mismatch, rows, stored
from core.importing.sources.integers import Integers, fitting
from core.memory.codec.coded import QuantizedTensor

PACKINGS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "3bit_32": (3, 10), "2bit_u8": (2, 4), "1bit_u8": (1, 8)}
"""Bits of a code, and codes in a byte; of 3 bits: in a word of 32."""
PARTS = (
    *("W_q", "scale", "zero", "shape", "axis", "group_size", "packing", "nbits", "unpack_view_dtype", "view_as_float"),
    *("quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config"),
    *("channel_wise", "optimize", "round_zero", "act_bits", "act_group_size"),
)
LONGEST = 16  # numbers in a setting


class HqqMatrix(QuantizedWeight):
    """One weight. `group`: how many codes share a scale; `axis` 1: codes of one row, where `group` divides it."""

    def __init__(self, files: TensorFiles, prefix: str) -> None:
        self._files, self._prefix = files, prefix
        shape, axis, group = (self._setting(name) for name in ("shape", "axis", "group_size"))
        packing = "".join(map(chr, self._setting("packing")))
        if packing not in PACKINGS or axis not in ([0], [1]) or len(shape) != 2 or len(group) != 1:
            raise mismatch(prefix, f"a weight {shape} packed as {packing!r}, in groups of {group} along {axis}")
        self.shape, self.axis, self.group = (shape[0], shape[1]), axis[0], group[0]
        self.bits, self._per = PACKINGS[packing]
        self.scales = self.axis, self.group
        count = shape[0] * shape[1]
        if min(shape) < 1 or self.group < 1 or count % self.group:
            raise mismatch(prefix, f"groups of {self.group} do not fit a weight {self.shape}")
        self._grouped = (count // self.group, self.group) if self.axis else (self.group, count // self.group)
        self._each = (self._grouped[0], 1) if self.axis else (1, self._grouped[1])
        codes, scale, zero = (stored(files, f"{prefix}.{part}", prefix) for part in PARTS[:3])
        packed = -(-self._grouped[0] // self._per)
        if (
            files.tensors[f"{prefix}.W_q"].bytes != packed * self._grouped[1] * (4 if self.bits == 3 else 1)
            or codes[:1] != (packed,)
            or (self.bits != 3 and self._grouped[0] % self._per)
            or any(s != self._each for s in (scale, zero))
            or not all(files.tensors[f"{prefix}.{part}"].dtype.is_floating_point for part in ("scale", "zero"))
        ):
            raise mismatch(prefix, f"scales {scale}, zeros {zero} and codes {codes} do not fit a weight {self.shape}")

    def read(self, row: int | None) -> torch.Tensor:
        scale, zero = (self._part(name).float() for name in ("scale", "zero"))
        return rows(((self._codes().float() - zero) * scale).view(self.shape), row)

    def coded(self, row: int | None) -> QuantizedTensor | None:
        if self.axis == 0 or self.shape[1] % self.group or fitting(self.bits, self.group) is None:
            return None
        scale, zero = (self._part(name).view(self.shape[0], -1) for name in ("scale", "zero"))
        coded = Integers(self.bits, self._codes().view(self.shape), scale, zero, None).coded(False, False)
        return None if coded is None else coded.each(lambda t: rows(t, row))

    def _part(self, name: str) -> torch.Tensor:
        return self._files.read(f"{self._prefix}.{name}")

    def _setting(self, name: str) -> list[int]:
        """A number, several, or the letters of a word."""
        shape = stored(self._files, f"{self._prefix}.{name}", self._prefix)
        if torch.Size(shape).numel() > LONGEST or self._files.tensors[f"{self._prefix}.{name}"].dtype.is_floating_point:
            raise mismatch(self._prefix, f"its {name} is no setting")
        return [int(number) for number in self._part(name).flatten().tolist()]

    def _codes(self) -> torch.Tensor:
        """uint8, as grouped. Codes may be stored as floats of the same bytes."""
        words = self._part("W_q").contiguous().view(torch.int32 if self.bits == 3 else torch.uint8)
        shifts = range(self.bits * (self._per - 1), -1, -self.bits)
        parts = [(words >> shift & (1 << self.bits) - 1).to(torch.uint8) for shift in shifts]
        return torch.cat(parts)[: self._grouped[0]].view(self._grouped)

    @property
    def label(self) -> str:
        return f"{self.bits}-bit, groups of {self.group}" + ("" if self.axis else " across rows")


def matrices(files: TensorFiles) -> Matrices:
    """Raises ModelError for what is stored in other ways."""
    prefixes = [name.removesuffix(".W_q") for name in files.tensors if name.endswith(".W_q")]
    made = {f"{prefix}.weight": HqqMatrix(files, prefix) for prefix in prefixes}
    found: dict[str, QuantizedWeight] = dict(made)
    label = "HQQ " + " and ".join(sorted({matrix.label for matrix in made.values()}))
    return found, [f"{prefix}.{part}" for prefix in prefixes for part in PARTS], label
