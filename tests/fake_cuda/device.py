"""Puts the fake device in the place of torch.cuda, and tells it what the engine's parts do with watched memory."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fake_cuda.clocks import Clocks, Event, Stream, Wait
from tests.fake_cuda.faults import Faults
from tests.fake_cuda.graphs import Captures
from tests.fake_cuda.kernels import FakeAttention, FakeKernels, mapped
from tests.fake_cuda.memory import DeviceMemory, PinnedMemory
from tests.fake_cuda.races import Races
from tests.fake_cuda.tensors import Tensors
from tests.fake_cuda.threads import traced_queue, traced_threading

SLOT, ROW, TABLE = "slot", "row", "table"


class FakeCuda:
    """One GPU. `races.found` and `races.counts`; `memory` and `pinned`; `faults`."""

    def __init__(self, total: int = 1 << 30, pinned: int = 1 << 30, seed: int = 0) -> None:
        """`total` bytes of device memory, and `pinned` bytes that the system lets be locked. `seed`: of what comes by
        chance."""
        self.capability = (8, 9)
        self.built_for = ["sm_75", "sm_80", "sm_86", "sm_90"]  # the machine code that this torch has
        self.faults = Faults()
        self.memory, self.pinned = DeviceMemory(total), PinnedMemory(pinned, self.faults)
        self.captures = Captures(self.faults, self.memory)
        self.clocks = Clocks(random.Random(seed), self.faults, self.captures)
        self.races = Races(self.clocks)
        self.tensors = Tensors(self.clocks, self.races, self.memory, self.pinned, self.faults, self.captures)

    @property
    def accesses(self) -> int:
        """Reads and writes of slots so far."""
        return self.races.counts[SLOT]

    @contextmanager
    def noting_waits(self) -> Iterator[list[Wait]]:
        """Inside, every wait of a thread for the device is noted, in order."""
        self.clocks.waits = waits = []
        try:
            yield waits
        finally:
            self.clocks.waits = None

    def functions(self) -> dict[str, Any]:
        """What torch.cuda has, by name."""
        clocks, memory = self.clocks, self.memory
        return {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "Stream": lambda *args, **values: Stream(clocks, *args, **values),
            "Event": lambda *args, **values: Event(clocks, *args, **values),
            "stream": clocks.using,
            "current_stream": clocks.current,
            "default_stream": lambda *_: clocks.default,
            "synchronize": clocks.synchronize,
            "mem_get_info": lambda *_: (memory.available, memory.total),
            "memory_allocated": lambda *_: memory.allocated,
            "max_memory_allocated": lambda *_: memory.most_allocated,
            "memory_reserved": lambda *_: memory.reserved,
            "max_memory_reserved": lambda *_: memory.most_reserved,
            "memory_stats_as_nested_dict": lambda *_: {"reserved_bytes": {"all": {"peak": memory.most_reserved}}},
            "reset_peak_memory_stats": lambda *_: memory.reset_peak(),
            "memory_snapshot": memory.snapshot,
            "empty_cache": memory.empty_cache,
            "get_device_name": lambda *_: "Fake GPU",
            "get_device_capability": lambda *_: self.capability,
            "get_arch_list": lambda: self.built_for,
            "cudart": lambda: self.pinned,
            **self.captures.functions(clocks.synchronize, lambda: clocks.change(Stream(clocks))),
        }


Told = Callable[..., Any]


@contextmanager
def installed(fake: FakeCuda, *, kernels: bool = False) -> Iterator[FakeCuda]:
    """Inside, the calling thread and copy threads have this GPU. `kernels`: it has some in the place of Triton's."""
    _before_is_remembered()
    with pytest.MonkeyPatch.context() as patch:
        for name, function in fake.functions().items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(torch._C, "_host_emptyCache", fake.pinned.empty_cache, raising=False)
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", fake.tensors.clear_products, raising=False)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", fake.memory.end_capture, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", fake.memory.release_pool, raising=False)
        generator = torch.Generator
        patch.setattr(torch, "Generator", lambda device="cpu": generator("cpu"))
        _watch(fake, patch)
        if kernels:
            patch.setattr("core.runtime.product_trials.make_kernels", lambda codec: FakeKernels(codec, fake))
            patch.setattr("core.hf.fused_rotary.available", lambda device: True)
            patch.setattr("core.capacity.sizes.available", lambda device: device.type == "cuda")
            patch.setattr("core.hf.rotary.tried", lambda own, states, tables: None)
            patch.setattr("core.hf.rotary._tried", {})
            patch.setattr("core.hf.decode_attention.tried", lambda shape, device: FakeAttention(shape))
            patch.setattr("core.hf.decode_attention.ATTENTION._made", {})
        try:
            with fake.tensors:
                yield fake
        finally:
            _forget_devices()


