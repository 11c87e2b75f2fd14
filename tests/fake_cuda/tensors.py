"""Tensors that say they are on the GPU. Their numbers are in host memory and computed there; their bytes count as
device memory, and what reads and writes watched memory is noted with the stream it was given to."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from tests.fake_cuda.calls import address_of, check_devices, key_of, needs_numbers, on_host, sends, tensors_of
from tests.fake_cuda.clocks import Clocks
from tests.fake_cuda.faults import Faults
from tests.fake_cuda.graphs import Captures, FakeGraph
from tests.fake_cuda.memory import Block, DeviceMemory, PinnedMemory, Segment
from tests.fake_cuda.races import Races

GPU = torch.device("cuda:0")
TOLD = {  # attributes of a tensor on the device
    torch.Tensor.device: GPU,
    torch.Tensor.is_cuda: True,
    torch.Tensor.is_cpu: False,
}
MOVES = frozenset(("to", "cpu", "cuda"))
WAITS = frozenset(  # return a number or a shape that depends on numbers, to the host
    "item tolist __bool__ __int__ __float__ __index__ nonzero equal allclose is_nonzero unique masked_select "
    "bincount argwhere".split()
)
MAKES = frozenset("tensor as_tensor asarray".split())  # a tensor of numbers of the host, which are sent while it waits
CHECKED = 2  # numbers that torch's `multinomial` reads back before it draws (aten/src/ATen/native/Distributions.cpp)
CHANGES = frozenset("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __iand__ __ior__ __ixor__".split())
PRODUCTS = frozenset("linear mm matmul bmm addmm __matmul__".split())


class Kept(NamedTuple):
    """A storage on the device."""

    watch: weakref.ref[Any]  # tells when it is gone
    segment: Segment
    block: Block


class Tensors(TorchFunctionMode):
    """Inside, on each thread that enters it, `device="cuda"` works."""

    def __init__(
        self,
        clocks: Clocks,
        races: Races,
        memory: DeviceMemory,
        pinned: PinnedMemory,
        faults: Faults,
        captures: Captures,
    ) -> None:
        super().__init__()
        self.captures = captures
        self._clocks, self._races, self._memory = clocks, races, memory
        self._pinned, self._faults = pinned, faults
        self._kept: dict[int, Kept] = {}  # by the address of a storage's C++ object
        self._locked: dict[int, weakref.ref[Any]] = {}  # address of memory that torch pinned
        self._lock = threading.RLock()
        self.product_bytes = 0
        """What the library of matrix products takes for itself with the first one, and for captures once more."""
        self._for_products: dict[bool, torch.Tensor] = {}  # by whether it is for captures

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__", "__delete__"):
            return self._attribute(func, args)
        result = self._called(func, name, args, kwargs)
        if self.captures.current is not None:
            self._captured(self.captures.current, func, args, kwargs, result)
        return result

    def _captured(
        self, graph: FakeGraph, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Keep a call for replays, which leave what it makes where it is now."""
        given = {key_of(tensor) for tensor in tensors_of((*args, *kwargs.values()))}
        made = tensors_of((result,))
        graph.made += [tensor for tensor in made if key_of(tensor) not in given]

        def again() -> None:
            for old, new in zip(made, tensors_of((func(*args, **kwargs),)), strict=True):
                if key_of(old) != key_of(new):
                    with torch._C.DisableTorchFunction():
                        old.copy_(new)

        graph.calls.append(again)

    def _called(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name == "_parse_to":  # what Module.to is asked for, and asks of each of its tensors
            return func(*args, **kwargs)
        pin, asked = False, None
        if kwargs or name == "to" or torch.device in map(type, args):
            kwargs = dict(kwargs)
            pin = bool(kwargs.pop("pin_memory", False))
            args, kwargs, asked = on_host(name, args, kwargs)
        if name == "pin_memory":
            self.captures.forbid()
            return self._pin(args[0].clone())
        if name == "is_pinned":
            return self._pinned.holds(args[0].data_ptr())
        if name in MOVES and isinstance(args[0], torch.Tensor):
            return self._moved(name, func, args, kwargs, asked)
        given = tensors_of((*args, *kwargs.values()) if kwargs else args)
        keys = [key_of(tensor) for tensor in given]
        ours = len([key for key in keys if key in self._kept])
        if ours:
            self._faults.check("launch")
            if name in ("numpy", "__array__"):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
            check_devices(name, given, ours)
            captured = self.captures.current is not None
            if name in PRODUCTS and self.product_bytes and captured not in self._for_products:
                self._for_products[captured] = self._keep(torch.empty(self.product_bytes, dtype=torch.uint8))
        elif asked == "cuda":
            self._faults.check("launch")
            if name in ("tensor", "as_tensor"):  # copied from where it is not pinned
                self.captures.forbid()
        result = func(*args, **kwargs)
        made = tensors_of((result,))
        results = [key_of(tensor) for tensor in made]
        if asked == "cuda" or (asked is None and ours):
            fresh = False
            for tensor, key in zip(made, results, strict=True):
                if key not in keys:
                    self._keep(tensor, key)
                    fresh = True
            if asked == "cuda" and isinstance(result, torch.Tensor) and not fresh:  # as_tensor of a host tensor
                result = self._keep(result.detach().clone())
                results = [key_of(result)]
            if asked == "cuda" and name in MAKES and result.numel():
                self._clocks.waited(name)
        elif pin:
            result = self._pin(result)
        self._note(name, args, kwargs, given, keys, results)
        if ours and (name in WAITS or needs_numbers(name, args, kwargs)):
            self._clocks.wait(name)
        if ours and name == "multinomial":
            for _ in range(CHECKED):
                self._clocks.wait(name)
        if ours and name in ("__getitem__", "__setitem__", "index_put_") and sends(args):
            self._clocks.waited(name)
        return result

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's bytes are device memory."""
        return key_of(tensor) in self._kept

    def clear_products(self) -> None:
        """torch._C._cuda_clearCublasWorkspaces."""
        self._for_products.clear()

    def _attribute(self, func: Callable[..., Any], args: Sequence[Any]) -> Any:
        told = TOLD.get(getattr(func, "__self__", None))
        return func(*args) if told is None or not self.on_device(args[0]) else told

    def _keep(self, tensor: torch.Tensor, key: int | None = None) -> torch.Tensor:
        """Count a tensor's storage as device memory, until it is gone. Raises torch.OutOfMemoryError."""
        key = key or key_of(tensor)
        with self._lock:
            if key is not None and key not in self._kept:
                storage = tensor.untyped_storage()
                segment, block = self._memory.allocate(storage.nbytes(), self.captures.pool)
                self._kept[key] = Kept(weakref.ref(storage, lambda _: self._gone(key)), segment, block)
        return tensor

    def _gone(self, key: int) -> None:
        with self._lock:
            kept = self._kept.pop(key)
        self._memory.free(kept.segment, kept.block)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        address, storage = tensor.data_ptr(), tensor.untyped_storage()

        def gone(_: object) -> None:
            del self._locked[address]
            self._pinned.release(address)

        self._pinned.allocate(address, storage.nbytes())
        self._locked[address] = weakref.ref(storage, gone)
        return tensor

    def _moved(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], asked: str | None
    ) -> torch.Tensor:
        x = args[0]
        source = self.on_device(x)
        if name != "to":
            asked = "cuda" if name == "cuda" else "cpu"
        elif len(args) > 1 and isinstance(args[1], torch.Tensor):
            asked = "cuda" if self.on_device(args[1]) else "cpu"
        target = source if asked is None else asked == "cuda"
        result: torch.Tensor = func(*args, **kwargs) if name == "to" else x
        if asked == "meta" or x.is_meta:
            return result
        if target != source and key_of(result) == key_of(x):
            result = result.detach().clone()
        if source or target:
            self._faults.check("launch")
        if target and not source and not (kwargs.get("non_blocking") and self._pinned.holds(x.data_ptr())):
            self.captures.forbid()
        if result is not x:
            self._reads(x, f"{name}()")
        non_blocking = bool(kwargs.get("non_blocking"))
        if source and not target:
            self._clocks.wait(name)
        elif target and not source and x.numel() and not (non_blocking and self._pinned.holds(x.data_ptr())):
            self._clocks.waited(name)
        return self._keep(result) if target else result

    def _note(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        given: Sequence[torch.Tensor],
        keys: Sequence[int | None],
        results: Sequence[int | None],
    ) -> None:
        """Note what a call read and wrote of watched memory: `keys` of what it was given, and of what it gave."""
        if name == "copy_":
            target, source = args[0], args[1]
            self._reads(source, name)
            self._writes(target, name, by_stream=self.on_device(source) or self.on_device(target))
            waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            from_device, to_device = self.on_device(source), self.on_device(target)
            if from_device and not to_device:
                if waits or not self._pinned.holds(target.data_ptr()):
                    self._clocks.wait(name)
            elif to_device and not from_device and (waits or not self._pinned.holds(source.data_ptr())):
                self._clocks.waited(name)
            return
        changed = tensors_of(args[:1]) if name in CHANGES or (name.endswith("_") and name[-2:] != "__") else []
        if "out" in kwargs:
            changed += tensors_of((kwargs["out"],))
        if not changed and (not set(keys).isdisjoint(results) if results else name not in WAITS):
            return  # a view, or what is known without the numbers
        for tensor in given:
            if not changed or all(tensor is not one for one in changed):
                self._reads(tensor, name)
        for tensor in changed:
            self._writes(tensor, name, by_stream=self.on_device(tensor))

    def _reads(self, tensor: torch.Tensor, what: str) -> None:
        region = self._races.region(address_of(tensor))
        if region is None:
            return
        if self.on_device(tensor) or self._pinned.holds(address_of(tensor)):
            self._races.by_stream(region, writes=False, what=what)
        else:  # pageable memory is read before a copy returns
            self._races.by_host(region, writes=False, what=what)

    def _writes(self, tensor: torch.Tensor, what: str, *, by_stream: bool) -> None:
        if (region := self._races.region(address_of(tensor))) is not None:
            (self._races.by_stream if by_stream else self._races.by_host)(region, writes=True, what=what)
