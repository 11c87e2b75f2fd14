"""What is said before an import: the pack's size to the byte, and what weights of each kind lose, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.hf import CheckpointReader, meta_skeleton
from core.importing import forecast_import, import_model
from core.importing.sources import open_source
from core.memory.pack import Manifest, PackReader, aligned
from tests.conftest import Checkpoint
from tests.gguf_files import make_gguf
from tests.selection import layered
from tests.sources.cases import CASES

WIDE: dict[str, Any] = dict(hidden_size=256, moe_intermediate_size=256, intermediate_size=256)
LARGE_DOWN = "Q6_K"  # as in a Q4_K_M


def q4_k_m(name: str) -> str:
    return "F32" if "_exps.weight" not in name else LARGE_DOWN if "down" in name else "Q4_K"


def in_pack(pack: Path, part: str) -> torch.Tensor:
    """A part of the first expert, fp32, as a pack has it."""
    manifest = Manifest.load(pack)
    codec = manifest.codec(torch.float32, torch.device("cpu"))
    with PackReader(pack) as reader:
        blob = aligned(reader.padded_bytes)
        reader.read_into(0, blob)
    slot = aligned(codec.slot_bytes)
    codec.place(blob, slot)
    return codec.dequantize(codec.views(slot), part)


def in_source(path: Path, part: str, shell: Path) -> torch.Tensor:
    shell.mkdir()
    with open_source(path) as source:
        reader = CheckpointReader(meta_skeleton(source.write_shell(shell)), source.tensors)
        return reader.read(0, 0)[part].float()


def test_six_bits_cut_to_four_are_said_with_what_that_loses(tmp_path: Path) -> None:
    _, file = make_gguf("qwen3_moe", tmp_path, q4_k_m, **WIDE)
    found = forecast_import(str(file))
    assert found is not None and found.format == "int4-g32"
    four, six = found.conversions
    assert (four.stored, four.how) == ("Q4_K", "exact codes, their scales cast to float16")
    assert (six.stored, six.how) == ("Q6_K", "requantised")
    assert (four.share, six.share) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    pack = import_model(str(file), tmp_path / "pack")
    for one, part in ((four, "gate_up_proj"), (six, "down_proj")):
        wanted, got = in_source(file, part, tmp_path / part), in_pack(pack, part)
        assert one.error == pytest.approx(float((got - wanted).norm() / wanted.norm()), rel=1e-3)
    assert four.error < 0.001 < 0.02 < six.error
    first, _, last = found.lines()
    assert first.startswith("The pack takes ") and " the source has " in first
    assert last.startswith("Q6_K, 33 % of the experts' weights: requantised, off by ")


@pytest.mark.parametrize("name", layered(["fp8-block", "gptq-sym", "mxfp4"], quick=lambda name: name == "fp8-block"))
def test_a_quantized_checkpoint_is_said_to_grow_as_it_does(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    path = case.write(tmp_path / "source").path
    found = forecast_import(str(path))
    assert found is not None
    assert found.source_bytes == sum(file.stat().st_size for file in path.glob("*.safetensors"))
    [one] = found.conversions
    assert (one.stored, one.share, one.error) == (case.label, 1.0, 0.0)
    pack = import_model(str(path), tmp_path / "pack")
    experts = sum(file.stat().st_size for file in pack.glob("experts-*.bin"))
    assert found.bytes - found.dense_bytes == experts
    assert 0 <= (pack / "model.safetensors").stat().st_size - found.dense_bytes < 16_000  # its header
    assert ("times as much" in found.lines()[0]) is (name != "mxfp4")
    assert "nothing is lost" in found.lines()[1]


def test_a_chosen_format_is_foretold(checkpoint: Checkpoint) -> None:
    said = {name: forecast_import(str(checkpoint("qwen3_moe")), name) for name in ("auto", "int8", "int2")}
    kept, eight, two = (one.conversions[0] for one in said.values() if one is not None)
    assert (kept.stored, kept.how, kept.error) == ("float32", "as stored", 0.0)
    assert (eight.how, two.how) == ("quantised", "quantised")
    assert 0 < eight.error < 0.02 < 0.2 < two.error


def test_what_is_not_on_this_machine_is_not_foretold() -> None:
    assert forecast_import("some/model") is None
