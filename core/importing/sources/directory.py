"""Model directories of safetensors files, plain or quantized, identified by config.json and tensor names."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from core.errors import ModelError
from core.hf.files import ModelFiles, check_files
from core.hf.quantization import IN_CONFIG, MLX, quantization_settings
from core.hf.safetensors_file import TensorFiles
from core.hf.tensors import Shape
from core.importing.sources import awq, bnb, compressed, fp8, gptq, hqq, mlx, modelopt, mxfp4, quark, torchao
from core.importing.sources.base import Source
from core.importing.sources.codings import PLAIN, codings
from core.importing.sources.decoded import INSTEAD, UNFIT, Decoded, Matrices
from core.memory.codec.formats import Numbers
from core.system.text_config import text_config
from core.system.wording import reason

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MARKS = (".qweight", ".weight_packed", ".absmax", "_blocks", "_scale_inv", ".W_q", "_qdata")
"""Endings of the names of quantised tensors only."""
ROUNDED = {"auto_gptq": "gptq", "gptq": "gptq", "auto_awq": "awq", "awq": "awq"}  # AutoRound's packing_format
ALSO = {
    "auto-gptq": "gptq",
    "auto-awq": "awq",
    "modelopt-fp4": "modelopt",
    "modelopt-mixed": "modelopt",
}  # other names that tools write
MAKERS: dict[str, Callable[[TensorFiles, dict[str, Any], torch.dtype], Matrices]] = {
    "gptq": lambda tensors, settings, dtype: gptq.matrices(tensors, settings),
    "awq": lambda tensors, settings, dtype: awq.matrices(tensors, settings),
    "compressed-tensors": compressed.matrices,
    "bitsandbytes": lambda tensors, settings, dtype: bnb.matrices(tensors, settings),
    "fp8": fp8.matrices,
    "mxfp4": lambda tensors, settings, dtype: mxfp4.matrices(tensors, settings),
    "modelopt": modelopt.matrices,
    "quark": quark.matrices,
    "hqq": lambda tensors, settings, dtype: hqq.matrices(tensors),
    "torchao": lambda tensors, settings, dtype: torchao.matrices(tensors, dtype),
}
NOT_READ = {  # why, and what to take instead
    "exl2": f"its codes are in the order in which the kernels of ExLlamaV2 read them. {INSTEAD}",
    "exl3": f"its weights are paths through a trellis, which only the kernels of ExLlamaV3 decode. {INSTEAD}",
}


def open_directory(path: Path) -> Source:
    """Open a model directory. Raises ModelError for what cannot be imported."""
    files = check_files(path)
    quantization = quantization_settings(files.path, files.config)
    kind = _method(quantization) if quantization is not None else ""
    config = _without_quantization(files.config)
    tensors = TensorFiles(files.weights)
    try:
        dtype = _dense_dtype(config, tensors)
        if quantization is None:
            return _plain(path, config, tensors, dtype, files)
        if kind == "mlx":
            matrices, parts, label = mlx.matrices(tensors, quantization, str(config.get("model_type")))
        else:
            matrices, parts, label = MAKERS[kind](tensors, quantization, dtype)
        if not matrices:
            raise ModelError(f"config.json of {path} says {kind}, but no weight is stored that way. Download it again.")
        decoded = Decoded(tensors, matrices, parts, dtype)
        exact, numbers = _exact(decoded, dtype)
    except BaseException as error:
        tensors.close()
        if isinstance(error, UNFIT):  # inconsistent settings or shapes fail anywhere in a format's code
            raise ModelError(
                f"{path} is damaged: its weights do not fit its quantization_config "
                f"({reason(error)}). Download it again."
            ) from error
        raise
    return Source(path, kind, label, config, decoded, exact, numbers, dtype, files)


def _plain(path: Path, config: dict[str, Any], tensors: TensorFiles, dtype: torch.dtype, files: ModelFiles) -> Source:
    """An unquantized checkpoint: its experts' number type is that of most of their weights."""
    for name in tensors.tensors:
        if name.endswith(MARKS):
            raise ModelError(
                f"{path} stores codes ({name}), but its config.json has no quantization_config, so how to "
                "read them is unknown. Download config.json again."
            )
    stored = _usual(tensors.tensors, _experts(tensors.tensors))
    if stored not in FLOATS:
        raise ModelError(
            f"{path} stores its weights as {str(stored).removeprefix('torch.')} without scales. Use a "
            "version in bfloat16, float16 or float32."
        )
    label = f"safetensors {str(stored).removeprefix('torch.')}"
    numbers = Numbers(stored, stored, stored)
    return Source(path, "safetensors", label, config, tensors, "checkpoint", numbers, dtype, files)


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the dequantised model, with nested configs stripped likewise."""
    return {
        name: _without_quantization(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in (*IN_CONFIG, MLX)
    }


def _method(quantization: dict[str, Any]) -> str:
    """The method that the settings name, as a key of MAKERS. Raises ModelError for every other one."""
    method = str(quantization.get("quant_method", "")).lower().replace("_", "-")
    method = ALSO.get(method, method)
    if method in ("auto-round", "intel/auto-round"):
        packing = str(quantization.get("packing_format", "")).rpartition(":")[2].lower()
        method = ROUNDED.get(packing, method)
    if method in NOT_READ:
        raise ModelError(f"This checkpoint is quantized with {method}: {NOT_READ[method]}")
    if method == "mlx":
        return method
    if method not in MAKERS:
        algorithm = f" ({quantization['quant_algo']!s:.40})" if quantization.get("quant_algo") else ""
        raise ModelError(
            f"This checkpoint is quantized with {method or 'an unnamed method'}{algorithm}, which is not read. Read "
            f"are {', '.join(MAKERS)}, mlx and GGUF. Use such a version of the model, or the original one, and "
            "choose an expert format here."
        )
    return method


def _dense_dtype(config: dict[str, Any], tensors: TensorFiles) -> torch.dtype:
    """The model's intended number type: from config.json, else that of most of its plain weights."""
    for owner in (config, text_config(config)):
        named = getattr(torch, str(owner.get("dtype") or owner.get("torch_dtype")).removeprefix("torch."), None)
        if isinstance(named, torch.dtype) and named in FLOATS:
            return named
    plain = [n for n, at in tensors.tensors.items() if at.dtype in FLOATS]
    return _usual(tensors.tensors, plain) if plain else torch.bfloat16


