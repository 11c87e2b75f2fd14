"""Tokens whose experts the GPU finds by itself, on the fake GPU.

They have the bits and the routing of tokens led by the host, the same experts are cached afterwards, a hit is what was
in a slot when the token began, and every access is ordered. Planted faults show that a missing order is found.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from core.cache.address_table import AddressTable
from core.engine import Engine
from core.errors import SettingError
from core.runtime.batch import Batch
from core.runtime.device_step import DeviceStep
from core.runtime.pipeline import Pipeline
from core.settings.sampling import Sampling
from core.types import Outcome
from tests.cuda.conftest import engine_on
from tests.decoded import PROMPT, answer
from tests.fake_cuda import FakeCuda, installed
from tests.fake_cuda.kernels import FakeKernels
from tests.logged import Logged
from tests.selection import layered


class Case(NamedTuple):
    """A load, and what is decided in it."""

    eviction: str
    scope: str = "layer"
    bypass: bool = False
    packed: bool = False

    def settings(self, decode: str) -> dict[str, object]:
        chosen = {"eviction": self.eviction, "scope": self.scope, "bypass": self.bypass}
        return {**chosen, "budget": "45%", "predictor": "none", "gpu_decode": decode}


CASES = (Case("lru"), Case("lfu", "global", packed=True), Case("lfu", bypass=True), Case("none"))


@pytest.mark.parametrize(
    "case", layered(CASES, quick=lambda case: case.bypass), ids=lambda case: "-".join(map(str, case))
)
def test_the_same_bits_routing_and_cache_as_led_by_the_host(
    case: Case, model: Path, pack: Path, fake_kernels: FakeCuda
) -> None:
    runs = []
    for decode in ("host", "device"):
        with engine_on(pack if case.packed else model, case.settings(decode)) as engine:
            runs.append([answer(engine, 5, seed) for seed in (0, 1)])
            assert (engine.parts.device_decode.step is not None) == (decode == "device")
    for host, device in zip(*runs, strict=True):
        assert torch.equal(host.logits, device.logits)
        assert device.resident == host.resident, "the same requests to the same policy left other experts"
        for one, other in zip(host.steps, device.steps, strict=True):
            assert np.array_equal(one.ids, other.ids)
            for name in ("phase", "tokens", "requests", "exact"):
                assert getattr(one, name) == getattr(other, name), name
            order = [np.lexsort((step.expert, step.layer)) for step in (one, other)]
            assert np.array_equal(one.layer[order[0]], other.layer[order[1]])
            assert np.array_equal(one.expert[order[0]], other.expert[order[1]])


@pytest.mark.long(0.1)
def test_hits_are_what_was_in_slots_when_the_token_began(
    model: Path, fake_kernels: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the numbers in the table on the device, and the bytes that crossed the link for the others."""
    tables: list[list[int]] = []
    call = DeviceStep.__call__

    def begun(self: DeviceStep, layer: int, *args: torch.Tensor) -> torch.Tensor:
        if layer == 0:
            tables.append(self.table.addresses.flatten().tolist())
        return call(self, layer, *args)

    monkeypatch.setattr(DeviceStep, "__call__", begun)
    with engine_on(model, Case("lru").settings("device")) as engine:
        home, experts, blob = engine.loaded.store.device_addresses(), engine.shape.experts, engine.sizes.blob
        steps = [step for step in answer(engine, 24).steps if step.phase == "decode"]
        engine.parts.device_decode.step.table.check()
    assert len(tables) == len(steps) > 10
    issued = 0
    for table, step in zip(tables, steps, strict=True):
        for layer, expert, outcome in zip(step.layer, step.expert, step.outcome, strict=True):
            eid = int(layer) * experts + int(expert)
            assert outcome == (Outcome.MISS if table[eid] == home[eid] else Outcome.HIT)
        misses = int((step.outcome == Outcome.MISS).sum())
        assert step.demand_bytes % blob == 0 and misses * blob <= step.demand_bytes <= 2 * misses * blob
        issued += step.demand_bytes // blob - misses
    assert issued > 0 and {int(o) for step in steps for o in step.outcome} == {Outcome.HIT, Outcome.MISS}


def waits_of(engine: Engine, fake: FakeCuda) -> set[int]:
    """How often the host waits for the device within the pass of a decoded token."""
    forward, found, me = Pipeline.forward, set[int](), threading.get_ident()

    def counted(self: Pipeline, batch: Batch, *args: Any, **values: Any) -> torch.Tensor:
        with fake.noting_waits() as waits:
            logits = forward(self, batch, *args, **values)
        if batch.phase == "decode":
            found.add(sum(one.thread == me for one in waits))
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "forward", counted)
        list(engine.generate(PROMPT, Sampling(max_new_tokens=8)))
    return found


