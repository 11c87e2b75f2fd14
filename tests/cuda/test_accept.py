"""What `launch.py accept` runs, on the fake GPU with toys: each check goes through, and finds what is wrong."""

import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.accept import arithmetic, decode, engines, joined, launches, link, parts, runner
from bench.accept.drawn import OLMOE, QWEN, Subject, subject
from bench.accept.report import NO_TIME
from core.cache.address_table import AddressTable
from core.hf.fused_rmsnorm import FORMS
from core.memory.codec import FORMATS, kernels
from core.memory.codec.kernels import Launcher
from core.memory.store import HostStore
from core.system.native.compile import supported
from tests.fake_cuda import FakeCuda, installed
from tests.fake_cuda.kernels import FakeKernels
from tests.fake_cuda.memory import MIB

GPU = torch.device("cuda")


@pytest.fixture
def toy(fake_cuda: FakeCuda, tmp_path: Path) -> Subject:
    return subject(tmp_path, small=True, device=GPU)


def test_the_link(toy: Subject) -> None:
    assert link.machine(toy)["machine"]["gpu"] == "Fake GPU"
    found = link.copies(toy, experts=8)
    assert found["copy_gbps"] > 0 and found["demands_at_once_gbps"] > 0 and found["not_pinned_bytes"] == 0
    assert 0 <= found["started_within_300us_of_python"] <= 1
    assert "not a real one" in link.zerocopy(toy)["left_out"]


@pytest.mark.long(0.1)
def test_experts_out_of_host_memory(tmp_path: Path, fake_kernels: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "make_kernels", lambda codec: FakeKernels(codec, fake_kernels))
    found = link.zerocopy(subject(tmp_path, small=True, device=GPU), rows=16)
    assert all(found[f"{count}_of_{where}_us"] >= 0 for count in (1, 2, 4, 8) for where in ("host", "slots"))
    multiply = FakeKernels.multiply_by_ids
    monkeypatch.setattr(FakeKernels, "multiply_by_ids", lambda *given: multiply(*given) + 1)
    with pytest.raises(link.Wrong, match="not the same bits out of host memory"):
        link.zerocopy(subject(tmp_path, small=True, device=GPU), rows=16)


def test_attention_at_lengths_that_are_new(toy: Subject) -> None:
    """As on a machine whose torch has no cuDNN: that is said, and everything is as before."""
    backends = torch.backends.cuda
    before = backends.cudnn_sdp_enabled(), backends.flash_sdp_enabled(), backends.math_sdp_enabled()
    found = parts.attention(toy)
    assert found["others"]["new_us"] > 0 < found["others"]["again_us"] and "others_plans_anew" in found
    assert "new_us" in found["cudnn"] or found["cudnn"]["left_out"]
    assert found["torch_takes"].isupper()
    assert (backends.cudnn_sdp_enabled(), backends.flash_sdp_enabled(), backends.math_sdp_enabled()) == before


