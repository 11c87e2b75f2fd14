"""Import: what a pack holds is what the checkpoint holds; codes are taken over where a format holds them."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core.errors import ModelError, SettingError
from core.hf.checkpoint import CheckpointReader
from core.hf.discover import find_experts
from core.hf.hooks import install
from core.hf.skeleton import load_skeleton
from core.importing import import_model, write
from core.importing.sources import open_source
from core.memory.codec import FORMATS
from core.memory.pack import PackReader, aligned, verify
from core.memory.pack.tensorfile import write_tensors
from tests import quantized
from tests.architectures.tiny import tiny
from tests.checkpoints import ARCHITECTURES
from tests.conftest import Checkpoint
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer


def make_large(directory: Path, layers: int = 6, experts: int = 32, hidden: int = 1024, inner: int = 512) -> Path:
    """A bf16 qwen3_moe checkpoint of 6 * hidden * inner * experts * layers bytes (604 MB) and some dense weights."""
    directory.mkdir(parents=True)
    sizes = dict(hidden_size=hidden, moe_intermediate_size=inner, intermediate_size=inner, head_dim=64)
    fields = tiny("qwen3_moe") | sizes | dict(num_hidden_layers=layers, num_experts=experts)
    config = AutoConfig.for_model("qwen3_moe", **fields)
    config.dtype = "bfloat16"
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(directory)
    save_tokenizer(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = {n: (torch.bfloat16, tuple(t.shape)) for n, t in model.state_dict().items() if ".experts." not in n}
    for layer in range(layers):
        for expert in range(experts):
            at = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors |= {
                f"{at}.gate_proj.weight": (torch.bfloat16, (inner, hidden)),
                f"{at}.up_proj.weight": (torch.bfloat16, (inner, hidden)),
                f"{at}.down_proj.weight": (torch.bfloat16, (hidden, inner)),
            }
    block = torch.randn(2 * hidden * hidden, generator=torch.Generator().manual_seed(0)).mul_(0.05).bfloat16()

    def read(name: str) -> torch.Tensor:
        shape = tensors[name][1]
        start = sum(name.encode()) % 997  # so that tensors differ
        return block[start : start + torch.Size(shape).numel()].view(shape)

    write_tensors(directory / "model.safetensors", tensors, read, {"format": "pt"}, int)
    return directory


CPU = torch.device("cpu")
MEMORY = r"""
import re, sys
from pathlib import Path
import psutil
from core.importing import import_model
before = psutil.Process().memory_info().rss
import_model(sys.argv[1], Path(sys.argv[2]))
most = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())  # getrusage's would be the parent's
print(int(most[1]) * 1024 - before)
"""


def check_experts(pack: Path, source: Path, dtype: torch.dtype) -> None:
    """Every expert in the pack is what encoding the checkpoint's gives."""
    with PackReader(pack) as reader, CheckpointReader(load_skeleton(pack), str(source)) as checkpoint:
        manifest, buffer = reader.manifest, aligned(reader.padded_bytes)
        codec = manifest.codecs(dtype, CPU)[0]
        for eid in range(manifest.total):
            reader.read_into(eid, buffer)
            expected = codec.encode(checkpoint.read(*divmod(eid, manifest.experts)))
            assert torch.equal(buffer[: reader.blob_bytes], expected), eid


