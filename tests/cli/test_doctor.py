"""`doctor`: it works on a machine without a GPU, reads a fake one, and says what stands in the way."""

import json
import os
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from app import cli
from app.cli import doctor
from app.services import examination, probes
from app.store.home import DISTANCES, PACES, PRODUCTS
from core.capacity import device as devices
from core.capacity.plan import plan
from core.engine import arithmetic, kept_pace
from core.memory.codec import kernels
from core.memory.codec.fast import choice
from core.memory.cuda_driver import CudaDriver, DriverError
from core.settings.loading import LoadSpec
from core.system.native.compile import supported
from core.system.nvidia import nvidia_gpus
from tests import fake_nvml

GPU = {
    "name": "NVIDIA Test",
    "usable": True,
    "total_bytes": 12 * 10**9,
    "free_bytes": 11 * 10**9,
    "capability": "8.9",
    "pcie": {"generation": 1, "generation_max": 4, "width": 8, "width_max": 16},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path))
    monkeypatch.setattr(probes.disk, "__defaults__", (2 * probes.MB,))
    monkeypatch.setattr(probes.link, "__defaults__", (2, 2 * probes.MB))
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)


def test_it_reports_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = cli.main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (1 if found["problems"] else 0)
    assert {p["name"]: p["version"] for p in found["packages"]}["torch"] == metadata.version("torch")
    assert 0 < found["memory"]["free_bytes"] <= found["memory"]["total_bytes"]
    assert found["cpu"]["threads"] == os.cpu_count()
    assert 0.05 < found["link"]["gbps"] < 5000
    assert ("GPU" in found["link"]["kind"] and bool(found["gpus"])) or "no GPU" in found["link"]["kind"]
    assert found["disk"]["write_gbps"] > 0 and found["data_dir"] == str(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
def test_it_shows_the_way(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.main(["doctor"])
    assert ", 512 x 512, 16 rows: " in capsys.readouterr().out, "timed now, for a small matrix"
    monkeypatch.setattr(choice, "_timed", {})
    choice.keep_in(tmp_path / PRODUCTS)
    ways = {"codes": lambda rows: None, "torch": lambda rows: None}
    seconds = iter(range(10**6))
    choice.choose("int8 8 x 8 bfloat16", ways, 3, clock=lambda: float(next(seconds)))
    choice.keep_in(None)
    cli.main(["doctor"])
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Products")]
    assert len(shown) == len(choice.ROWS) and all("int8 8 x 8 bfloat16, 3 threads, " in line for line in shown)
    assert "codes 1000.00, torch 1000.00 ms; codes is taken" in shown[0]


def test_it_shows_the_distances_of_the_fast_arithmetic(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = LoadSpec.checked("demo", format="int8", dense="int8", arithmetic="fast")
    arithmetic.keep_in(tmp_path / DISTANCES)
    near = arithmetic.Distance(200, 0.0004, 0.0001, 0.01, 190, 5.0, 5.1, 0.02)
    arithmetic.keep(plan(spec), "hash", near)
    arithmetic.keep(plan(spec), "other", replace(near, kl_error=0.01))
    arithmetic.keep_in(None)
    cli.main(["doctor"])
    shown, far = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Arithmetic")]
    assert "fast, demo int8, dense int8, bfloat16: KL 0.0004 nats a token over 200 tokens (95 %: up to 0.0006)" in shown
    assert "95.0 % (95 %: 91.0 to 97.3 %), perplexity 5 (5.1); auto: fast" in shown
    assert "(95 %: up to 0.02)" in far and far.endswith("auto: the reference")


def test_it_shows_the_kept_speed_of_the_demo_models_link(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept_pace.keep_in(tmp_path / PACES)
    kept_pace.layer_ms(plan(LoadSpec.checked("demo")), "hash", "fast", lambda: 0.5)
    kept_pace.keep_in(None)
    (row,) = kept_pace.kept_in(tmp_path / PACES)
    cli.main(["doctor"])
    (shown,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Simulated PCIe")]
    assert f"{row['gbps']:.2g} GB/s for demo checkpoint, fast, whose layers take 0.5 ms: kept, EMULATED" in shown


def test_the_text_shows_a_gpu_and_its_link(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "gpus", lambda: [GPU])
    cli.main(["doctor"])
    assert "NVIDIA Test, 11.0 GB free of 12.0 GB, PCIe 1 x8 now, at most 4 x16" in capsys.readouterr().out


def test_without_nvml_there_is_less_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert probes.nvml("", 0) == {} and nvidia_gpus() == []


@pytest.mark.parametrize(("tool", "said"), [("gcc", "a C compiler"), ("Python.h", "Python's headers")])
def test_what_triton_cannot_launch_without_is_a_problem_where_the_driver_cannot_be_opened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tool: str, said: str
) -> None:
    def refuse(device: torch.device) -> CudaDriver:
        raise DriverError("NVIDIA's driver cannot be opened (not found)")

    include, found = tmp_path / "include", {"gcc": "/usr/bin/gcc"}
    include.mkdir()
    (include / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(kernels, "why_not", lambda device: "")
    monkeypatch.setattr(kernels.shutil, "which", lambda name: found.get(Path(name).name))
    monkeypatch.setattr(kernels.sysconfig, "get_paths", lambda scheme=None: {"include": str(include)})
    monkeypatch.setattr(kernels.platform, "system", lambda: "Linux")
    monkeypatch.setattr(kernels, "driver_launcher", refuse)
    monkeypatch.setattr(probes, "gpus", lambda: [GPU])
    cli.main(["doctor"])
    printed = capsys.readouterr().out
    assert "Triton needs" not in printed and "Kernels        launched by Triton, as the CUDA driver does not" in printed
    found.pop(tool, None)
    (include / tool).unlink(missing_ok=True)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert f"Triton needs {said} to take its place" in printed and "cannot be opened (not found)" in printed
    assert "apt install gcc python3-dev" in printed
    monkeypatch.setattr(kernels.platform, "system", lambda: "Windows")  # where the package has a compiler
    assert kernels.notice(torch.device("cuda")) == ""
    monkeypatch.setattr(kernels, "driver_launcher", lambda device: None)
    cli.main(["doctor"])
    printed = capsys.readouterr().out
    assert "Triton needs" not in printed and "Kernels        launched by the CUDA driver\n" in printed
    assert "on the GPU auto takes the reference" in printed


def test_a_compiler_that_is_named_and_absent_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O3")
    assert "a C compiler" in kernels.lacking() and kernels.notice(torch.device("cpu")) == ""


def test_an_unusable_gpu_is_a_problem(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)  # a CPU build
    monkeypatch.setattr(
        devices, "_why_none", devices._why_none.__wrapped__
    )  # another test's answer is not kept, nor this one's
    fake_nvml.with_gpu(monkeypatch)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "8.0 GB (this torch cannot use it)" in printed and "launch.py doctor --mend" in printed


def test_without_a_driver_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.without_driver(monkeypatch)
    assert probes.nvml("", 0) == {} and nvidia_gpus() == []


@pytest.mark.parametrize("done", [True, False])
def test_doctor_replaces_torch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, done: bool) -> None:
    did: list[str] = []
    monkeypatch.setattr(doctor.installer, "replace_torch", lambda: did.append("replaced") or done)
    monkeypatch.setattr(doctor, "examine", lambda folder: did.append("examined") or {"problems": []})
    monkeypatch.setattr(doctor, "report", lambda found: "the report")
    assert cli.main(["doctor", "--mend"]) == (0 if done else 1)
    assert did == (["replaced", "examined"] if done else ["replaced"])
    out, err = capsys.readouterr()
    assert ("the report" in out) is done and ("not replaced" in err) is not done


@pytest.mark.parametrize(
    ("version", "problems", "text"),
    [("2.14.0", 1, "2.14.0  (wanted: >=2.11,<2.14)"), ("", 0, "not installed  (wanted: >=2.11,<2.14)")],
)
def test_a_version_out_of_bounds_is_a_problem(
    version: str, problems: int, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(examination.installer, "installed", lambda name: version if name == "torch" else "")
    monkeypatch.setattr(probes, "gpus", list)
    found: dict[str, Any] = examination.examine(tmp_path)
    assert len(found["problems"]) == problems
    assert text in examination.report(found)


def test_a_folder_that_cannot_be_written_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(**kinds: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(probes.tempfile, "TemporaryFile", refuse)
    found = probes.disk(tmp_path)
    assert found["write_gbps"] is None and found["free_bytes"] > 0
    whole = examination.examine(tmp_path)
    assert any("MOESTRO_HOME" in problem for problem in whole["problems"])
    assert "not measured" in examination.report(whole)


def test_the_folder_need_not_exist_yet(tmp_path: Path) -> None:
    assert probes.disk(tmp_path / "not" / "yet")["path"] == str(tmp_path)
    assert not list(tmp_path.iterdir())