@pytest.mark.long(0.1)
def test_a_token_stopped_between_its_layers_leaves_nothing_that_races(
    model: Path, fake_kernels: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, begun, cancel = DeviceStep.__call__, list[None](), threading.Event()

    def stopping(self: DeviceStep, layer: int, *args: torch.Tensor) -> torch.Tensor:
        if layer == 0:
            begun.append(None)
            if len(begun) % 4 == 0:
                cancel.set()
        return call(self, layer, *args)

    monkeypatch.setattr(DeviceStep, "__call__", stopping)
    with engine_on(model, Case("random", "global").settings("device")) as engine:
        for _ in range(3):
            cancel.clear()
            pieces = list(engine.generate(PROMPT, Sampling(max_new_tokens=12), cancel))
            assert [piece.kind for piece in pieces].count("token") == 4 and len(begun) % 4 == 0
            assert pieces[-1].stats is not None and pieces[-1].stats.reason == "cancelled"
            engine.expert_cache.check_integrity()
        monkeypatch.undo()
        assert answer(engine, 8).steps


NEED_THE_HOST: tuple[tuple[dict[str, object], str], ...] = (
    ({"predictor": "gate"}, "a prefetcher is on"),
    ({"miss": "drop"}, "a lossy mode is on"),
    ({"link": "emulated", "link_gbps": 100.0}, "the link is emulated"),
    ({"telemetry": "lab"}, "recorded for the lab"),
)


@pytest.mark.long(0.1)
def test_settings_that_need_the_host_are_named(model: Path, fake_kernels: FakeCuda, caplog: Logged) -> None:
    with engine_on(model, Case("lru").settings("device")) as engine:
        for settings, why in NEED_THE_HOST:
            assert engine.parts.device_decode.reason == ""
            engine.change(settings)
            assert why in engine.parts.device_decode.reason
            assert list(engine.generate(PROMPT, Sampling(max_new_tokens=4)))
            marks = [text for _, text in engine.parts.telemetry.marks]
            assert any(why in text for text in marks) and why in caplog.text
            engine.change({name: engine.spec.settings[name] for name in settings})
        assert engine.parts.device_decode.reason == ""


@pytest.mark.long(0.1)
def test_loads_that_cannot_have_it_say_so(model: Path, pack: Path, fake_kernels: FakeCuda, caplog: Logged) -> None:
    wanted = Case("lru").settings("device")
    for path, choices, why in (
        (pack, {"host": "200kB"}, "not every expert is in pinned host memory"),
        (model, {"blocks": 2}, "several blocks per expert"),
    ):
        with engine_on(path, wanted, **choices) as engine:
            assert why in engine.parts.device_decode.reason and why in caplog.text
            assert list(engine.generate(PROMPT, Sampling(max_new_tokens=4)))
    with engine_on(model, {"budget": "45%", "gpu_decode": "host"}, blocks=2) as engine:
        with pytest.raises(SettingError, match="several blocks per expert"):
            engine.change({"gpu_decode": "device"})
        assert engine.settings["gpu_decode"] == "host"
    fake_kernels.pinned.limit = 200 << 10
    with engine_on(pack, wanted, host="all") as engine:
        assert "not every expert is in pinned host memory" in engine.parts.device_decode.reason


def test_without_kernels_it_is_refused(model: Path, fake_cuda: FakeCuda) -> None:
    refused = pytest.raises(SettingError, match="Triton kernels do not run here")
    with engine_on(model, {"budget": "45%"}) as engine, refused:
        engine.change({"gpu_decode": "device"})


@pytest.mark.long(0.1)
def test_other_bits_out_of_host_memory_are_noticed(
    model: Path, fake_kernels: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FakeKernels.multiply_by_ids
    monkeypatch.setattr(FakeKernels, "multiply_by_ids", lambda *args: real(*args) * 1.001)
    with engine_on(model, Case("lru").settings("device")) as engine:
        assert "do not compute the bits" in engine.parts.device_decode.reason


@pytest.mark.long(0.1)
def test_kernels_that_do_not_run_are_noticed_and_a_lack_of_memory_is_tried_again(
    model: Path, fake_kernels: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB. GPU 0 is full.")]

    def failing(*_: object) -> torch.Tensor:
        raise errors[-1]

    with engine_on(model, Case("lru").settings("host")) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(FakeKernels, "multiply_by_ids", failing)
            engine.change({"gpu_decode": "device"})
            assert "has no room" in engine.parts.device_decode.reason
        engine.change({"budget": "50%"})
        assert engine.parts.device_decode.reason == "" and engine.parts.device_decode.step is not None
        engine.change({"gpu_decode": "host"})
        errors.append(ValueError("no such instruction"))
        monkeypatch.setattr(FakeKernels, "multiply_by_ids", failing)
        engine.change({"gpu_decode": "device"})
        assert "do not run here (ValueError: no such" in engine.parts.device_decode.reason
        assert list(engine.generate(PROMPT, Sampling(max_new_tokens=4)))


def too_late(patch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
    """The table still names slots that others are copied into."""
    real, calls = AddressTable._update, []

    def update(self: AddressTable, landed: Any) -> None:
        calls.append(landed)
        if len(calls) == 1:
            real(self, landed)

    patch.setattr(AddressTable, "_update", update)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as found:
        yield found


def logits_of(
    model: Path, decode: str, plant: Callable[[], None] = lambda: None, case: Case = CASES[0]
) -> torch.Tensor:
    with engine_on(model, case.settings(decode)) as engine:
        plant()
        return answer(engine, 24).logits


@pytest.mark.long(0.1)
def test_a_table_that_is_not_synced_gives_other_logits(model: Path, patch: pytest.MonkeyPatch) -> None:
    """What was in a slot has left it: by then the copy into it is mostly over, and no race."""
    with installed(FakeCuda(), kernels=True) as fake:
        want = logits_of(model, "host")
        assert not torch.equal(logits_of(model, "device", lambda: too_late(patch, fake)), want)