def _usual(tensors: Mapping[str, Shape], names: list[str]) -> torch.dtype:
    """The most common number type, weighted by element count; over all weights when no names are given."""
    counts: Counter[torch.dtype] = Counter()
    for name in names or tensors:
        counts[tensors[name].dtype] += torch.Size(tensors[name].shape).numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


def _experts(tensors: Mapping[str, Shape]) -> list[str]:
    """The names of routed experts' weights, guessed from names and shapes."""
    named = [n for n in tensors if ".experts." in n and not n.endswith("bias")]
    return named or [n for n, at in tensors.items() if len(at.shape) == 3]


def _exact(tensors: Decoded, dtype: torch.dtype) -> tuple[str | None, Numbers | None]:
    """The format that holds all experts' codes, and number types that make it lossless."""
    names = _experts(tensors.tensors)
    found = {(one.format, one.numbers) for one in codings(tensors, names).values()}
    formats = {format for format, _ in found}
    if formats <= {PLAIN}:  # or none: only non-expert layers are quantized
        usual = _usual(tensors.tensors, names)
        return PLAIN.name, Numbers(usual, usual, usual)
    if len(found) > 1 or None in formats:
        return None, None
    [(format, scale)] = found
    assert format is not None
    return format.name, Numbers(dtype, scale, torch.float32)