@pytest.mark.parametrize("arch", layered(ARCHITECTURES, quick=lambda arch: arch in ("gpt_oss", "deepseek_v3")))
def test_every_architecture(arch: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint(arch)
    pack = import_model(str(source), tmp_path / "pack")
    manifest = PackReader(pack).manifest
    assert (manifest.format, set(manifest.exact.values())) == ("checkpoint", {"as stored"})
    check_experts(pack, source, torch.float32)
    plain, packed = load_skeleton(source), load_skeleton(pack)  # the dense weights are all there, and the same
    theirs = dict(plain.named_parameters())
    assert all(torch.equal(p, theirs[n]) for n, p in packed.named_parameters())
    assert len(find_experts(packed)) == manifest.layers
    assert verify(pack).problems == ()


@pytest.mark.parametrize(
    ("name", "blocks"),
    layered(
        itertools.product(FORMATS, (1, 2)),  # some whole, some in two blocks; test_segments.py has all
        quick=lambda case: list(FORMATS).index(case[0]) % 8 == (2 if case[1] > 1 else 0),
    ),
)
def test_every_format(name: str, blocks: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("granitemoe")
    if blocks > 1 and FORMATS[name].grain >= 64 or FORMATS[name].grain > 64:
        with pytest.raises((ModelError, SettingError), match=r"cannot be cut|does not divide"):
            import_model(str(source), tmp_path / "pack", format=name, blocks=blocks)
        assert list(tmp_path.iterdir()) == []
        return
    pack = import_model(str(source), tmp_path / "pack", format=name, blocks=blocks)
    manifest = PackReader(pack).manifest
    assert manifest.format == name and len(manifest.kinds[0].segments) == (2 if blocks > 1 else 0)
    how = {"checkpoint": "as stored"}.get(
        name, "cast from float32" if FORMATS[name].is_plain else "quantised from float32"
    )
    assert set(manifest.exact.values()) == {how}
    check_experts(pack, source, torch.float32)


def test_a_transposed_model_with_biases_is_cut_and_joined(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for name in ("checkpoint", "int4-g32"):
        pack = import_model(str(checkpoint("gpt_oss")), tmp_path / name, format=name, blocks=3)
        check_experts(pack, checkpoint("gpt_oss"), torch.float32)


def test_how_numbers_came_about_is_summed_up() -> None:
    exact, not_exact = {"up": "exact codes"}, {"up": "requantised from Q6_K"}
    assert write.exactness([exact, exact]) == exact
    assert write.exactness([exact, exact, not_exact]) == {
        "up": "exact codes (2 layers), requantised from Q6_K (1 layer)"
    }


@pytest.mark.long(0.3)
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    source = make_large(tmp_path / "model", layers=4)
    size = sum(f.stat().st_size for f in source.iterdir())
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, source, tmp_path / "pack"], capture_output=True, text=True, check=True
    )
    peak, dense = int(run.stdout.split()[-1]), (tmp_path / "pack" / "model.safetensors").stat().st_size
    assert size > 400e6 and dense < 10e6
    assert peak < dense + 200e6, f"{peak / 1e6:.0f} MB"


def test_the_forward_pass_of_a_pack_is_that_of_the_checkpoint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Dense weights from the pack, experts out of its blobs: the logits are transformers' own."""
    from transformers import AutoModelForCausalLM

    source = checkpoint("qwen3_moe")
    pack = import_model(str(source), tmp_path / "pack")
    model, ids = load_skeleton(pack), torch.arange(12)[None]
    with PackReader(pack) as reader, torch.no_grad():
        codec, buffer = reader.manifest.codecs(torch.float32, CPU)[0], aligned(reader.padded_bytes)

        def experts(site: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(hidden)
            for eid in chosen.unique().tolist():
                reader.read_into(site.index * site.num_experts + eid, buffer)
                slot = torch.empty(codec.slot_bytes, dtype=torch.uint8)
                codec.place(buffer[: reader.blob_bytes], slot)
                parts = codec.views(slot)
                token, k = (chosen == eid).nonzero(as_tuple=True)
                gate, up = codec.linear(parts, "gate_up_proj", hidden[token]).chunk(2, -1)
                y = codec.linear(parts, "down_proj", torch.nn.functional.silu(gate) * up)
                out.index_add_(0, token, y * weights[token, k, None])
            return out

        with install(model, find_experts(model), experts):
            ours = model(ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(source)(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


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
        codec, checkpoint = manifest.codecs(torch.float32, CPU)[0], CheckpointReader(model, opened.tensors)
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
    assert len(manifest.kinds[0].segments) == (2 if blocks > 1 else 0)
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
