"""Every source format x architecture: experts and dense weights mean exactly what the format says, as weights and as
codes in ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Mxfp4Config

from core.hf import CheckpointReader, load_skeleton, meta_skeleton
from core.importing.sources import open_source
from core.memory.codec import make_codec
from core.memory.codec.coded import QuantizedTensor
from tests import quantized
from tests.quantized import Written, write, write_mxfp4


@dataclass(frozen=True)
class Case:
    """One checkpoint and what its source is expected to say of it."""

    name: str
    kind: str
    arch: str
    config: dict[str, Any]
    writer: Callable[[], quantized.Writer | dict[str, quantized.Writer]] | None
    exact: str | None
    label: str
    dtype: torch.dtype = torch.float16
    fields: dict[str, Any] = field(default_factory=dict)
    best: str = "int4-g32"  # where nothing is exact
    formats: frozenset[str | None] | None = None  # that experts' weights are coded in; None: in `exact` alone

    def write(self, directory: Path) -> Written:
        if self.writer is None:
            return write_mxfp4(directory)
        return write(self.arch, directory, self.writer(), self.config, dtype=self.dtype, **self.fields)


def gptq(
    name: str,
    arch: str,
    exact: str | None,
    label: str,
    config: dict[str, Any] | None = None,
    best: str = "int4-g32",
    **settings: Any,
) -> Case:
    described = {
        "quant_method": "gptq",
        "bits": settings.get("bits", 4),
        "group_size": settings.get("group", 128),
        "sym": settings.get("symmetric", True),
        "desc_act": settings.get("act_order", False),
        "lm_head": False,
        "damp_percent": 0.01,
        **(config or {}),
    }
    writer, formats = settings.pop("writer", lambda: quantized.gptq(**settings)), settings.pop("formats", ())
    return Case(
        f"gptq-{name}", "gptq", arch, described, writer, exact, label, formats=frozenset(formats) or None, best=best
    )


def compressed(
    name: str,
    arch: str,
    exact: str | None,
    label: str,
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
    writer: Any = None,
    **config: Any,
) -> Case:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "actorder": None,
        "dynamic": False,
        "group_size": None if group == -1 else group,
        "strategy": "channel" if group == -1 else "group",
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    described = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        **config,
    }
    return Case(
        f"compressed-{name}",
        "compressed-tensors",
        arch,
        described,
        writer or (lambda: quantized.packed_by_compressed_tensors(bits, group, symmetric)),
        exact,
        label,
        torch.bfloat16,
    )


def bnb(name: str, arch: str, exact: str | None, label: str, kind: str = "nf4", **settings: Any) -> Case:
    described = {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": True,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": settings.get("nested", True),
        "bnb_4bit_compute_dtype": "bfloat16",
        "llm_int8_skip_modules": ["lm_head"],
    }
    return Case(
        f"bnb-{name}",
        "bitsandbytes",
        arch,
        described,
        lambda: quantized.bnb(kind, **settings),
        exact,
        label,
        torch.bfloat16,
    )


def fp8(name: str, arch: str, label: str, *writer: Any, **config: Any) -> Case:
    described = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **config}
    fields = (
        {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
        if arch == "deepseek_v3"
        else {}
    )
    return Case(
        f"fp8-{name}",
        "fp8",
        arch,
        described,
        lambda: quantized.fp8(*writer),
        "checkpoint",
        label,
        torch.bfloat16,
        fields,
    )


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8_GROUPS = {
    "group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None},
    }
}
CASES = [
    gptq("sym", "qwen3_moe", "int4-g128-sym", "GPTQ 4-bit, groups of 128"),
    gptq("sym", "mixtral", "int4-g128-sym", "GPTQ 4-bit, groups of 128", {"checkpoint_format": "gptq"}),
    gptq(
        "asym-v2",
        "qwen3_moe",
        "int4-g128",
        "GPTQ 4-bit, groups of 128",
        {"checkpoint_format": "gptq_v2", "dynamic": {"-:.*mlp.gate": {}}},
        symmetric=False,
        minus_one=False,
    ),
    gptq("asym-v1-g32", "qwen3_moe", "int4-g32", "GPTQ 4-bit, groups of 32", symmetric=False, group=32),
    gptq("act-order", "qwen3_moe", None, "GPTQ 4-bit, groups of 64", act_order=True, group=64, symmetric=False),
    gptq("row-act-order", "qwen3_moe", "int4-g128-sym", "GPTQ 4-bit, one scale a row", act_order=True, group=-1),
    gptq("g16", "qwen3_moe", None, "GPTQ 4-bit, groups of 16", group=16),
    gptq(
        "dynamic",
        "qwen3_moe",
        "int4-g128-sym",
        "GPTQ 4-bit, groups of 128",
        {"dynamic": {"-:.*layers.0.self_attn": {}, "+:.*self_attn": {"bits": 8, "group_size": 32}}},
        writer=lambda: {r"experts": quantized.gptq(), r"layers\.1\.self_attn": quantized.gptq(8, 32)},
    ),
    gptq(
        "mixed",
        "mixtral",
        None,
        "GPTQ 4-bit, groups of 64",
        group=64,
        writer=lambda: {r"layers\.0\.": quantized.gptq(8, 32), "": quantized.gptq(4, 64)},
        formats=("int8-g32", "int4-g64-sym"),
        best="int8-g32",
    ),
    gptq("8bit-g32", "qwen3_moe", "int8-g32", "GPTQ 8-bit, groups of 32", bits=8, group=32),
    gptq("8bit-g128", "mixtral", "int8-g32", "GPTQ 8-bit, groups of 128", bits=8, group=128),
    gptq("8bit-row", "qwen3_moe", "int8", "GPTQ 8-bit, one scale a row", bits=8, group=-1),
    gptq(
        "8bit-asym", "qwen3_moe", None, "GPTQ 8-bit, groups of 32", bits=8, group=32, symmetric=False, best="int8-g32"
    ),
    Case(
        "awq",
        "awq",
        "qwen3_moe",
        AWQ | {"modules_to_not_convert": ["gate"]},
        quantized.awq,
        "int4-g128",
        "AWQ 4-bit, groups of 128",
    ),
    Case(
        "awq",
        "awq",
        "mixtral",
        AWQ | {"modules_to_not_convert": ["gate"], "version": "GEMM"},
        quantized.awq,
        "int4-g128",
        "AWQ 4-bit, groups of 128",
    ),
    Case(
        "auto-round",
        "gptq",
        "qwen3_moe",
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "data_type": "int",
        },
        quantized.gptq,
        "int4-g128-sym",
        "GPTQ 4-bit, groups of 128",
    ),
    compressed("sym", "qwen3_moe", "int4-g128-sym", "compressed-tensors INT4, groups of 128"),
    compressed("asym", "mixtral", "int4-g64", "compressed-tensors INT4, groups of 64", group=64, symmetric=False),
    compressed("row", "qwen3_moe", "int4-g128-sym", "compressed-tensors INT4", group=-1),
    compressed("8bit-row", "qwen3_moe", "int8", "compressed-tensors INT8", bits=8, group=-1),
    replace(
        compressed(
            "8bit-asym", "qwen3_moe", None, "compressed-tensors INT8, groups of 32", bits=8, group=32, symmetric=False
        ),
        best="int8-g32",
    ),
    compressed(
        "bytes",
        "qwen3_moe",
        "int8",
        "compressed-tensors INT8",
        bits=8,
        group=-1,
        format="int-quantized",
        writer=lambda: quantized.bytes_by_compressed_tensors,
    ),
    compressed(
        "mixed",
        "qwen3_moe",
        "int4-g32-sym",
        "compressed-tensors INT4 + FP8, groups of 32",
        config_groups={
            "group_0": {
                "targets": ["re:.*mlp.experts.*"],
                "format": "pack-quantized",
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            },
            "group_1": {
                "targets": ["re:.*self_attn.*"],
                "format": "float-quantized",
                "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            },
        },
        format="mixed-precision",
        writer=lambda: {
            "experts": quantized.packed_by_compressed_tensors(4, 32, True),
            "self_attn": quantized.fp8(None, "weight_scale"),
        },
    ),
    compressed(
        "fp8",
        "qwen3_moe",
        "checkpoint",
        "compressed-tensors FP8",
        format="float-quantized",
        config_groups=FP8_GROUPS,
        writer=lambda: quantized.fp8(None, "weight_scale"),
    ),
    compressed(
        "mxfp4",
        "mixtral",
        "mxfp4",
        "compressed-tensors FP4, groups of 32",
        format="mxfp4-pack-quantized",
        config_groups={
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
            }
        },
        writer=lambda: quantized.mxfp4_by_compressed_tensors,
    ),
    bnb("nf4-nested", "qwen3_moe", "nf4", "bitsandbytes 4-bit NF4"),
    bnb("nf4-128", "mixtral", "nf4", "bitsandbytes 4-bit NF4", nested=False, block=128),
    Case(
        "bnb-attention",
        "bitsandbytes",
        "qwen3_moe",
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda: {"self_attn": quantized.bnb()},
        "checkpoint",
        "bitsandbytes 4-bit FP4",
        torch.bfloat16,
    ),
    bnb("fp4", "qwen3_moe", None, "bitsandbytes 4-bit FP4", kind="fp4"),
    fp8(
        "block",
        "qwen3_moe",
        "FP8, blocks of 128 x 128",
        weight_block_size=[128, 128],
        modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate"],
    ),
    fp8("block", "deepseek_v3", "FP8, blocks of 128 x 128", weight_block_size=[128, 128]),
    fp8("stacked", "granitemoe", "FP8, blocks of 128 x 128", weight_block_size=[128, 128]),
    fp8("tensor", "qwen3_moe", "FP8, one scale a tensor", None),
    Case("mxfp4", "mxfp4", "gpt_oss", {}, None, "mxfp4", "MXFP4", torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.arch}")
def test_a_source_means_what_its_format_says(case: Case, tmp_path: Path) -> None:
    written = case.write(tmp_path)
    shell = tmp_path / "shell"
    shell.mkdir()
    with open_source(written.path) as source:
        assert (source.kind, source.label, source.exact_format) == (case.kind, case.label, case.exact)
        assert source.best_format == (case.exact or case.best)
        assert source.dense_dtype == case.dtype
        assert "quantization_config" not in source.config
        meta = meta_skeleton(source.write_shell(shell))
        with CheckpointReader(meta, source.tensors) as reader:
            full = reference(written, tmp_path / "reference")
            experts_are_equal(reader, full)
            rows_are_equal(source.tensors)
            coded = None if case.exact == "checkpoint" else case.exact
            assert coded_formats(reader, full) == (case.formats or {coded})
            if source.exact_format:
                packed_is_equal(reader, full, source.exact_format, source.numbers)
            dense_is_equal(reader, full, source.tensors, written, shell)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", ["compressed-sym", "compressed-mixed", "compressed-fp8", "compressed-mxfp4", "mxfp4"])
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


def packed_is_equal(reader: CheckpointReader, full: Any, exact: str, numbers: Any) -> None:
    """In a blob of the exact format an expert is still what it was."""
    site = reader.sites[-1]
    codec = make_codec(
        exact,
        specs=site.parts,
        dtype=torch.float32,
        device=torch.device("cpu"),
        is_transposed=site.is_transposed,
        stored=numbers,
    )
    slot = torch.zeros(codec.slot_bytes, dtype=torch.uint8)
    views = codec.views(slot)
    for expert in range(site.num_experts):
        codec.place(codec.encode(reader.read_coded(site.index, expert)), slot)
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
