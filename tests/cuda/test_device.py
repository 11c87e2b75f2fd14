"""Which device computes, what the user is told of a GPU that cannot be used, and the speed to expect of one."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from app.services import examination, probes
from app.ui import text
from core.capacity import device as devices
from core.capacity import forecast
from core.capacity.device import choose_device, passed_over, why_no_gpu, why_not_built_for
from core.capacity.fit import fit_of
from core.capacity.plan import Plan, plan
from core.engine import Engine
from core.errors import BudgetError
from core.memory.codec import PartSpec, make_codec
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests import fake_nvml
from tests.checkpoints import make_checkpoint
from tests.cuda.conftest import CONTEXT
from tests.fake_cuda import FakeCuda
from tests.loaded import unloading
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

GPU, CPU = torch.device("cuda"), torch.device("cpu")
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
NONE = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from ..."


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch built for CUDA 12.8 that sees no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    devices._why_none.cache_clear()
    return monkeypatch


def said_by_driver(patch: pytest.MonkeyPatch, text: str) -> None:
    def fails() -> None:
        raise RuntimeError(text)

    patch.setattr(torch.cuda, "init", fails)
    devices._why_none.cache_clear()


def test_the_gpu_is_chosen_where_torch_has_code_for_it(fake_cuda: FakeCuda) -> None:
    assert (choose_device("auto"), choose_device("cuda"), choose_device("cpu")) == (GPU, GPU, CPU)
    assert why_no_gpu() == why_not_built_for(GPU) == passed_over("auto") == ""


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((8, 9), ["sm_80", "sm_90"], True),  # code of the same generation
        ((7, 5), ["sm_80", "sm_90"], False),
        ((8, 0), ["sm_86"], False),  # of a later one of the generation
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_80", "sm_90", "compute_90"], True),  # which the driver compiles
        ((6, 1), ["sm_75", "compute_120"], False),
        ((9, 0), ["sm_90a"], True),
        ((12, 1), ["sm_120"], True),
        ((12, 1), ["sm_120a", "compute_120a"], False),
        ((8, 6), [], True),  # nothing is known
    ],
)
def test_a_gpu_that_torch_was_not_built_for(
    fake_cuda: FakeCuda, capability: tuple[int, int], built_for: Sequence[str], runs: bool
) -> None:
    fake_cuda.capability, fake_cuda.built_for = capability, list(built_for)
    assert (why_not_built_for(GPU) == "") is runs
    assert choose_device("auto") == (GPU if runs else CPU)
    if not runs:
        has = f"Fake GPU has compute capability {capability[0]}.{capability[1]}"
        assert has in passed_over("auto") and not passed_over("cpu")
        with pytest.raises(BudgetError, match=rf"{has}.*built for {', '.join(built_for)} only.*choose device cpu"):
            choose_device("cuda")
        assert any(has in problem for problem in probes.remarks())


def test_a_driver_too_old_for_this_torch(no_gpu: pytest.MonkeyPatch) -> None:
    said_by_driver(no_gpu, TOO_OLD)
    with pytest.raises(BudgetError, match=r"too old: it has CUDA 11\.4, and this torch is built for CUDA 12\.8"):
        choose_device("cuda")
    assert choose_device("auto") == CPU and "driver is too old" in passed_over("auto")


def test_no_driver_and_no_gpu_are_nothing_to_be_told_of_unasked(no_gpu: pytest.MonkeyPatch) -> None:
    said_by_driver(no_gpu, NONE)
    with pytest.raises(BudgetError, match="no NVIDIA driver is installed"):
        choose_device("cuda")
    assert choose_device("auto") == CPU and passed_over("auto") == ""
    no_gpu.setattr(torch.cuda, "init", lambda: None)
    devices._why_none.cache_clear()
    assert "CUDA_VISIBLE_DEVICES" in why_no_gpu() and passed_over("auto") == ""


@pytest.fixture
def cpu_build(no_gpu: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch that was built for no GPU."""
    no_gpu.setattr(torch.version, "cuda", None)
    no_gpu.setattr(torch.version, "hip", None)
    return no_gpu


def test_a_torch_without_cuda_where_there_is_no_gpu(cpu_build: pytest.MonkeyPatch) -> None:
    fake_nvml.without_driver(cpu_build)
    with pytest.raises(BudgetError, match="CPU build"):
        choose_device("cuda")
    assert passed_over("auto") == ""


def test_a_torch_without_cuda_beside_a_gpu_is_in_the_note_and_on_the_page(
    cpu_build: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_nvml.with_gpu(cpu_build)
    said = "Computed on the CPU: this torch is a CPU build and cannot use NVIDIA Test. `python launch.py doctor --mend`"
    path = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path))

    def planned(device: str) -> Plan:
        return plan(LoadSpec.checked(str(path), Settings(), device=device, context=CONTEXT))

    assert said in planned("auto").note and said in text.fit_card(fit_of(planned("auto"), forecast=False))
    assert planned("cpu").note == ""
    with pytest.raises(BudgetError, match=r"doctor --mend.*choose device cpu"):
        choose_device("cuda")


