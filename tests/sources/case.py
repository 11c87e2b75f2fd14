"""A case of the matrix, and short ways to describe one in each way to quantise."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests import quantized, quantized_layouts, quantized_states
from tests.quantized import Written, write, write_mxfp4
from tests.quantized_layouts import as_mlx
from tests.quantized_states import as_torchao


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
    layers: tuple[str, ...] = ()  # what experts of each layer are held in, where that is not one format for all
    loses: bool = False  # some of `layers` do not hold what is stored
    after: Callable[[Written], Written] | None = None  # changes names and headers of what was written

    @property
    def is_kept(self) -> bool:
        """Whether nothing is rounded."""
        return self.exact is not None or bool(self.layers and not self.loses)

    def held(self, layers: int) -> tuple[str, ...]:
        """What experts are held in, by layer."""
        return self.layers or (self.exact or self.best,) * layers

    def write(self, directory: Path) -> Written:
        if self.writer is None:
            return write_mxfp4(directory)
        written = write(self.arch, directory, self.writer(), self.config, dtype=self.dtype, **self.fields)
        return self.after(written) if self.after is not None else written


def gptq(
    name: str,
    arch: str,
    exact: str | None,
    label: str,
    config: dict[str, Any] | None = None,
    best: str = "int4-g32",
    layers: tuple[str, ...] = (),
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
        f"gptq-{name}",
        "gptq",
        arch,
        described,
        writer,
        exact,
        label,
        formats=frozenset(formats) or None,
        best=best,
        layers=layers,
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
        writer or (lambda: quantized_layouts.packed_by_compressed_tensors(bits, group, symmetric)),
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


def modelopt(name: str, arch: str, exact: str | None, algorithm: str, writer: Any) -> Case:
    return Case(
        f"modelopt-{name}",
        "modelopt",
        arch,
        {"quant_method": "modelopt", "quant_algo": algorithm, "producer": {"name": "modelopt"}, "ignore": ["lm_head"]},
        writer,
        exact,
        f"ModelOpt {algorithm}",
        torch.bfloat16,
    )


def mlx(
    name: str,
    exact: str | None,
    label: str,
    writer: Any,
    best: str = "int4-g32",
    dtype: Any = torch.bfloat16,
    **config: Any,
) -> Case:
    return Case(
        f"mlx-{name}", "mlx", "qwen3_moe", config, writer, exact, f"MLX {label}", dtype, best=best, after=as_mlx
    )


def hqq(
    name: str, arch: str, exact: str | None, bits: int, group: int, axis: int = 1, best: str = "int4-g32", **of: Any
) -> Case:
    weights = {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": True, "optimize": True}
    described = {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": weights, "scale_quant_params": None, "zero_quant_params": None},
        "skip_modules": ["lm_head"],
    }
    label = f"HQQ {bits}-bit, groups of {group}{'' if axis else ' across rows'}"
    writer = quantized_states.hqq(bits, group, axis)
    return Case(f"hqq-{name}", "hqq", arch, described, lambda: writer, exact, label, best=best, **of)


def torchao(
    name: str, arch: str, exact: str | None, label: str, writer: Any, best: str = "int4-g32", **written: Any
) -> Case:
    """As transformers stores it: `written` says how, to `as_torchao`."""
    return Case(
        f"torchao-{name}",
        "torchao",
        arch,
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig"}}},
        writer,
        exact,
        f"torchao {label}",
        torch.bfloat16,
        best=best,
        after=partial(as_torchao, **written),
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
