"""Quantized sources: codes are taken over where a format holds them, and the manifest says which were and which not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.hf import CheckpointReader, load_skeleton
from core.importing import import_model
from core.importing.sources import open_source
from core.memory.pack import PackReader, aligned
from tests import quantized

CPU = torch.device("cpu")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized.write("qwen3_moe", tmp_path_factory.mktemp("gptq"), quantized.gptq(), GPTQ).path


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized.write_mxfp4(tmp_path_factory.mktemp("mxfp4")).path


def check_weights(pack: Path, source: Path, exact: bool) -> None:
    """What the pack's experts mean, against what the source's reader dequantises."""
    model = load_skeleton(pack)
    with PackReader(pack) as reader, open_source(source) as opened:
        manifest, buffer = reader.manifest, aligned(reader.padded_bytes)
        codec, checkpoint = manifest.codec(torch.float32, CPU), CheckpointReader(model, opened.tensors)
        slot = torch.empty(codec.slot_bytes, dtype=torch.uint8)
        for eid in range(manifest.total):
            reader.read_into(eid, buffer)
            codec.place(buffer[: reader.blob_bytes], slot)
            parts = codec.views(slot)
            for name, weight in checkpoint.read(*divmod(eid, manifest.experts)).items():
                if manifest.parts[name].is_weight:
                    ours, theirs = codec.dequantize(parts, name), weight.float()
                    assert torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, atol=0.05)


@pytest.mark.parametrize("blocks", [1, 2])
def test_mxfp4_codes_are_taken_over(mxfp4: Path, tmp_path: Path, blocks: int) -> None:
    pack = import_model(str(mxfp4), tmp_path / "pack", blocks=blocks)
    manifest = PackReader(pack).manifest
    assert manifest.format == "mxfp4" and manifest.numbers.scale == torch.uint8
    assert len(manifest.segments) == (2 if blocks > 1 else 0)
    assert {how for part, how in manifest.exact.items() if not part.endswith("bias")} == {"exact codes"}
    check_weights(pack, mxfp4, exact=True)


def test_gptq_codes_are_taken_over(gptq: Path, tmp_path: Path) -> None:
    pack = import_model(str(gptq), tmp_path / "pack")
    manifest = PackReader(pack).manifest
    assert manifest.format == "int4-g128-sym" and set(manifest.exact.values()) == {"exact codes"}
    assert (
        manifest.source["label"] == "GPTQ 4-bit, groups of 128"
        and "quantization_config" not in (pack / "config.json").read_text()
    )
    check_weights(pack, gptq, exact=True)


@pytest.mark.parametrize(
    ("format", "how"), [("int8", "requantised from int4-g128-sym"), ("checkpoint", "dequantised from int4-g128-sym")]
)
def test_other_formats_are_rounded_and_say_so(gptq: Path, tmp_path: Path, format: str, how: str) -> None:
    pack = import_model(str(gptq), tmp_path / "pack", format=format)
    manifest = PackReader(pack).manifest
    assert manifest.format == format and set(manifest.exact.values()) == {how}
    check_weights(pack, gptq, exact=False)
