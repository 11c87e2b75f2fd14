"""Rounded experts: the engine's answers are those of plain transformers with the very same rounded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from core.engine import Engine
from core.hf import find_experts
from core.memory.codec import Codec, make_codec
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.checkpoints import make_checkpoint
from tests.equality.passes import plain_transformers, run
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

TOLERANCE = 1e-5  # fp32: the same weights, another order of summation


def round_experts(model: Any, format: str) -> Codec:
    """Replace every expert of a plain model by what the format keeps of it."""
    codec: Codec | None = None
    for site in find_experts(model):
        codec = make_codec(
            format, specs=site.parts, dtype=torch.float32, device=torch.device("cpu"), is_transposed=site.is_transposed
        )
        for expert in range(site.num_experts):
            weights = {part: getattr(site.module, part).data[expert] for part in site.parts}
            slot = torch.empty(codec.slot_bytes, dtype=torch.uint8)
            codec.place(codec.encode(weights), slot)
            parts = codec.views(slot)
            for part, spec in site.parts.items():
                if spec.is_weight:
                    weights[part].copy_(codec.dequantize(parts, part))
    assert codec is not None
    return codec


@pytest.mark.parametrize(
    ("arch", "format"),
    layered(
        [
            *(("qwen3_moe", format) for format in ("int8", "int4-g64", "nf4", "int3", "int2")),
            ("mixtral", "int4-g32-sym"),
            *(("gpt_oss", format) for format in ("int4-g32", "int8-g32", "mxfp4", "iq4_nl")),
        ],
        quick=lambda case: case[1] == "mxfp4",
    ),
)
def test_the_engine_computes_with_the_rounded_weights(arch: str, format: str, tmp_path: Path) -> None:
    path = save_tokenizer(make_checkpoint(arch, tmp_path / arch))
    exact, _ = run(plain_transformers(path, torch.float32), None, lambda step: None, steps=4)
    plain = plain_transformers(path, torch.float32)
    round_experts(plain, format)
    want, _ = run(plain, DynamicCache(config=plain.config), lambda step: None, steps=4)
    engine = Engine.load(LoadSpec.checked(str(path), Settings({"budget": "50%"}), dtype="float32", format=format))
    try:
        got, _ = run(engine.model, engine.fresh_cache(), lambda step: None, steps=4)
        assert (got - want).abs().max().item() <= TOLERANCE
        assert (got[:24] - exact[:24]).abs().max().item() > 10 * TOLERANCE, "nothing was rounded"
        assert engine.sizes.slot < engine.shape.hidden * 64 * 3 * 4
    finally:
        engine.unload()


@pytest.mark.long(0.1)
@pytest.mark.parametrize(
    "format", layered(["int8", "int4-g64", "iq4_nl", "int3"], quick=lambda format: format == "int4-g64")
)
def test_bfloat16_runs_the_fast_paths(format: str, tmp_path: Path) -> None:
    path = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path / "m", dtype=torch.bfloat16))
    logits = []
    for dtype in ("float32", "bfloat16"):
        engine = Engine.load(LoadSpec.checked(str(path), Settings({"budget": "50%"}), dtype=dtype, format=format))
        logits.append(run(engine.model, engine.fresh_cache(), lambda step: None, steps=0)[0].float())
        engine.unload()
    error = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert 0 < error < 0.05
