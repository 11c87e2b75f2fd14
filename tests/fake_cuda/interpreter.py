"""Triton's interpreter in the place of the fake GPU's kernels: it computes at once what is launched, on the CPU's
memory, which is the fake GPU's. What kernels are told the addresses of is noted as read in the current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tests.fake_cuda.kernels import MAPPED

TABLE = "bases"  # the argument of kernels that has the addresses of experts

if TYPE_CHECKING:
    from tests.fake_cuda.device import FakeCuda


class Interpreter:
    """A launcher of core.memory.codec.kernels.products, for kernels that were imported with TRITON_INTERPRET=1."""

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake
        self.launches = 0
        self.after = dict[str, Callable[[Mapping[str, Any]], None]]()  # by the name of a kernel: gets its arguments

    def __call__(self, kernel: Any, constants: Mapping[str, Any]) -> Launch:
        return Launch(self, kernel, constants)

    def launch(self, name: str, call: Callable[..., object], given: Mapping[str, Any]) -> None:
        """Compute now, and at every replay of a graph that is captured."""

        def launched() -> None:
            self._fake.faults.check("launch")
            with torch._C.DisableTorchFunction():
                told = given
                if isinstance(table := given.get(TABLE), torch.Tensor):  # pinned memory is where the host has it
                    told = {**given, TABLE: torch.where(table >= MAPPED, table - MAPPED, table)}
                told = {name: one - MAPPED if _is_mapped(one) else one for name, one in told.items()}
                for address in _addresses(told):
                    if (region := self._fake.races.region(address)) is not None:
                        self._fake.races.by_stream(region, writes=False, what="kernel")
                call(*told.values())
                if (after := self.after.get(name)) is not None:
                    after(told)

        self.launches += 1
        launched()
        if (graph := self._fake.captures.current) is not None:
            graph.calls.append(launched)


class Launch:
    """A kernel with its constants."""

    def __init__(self, interpreter: Interpreter, kernel: Any, constants: Mapping[str, Any]) -> None:
        self._interpreter, self._kernel, self._constants = interpreter, kernel, constants
        self._names = [name for name in kernel.arg_names if name not in constants]

    def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., None]:
        def start(*given: Any) -> None:
            on_device = self._interpreter._fake.tensors.on_device
            assert all(on_device(one) for one in given if isinstance(one, torch.Tensor)), "a kernel got host memory"
            named = dict(zip(self._names, given, strict=True))
            call = functools.partial(self._kernel[programs], **self._constants)
            self._interpreter.launch(self._kernel.__name__, call, named)

        return start


def _is_mapped(one: object) -> bool:
    return isinstance(one, int) and one >= MAPPED


def _addresses(given: Mapping[str, Any]) -> Iterator[int]:
    """What is read: where tensors lie, and the experts, by address or by their numbers in a table."""
    for name, one in given.items():
        if isinstance(one, torch.Tensor):
            yield one.data_ptr()
            if name == TABLE:
                yield from one[given["ids"]].tolist()
        elif isinstance(one, tuple):
            yield from one
