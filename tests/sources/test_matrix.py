"""Every source format x architecture: experts and dense weights mean exactly what the format says, as weights and as
codes in ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Mxfp4Config

from core.hf.checkpoint import CheckpointReader
from core.hf.safetensors_file import TensorFiles
from core.hf.skeleton import load_skeleton, meta_skeleton
from core.importing.job import formats_for
from core.importing.sources import open_source
from core.importing.sources.nvfp4 import Nvfp4Matrix
from core.memory.codec import make_codec
from core.memory.codec.coded import QuantizedTensor
from tests.quantized import Written
from tests.quantized_layouts import nvfp4
from tests.selection import layered
from tests.sources.case import Case
from tests.sources.cases import CASES

QUICK = {  # each kind of file in its hardest case: rows in another order, zero points, mixed widths, nested scales
    ("gptq-act-order", "qwen3_moe"),
    ("awq", "mixtral"),
    ("bnb-nf4-nested", "qwen3_moe"),
    ("fp8-block", "deepseek_v3"),
    ("mxfp4", "gpt_oss"),
    ("compressed-mixed-matrices", "qwen3_moe"),
    ("modelopt-nvfp4", "granitemoe"),
    ("mlx-4bit", "qwen3_moe"),
    ("hqq-4bit", "qwen3_moe"),
    ("torchao-mixed", "qwen3_moe"),
}


@pytest.mark.parametrize(
    "case",
    layered(CASES, quick=lambda case: (case.name, case.arch) in QUICK),
    ids=lambda case: f"{case.name}-{case.arch}",
)
def test_a_source_means_what_its_format_says(case: Case, tmp_path: Path) -> None:
    written = case.write(tmp_path)
    shell = tmp_path / "shell"
    shell.mkdir()
    with open_source(written.path) as source:
        assert (source.kind, source.label, source.exact_format) == (case.kind, case.label, case.exact)
        assert source.dense_dtype == case.dtype
        assert "quantization_config" not in source.config
        meta = meta_skeleton(source.write_shell(shell))
        with CheckpointReader(meta, source.tensors) as reader:
            full = reference(written, tmp_path / "reference")
            experts_are_equal(reader, full)
            rows_are_equal(source.tensors)
            coded = None if case.exact == "checkpoint" else case.exact
            assert coded_formats(reader, full) == (case.formats or {coded})
            formats, numbers = formats_for(source, "auto", reader)
            assert formats == case.held(len(reader.sites))
            if case.is_kept:
                for layer, format in enumerate(formats):
                    packed_is_equal(reader, full, layer, format, numbers)
            dense_is_equal(reader, full, source.tensors, written, shell)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    "name",
    layered(
        ["compressed-sym", "compressed-mixed", "compressed-fp8", "compressed-mxfp4", "mxfp4"],
        quick=lambda name: name in ("compressed-mixed", "mxfp4"),
    ),
)
def test_the_checkpoints_written_here_are_what_transformers_reads(name: str, tmp_path: Path) -> None:
    """Formats that transformers dequantises on a CPU without further packages: its own load agrees."""
    case = next(case for case in CASES if case.name == name)
    written = case.write(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        written.path,
        dtype=case.dtype,
        quantization_config=Mxfp4Config(dequantize=True)
        if name == "mxfp4"
        else CompressedTensorsConfig(run_compressed=False),
    ).state_dict()
    wanted = reference(written, tmp_path / "reference").state_dict()
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name].to(tensor.dtype)) for name, tensor in loaded.items())


def reference(written: Written, directory: Path) -> Any:
    """The dequantised checkpoint in plain transformers, fp32."""
    directory.mkdir()
    save_file(
        {n: t.float().contiguous() for n, t in written.weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    with open_source(written.path) as source:
        source.write_shell(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def experts_are_equal(reader: CheckpointReader, full: Any) -> None:
    for site in reader.sites:
        stacked = full.get_submodule(site.name)
        for expert in range(site.num_experts):
            for part, tensor in reader.read(site.index, expert).items():
                assert tensor.shape == site.parts[part].shape
                assert torch.equal(tensor.float(), stacked.get_parameter(part)[expert]), (site.name, part, expert)


def rows_are_equal(tensors: Any) -> None:
    """A row of the first dimension is that row of the whole, as weights and as codes."""
    for name in list(tensors.matrices)[:: max(1, len(tensors.matrices) // 4)]:
        assert torch.equal(tensors.read(name, 1), tensors.read(name)[1:2]), name
        whole, row = tensors.coded(name), tensors.coded(name, 1)
        assert (whole is None) == (row is None)
        if whole is not None:
            assert all(
                r is None if w is None else torch.equal(r, w[1:2]) for w, r in zip(whole[1:], row[1:], strict=True)
            ), name


def coded_formats(reader: CheckpointReader, full: Any) -> set[str | None]:
    """The formats that experts' weights are coded in, None for plain ones, having seen that codes mean the weights."""
    formats = set()
    for site in reader.sites:
        stacked = full.get_submodule(site.name)
        for expert in range(site.num_experts):
            parts = reader.read_coded(site.index, expert)
            formats |= {
                p.format if isinstance(p, QuantizedTensor) else None
                for n, p in parts.items()
                if site.parts[n].is_weight
            }
            for part, found in parts.items():
                if isinstance(found, QuantizedTensor):
                    assert found.codes.shape == site.parts[part].shape
                    found = (found.turned() if site.is_transposed else found).dequantized()
                    found = found.t() if site.is_transposed else found
                assert torch.equal(found.float(), stacked.get_parameter(part)[expert]), (site.name, part, expert)
    return formats