def test_a_kernel_that_plans_anew_is_told(toy: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = itertools.cycle([[3e-3, 4e-3, 5e-3], [1e-3, 1e-3, 1e-3]])
    monkeypatch.setattr(parts, "_at_each_length", lambda subject, lengths: next(spans))
    found = parts.attention(toy)
    assert found["cudnn"] == {"new_us": 4000.0, "again_us": 1000.0} and found["cudnn_plans_anew"] is True


def test_norms_at_once(toy: Subject) -> None:
    found = parts.norms(toy)
    forms = [form.__name__ for form in FORMS]
    assert all(found[f"{form}_us"] > 0 <= found[f"{form}_units_off"] for form in forms)
    assert found["taken"] in (*forms, "the model's own")


def test_rotation_at_once(toy: Subject) -> None:
    """Without a kernel, as here, the engine calls what the model does."""
    found = parts.rotation(toy)
    assert found["own_us"] > 0 < found["engine_us"] and found["exact"] == "the model's own"


@pytest.mark.long(0.5)
def test_whole_engines(toy: Subject, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load each for speed, memory and what replaces it; no bytes are left."""
    monkeypatch.setattr(engines, "_launches", lambda *_: {"a_pass": 1.0})  # torch's profiler would look for a real GPU
    found = engines.speed(toy)
    assert found["all"]["hit_rate"] == 1 > found["15%"]["hit_rate"] > found["15%_ondemand"]["hit_rate"] == 0
    assert found["35%_ondemand"]["demand_mb"] > found["35%"]["demand_mb"] > 0 == found["all"]["demand_mb"]
    used = engines.memory(toy)
    assert 0 < used["checkpoint"]["reserved_gb"] <= used["checkpoint"]["said_gb"]
    assert "Triton on a GPU" in used["int4-g64"]["left_out"]
    assert engines.swap(toy)["used_gb"] > 0
    assert fake_cuda.memory.reserved == 0 and fake_cuda.pinned.used == 0


@pytest.mark.long(0.5)
def test_without_room_for_all_experts_the_rest_is_measured(
    toy: Subject, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_launches", lambda *_: {"a_pass": 1.0})
    change = engines.Engine.change

    def full(engine: Any, changes: Any) -> Any:
        fake_cuda.memory.taken = fake_cuda.memory.available if changes["budget"] == "all" else 0
        return change(engine, changes)

    monkeypatch.setattr(engines.Engine, "change", full)
    found = engines.speed(toy)
    assert found["35%"]["ms"] > 0 and found["all_ms"] == found["all"]["left_out"]


@pytest.mark.long(0.5)
def test_speeds_for_which_no_time_is_left_are_left_out(
    toy: Subject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that were measured have been printed by then."""
    monkeypatch.setattr(engines, "_launches", lambda *_: {"a_pass": 1.0})
    found = engines.speed(replace(toy, until_s=time.monotonic()))
    assert all(found[name] == {"left_out": NO_TIME} for name, _ in engines.SPEEDS)
    clock = itertools.count(0, 10)  # seconds: each part takes 10
    monkeypatch.setattr("bench.accept.report.monotonic", lambda: next(clock))
    capsys.readouterr()
    found = engines.speed(replace(toy, until_s=45))
    assert [name for name, _ in engines.SPEEDS if "ms" in found[name]] == ["all", "35%"]
    assert runner.figures(capsys.readouterr().out)["35%"]["ms"] == found["35%"]["ms"]


@pytest.mark.long(0.1)
def test_memory_that_unloading_leaves_is_found(toy: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    monkeypatch.setattr("core.engine.engine.release_weights", lambda model: left.append(model))
    with pytest.raises(link.Wrong, match="are left after unloading"):
        engines.memory(toy)


@pytest.mark.long(1)
def test_the_same_bits(toy: Subject) -> None:
    found = engines.stress(toy, seconds=0)
    assert found["runs"] == len(engines.STRESSED) and found["passes"] == 24 * found["runs"]


@pytest.mark.long(0.3)
def test_other_bits_are_found(toy: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that brings something else."""
    real, calls = HostStore.fetch, itertools.count()

    def fetch(self: HostStore, eid: int, slots: Sequence[torch.Tensor], first: int = 0) -> int:
        read = real(self, eid, slots, first)
        if next(calls) % 200 == 199:
            slots[0].zero_()
        return read

    monkeypatch.setattr(HostStore, "fetch", fetch)
    with pytest.raises(link.Wrong, match="other logits from pass"):
        engines.stress(toy, seconds=0)


@pytest.mark.long(0.5)
def test_tokens_led_by_the_gpu(tmp_path: Path, fake_kernels: FakeCuda) -> None:
    toy = subject(tmp_path / "right", small=True, device=GPU)
    found = decode.led_by_the_gpu(toy)
    assert found["passes"] == 24 and found["replayed"] > 12 and found["graph_off"] < decode.OFF
    assert found["graph_same_bits"] == 24
    assert found["not_captured"] == "" and {*found["verdict"]} == {*decode.BUDGETS}
    assert all(found["by_budget"][budget][way]["ms"] > 0 for budget in decode.BUDGETS for way in decode.WAYS)
    assert fake_kernels.memory.reserved == 0 and fake_kernels.pinned.used == 0


@pytest.mark.long(0.3)
def test_other_bits_led_by_the_gpu_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies into slots that bring something else."""
    request = AddressTable.request
    monkeypatch.setattr(AddressTable, "request", lambda self, routed: (request(self, routed), _spoil(self))[0])
    with installed(FakeCuda(), kernels=True), pytest.raises(link.Wrong, match="logits are others"):
        decode.led_by_the_gpu(subject(tmp_path, small=True, device=GPU))


def _spoil(table: AddressTable) -> None:
    for eid in table._submitted:
        table._expert_cache.core.table[eid][0].raw.zero_()


@pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
def test_the_fast_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU in the GPU's place, as kernels for a GPU run under Triton's interpreter alone here."""
    toy = subject(tmp_path, small=True, device=torch.device("cpu"))
    found = arithmetic.fast(toy)
    bits = found["int4-g64"]
    assert bits["same_bits_as"] == "this CPU" and bits["passes"] == 8
    assert {*bits["left_out_ways"]} == {"graph_all", "graph_20%"}
    times = found["milliseconds"]
    assert times["fast"]["35%_misses_on_the_host"] > 0 < times["reference"]["prompt_400"]
    assert {*found["verdict"]} == {"all", "35%", "15%", "prompt_64", "prompt_400"}
    monkeypatch.setattr(arithmetic, "_speed", lambda subject: {})
    monkeypatch.setattr(arithmetic, "supported", lambda: False)
    assert arithmetic.fast(toy)["int4-g64"]["same_bits_as"] == "all experts in slots"
    fetch, calls = HostStore.fetch, itertools.count()

    def spoiling(self: HostStore, eid: int, slots: Sequence[torch.Tensor], first: int = 0) -> int:
        read = fetch(self, eid, slots, first)
        if next(calls) % 20 == 19:
            slots[0].zero_()
        return read

    monkeypatch.setattr(HostStore, "fetch", spoiling)
    with pytest.raises(link.Wrong, match="other bits than all experts in slots"):
        arithmetic.fast(toy)


@pytest.mark.long(0.1)
def test_without_kernels_the_gpu_leads_no_token(toy: Subject) -> None:
    assert "Triton kernels do not run here" in decode.led_by_the_gpu(toy)["left_out"]


@pytest.mark.long(0.1)
def test_without_kernels_the_host_joins_no_token(toy: Subject) -> None:
    assert "the GPU is not a real one" in joined.joined_by_the_host(toy)["left_out"]


@pytest.mark.long(0.1)
def test_an_answer_without_a_compiler_with_the_kernels(
    tmp_path: Path, fake_kernels: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    found = engines.no_compiler(subject(tmp_path, small=True, device=GPU))
    assert found["launched_by"].startswith("Triton, as the CUDA driver does not")  # there is none to open here


@pytest.mark.long(0.1)
def test_launches_in_both_ways(toy: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that write one number, in each way: their bits are compared, and a launch is timed."""
    assert "not a real one" in launches.launches(toy)["left_out"]
    calls: list[str] = []

    def writing(way: str, number: float) -> Launcher:
        def starter(kernel: Any, constants: Mapping[str, Any]) -> Any:
            def launch(*given: Any) -> None:
                calls.append(way)
                given["x" in kernel.arg_names].fill_(number)

            return defaultdict(lambda: launch)

        return starter

    monkeypatch.setattr(kernels, "why_not", lambda device: "")
    monkeypatch.setattr(kernels, "lacking", lambda: "")
    monkeypatch.setattr(kernels, "ByTriton", writing("triton", 1.0))
    monkeypatch.setattr(kernels, "driver_launcher", lambda device: writing("driver", 1.0))
    found = launches.launches(toy)
    assert found["formats"] == len(FORMATS) and found["triton_us"] > 0 < found["driver_us"]
    assert calls.count("triton") == calls.count("driver") - 3 > 50  # the graph takes three more
    assert "us less" in found["verdict"]
    monkeypatch.setattr(kernels, "driver_launcher", lambda device: writing("driver", 2.0))
    with pytest.raises(link.Wrong, match="checkpoint, a state each: other bits"):
        launches.launches(toy)
    monkeypatch.setattr(kernels, "lacking", lambda: "a C compiler")
    found = launches.launches(toy)
    assert "needs a C compiler" in found["left_out"] and found["driver_us"] > 0


@pytest.mark.parametrize(
    ("device_mib", "host_mib", "name"),
    [(12000, 60000, QWEN.name), (12000, 16000, OLMOE.name), (8000, 60000, OLMOE.name), (2000, 60000, "different")],
)
def test_the_largest_model_that_fits_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_mib: int, host_mib: int, name: str
) -> None:
    def free(device: torch.device) -> tuple[int, int]:
        return (device_mib if device.type == "cuda" else host_mib) * MIB, 1 << 40

    monkeypatch.setattr("bench.accept.drawn.free_bytes", free)
    assert subject(tmp_path, small=False, device=GPU).sizes.name == name
