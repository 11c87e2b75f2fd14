"""bitsandbytes 4-bit: `weight`, two codes per byte with the first in the high half; `absmax`, one per block of
consecutive weights; `quant_map`, the code table; `quant_state`, the shape. `absmax` may be 8-bit codes (nested)."""

from typing import Any

import torch

from core.errors import ModelError
from core.hf.safetensors_file import TensorFiles
from core.importing.sources.decoded import Matrices, QuantizedWeight, mismatch, rows
from core.memory.codec.coded import QuantizedTensor
from core.memory.codec.tables import table
from core.system.reading import parse_json

GROUP = 64  # of our nf4
STATE = ".quant_state.bitsandbytes__"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class BnbMatrix(QuantizedWeight):
    """One 4-bit weight. nf4 is preserved exactly; none of our formats has fp4's table."""

    def __init__(self, files: TensorFiles, name: str, state: str) -> None:
        self._files, self._name = files, name
        try:
            self._state: dict[str, Any] = parse_json(bytes(files.read(state).tolist()))
            self.kind = str(self._state["quant_type"])
            self.shape = tuple(int(n) for n in self._state["shape"])
            self._block = int(self._state["blocksize"])
            self.scales = self.kind, self._block
            if min(self._block, int(self._state.get("nested_blocksize", 1)), *self.shape) < 1:
                raise ValueError("a size of 0")
        except (ValueError, KeyError, TypeError) as error:
            raise mismatch(name, f"its quant_state cannot be read ({error!r})") from None
        missing = [
            p for p in (PARTS if "nested_blocksize" in self._state else PARTS[:2]) if f"{name}.{p}" not in files.tensors
        ]
        if missing:
            raise ModelError(
                f"The quantized weight {name!r} lacks {missing[0]!r}. The checkpoint is incomplete: download it again."
            )
        numbers = torch.Size(self.shape).numel()
        blocks, table = (torch.Size(files.tensors[f"{name}.{p}"].shape).numel() for p in PARTS[:2])
        if blocks != -(-numbers // self._block) or table != 16:
            raise mismatch(name, f"{blocks:,} scales and a table of {table} do not fit {numbers:,} 4-bit codes")
        if files.tensors[name].bytes != -(-numbers // 2):
            raise mismatch(name, f"{files.tensors[name].bytes:,} bytes are not {numbers:,} 4-bit codes")

    def read(self, row: int | None) -> torch.Tensor:
        values = self._part("quant_map").float().index_select(0, self._codes().int())
        blocks = values.view(-1, self._block) if len(values) % self._block == 0 else None
        absmax = self._absmax()
        if blocks is None:
            weight = values * absmax.repeat_interleave(self._block)[: len(values)]
        else:
            weight = (blocks * absmax[:, None]).view(-1)
        return rows(weight.view(self.shape), row)

    def coded(self, row: int | None) -> QuantizedTensor | None:
        if (
            self.kind != "nf4"
            or self._block % GROUP
            or self.shape[-1] % GROUP
            or not torch.equal(self._part("quant_map").float(), table("nf4", torch.device("cpu")))
        ):
            return None
        groups = torch.Size(self.shape).numel() // GROUP
        scale = self._absmax().repeat_interleave(self._block // GROUP)[:groups]
        return QuantizedTensor(
            "nf4",
            rows(self._codes().view(self.shape), row),
            rows(scale.view(*self.shape[:-1], self.shape[-1] // GROUP), row),
            None,
        )

    def _part(self, part: str) -> torch.Tensor:
        return self._files.read(f"{self._name}.{part}")

    def _codes(self) -> torch.Tensor:
        """uint8, one per weight, flat."""
        raw = self._files.read(self._name).contiguous().view(torch.uint8).view(-1)  # may be stored under another dtype
        return torch.stack((raw >> 4, raw & 15), -1).view(-1)[: torch.Size(self.shape).numel()]

    def _absmax(self) -> torch.Tensor:
        """The scale of each block, fp32."""
        absmax = self._part("absmax").view(-1)
        if "nested_blocksize" not in self._state:
            return absmax.float()
        values = self._part("nested_quant_map").float()[absmax.long()]
        scale = self._part("nested_absmax").float().repeat_interleave(int(self._state["nested_blocksize"]))
        return values * scale[: len(values)] + float(self._state["nested_offset"])


def matrices(files: TensorFiles, config: dict[str, Any]) -> Matrices:
    """Raises ModelError for unsupported variants."""
    if config.get("load_in_8bit") or any(n.endswith(".SCB") for n in files.tensors):
        raise ModelError(
            "This is a bitsandbytes 8-bit checkpoint, which is not read. Use the original model, and "
            "choose the format int8 here."
        )
    states = {n.partition(STATE)[0]: n for n in files.tensors if STATE in n}
    bare = [n for n in files.tensors if n.endswith(".absmax") and n.removesuffix(".absmax") not in states]
    if bare:
        raise ModelError(
            f"The quantized weight {bare[0].removesuffix('.absmax')!r} lacks its quant_state. The "
            "checkpoint is incomplete: download it again."
        )
    found: dict[str, QuantizedWeight] = {n: BnbMatrix(files, n, state) for n, state in states.items()}
    taken = [*states.values(), *(f"{n}.{p}" for n in states for p in PARTS)]
    kind = str(config.get("bnb_4bit_quant_type", "fp4")).upper()
    return found, taken, f"bitsandbytes 4-bit {kind}"
