"""What a bench's figures were measured on: part of every result of a bench that loads one model."""

from __future__ import annotations

from pathlib import Path

from core.engine import Engine
from core.session.manifest import device_name, versions


def subject(engine: Engine) -> dict[str, object]:
    """The model, its shape, the device and the versions of the libraries."""
    shape = engine.shape
    return {
        "model": Path(engine.model_name).name,
        "model_hash": engine.model_hash,
        "layers": shape.layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "device": device_name(engine.device),
        "versions": versions(),
    }