def test_doctor_says_which_of_these_it_is(no_gpu: pytest.MonkeyPatch) -> None:
    said_by_driver(no_gpu, TOO_OLD)
    gpu = {"name": "NVIDIA Test", "usable": False, "total_bytes": 8 * 10**9, "free_bytes": 7 * 10**9}
    found = {"packages": [], "gpus": [gpu], "disk": {}}
    (problem,) = examination.problems(found)
    assert "There is an NVIDIA GPU" in problem and "has CUDA 11.4" in problem and problem.endswith("Update the driver.")


@pytest.mark.parametrize(("capability", "slow"), layered([((7, 5), True), ((8, 0), False)], quick=lambda case: case[1]))
def test_bfloat16_on_a_gpu_that_does_not_have_it(
    fake_cuda: FakeCuda, tmp_path: Path, capability: tuple[int, int], slow: bool
) -> None:
    fake_cuda.capability, fake_cuda.built_for = capability, []
    path = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16))

    def note(dtype: str) -> str:
        return plan(LoadSpec.checked(str(path), Settings(), device="cuda", context=CONTEXT, dtype=dtype)).note

    assert ("choose the compute type float16" in note("auto")) is slow
    assert "choose the compute type" not in note("float16")
    assert any("bfloat16" in text for text in probes.remarks()) is slow


def test_the_note_of_a_model_on_the_cpu_says_what_was_passed_over(fake_cuda: FakeCuda, model: Path) -> None:
    fake_cuda.built_for = ["sm_120"]
    for device, told in (("auto", True), ("cpu", False)):
        note = plan(LoadSpec.checked(str(model), Settings(), device=device, context=CONTEXT)).note
        assert ("Computed on the CPU: Fake GPU has compute capability 8.9" in note) is told


@pytest.mark.long(0.1)
def test_a_miss_is_felt_and_marked(fake_cuda: FakeCuda) -> None:
    spec = LoadSpec.checked("demo", Settings({"budget": "50%", "eviction": "lru"}), device="cuda", context=CONTEXT)
    with unloading(Engine.load(spec)) as engine:
        manifest = engine.manifest()
        assert manifest["link"] == "emulated" and manifest["link_gbps"] == engine.transfers.pace.gbps > 0
        layer_ms = engine.sizes.blob / engine.transfers.pace.gbps / 1e6
        assert layer_ms > 0.1, "about as long as a layer is computed, whatever the card's own link can do"
        engine.transfers.hurried = True  # nobody needs to wait here
        steps = [
            piece.step for piece in engine.generate("deque?", Sampling(max_new_tokens=4)) if piece.step is not None
        ]
        assert all(step.emulated for step in steps) and sum(step.demand_bytes for step in steps) > 0
        assert engine.frame().emulated
        engine.change({"link": "own"})
        assert not engine.transfers.pace and engine.manifest()["link"] == "measured"


SPECS = {"gate_up_proj": PartSpec((128, 64), torch.float16), "down_proj": PartSpec((64, 64), torch.float16)}
TOP_K = 4


class Kernels:
    """Notes which slots are multiplied together."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, int]] = []

    def multiply(self, part: str, slots: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        assert x.shape == (1, SPECS[part].shape[1])
        self.launched.append((part, len(slots)))


def speeds(monkeypatch: pytest.MonkeyPatch, kernels: object) -> tuple[forecast.Speeds, int]:
    """The measured speeds, and how many portable products were made for them."""
    codec = make_codec("int4-g32", specs=SPECS, dtype=torch.float16, device=torch.device("cuda"))
    products: list[str] = []
    portable = codec.linear
    monkeypatch.setattr(forecast, "LONGEST_S", 0.0)
    monkeypatch.setattr(forecast, "COLD", 1 << 16)
    monkeypatch.setattr(forecast, "make_kernels", lambda codec: kernels)
    monkeypatch.setattr(codec, "linear", lambda slot, part, x: products.append(part) or portable(slot, part, x))
    forecast._measured.clear()
    return forecast.measure_speeds(codec, 64, TOP_K), len(products)


def test_a_gpu_is_timed_with_its_kernels(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels()
    found, portable = speeds(monkeypatch, kernels)
    assert portable == 0 and found.expert_ms > 0
    assert kernels.launched and {count for _, count in kernels.launched} == {TOP_K}


def test_without_kernels_by_what_will_run_instead(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Kernels):
        def multiply(self, part: str, slots: Sequence[torch.Tensor], x: torch.Tensor) -> None:
            raise OSError("no compiler")

    for kernels in (None, Broken()):
        found, portable = speeds(monkeypatch, kernels)
        assert portable > 0 and found.expert_ms > 0