def _around(
    patch: pytest.MonkeyPatch, kind: type[Any], name: str, before: Told | None = None, after: Told | None = None
) -> None:
    """Call `before` with what a method gets, and `after` it with what that gave in front of the method's arguments."""
    real = getattr(kind, name)

    def call(self: Any, *args: Any, **values: Any) -> Any:
        found = before(self, *args) if before is not None else None
        result = real(self, *args, **values)
        if after is not None:
            after(self, found, *args)
        return result

    patch.setattr(kind, name, call)


def _watch(fake: FakeCuda, patch: pytest.MonkeyPatch) -> None:
    """Tell `fake` which memory holds slots and rows, and what happens outside torch."""
    from core.cache.address_table import AddressTable
    from core.memory import disk, host_memory, ticket, transfer
    from core.memory.arena import Arena
    from core.memory.codec import kernels
    from core.memory.host_memory import HostMemory
    from core.memory.pack import PackReader
    from core.memory.transfer import TransferEngine

    races = fake.races
    traced = traced_threading(fake.clocks)
    for module in (disk, ticket, transfer):
        patch.setattr(module, "threading", SimpleNamespace(**vars(traced)))
    for module in (disk, host_memory):
        patch.setattr(module, "SimpleQueue", traced_queue(fake.clocks))
    patch.setattr(kernels, "why_not", lambda device: "the GPU is not a real one")
    patch.setattr(host_memory, "device_address", lambda pinned: mapped(fake, pinned))

    def given(arena: Any, result: Any, slot: Any, raw: torch.Tensor) -> None:
        races.watch(raw.data_ptr(), raw.numel(), SLOT)

    def rows(memory: HostMemory) -> list[torch.Tensor]:
        staging = memory._locked[0].view(-1, memory.row_bytes) if memory._staging is not None else ()
        return [*memory.rows, *staging]

    def made(memory: HostMemory, *_: object) -> None:
        for row in rows(memory):
            races.watch(row.data_ptr(), row.numel(), ROW)

    def read(reader: Any, eid: int, buffer: torch.Tensor) -> None:
        if (region := races.region(buffer.data_ptr())) is not None:
            races.by_host(region, writes=True, what="read_into")

    def tabled(table: AddressTable, *_: object) -> None:
        for memory in (table._staged, table._flat):
            races.watch(memory.data_ptr(), memory.nbytes, TABLE)

    def freed(_: object, starts: Sequence[int], *more: object) -> None:
        for start in starts:
            races.freed(start)

    around = partial(_around, patch)
    around(AddressTable, "__init__", after=tabled)
    around(Arena, "_give", after=given)
    around(Arena, "_take_back", lambda arena, slot: races.freed(slot.raw.data_ptr()))
    around(Arena, "_move", lambda arena, slot, raw: [slot.raw.data_ptr()], freed)
    around(HostMemory, "__init__", after=made)
    around(HostMemory, "close", lambda memory: [row.data_ptr() for row in rows(memory)], freed)
    around(PackReader, "read_into", read)
    serve = TransferEngine._serve

    def served(self: TransferEngine) -> None:
        with fake.tensors:
            serve(self)

    patch.setattr(TransferEngine, "_serve", served)


def _before_is_remembered() -> None:
    """Libraries ask once whether there is a GPU: they have asked before it appears."""
    import transformers.utils.import_utils as found

    import core.engine.engine
    import core.importing  # noqa: F401

    for name in ("is_torch_cuda_available", "is_torch_bf16_gpu_available", "is_torch_tf32_available"):
        if (function := getattr(found, name, None)) is not None:
            function()


def _forget_devices() -> None:
    """What is remembered by device, and would be taken for that of another GPU."""
    from core.capacity import forecast
    from core.hf import quantized_linear
    from core.memory import link
    from core.memory.codec import kernels, tables

    for function in (link.measure_gbps, quantized_linear._codec, kernels.say_unavailable, tables.table, tables.grid):
        function.cache_clear()
    forecast._measured.clear()
