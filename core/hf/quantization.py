"""Which quantization a checkpoint states: in config.json, or in a file of its own."""

import os
from pathlib import Path
from typing import Any

from core.errors import ModelError
from core.system.reading import read_json
from core.system.text_config import text_config

IN_CONFIG = ("quantization_config", "compression_config")  # the second: written by older compressed-tensors
MLX = "quantization"  # in config.json, by MLX
SIDECARS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files that some tools write next to config.json, and the method of each."""


def quantization_settings(path: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of the quantization that a model directory states; None when its weights are not quantized. Raises
    ModelError for a sidecar that cannot be read."""
    mlx = config.get(MLX)
    if isinstance(mlx, dict) and "bits" in mlx:
        return {"quant_method": "mlx", **mlx}
    for owner in (config, text_config(config)):
        for name in IN_CONFIG:
            if found := owner.get(name):
                return dict(found) if isinstance(found, dict) else {"quant_method": str(found)}
    for name, method in SIDECARS.items():
        if os.path.lexists(path / name) and (stated := _sidecar(path / name)) is not None:
            return {"quant_method": method, **stated}
    return None


def quantization(path: Path, config: dict[str, Any]) -> str:
    """The quantization that a model directory states, in words; empty when its weights are not quantized."""
    settings = quantization_settings(path, config)
    if settings is None:
        return ""
    method, algorithm = str(settings.get("quant_method") or "an unnamed method"), settings.get("quant_algo")
    return f"{method} {algorithm}" if algorithm else method


def _sidecar(file: Path) -> dict[str, Any] | None:
    """The settings in a sidecar; None where they leave the weights as they are, and quantize only the
    KV cache."""
    stated = read_json(file)
    if not isinstance(stated, dict):
        raise ModelError(f"{file} is damaged: it holds no object. Download it again.")
    inner = stated.get("quantization")
    if not isinstance(inner, dict):
        return stated
    return inner if inner.get("quant_algo") else None
