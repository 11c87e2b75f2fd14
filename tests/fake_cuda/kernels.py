"""What Triton's kernels would do on the fake GPU: products of slots, or of experts that only the device knows.

Products of single rows are summed in fp64 and rounded once, so that they differ from torch's products of dequantised
weights in some bits, as those of real kernels do. Reads of slots, pinned rows and tables are noted in the
current stream. An address that is neither a slot's nor one of pinned memory, as kernels have it, loses the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from core.errors import DeviceError
from core.hf.attention_launch import Shape
from core.memory.codec.base import Codec
from core.memory.codec.kernels import portable

if TYPE_CHECKING:
    from tests.fake_cuda.device import FakeCuda

MAPPED = 1 << 52  # added to the host's address of pinned memory: where kernels have it


class FakeKernels:
    """In the place of core.memory.codec.kernels.SlotKernels."""

    def __init__(self, codec: Codec, fake: FakeCuda) -> None:
        self._codec, self._fake = portable(codec), fake
        self.dtype, self.is_plain = codec.dtype, codec.is_plain

    def outputs(self, part: str) -> int:
        return self._codec.out_in(part)[0]

    def multiply(self, part: str, slots: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        addresses = [slot.data_ptr() for slot in slots]
        return self._rows(part, len(slots), lambda: addresses, x)

    def multiply_by_ids(self, part: str, table: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert table.dtype == ids.dtype == torch.int64 and all(map(self._fake.tensors.on_device, (table, ids, x)))

        def found() -> list[int]:
            self._note(table.data_ptr(), "kernel")
            self._note(ids.data_ptr(), "kernel")
            with torch._C.DisableTorchFunction():
                at: list[int] = table[ids].tolist()
                return at

        return self._rows(part, len(ids), found, x)

    def dequantized(self, part: str, slots: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        for at, slot in enumerate(slots):
            weight = self._codec.dequantize(self._codec.views(slot), part)
            yield at, (weight.t() if self._codec.is_transposed else weight)[None].contiguous().to(slot.device)

    def _rows(self, part: str, count: int, addresses: Callable[[], Sequence[int]], x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(count, self.outputs(part))

        def launched() -> None:
            self._fake.faults.check("launch")
            raws = [self._bytes(at) for at in addresses()]
            with torch._C.DisableTorchFunction():
                for i, raw in enumerate(raws):
                    parts, row = self._codec.views(raw), x[min(i, len(x) - 1)][None]
                    weight = self._codec.dequantize(parts, part)
                    y = row[0].double() @ (weight if self._codec.is_transposed else weight.t()).double()
                    out[i] = y + parts.plain[part + "_bias"] if part + "_bias" in parts.plain else y

        launched()
        if (graph := self._fake.captures.current) is not None:
            graph.calls.append(launched)
        return out

    def _bytes(self, address: int) -> torch.Tensor:
        """The bytes at an address that a kernel was given."""
        memory = (ctypes.c_uint8 * self._codec.slot_bytes).from_address(read_by_kernel(self._fake, address))
        with torch._C.DisableTorchFunction():
            return torch.frombuffer(memory, dtype=torch.uint8)

    def _note(self, address: int, what: str) -> None:
        if (region := self._fake.races.region(address)) is not None:
            self._fake.races.by_stream(region, writes=False, what=what)


def read_by_kernel(fake: FakeCuda, address: int) -> int:
    """Note that a kernel reads a slot, or pinned memory -> where the host has it."""
    host = address - MAPPED if address >= MAPPED else address
    region = fake.races.region(host)
    if region is None or not (fake.pinned.holds(host) if address >= MAPPED else region.kind == "slot"):
        fake.faults.lose_device(lambda call: True)
        fake.faults.check("launch")
    assert region is not None
    fake.races.by_stream(region, writes=False, what="kernel")
    return host


class FakeAttention:
    """In the place of core.hf.attention_launch.AttentionKernels: the formula in fp64, rounded once."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        times = self._shape.heads // self._shape.shared
        keys, values = (one[0].repeat_interleave(times, 0).double() for one in (k, v))
        scores = q[0].double() @ keys.transpose(1, 2) * self._shape.scaling
        if last is not None:
            scores = scores.masked_fill(torch.arange(k.shape[2], device=k.device) > last, float("-inf"))
        return (scores.softmax(-1) @ values).transpose(0, 1)[None].to(q.dtype)


def mapped(fake: FakeCuda, pinned: torch.Tensor) -> int:
    """In the place of core.memory.mapped.device_address."""
    if not fake.pinned.holds(pinned.data_ptr()):
        raise DeviceError("the driver gives pinned memory no address for kernels (CUDA error 1)")
    return MAPPED + pinned.data_ptr()
