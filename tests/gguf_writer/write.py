"""Writes a checkpoint, and the same model as a GGUF file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file

from tests.architectures.trial import random_model
from tests.checkpoints import make_checkpoint
from tests.gguf_writer.blocks import blocks
from tests.gguf_writer.keys import keys, layers_of
from tests.gguf_writer.models import ARCHITECTURES, OTHERS
from tests.gguf_writer.tensors import convert, rope_factors, stack

T = gguf.GGMLQuantizationType
Choice = Callable[[str], str]
"""A GGUF tensor's name -> the type it is stored in."""


Also = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""A GGUF model's tensors -> the same, and more."""


def all_f32(name: str) -> str:
    return "F32"


def experts_in(kind: str) -> Choice:
    """Matrices of routed experts in one type, the rest in F32."""
    return lambda name: kind if "_exps.weight" in name else "F32"


def make_gguf(
    arch: str,
    directory: Path,
    choice: Choice = all_f32,
    tokenizer: dict[str, Any] | None = None,
    parts: int = 1,
    also: Also | None = None,
    **overrides: Any,
) -> tuple[Path, Path]:
    """Write a random checkpoint of `arch` and the same model as GGUF, with the tensors that `also` makes of its.
    Returns (checkpoint directory, GGUF file)."""
    made = {**(ARCHITECTURES | OTHERS)[arch], **overrides}
    ggml, model = made.pop("ggml"), made.pop("model", arch)
    tokenizer = made.pop("more", {}) | (tokenizer or {})
    checkpoint = directory / "checkpoint"
    if arch in OTHERS:
        dtype = made.pop("dtype", torch.float32)
        random_model(model, **made).to(dtype).save_pretrained(checkpoint, max_shard_size="1GB")
    else:
        make_checkpoint(model, checkpoint, max_shard_size="1GB", **made)
    config = made | json.loads((checkpoint / "config.json").read_text())
    weights = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for tensor in weights.values():
        if tensor.dim() == 1:  # norms would be all ones; so small a number of steps is exact when 1 is added
            tensor += torch.randint(-96, 96, tensor.shape, generator=generator) / 1024
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint, write_gguf(directory, ggml, config, weights, choice, tokenizer, parts, also=also)


def write_gguf(
    directory: Path,
    ggml: str,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    choice: Choice,
    more: dict[str, Any],
    parts: int = 1,
    convert_names: bool = True,
    also: Also | None = None,
) -> Path:
    """Write weights under transformers' names as a GGUF model of architecture `ggml`, with `more` metadata. Without
    `convert_names` the weights are GGUF's already."""
    tensors = weights
    if convert_names:
        named = [pair for key, value in weights.items() for pair in convert(ggml, config, key, value.float())]
        tensors = stack(dict(named), layers_of(config)) | rope_factors(config)
    tensors = tensors if also is None else also(tensors)
    groups = [list(tensors)[i::parts] for i in range(parts)]
    for number, names in enumerate(groups):
        path = directory / (f"model-{number + 1:05}-of-{parts:05}.gguf" if parts > 1 else "model.gguf")
        writer = gguf.GGUFWriter(path, ggml)
        if number == 0:
            for key, value in (keys(ggml, config) | more).items():
                add(writer, key, value)
        if parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(tensors))
        for name in names:
            kind = T[choice(name)] if tensors[name].dim() > 1 else T.F32
            data = blocks(tensors[name].float().numpy(), kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return directory / (f"model-00001-of-{parts:05}.gguf" if parts > 1 else "model.gguf")


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