def packed_is_equal(reader: CheckpointReader, full: Any, layer: int, format: str, numbers: Any) -> None:
    """In a blob of what holds it exactly an expert of the layer is still what it was."""
    site = reader.sites[layer]
    codec = make_codec(
        format,
        specs=site.parts,
        dtype=torch.float32,
        device=torch.device("cpu"),
        is_transposed=site.is_transposed,
        stored=numbers,
    )
    slot = torch.zeros(codec.slot_bytes, dtype=torch.uint8)
    views = codec.views(slot)
    for expert in range(site.num_experts):
        codec.place(codec.encode(reader.read_coded(layer, expert)), slot)
        for part, spec in site.parts.items():
            ours = codec.dequantize(views, part) if spec.is_weight else views.plain[part]
            assert torch.equal(ours, full.get_submodule(site.name).get_parameter(part)[expert]), (part, expert)


def dense_is_equal(reader: CheckpointReader, full: Any, tensors: Any, written: Written, shell: Path) -> None:
    """What dense_names lists, kept as stated, is all that a model without experts loads, and has the right values."""
    kept = {n: tensors.read(n).to(tensors.tensors[n].dtype) for n in reader.dense_names()}
    for name, tensor in kept.items():
        assert torch.equal(tensor, written.weights[name].to(tensor.dtype)), name
        assert tensor.shape == tensors.tensors[name].shape
    save_file(kept, shell / "model.safetensors", metadata={"format": "pt"})
    theirs = full.state_dict()
    assert all(torch.equal(t, theirs[n].to(t.dtype)) for n, t in load_skeleton(shell).state_dict().items())


def test_settings_of_modelopt_beside_config_json(tmp_path: Path) -> None:
    """hf_quant_config.json, as ModelOpt writes where config.json says nothing."""
    path = next(case for case in CASES if case.name == "modelopt-nvfp4").write(tmp_path).path
    config = json.loads((path / "config.json").read_text())
    stated = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    beside = {"producer": stated["producer"], "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (path / "hf_quant_config.json").write_text(json.dumps(beside))
    with open_source(path) as source:
        assert (source.kind, source.label, source.exact_format) == ("modelopt", "ModelOpt NVFP4", "nvfp4")


def test_a_divisor_that_is_no_power_of_two(tmp_path: Path) -> None:
    """compressed-tensors' own decompression of NVFP4 is met up to its rounding to bfloat16."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scale, divisor, _ = nvfp4(weight)
    tensors = {
        "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scale,
        "weight_global_scale": torch.tensor([divisor]),
    }
    arguments = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    library = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    theirs = library.decompress(tensors, QuantizationScheme(targets=["Linear"], weights=arguments))["weight"]
    save_file({f"p.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "one.safetensors")
    files = TensorFiles((tmp_path / "one.safetensors",))
    ours = Nvfp4Matrix(files, "p.weight_packed", "p.weight_scale", "p.weight_global_scale", divides=True).read(None)
    files.close()
    torch.testing.assert_close(ours, theirs.float(), rtol=2**-8, atol=0)
    assert (ours.to(theirs.dtype) == theirs).float().mean() > 0.99
    assert (ours - weight.float()).square().mean() < 0.02
