"""`python -m tests.memory.interpret interpreted_join[:all]`: layers of which the host computes some experts within what
the GPU does, on the emulated GPU, whose kernels Triton's interpreter runs, as {case: what was found}: how many numbers
differ, how many races there were, or the error."""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import HostError
from core.memory.codec import Numbers, PartSpec, make_codec, on_cpu
from core.memory.codec.base import Base
from core.memory.codec.fast import background
from core.memory.codec.fast.background import Background
from core.memory.codec.matrix import matrix
from core.runtime import attend_code, host_join
from core.runtime.host_join import HostJoin
from core.runtime.program.experts import ExpertKernels, gate_of
from core.runtime.program.gpu.experts import GpuExperts, Where
from tests.fake_cuda import FakeCuda, installed
from tests.fake_cuda.interpreter import Interpreter
from tests.fake_cuda.mail import Mails, attend
from tests.kernel_cases import gate
from tests.memory.interpreted_layer import differing

HIDDEN, INNER, EXPERTS, CHOSEN, LAYERS = 32, 32, 4, 3, 2
MISSING: tuple[tuple[int, ...], ...] = ((), (1,), (0, 2), (0, 1, 2, 3), (3,))  # experts of a layer without a slot
QUICK_S = 0.2


class Layers:
    def __init__(self, fake: FakeCuda, name: str, dtype: torch.dtype, threads: int) -> None:
        self.fake, self.interpreter = fake, Interpreter(fake)
        self.random = torch.Generator().manual_seed(0)
        specs = {"gate_up_proj": PartSpec((2 * INNER, HIDDEN), dtype), "down_proj": PartSpec((HIDDEN, INNER), dtype)}
        self.device, numbers = torch.device("cuda"), Numbers(dtype, torch.float16, torch.bfloat16)
        codec = make_codec(name, specs=specs, dtype=dtype, device=self.device, stored=numbers)
        assert isinstance(codec, Base)
        self.module = SimpleNamespace(has_gate=True, has_bias=False, _apply_gate=gate)
        self.gpu = GpuExperts(
            matrix(codec, "gate_up_proj"),
            matrix(codec, "down_proj"),
            gate_of(self.module, INNER),
            self.interpreter,
        )
        self.blobs = [self._encoded(codec, specs, dtype) for _ in range(LAYERS * EXPERTS)]
        self.slots = [blob.to(self.device) for blob in self.blobs]
        self.kernels = ExpertKernels(self.module, on_cpu(codec))
        self.team = Background(threads)
        self.store: Any = SimpleNamespace(borrow=self.blobs.__getitem__, give_back=lambda eid: None)
        self.lost = list[str]()

    def _encoded(self, codec: Base, specs: dict[str, PartSpec], dtype: torch.dtype) -> torch.Tensor:
        parts = {part: (torch.randn(spec.shape, generator=self.random) * 0.3).to(dtype) for part, spec in specs.items()}
        blob = torch.zeros(codec.slot_bytes, dtype=torch.uint8)
        blob[: codec.blob_bytes] = on_cpu(codec).encode(parts)[: codec.blob_bytes]
        return blob

    def join(self) -> HostJoin:
        found = HostJoin(self.kernels, self.team, self.store, LAYERS * EXPERTS, CHOSEN, self.device)
        found.lose = self.lost.append
        return found

    def rows(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.randn(1, HIDDEN, generator=self.random).to(dtype)
        ids = torch.randperm(EXPERTS, generator=self.random)[:CHOSEN]
        return x.to(self.device), ids.to(self.device), torch.rand(CHOSEN, generator=self.random).to(self.device)

    def tables(self, missing: Sequence[int]) -> list[torch.Tensor]:
        return [self.table(layer, missing) for layer in range(LAYERS)]

    def table(self, layer: int, missing: Sequence[int]) -> torch.Tensor:
        addresses = [slot.data_ptr() for slot in self.slots[layer * EXPERTS :][:EXPERTS]]
        return torch.tensor([0 if e in missing else addresses[e] for e in range(EXPERTS)], device=self.device)

    def through(
        self, join: HostJoin, tables: Sequence[torch.Tensor], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        for layer, table in enumerate(tables):
            x = self.gpu.with_host(join.mail, table, ids, layer * EXPERTS, x, weights)
        return x

    def alone(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for layer in range(LAYERS):
            x = self.gpu.token(Where(table=self.table(layer, ()), ids=ids), x, weights)
        return x

    def finish(self) -> None:
        torch.cuda.current_stream().synchronize()


@contextmanager
def layers(
    name: str = "checkpoint", dtype: torch.dtype = torch.float32, threads: int = 1, limit_s: float = 20.0
) -> Iterator[Layers]:
    with installed(FakeCuda()) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_join, "LIMIT_S", limit_s)
        made = Layers(fake, name, dtype, threads)
        try:
            yield made
        finally:
            made.team.close()


def found(which: str) -> dict[str, Any]:
    if which != "all":
        return {"bits": bits("checkpoint", torch.float32, 1, MISSING[2:3])} | says_nothing() | races(*FAULTS)
    told: dict[str, Any] = {"bits": bits("checkpoint", torch.float32, 2), "codes": bits("int4-g32", torch.bfloat16, 1)}
    for case in (never_begins, ends_at_once, is_stuck, broken_off):
        told |= case()
    return told


def bits(name: str, dtype: torch.dtype, threads: int, patterns: Sequence[tuple[int, ...]] = MISSING) -> int:
    count = 0
    with layers(name, dtype, threads) as some:
        join, took = some.join(), list[float]()
        for missing in patterns:
            given = some.rows(torch.bfloat16 if missing == (1,) else torch.float32)
            with join.attended(took.append):
                got = some.through(join, some.tables(missing), *given)
                some.finish()
            count += differing(got.cpu(), some.alone(*given).cpu())
        x, ids, weights = some.rows()
        graph, tables = torch.cuda.CUDAGraph(), some.tables((0, 1))
        with join.attended(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = some.through(join, tables, x, ids, weights)
        for _ in range(2):
            for into, new in zip((x, ids, weights), some.rows(), strict=True):
                into.copy_(new)
            with join.attended(took.append):
                graph.replay()
                some.finish()
            count += differing(out.cpu(), some.alone(x, ids, weights).cpu())
        assert sum(took) > 0 and (patterns[0] or not took[0]) and not some.lost
        join.close()
        assert not some.fake.pinned.used and not some.fake.races.found
    return count


def ended(some: Layers, join: HostJoin) -> str:
    """The error with which a layer ends, and that nothing is joined any more."""

    def compute() -> None:
        with join.attended():
            some.through(join, some.tables((0, 1)), *some.rows())
            some.finish()

    with pytest.raises(HostError) as raised:
        compute()
    assert some.lost == [str(raised.value)] == [join.failed]
    return str(raised.value)


def never_begins() -> dict[str, Any]:
    with layers() as some, pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "TIMEOUT_S", QUICK_S)
        some.team._closing = True
        some.team._called.set()
        some.team._leader.join()
        join = some.join()
        return {"never begins": ended(some, join), "never begins: stuck": join.stuck}


def by(call: Callable[[int, int, int], None], patch: pytest.MonkeyPatch) -> None:
    """Threads call this."""
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
    function = kind(lambda team, until, plan, _: call(team, until, plan))
    patch.setattr(attend_code, "functions", lambda: {"attend": function})


def ends_at_once() -> dict[str, Any]:
    with layers(limit_s=QUICK_S) as some, pytest.MonkeyPatch.context() as patch:
        by(lambda team, until, plan: None, patch)
        join = some.join()
        return {"ends at once": ended(some, join), "ends at once: stuck": join.stuck}


def says_nothing() -> dict[str, Any]:
    def call(team: int, until: int, plan: int) -> None:
        while not ctypes.c_int64.from_address(until).value:
            pass

    with layers(limit_s=QUICK_S) as some, pytest.MonkeyPatch.context() as patch:
        by(call, patch)
        join = some.join()
        told = {"says nothing": ended(some, join), "says nothing: stuck": join.stuck}
        join.close()
        assert not some.fake.pinned.used
        return told


def is_stuck() -> dict[str, Any]:
    """Threads that never come back: what they may write to stays."""
    with layers(limit_s=QUICK_S) as some, pytest.MonkeyPatch.context() as patch:
        release = threading.Event()
        patch.setattr(background, "TIMEOUT_S", QUICK_S)
        by(lambda team, until, plan: release.wait() and None, patch)
        join = some.join()
        told = {"is stuck": ended(some, join), "is stuck: stuck": join.stuck}
        join.close()
        assert some.fake.pinned.used
        release.set()
        return told


def broken_off() -> dict[str, Any]:
    """An error between two layers: the next token is computed as ever."""
    with layers() as some:
        join = some.join()
        with suppress(ArithmeticError), join.attended():
            x, ids, weights = some.rows()
            some.gpu.with_host(join.mail, some.table(0, (0, 1)), ids, 0, x, weights)
            some.finish()
            raise ArithmeticError
        given = some.rows()
        with join.attended():
            got = some.through(join, some.tables((0, 1)), *given)
            some.finish()
        told = {"broken off": differing(got.cpu(), some.alone(*given).cpu())}
        join.close()
        return told


FAULTS: dict[str, Callable[[Mails, pytest.MonkeyPatch], None]] = {
    "none": lambda mails, patch: None,
    "the host does not wait": lambda mails, patch: setattr(mails, "attends", partial(attend, acquires=False)),
    "the host is early": lambda mails, patch: setattr(mails, "attends", partial(attend, computes_first=False)),
    "the GPU does not wait": lambda mails, patch: patch.setattr(
        "core.runtime.program.gpu.hosted.await_host", lambda *given: None
    ),
}


def races(*faults: str) -> dict[str, Any]:
    """Whether accesses are ordered, and planted faults are found."""
    told: dict[str, Any] = {}
    for fault in faults:
        with layers() as some, pytest.MonkeyPatch.context() as patch:
            mails = Mails(some.fake).installed(some.interpreter, patch)
            FAULTS[fault](mails, patch)
            join = some.join()
            for missing in (range(EXPERTS), (1, 2)):
                with join.attended():
                    some.through(join, some.tables(missing), *some.rows())
                    some.finish()
            join.close()
            told[f"races, {fault}"] = len(some.fake.races.found)
    return told
