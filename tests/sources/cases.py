"""The source formats and architectures that are tried: one checkpoint each, and what its source should say of it."""

from dataclasses import replace
from functools import partial

import torch

from tests import quantized
from tests import quantized_layouts as layouts
from tests import quantized_states as states
from tests.sources.case import Case, bnb, compressed, fp8, gptq, hqq, mlx, modelopt, torchao

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


FP8_GROUPS = {
    "group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None},
    }
}


def _group(target: str, bits: int, type: str = "int", format: str = "pack-quantized", **sizes: object) -> object:
    """A config group of compressed-tensors."""
    weights = {"num_bits": bits, "type": type, "symmetric": True, **sizes}
    return {"targets": [target], "format": format, "weights": weights}


def _nvfp4(target: str) -> object:
    return _group(target, 4, "float", "nvfp4-pack-quantized", strategy="tensor_group", group_size=16)


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
        layers=("int8-g32", "int4-g64-sym"),
    ),
    gptq(
        "plain",
        "qwen3_moe",
        None,
        "GPTQ 4-bit, groups of 128",
        {"dynamic": {r"-:.*layers\.0\.": {}}},
        writer=lambda: {r"layers\.1\.": quantized.gptq()},
        formats=(None, "int4-g128-sym"),
        layers=("checkpoint", "int4-g128-sym"),
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
        writer=lambda: layouts.bytes_by_compressed_tensors,
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
            "experts": layouts.packed_by_compressed_tensors(4, 32, True),
            "self_attn": quantized.fp8(None, "weight_scale"),
        },
    ),
    replace(
        compressed(
            "mixed-matrices",
            "qwen3_moe",
            None,
            "compressed-tensors INT4 + INT8, groups of 32",
            config_groups={
                "group_0": _group("re:.*experts.*(gate|up)_proj", 4, strategy="group", group_size=32),
                "group_1": _group("re:.*experts.*down_proj", 8, strategy="channel"),
            },
            writer=lambda: {
                "experts.*(gate|up)_proj": layouts.packed_by_compressed_tensors(4, 32, True),
                "experts.*down_proj": layouts.packed_by_compressed_tensors(8, -1, True),
            },
        ),
        formats=frozenset(("int4-g32-sym", "int8")),
        layers=("int4-g32-sym/int8",) * 2,
    ),
    replace(
        compressed(
            "mixed-layers",
            "mixtral",
            None,
            "compressed-tensors FP4 + FP8, groups of 16",
            format="mixed-precision",
            config_groups={
                "group_0": _nvfp4(r"re:.*layers\.0.*experts.*"),
                "group_1": _group(r"re:.*layers\.1.*experts.*", 8, "float", "float-quantized", strategy="tensor"),
            },
            writer=lambda: {
                r"layers\.0.*experts": layouts.nvfp4_by_compressed_tensors,
                r"layers\.1.*experts": quantized.fp8(None, "weight_scale"),
            },
        ),
        formats=frozenset(("nvfp4", None)),
        layers=("nvfp4", "checkpoint"),
    ),
    replace(
        compressed(
            "mixed-floats",
            "qwen3_moe",
            None,
            "compressed-tensors FP4 + FP8, groups of 16",
            format="mixed-precision",
            config_groups={
                "group_0": _nvfp4("re:.*experts.*(gate|up)_proj"),
                "group_1": _group("re:.*experts.*down_proj", 8, "float", "float-quantized", strategy="tensor"),
            },
            writer=lambda: {
                "experts.*(gate|up)_proj": layouts.nvfp4_by_compressed_tensors,
                "experts.*down_proj": quantized.fp8(None, "weight_scale"),
            },
        ),
        formats=frozenset(("nvfp4", None)),
        layers=("nvfp4/int8-g32",) * 2,
        loses=True,
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
        writer=lambda: layouts.mxfp4_by_compressed_tensors,
    ),
    compressed(
        "nvfp4",
        "qwen3_moe",
        "nvfp4",
        "compressed-tensors FP4, groups of 16",
        format="nvfp4-pack-quantized",
        config_groups={"group_0": _nvfp4("Linear")},
        writer=lambda: layouts.nvfp4_by_compressed_tensors,
    ),
    modelopt("nvfp4", "qwen3_moe", "nvfp4", "NVFP4", lambda: layouts.nvfp4_by_modelopt),
    modelopt("nvfp4", "granitemoe", "nvfp4", "NVFP4", lambda: layouts.nvfp4_by_modelopt),
    modelopt("nvfp4-awq", "mixtral", None, "NVFP4_AWQ", lambda: partial(layouts.nvfp4_by_modelopt, scaled_inputs=True)),
    modelopt("int4", "mixtral", "int4-g128-sym", "W4A16_AWQ", lambda: layouts.int4_by_modelopt),
    modelopt("int4-awq", "qwen3_moe", None, "W4A16_AWQ", lambda: partial(layouts.int4_by_modelopt, scaled_inputs=True)),
    modelopt("fp8", "qwen3_moe", "checkpoint", "FP8", lambda: quantized.fp8(None, "weight_scale")),
    modelopt("fp8-blocks", "mixtral", "checkpoint", "FP8_PB_WO", lambda: layouts.fp8_blocks_by_modelopt),
    modelopt(
        "mixed",
        "qwen3_moe",
        "nvfp4",
        "MIXED_PRECISION",
        lambda: {"experts": layouts.nvfp4_by_modelopt, "self_attn": quantized.fp8(None, "weight_scale")},
    ),
    replace(
        modelopt(
            "mixed-matrices",
            "qwen3_moe",
            None,
            "MIXED_PRECISION",
            lambda: {
                "experts.*(gate|up)_proj": layouts.nvfp4_by_modelopt,
                "experts.*down_proj": layouts.int4_by_modelopt,
                "self_attn": quantized.fp8(None, "weight_scale"),
            },
        ),
        formats=frozenset(("nvfp4", "int4-g128-sym")),
        layers=("nvfp4/int4-g128-sym",) * 2,
    ),
    Case(
        "quark-mxfp4",
        "quark",
        "qwen3_moe",
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}},
        lambda: {"experts": layouts.mxfp4_by_quark, "self_attn": quantized.fp8(None, "weight_scale")},
        "mxfp4",
        "Quark FP8 and MXFP4",
        torch.bfloat16,
    ),
    mlx("4bit", "int4-g64", "4-bit", lambda: layouts.mlx(), bits=4, group_size=64),
    mlx("4bit-g32", "int4-g32", "4-bit", lambda: layouts.mlx(4, 32), bits=4, group_size=32, dtype=torch.float16),
    mlx("3bit", "int3", "3-bit", lambda: layouts.mlx(3), bits=3, group_size=64),
    mlx("6bit", None, "6-bit", lambda: layouts.mlx(6), "int8-g32", bits=6, group_size=64),
    mlx("8bit", None, "8-bit", lambda: layouts.mlx(8), "int8-g32", bits=8, group_size=64),
    mlx("mxfp4", "mxfp4", "MXFP4", lambda: layouts.mlx_floats("mxfp4"), bits=4, group_size=32, mode="mxfp4"),
    mlx("nvfp4", "nvfp4", "NVFP4", lambda: layouts.mlx_floats("nvfp4"), bits=4, group_size=16, mode="nvfp4"),
    hqq("4bit", "qwen3_moe", "int4-g64", 4, 64),
    hqq("4bit-g128", "mixtral", "int4-g128", 4, 128, dtype=torch.bfloat16),
    hqq("3bit", "qwen3_moe", "int3", 3, 64),
    hqq("2bit", "qwen3_moe", "int2", 2, 128),
    hqq("8bit", "qwen3_moe", None, 8, 128, best="int8-g32"),
    hqq("4bit-axis0", "qwen3_moe", None, 4, 64, axis=0),
    torchao("int4", "qwen3_moe", "int4-g64", "INT4, groups of 64", lambda: states.int4(64)),
    torchao("int4-stacked", "qwen3_moe", "int4-g128", "INT4, groups of 128", lambda: states.int4(128), stacked=True),
    torchao("int8", "mixtral", "int8", "INT8, one scale a row", lambda: states.integers(8)),
    torchao("int8-stacked", "qwen3_moe", "int8", "INT8, one scale a row", lambda: states.integers(8), stacked=True),
    torchao(
        "int8-asym",
        "qwen3_moe",
        None,
        "INT8, one scale a row",
        lambda: states.integers(8, symmetric=False),
        "int8-g32",
    ),
    torchao("int8-g128", "qwen3_moe", "int8-g32", "INT8, groups of 128", lambda: states.integers(8, 128), "int8-g32"),
    torchao("intx4", "qwen3_moe", "int4-g32-sym", "INT4, groups of 32", lambda: states.integers(4, 32), bits=4),
    torchao(
        "intx3-asym",
        "mixtral",
        "int3",
        "INT3, groups of 64",
        lambda: states.integers(3, 64, symmetric=False),
        bits=3,
    ),
    torchao("fp8", "qwen3_moe", "checkpoint", "FP8", lambda: states.floats),
    torchao(
        "mixed",
        "qwen3_moe",
        "int4-g32",
        "INT4, groups of 32 and INT8, one scale a row",
        lambda: {"experts": states.int4(32), "self_attn": states.integers(8)},
        stacked=True,
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
